"""How long a replay takes, by requests and by replicas.

Question  does a policy on 12,000 requests and 16 replicas stay under 12 s on one core, and does the cost grow at most
          linearly in requests and in replicas?
Work      whole conversations of a trace with 512-token blocks (the Mooncake conversation trace), seed 0, ideal cached
          load 0.5, so that the engines' queues stay short of the fleet's memory; round_robin and e2e
Measure   processor seconds of one run, trace reading and report excluded, one process
Pass      the run of 12,000 on 16 under 12 s; seconds per request at 12,000 at most 1.3 times those at 6,000 (before
          the store is full, some 2,000 requests, nothing is evicted and each costs less); seconds at 64 replicas at
          most 4 times those at 16
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS = (3000, 6000, 12000)
REPLICAS = (8, 16, 64)
POLICIES = ("round_robin", "e2e")
LIMIT_S, GROWTH = 12.0, 1.3

Taken = dict[tuple[int, int], dict[str, float]]  # (requests, replicas) -> policy -> processor seconds


def measured_s(trace: Path, *, requests: int, replicas: int, card: str) -> dict[str, float]:
    """Processor seconds of each policy's run, as `tfirst replay` reports them."""
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder:
        numbers = Path(folder) / "numbers.json"
        flags = {
            "--trace": trace,
            "--requests": requests,
            "--replicas": replicas,
            "--cards": card,
            "--load": 0.5,
            "--policy": ",".join(POLICIES),
            "--jobs": 1,
            "--json": numbers,
        }
        words = [str(part) for pair in flags.items() for part in pair]
        command = [sys.executable, "-m", "router.cli.main", "replay", "--no-bounds", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return {run["policy"]: run["took_s"] for run in json.loads(numbers.read_bytes())["runs"]}


def table(taken: Taken) -> str:
    """A line for each number of requests, a column for each number of replicas and policy."""
    sizes = sorted({replicas for _requests, replicas in taken})
    head = "requests  " + "".join(f"{policy} on {size}".rjust(20) for size in sizes for policy in POLICIES)
    lines = [head]
    for requests in sorted({requests for requests, _replicas in taken}):
        cells = [taken[requests, size][policy] for size in sizes for policy in POLICIES]
        lines.append(f"{requests:>8}  " + "".join(f"{cell:.2f} s".rjust(20) for cell in cells))
    return "\n".join(lines)


def failures(taken: Taken) -> list[str]:
    """What does not pass, a sentence each."""
    wrong = []
    least, most = REQUESTS[-2:]
    for policy in POLICIES:
        full_s = taken[most, 16][policy]
        if full_s > LIMIT_S:
            wrong.append(f"{policy}: {most} requests on 16 replicas took {full_s:.1f} s, more than {LIMIT_S:g} s")
        growth = full_s / most / (taken[least, 16][policy] / least)
        if growth > GROWTH:
            wrong.append(f"{policy}: a request costs {growth:.2f} times as much at {most} as at {least}")
        wider = taken[most, 64][policy] / full_s
        if wider > 4:
            wrong.append(f"{policy}: 64 replicas cost {wider:.1f} times as much as 16")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="trace of at least 12,000 requests")
    parser.add_argument("--card", default="A100", help="of all replicas (default A100)")
    args = parser.parse_args()
    taken = {
        (requests, replicas): measured_s(args.trace, requests=requests, replicas=replicas, card=args.card)
        for requests in REQUESTS
        for replicas in REPLICAS
    }
    print(table(taken))
    wrong = failures(taken)
    print("\n".join(wrong) or "passes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
