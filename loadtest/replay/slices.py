"""Cuts a small piece of traffic out of a long trace and scales it to a stated load.

Model     whole conversations (requests that share their second hash id) are drawn until there are enough requests;
          arrivals inside one coarse timestamp are spread evenly over the time to the next one; then time is
          stretched to the ideal cached load `load` of the fleet's engines (`bounds.ideal_busy_s`)
Valid     traces in Mooncake's form: timestamp in ms, lengths, one hash id for each 512 tokens
Source    Mooncake project, https://github.com/kvcache-ai/Mooncake, Apache-2.0
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from loadtest.replay.bounds import Prompt, ideal_busy_s
from loadtest.traffic import TrafficRow, write_traffic
from sim_backends import fleet as fleet_file
from sim_backends.fleet import Fleet

DEMO_LOAD = 0.6234  # of the demo's traffic


class TraceRow(msgspec.Struct, frozen=True):
    """One line of a Mooncake trace; timestamp in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> list[TraceRow]:
    """All rows of a gzipped Mooncake trace, in order."""
    decoder = msgspec.json.Decoder(TraceRow)
    with gzip.open(path) as lines:
        return [decoder.decode(line) for line in lines]


def sample_conversations(rows: Sequence[Prompt], requests: int, seed: int) -> list[int]:
    """Indices of about `requests` rows, in order: whole conversations drawn without replacement.

    A row without ids is a conversation of its own.
    """
    conversations: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        key = row.hash_ids[min(1, len(row.hash_ids) - 1)] if row.hash_ids else -1 - index
        conversations[key].append(index)
    order = list(conversations.values())
    random.Random(f"{seed}/conversations").shuffle(order)
    taken: list[int] = []
    for conversation in order:
        if len(taken) >= requests:
            break
        taken += conversation
    return sorted(taken)


def spread_arrivals(rows: list[TraceRow], seed: int) -> list[float]:
    """Arrival of every row in seconds: ordered, and uniform between its timestamp and the next distinct one."""
    spread_ms = spread([row.timestamp for row in rows], random.Random(f"{seed}/arrivals"))
    return [at_ms / 1000 for at_ms in spread_ms]


def spread(stamps: Sequence[float], chance: random.Random) -> list[float]:
    """Moments in the unit of `stamps`: ordered, and uniform between each stamp and the next distinct one.

    stamps : ascending; those that share the last one stay there
    """
    width = {stamp: after - stamp for stamp, after in pairwise(sorted(set(stamps)))}
    offsets: dict[float, list[float]] = defaultdict(list)
    for stamp in stamps:
        offsets[stamp].append(chance.random() * width.get(stamp, 0))
    for same in offsets.values():
        same.sort(reverse=True)
    return [stamp + offsets[stamp].pop() for stamp in stamps]


def cut(trace: list[TraceRow], fleet: Fleet, *, requests: int, load: float, seed: int) -> list[TrafficRow]:
    """Traffic of about `requests` requests that loads `fleet` to the ideal cached load `load` > 0."""
    arrivals = spread_arrivals(trace, seed)
    taken = sample_conversations(trace, requests, seed)
    rows = [trace[index] for index in taken]
    busy_s = ideal_busy_s(fleet, rows)
    first_s, last_s = arrivals[taken[0]], arrivals[taken[-1]]
    stretch = busy_s / load / (last_s - first_s)
    return [
        TrafficRow(
            at_s=round((arrivals[index] - first_s) * stretch, 6),
            input_length=row.input_length,
            output_length=row.output_length,
            hash_ids=row.hash_ids,
        )
        for index, row in zip(taken, rows, strict=True)
    ]


def main() -> None:
    """Cut a slice from the command line: `python -m loadtest.replay.slices --help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="gzipped Mooncake trace")
    parser.add_argument("--fleet", type=Path, required=True, help="fleet file: model and cards")
    parser.add_argument("--requests", type=int, default=450, help="about how many requests (default 450)")
    parser.add_argument("--load", type=float, default=DEMO_LOAD, help="ideal cached load (default %(default)s)")
    parser.add_argument("--seed", type=int, default=5, help="of the draw and of the spreading (default 5)")
    parser.add_argument("--out", type=Path, required=True, help="gzipped JSON lines to write")
    args = parser.parse_args()
    rows = cut(
        read_trace(args.trace), fleet_file.read(args.fleet), requests=args.requests, load=args.load, seed=args.seed
    )
    write_traffic(args.out, rows)
    print(f"{len(rows)} requests over {rows[-1].at_s:.1f} s in {args.out}")


if __name__ == "__main__":
    main()
