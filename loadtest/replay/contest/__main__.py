"""`python -m loadtest.replay.contest`: play the tables of docs/results.md, and write them into a page.

Question   which rule is best where, and how far from what is possible
Pass marks `marks.py`; printed and written, a missed one is exit status 1 only with --strict
Traces     `--traces DIR` with mooncake_conversation_trace.jsonl.gz and mooncake_synthetic_trace.jsonl.gz, of which the
           part behind the one that weights were chosen on is played; without it the slices beside this file
Kept       each run is a line of its table's file: what is there is not played again, unless --again names its rule;
           runs of another part or of other traces want a folder of their own
Seeds      0, 1, ...; arrivals spread inside a coarse timestamp, the first 15 % of the requests not counted
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from loadtest.replay.contest import page
from loadtest.replay.contest.marks import marks
from loadtest.replay.contest.plan import TRACES, Table, full, quick
from loadtest.replay.contest.play import YARDSTICK, Played, forget, keep_apart, play_missing, read
from loadtest.replay.flags import part
from loadtest.replay.workload import PARTS

SLICES = Path(__file__).parent
EXIT_MISSED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 130
DESCRIPTION = "play the tables of docs/results.md, and write them into a page"


def trace_file(name: str, folder: Path | None) -> Path:
    return SLICES / f"{name}.jsonl.gz" if folder is None else folder / f"mooncake_{name}_trace.jsonl.gz"


def play_tables(tables: Sequence[Table], played_part: tuple[float, float], args: argparse.Namespace) -> None:
    """Play what has no line in the folder yet, and say how it goes on."""
    for number, table in enumerate(tables, 1):
        if args.again:
            forget(table.name, args.again, args.out)
        play_missing(
            table,
            trace_file(table.trace, args.traces),
            played_part,
            args.out,
            processes=args.jobs,
            only=args.rules,
            on_run=say(f"{number}/{len(tables)} {table.name}"),
        )


def say(what: str) -> Callable[[int, int], None]:
    """One line for each run that ended: a run takes seconds, a table up to hours."""
    began_s = monotonic()

    def line(ended: int, of: int) -> None:
        print(f"{what}: run {ended} of {of}, {monotonic() - began_s:.0f} s", flush=True)

    return line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.replay.contest", description=DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="fewer loads, rules and seeds: minutes instead of hours")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of both traces (default: small slices)")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="a file of JSON lines for each table; runs that are there are not played again",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="Markdown page whose tables are written anew")
    parser.add_argument("--only", metavar="A,..", help="only the tables whose name begins so")
    parser.add_argument(
        "--rules", type=names, metavar="A,..", help="play only these rules now; the page has all that were played"
    )
    parser.add_argument("--again", type=names, metavar="A,..", help="play these rules again though they were")
    parser.add_argument(
        "--part", type=part, metavar="A-B", help="shares of each trace that are played (default test, of slices all)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default 1)")
    parser.add_argument("--strict", action="store_true", help="status 1 when a mark is missed")
    args = parser.parse_args(arguments)
    tables = chosen(quick() if args.quick else full(), args.only)
    missing = [path for name in TRACES if not (path := trace_file(name, args.traces)).exists()]
    if not tables or missing:
        print(f"nothing to play: {missing[0]} is not there" if missing else "no table is called so", file=sys.stderr)
        return EXIT_USAGE
    played_part = args.part or ((0.0, 1.0) if args.traces is None else PARTS["test"])
    try:
        keep_apart({name: trace_file(name, args.traces) for name in TRACES}, played_part, args.out)
    except ValueError as others:
        print(others, file=sys.stderr)
        return EXIT_USAGE
    try:
        play_tables(tables, played_part, args)
    except KeyboardInterrupt:
        print(f"stopped; what was played is kept in {args.out}, and the same command goes on with it", file=sys.stderr)
        return EXIT_STOPPED
    played = {table.name: own for table in tables if (own := read(table, args.out)) is not None}
    return report(tables, played, args.page, strict=args.strict)


def names(text: str) -> frozenset[str]:
    """Rules of a contest. Raises argparse.ArgumentTypeError."""
    rules = frozenset(text.split(","))
    known = {YARDSTICK, *(rule for table in full() for rule in table.seeds)}
    if unknown := sorted(rules - known):
        raise argparse.ArgumentTypeError(f"{unknown[0]} is in no contest; there are {', '.join(sorted(known))}")
    return rules


def chosen(tables: list[Table], only: str | None) -> list[Table]:
    """Those whose name begins with one of the words in `only`; None: all."""
    words = tuple(only.split(",")) if only else ("",)
    return [table for table in tables if table.name.startswith(words)]


def report(tables: list[Table], played: dict[str, Played], target: Path | None, *, strict: bool) -> int:
    """Say which marks were reached; write the page and its plots."""
    missed = 0
    for reached, words in marks(tables, played):
        missed += not reached
        print(f"{'reached' if reached else 'MISSED '}  {words}")
    if target is not None:
        plots = target.parent / target.stem
        page.write_plots(played, plots)
        text = target.read_text(encoding="utf-8")
        target.write_text(page.into(text, tables, played, target.stem), encoding="utf-8")
    return EXIT_MISSED if strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
