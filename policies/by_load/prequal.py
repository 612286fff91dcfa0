"""Probes of a few replicas, kept for a second: of those with few requests in flight the one that answers fastest.

Model     each placement asks `probes` replicas for requests in flight (RIF) and latency at that RIF; the newest answer
          of a replica replaces its older one, and an answer is dropped after `keep_s`. theta is the `hot` quantile of
          RIF over the answers as they came. If any entry is at or under theta, the one of those with the lowest
          latency, else the one with the fewest in flight; with fewer than two entries, chance. A use adds one to the
          entry's RIF; after b uses it is dropped, b = max(1, (1 + d) / ((1 - m/n) probes - r_remove)), unlimited where
          the denominator is not positive. Above m replicas each placement also drops r_remove entries, the oldest and
          the worst in turn; up to m the whole pool stays
Reads    the answers: requests booked there, and the median of its latest first tokens at about that RIF
Ties     of latency go to the fewer in flight, then to chance
Blind to the cache, the length of prompts. A replica without first tokens yet has the median latency of the others;
         few requests a second leave few answers, and then the rule is chance
Source   Wydrowski et al., NSDI 2024
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from math import floor, inf, isnan, nan

import numpy as np

from estimators.estimates import Estimates
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, choice_of, draw
from policies.newcomers import Newcomers
from policies.watcher import Placed, Watcher

REMEMBERED = 32  # first tokens of a replica that its latency is taken from
NEAREST = 5  # of those, as many as are closest to the RIF asked about


@dataclass(slots=True)
class Answer:
    """in_flight : with uses since added; answered : as it came; latency_s : NaN unknown; uses_left : before it goes"""

    row: int
    at_s: float
    answered: int
    in_flight: int
    latency_s: float
    uses_left: float


class Prequal(Watcher):
    """pool (m) : answers kept, >= 2; probes : sent at each placement, >= 1; keep_s : how long an answer is good, > 0

    hot : quantile of RIF, 0..1; remove (r_remove) : answers dropped at each placement, >= 0; slack (d) : >= 0
    """

    summary = "of probed replicas with few requests in flight the one with the lowest latency"
    reads = "probes: requests booked per replica, times of first tokens"
    source = "Prequal, NSDI 2024"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        pool: int = 16,
        probes: int = 3,
        keep_s: float = 1.0,
        hot: float = 0.84,
        remove: int = 1,
        slack: float = 1.0,
    ) -> None:
        require(pool >= 2, "pool", pool)
        require(probes >= 1, "probes", probes)
        require(0 < keep_s < inf, "keep_s", keep_s)
        require(0 <= hot <= 1, "hot", hot)
        require(remove >= 0, "remove", remove)
        require(0 <= slack < inf, "slack", slack)
        self._rng = rng
        self._most, self._probes, self._keep_s, self._hot = pool, probes, keep_s, hot
        self._remove, self._slack = remove, slack
        self._newcomers = Newcomers()
        self._pool: dict[int, Answer] = {}  # by row, oldest first
        self._latencies: dict[int, deque[tuple[int, float]]] = {}  # by row: RIF when placed, seconds
        self._in_flight: dict[Placed, int] = {}  # when placed
        self._turn = count()

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        usable = estimates.usable_rows
        self._expire(fleet)
        answers = [answer for answer in self._pool.values() if usable[answer.row]]
        if len(answers) < 2:
            return draw(usable, Reason.DRAWN, estimates, self._rng)
        best = self._best(answers)
        row = best[0] if len(best) == 1 else int(self._rng.choice(best))
        return choice_of(row, Reason.LOWER_LOAD, estimates, probability=1.0 / len(best))

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        rows = estimates.usable_rows.nonzero()[0]
        self._expire(fleet)
        self._use(placed.row)
        self._in_flight[placed] = fleet.booked.item(placed.row)
        if len(rows) > self._most:
            for _ in range(min(self._remove, len(self._pool))):
                del self._pool[self._worst() if next(self._turn) % 2 else next(iter(self._pool))]
        for row in self._rng.choice(rows, size=min(self._probes, len(rows)), replace=False).tolist():
            self._probe(row, fleet, self._budget(len(rows)))

    def first_token(self, placed: Placed, fleet: FleetView) -> None:
        in_flight = self._in_flight.pop(placed, None)
        if in_flight is not None:
            latest = self._latencies.setdefault(placed.row, deque(maxlen=REMEMBERED))
            latest.append((in_flight, fleet.now_s - placed.placed_at_s))

    def ended(self, placed: Placed, fleet: FleetView) -> None:
        self._in_flight.pop(placed, None)

    def _best(self, answers: list[Answer]) -> list[int]:
        """Rows of the answers that are equally good and better than all others."""
        theta = self._theta(answers)
        cold = [answer for answer in answers if answer.in_flight <= theta]
        if not cold:
            fewest = min(answer.in_flight for answer in answers)
            return [answer.row for answer in answers if answer.in_flight == fewest]
        known = [answer.latency_s for answer in cold if not isnan(answer.latency_s)]
        usual_s = float(np.median(known)) if known else 0.0
        keys = [(usual_s if isnan(one.latency_s) else one.latency_s, one.in_flight) for one in cold]
        least = min(keys)
        return [answer.row for answer, key in zip(cold, keys, strict=True) if key == least]

    def _theta(self, answers: list[Answer]) -> float:
        return float(np.quantile([answer.answered for answer in answers], self._hot))

    def _worst(self) -> int:
        """Of the hot ones the one with the most in flight, else the slowest."""
        answers = list(self._pool.values())
        theta = self._theta(answers)
        hot = [answer for answer in answers if answer.in_flight > theta]
        if hot:
            return max(hot, key=lambda answer: answer.in_flight).row
        return max(answers, key=lambda answer: -1.0 if isnan(answer.latency_s) else answer.latency_s).row

    def _budget(self, replicas: int) -> float:
        """Uses of one answer."""
        left = (1.0 - self._most / replicas) * self._probes - self._remove
        return inf if left <= 0 else max(1.0, (1.0 + self._slack) / left)

    def _use(self, row: int) -> None:
        answer = self._pool.get(row)
        if answer is None:
            return
        answer.in_flight += 1
        answer.uses_left -= 1
        if answer.uses_left <= 0:
            del self._pool[row]

    def _probe(self, row: int, fleet: FleetView, uses: float) -> None:
        in_flight = fleet.booked.item(row)
        if uses < inf:  # a part of a use is a use with that chance
            uses = floor(uses) + (self._rng.random() < uses % 1.0)
        self._pool.pop(row, None)
        if len(self._pool) >= self._most:
            del self._pool[next(iter(self._pool))]
        self._pool[row] = Answer(row, fleet.now_s, in_flight, in_flight, self._latency_s(row, in_flight), uses)

    def _latency_s(self, row: int, in_flight: int) -> float:
        latest = self._latencies.get(row)
        if not latest:
            return nan
        nearest = sorted(latest, key=lambda one: abs(one[0] - in_flight))[:NEAREST]
        return float(np.median([took_s for _, took_s in nearest]))

    def _expire(self, fleet: FleetView) -> None:
        for row in self._newcomers.rows(fleet):
            self._pool.pop(row, None)
            self._latencies.pop(row, None)
        while self._pool and (oldest := next(iter(self._pool.values()))).at_s + self._keep_s < fleet.now_s:
            del self._pool[oldest.row]
