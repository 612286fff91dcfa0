"""How long the estimates of one request take, by replicas, places, links and what is learned.

Question  do all candidates of a request cost microseconds, so that a decision is no part of a first token?
Work      fleets of two kinds of cards with bookings, reported load and known memory on every replica. Prompts of 8,448
          tokens, of which each replica and the store have some; blocks in a store, with peers, or in tiers as well.
          Busy: four fetches are promised from the store, and one is replaced between two decisions. Doubt: hits and
          first tokens were observed a minute ago. A booking changes between any two decisions, as it does in service
Measure   wall time of `Estimator.estimate` and of the means that every objective reads, median of rounds in which the
          cases take turns, so that a machine's bad moments hit all of them. The yardstick is one addition of two
          arrays of 4 x 64 numbers: compare runs by their ratio to it
Pass      store and peers (four paths), idle links: 4 replicas under 25 us, 64 under 60, 1,024 under 400
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import perf_counter

import numpy as np

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimator, Surroundings
from estimators.hardware import CARDS
from estimators.hit_probability import HitProbability
from estimators.links import LinkTable, Promise
from estimators.request import RequestFacts
from estimators.roofline import rates_of
from estimators.routes import Held, Routes
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from estimators.spread import ResidualSpread
from estimators.tiers import Tier
from estimators.view import FleetView

ROWS = (4, 16, 64, 256, 1024)
PLACES = ("store", "store + peers", "all tiers")
LIMITS_US = {4: 25.0, 64: 60.0, 1024: 400.0}
ROUNDS, CALLS = 10, 60
PROMPT_TOKENS, BLOCKS = 8448, 528
OBSERVED_AT_S, NOW_S = 0.0, 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    places: str
    doubt: bool
    busy: bool

    @property
    def name(self) -> str:
        links = "busy links" if self.busy else "idle links"
        return f"{self.places}, {links}, {'with' if self.doubt else 'no'} doubt"


CASES = tuple(Case(places, doubt, busy) for places, doubt, busy in product(PLACES, (False, True), (False, True)))
JUDGED = (Case("store + peers", False, False), Case("store + peers", True, False))

Taken = Mapping[tuple[Case, int], float]  # (case, rows) -> microseconds


def a_fleet(rows: int, rng: np.random.Generator) -> FleetView:
    """Every replica busy, reporting, and with memory enough."""
    names = [f"replica-{row}" for row in range(rows)]
    view = FleetView(names, [rates_of(QWEN3_8B, CARDS[card]) for card in ("A100", "H20") * (rows // 2)])
    view.ready[:] = True
    view.head_ends_s[:] = NOW_S + rng.uniform(0.0, 1.0, rows)
    view.head_compute_s[:], view.head_tokens[:] = 1.0, 8000.0
    view.waiting_linear_s[:], view.waiting_attention_s[:] = 0.5, 0.1
    view.waiting_tokens[:], view.waiting_context_tokens[:] = 5000.0, 8000.0
    view.decode_batch[:], view.decode_context_tokens[:] = rng.integers(0, 30, rows), 40_000.0
    view.foreign_waiting[:], view.foreign_decoding[:] = 0.0, rng.integers(0, 2, rows)
    for row in range(rows):
        view.has_capacity(row, 200_000.0)
    return view


def routes_of(rows: int, places: str) -> Routes:
    """A network link, then for each replica its host link, its disk, and the link that leaves it."""
    host, disk, egress = (range(1 + place * rows, 1 + (place + 1) * rows) for place in range(3))
    tiers = places == "all tiers"
    return Routes(
        table=LinkTable(bytes_per_s=[25e9] * (1 + 3 * rows), look_up_s=0.01),
        store=[[0, link] for link in host],
        host=[[link] for link in host] if tiers else [],
        disk=[[far, near] for far, near in zip(disk, host, strict=True)] if tiers else [],
        egress=[] if places == "store" else list(egress),
    )


def held_of(rows: int, places: str, rng: np.random.Generator) -> Held:
    """Some of the prompt on every replica, all of it in the store."""
    hbm, host, disk = np.sort(rng.integers(0, BLOCKS, (3, rows)).astype(np.int32), axis=0)
    return Held(hbm, BLOCKS, host, disk) if places == "all tiers" else Held(hbm, BLOCKS)


def observed(names: Sequence[str]) -> Doubt:
    """Hits of every tier and first tokens of every replica, as of `OBSERVED_AT_S`."""
    hits, spread = HitProbability(names), ResidualSpread(names)
    for row in range(len(names)):
        spread.observe(row, observed_s=1.1, predicted_s=1.0, now_s=OBSERVED_AT_S)
    for tier in Tier:
        hits.reported(0, tier, expected_blocks=9, reported_blocks=9, age_s=5.0, now_s=OBSERVED_AT_S)
    return Doubt(hits, spread, Conformal(LEVELS))


class Decisions:
    """One case and size: `take` estimates one request after another, and returns how long each took, seconds."""

    def __init__(self, case: Case, rows: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._view, self._routes = a_fleet(rows, rng), routes_of(rows, case.places)
        self._held = held_of(rows, case.places, rng)
        self._estimator = Estimator(
            costs=costs_of(QWEN3_8B),
            layers=QWEN3_8B.layers,
            rows=rows,
            routes=self._routes,
            engine_decides=False,
            doubt=observed(self._view.names) if case.doubt else None,
        )
        self._request = RequestFacts(request_id="r", model="m", prompt_tokens=PROMPT_TOKENS)
        self._around = Surroundings(
            arrival_rps=1.0,
            mean_compute_s=0.5,
            mean_context_tokens=900.0,
            output_tokens=200.0,
            others_output_tokens=200.0,
        )
        self._promised = [self._promise(row) for row in range(4 * case.busy)]

    def take(self, calls: int) -> list[float]:
        taken_s = []
        for call in range(calls):
            self._something_changes(call % self._view.rows)
            begun_s = perf_counter()
            estimates = self._estimator.estimate(self._request, self._held, self._view, self._around, NOW_S)
            _ = estimates.expected_s
            taken_s.append(perf_counter() - begun_s)
        return taken_s

    def _something_changes(self, row: int) -> None:
        self._view.decode_batch[row] += 1 if self._view.decode_batch[row] < 30 else -20
        if self._promised:
            self._routes.table.take_back(self._promised.pop(0), NOW_S)
            self._promised.append(self._promise(row))

    def _promise(self, row: int) -> Promise:
        return self._routes.table.promise(self._routes.store[row], 1e9, now_s=NOW_S)


def yardstick_s(calls: int) -> list[float]:
    """One addition of two arrays of 4 x 64 numbers."""
    one, other = np.ones((4, 64)), np.ones((4, 64))
    taken_s = []
    for _ in range(calls):
        begun_s = perf_counter()
        np.add(one, other)
        taken_s.append(perf_counter() - begun_s)
    return taken_s


def measured(cases: Sequence[Case], rows: Sequence[int], *, rounds: int, calls: int) -> tuple[Taken, float]:
    """Medians, and that of the yardstick, microseconds."""
    takers: dict[object, Callable[[int], list[float]]] = {
        (case, size): Decisions(case, size).take for case, size in product(cases, rows)
    }
    takers["yardstick"] = yardstick_s
    taken_s: dict[object, list[float]] = {key: [] for key in takers}
    for _ in range(rounds):
        for key, take in takers.items():
            take(2)  # the caches of the processor still hold the last case
            taken_s[key] += take(calls)
    taken = {(case, size): 1e6 * median(taken_s[case, size]) for case, size in product(cases, rows)}
    return taken, 1e6 * median(taken_s["yardstick"])


def table(taken: Taken) -> str:
    """A line for each case, a column for each size of the fleet, microseconds."""
    sizes = sorted({rows for _case, rows in taken})
    cases = list(dict.fromkeys(case for case, _rows in taken))
    lines = ["median us by replicas".ljust(44) + "".join(f"{size:>8}" for size in sizes)]
    lines += [case.name.ljust(44) + "".join(f"{taken[case, size]:8.1f}" for size in sizes) for case in cases]
    return "\n".join(lines)


def failures(taken: Taken) -> list[str]:
    """What does not pass, a sentence each."""
    return [
        f"{case.name}: {rows} replicas took {us:.1f} us, not under {LIMITS_US[rows]:g}"
        for (case, rows), us in taken.items()
        if case in JUDGED and us >= LIMITS_US.get(rows, np.inf)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of every case (default {ROUNDS})")
    args = parser.parse_args()
    taken, yardstick_us = measured(CASES, ROWS, rounds=args.rounds, calls=CALLS)
    print(table(taken))
    print(f"yardstick: {yardstick_us:.2f} us")
    wrong = failures(taken)
    print("\n".join(wrong) or "passes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
