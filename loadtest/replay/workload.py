"""From a trace to the arrivals of one run: a part of it, spread, scaled, with an id for every block.

Model     a stretch of the trace in order of arrival; of it whole conversations (requests that share their second
          block) drawn with a seed; where many requests share a timestamp, arrivals spread evenly until the next one;
          then time stretched so that with a perfect cache the engines, pooled into one server, prefill for `load` of
          it. Order of arrival is kept
Valid     load > 0; 1 is what that server could just do (`bounds.ideal_busy_s`): no fleet can do more
Blind to  decode work and steps that are not full, so a load of 0.9 can be more than a fleet sustains
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from estimators.ranges import require
from loadtest.replay.bounds import ideal_busy_s
from loadtest.replay.fleets import Fleets, with_blocks
from loadtest.replay.formats import Trace
from loadtest.replay.slices import sample_conversations, spread
from loadtest.traffic import TrafficRow
from router.errors import ConfigError

# Constants of a rule are tuned on one part and judged on the other, later one, as they would be in use.
PARTS = {"train": (0.0, 0.3), "test": (0.3, 1.0)}

COARSE_SHARE = 0.9  # fewer distinct timestamps than this for each request: the clock was coarse, not the arrivals


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a trace.

    part : from which to which share of its requests in order of arrival, 0 <= first < last <= 1
    requests : about how many, whole conversations; None all
    load : ideal cached load of the fleet's engines, > 0; None leaves the times to `speedup`
    speedup : arrivals this much faster than in the trace, > 0; ignored with `load`
    seed : of the draw and the spreading
    shared_prefixes : False makes every block its own, the control in which no cache can help
    first_tokens_only : True makes every answer one token long, the control in which placement of prefills is all
    """

    requests: int | None = None
    load: float | None = None
    speedup: float = 1.0
    seed: int = 0
    shared_prefixes: bool = True
    first_tokens_only: bool = False
    part: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        require(0 <= self.part[0] < self.part[1] <= 1, "part", self.part)
        require(self.requests is None or self.requests >= 1, "requests", self.requests)
        require(self.load is None or 0 < self.load < float("inf"), "load", self.load)
        require(0 < self.speedup < float("inf"), "speedup", self.speedup)


def arrivals(trace: Trace, fleets: Fleets, demand: Demand) -> list[TrafficRow]:
    """The requests of one run in order of arrival, the first at 0, each with an id for every block it fills.

    Raises
    ------
    ConfigError : the part holds no request, or a load is asked of one that has no length in time.
    """
    spread_s = _spread_if_coarse([row.at_s for row in trace.rows], demand.seed)  # gaps are those of the whole trace
    every = [msgspec.structs.replace(row, at_s=at_s) for row, at_s in zip(trace.rows, spread_s, strict=True)]
    rows = _selected(part_of(every, demand.part), demand)
    if not demand.shared_prefixes:
        rows = [msgspec.structs.replace(row, hash_ids=[]) for row in rows]
    if demand.first_tokens_only:
        rows = [msgspec.structs.replace(row, output_length=1) for row in rows]
    rows = _with_ids(rows, trace.block_tokens)
    times_s = [row.at_s for row in rows]
    if demand.load is None:
        factor = 1.0 / demand.speedup
    else:
        factor = stretch(rows, times_s[-1] - times_s[0], fleets, load=demand.load, block_tokens=trace.block_tokens)
    return [
        msgspec.structs.replace(row, at_s=(at_s - times_s[0]) * factor) for row, at_s in zip(rows, times_s, strict=True)
    ]


def stretch(rows: Sequence[TrafficRow], span_s: float, fleets: Fleets, *, load: float, block_tokens: int) -> float:
    """Factor on all times at which `rows`, now over `span_s`, load the engines to `load`. Raises ConfigError.

    block_tokens : behind each id, and of the engines' cache
    """
    if span_s <= 0:
        raise ConfigError("all requests of the trace arrive at once, so no load can be set; use --speedup")
    engines = with_blocks(fleets, router_tokens=1, engine_tokens=block_tokens).engines
    return ideal_busy_s(engines, rows, tokens_per_id=block_tokens) / load / span_s


def part_of(rows: list[TrafficRow], part: tuple[float, float]) -> list[TrafficRow]:
    """Rows from the first to the last share of them; parts that meet share no row and leave none out.

    Raises
    ------
    ConfigError : no row is in it.
    """
    first, last = (round(share * len(rows)) for share in part)
    if first == last:
        raise ConfigError(f"--slice {part[0]:g}-{part[1]:g} of {len(rows)} requests holds none")
    return rows[first:last]


def _selected(rows: list[TrafficRow], demand: Demand) -> list[TrafficRow]:
    if demand.requests is None or demand.requests >= len(rows):
        return rows
    return [rows[index] for index in sample_conversations(rows, demand.requests, demand.seed)]


def _spread_if_coarse(times_s: list[float], seed: int) -> list[float]:
    if len(set(times_s)) >= COARSE_SHARE * len(times_s):
        return times_s
    return spread(times_s, random.Random(f"{seed}/arrivals"))


def _with_ids(rows: list[TrafficRow], block_tokens: int) -> list[TrafficRow]:
    """Rows as they are when they name all their blocks; else blocks nobody shares fill the gap."""
    fresh = count(max((max(row.hash_ids) for row in rows if row.hash_ids), default=-1) + 1)
    full = []
    for row in rows:
        missing = -(-row.input_length // block_tokens) - len(row.hash_ids)
        if missing > 0:
            row = msgspec.structs.replace(row, hash_ids=[*row.hash_ids, *(next(fresh) for _ in range(missing))])
        full.append(row)
    return full
