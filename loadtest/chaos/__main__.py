"""`python -m loadtest.chaos`: does every request have exactly one end while things fail, and how soon is all as before?

Question      what clients see of a replica that is killed, held still, silent, slow or empty, of lost cache events,
              frozen load pages, a broken fleet file, a total outage, and of a router that ends or is killed
Arrivals      open loop, a pattern of seven requests a second repeated; drawn from the seed
Warm-up       some eight seconds without a failure, not counted
Pass mark     every request has one end, the same for client and receipt, of a kind the failure allows; none hangs or
              ends as if it were whole; /fleet shows the failure; no booking and no socket is left; mean first token
              within 20 % of before within 12 s of the end of the failure. Exit status 0, else 1; 2: it could not run
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from loadtest.chaos.phases import PHASES
from loadtest.chaos.processes import NotRunning
from loadtest.chaos.report import as_values, line_of, passed, table_of, verdict
from loadtest.chaos.run import Result, Sizes, run


def parser() -> argparse.ArgumentParser:
    """Flags of the run."""
    made = argparse.ArgumentParser(prog="python -m loadtest.chaos", description=(__doc__ or "").partition("\n")[0])
    names = [phase.name for phase in PHASES]
    made.add_argument("--phase", action="append", choices=names, metavar="NAME", help=f"only this: {', '.join(names)}")
    made.add_argument("--seed", type=int, default=0, help="of traffic, engines and router (default 0)")
    made.add_argument("--json", action="store_true", help="print everything as JSON instead of the table")
    made.add_argument("--keep-files", type=Path, metavar="DIR", help="keep logs, receipts and files in DIR")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status."""
    args = parser().parse_args(arguments)
    phases = [phase for phase in PHASES if args.phase is None or phase.name in args.phase]
    began = time.monotonic()
    print(f"{len(phases)} phases, seed {args.seed}; starting the fleet and warming up", file=sys.stderr, flush=True)
    done = 0

    def on_end(result: Result) -> None:
        nonlocal done
        done += 1
        print(f"[{done:>2}/{len(phases)}] {line_of(result)}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="tfirst-chaos-") as scratch:
        folder = args.keep_files or Path(scratch)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            results = uvloop.run(run(phases, folder, seed=args.seed, sizes=Sizes(), on_end=on_end))
        except (NotRunning, OSError) as exc:
            print(f"chaos: {exc}", file=sys.stderr)
            return 2
    took_s = time.monotonic() - began
    if args.json:
        print(msgspec.json.encode(as_values(results, seed=args.seed, took_s=took_s)).decode())
    else:
        console = Console()
        console.print(table_of(results))
        console.print(verdict(results, took_s=took_s), markup=False, highlight=False)
    return 0 if passed(results) else 1


if __name__ == "__main__":
    sys.exit(main())
