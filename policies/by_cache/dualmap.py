"""Two replicas for each prefix, from two hashes: the one with more of the prompt, while it answers in time.

Model     both rings are asked with the prompt's beginning; where they agree, the second goes on to the next replica. Of
          the two the larger hit, unless its estimated first token misses the deadline: then the smaller estimate. The
          beginning is `step_tokens` long and grows by as much while it is a hot one: hot from more than `grow_share` of
          the last `window` requests on, until it is less than `shrink_share` of them
Reads    first tokens of the prompt, cached tokens, estimated first tokens of two replicas; what was placed lately
Ties     of equal hits go to the smaller estimate
Blind to load, but through the estimate, and to every replica but two
Source   DualMap, ICLR 2026; how prefixes grow is our reading, the shares are the published ones
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import numpy as np

from estimators.estimates import Estimates
from estimators.paths import COLUMN
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, choice_of, choose_replica
from policies.by_cache.ring import Ring
from policies.symbols import cached_tokens
from policies.watcher import Placed, Watcher

VIRTUAL_NODES = 128


class DualMap(Watcher):
    """deadline_s : of the first token, > 0; step_tokens : by which beginnings grow, >= 1; window : requests, >= 1

    grow_share, shrink_share : of the window, 0 <= shrink_share <= grow_share <= 1
    """

    summary = "of two replicas by two prefix hashes the larger hit, while it answers in time"
    reads = "first tokens of the prompt, cached tokens and estimated first tokens"
    source = "DualMap, ICLR 2026"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        deadline_s: float = 5.0,
        step_tokens: int = 512,
        window: int = 200,
        grow_share: float = 0.0612,
        shrink_share: float = 0.02,
    ) -> None:
        require(0 < deadline_s < float("inf"), "deadline_s", deadline_s)
        require(step_tokens >= 1, "step_tokens", step_tokens)
        require(window >= 1, "window", window)
        require(
            0 <= shrink_share <= grow_share <= 1, "shrink_share", shrink_share, f"not in 0..grow_share={grow_share}"
        )
        self._rng = rng
        self._deadline_s = deadline_s
        self._step_tokens = step_tokens
        self._window = window
        self._grow, self._shrink = grow_share * window, shrink_share * window
        self._rings = Ring(VIRTUAL_NODES, seed=1), Ring(VIRTUAL_NODES, seed=2)
        self._latest: deque[list[int]] = deque()  # beginnings of the last requests, the short ones of each too
        self._seen: Counter[int] = Counter()
        self._hot: set[int] = set()

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        if not request.chain:
            return choose_replica(fleet.booked.astype(np.float64), Reason.LOWER_LOAD, estimates, self._rng)
        *_, key = self._beginnings(request)
        one, other = self._candidates(key, fleet, estimates)
        hit = cached_tokens(request, estimates)
        if hit[other] > hit[one] or (
            hit[other] == hit[one] and expected_s(other, estimates) < expected_s(one, estimates)
        ):
            one, other = other, one
        if expected_s(one, estimates) <= self._deadline_s:
            return choice_of(one, Reason.PREFIX_HASH, estimates)
        sooner = min((one, other), key=lambda row: expected_s(row, estimates))
        return choice_of(sooner, Reason.LOWEST_ESTIMATE, estimates)

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        if not placed.request.chain:
            return
        beginnings = list(self._beginnings(placed.request))
        self._latest.append(beginnings)
        self._seen.update(beginnings)
        self._hot.update(key for key in beginnings if self._seen[key] > self._grow)
        if len(self._latest) > self._window:
            self._forget(self._latest.popleft())

    def _beginnings(self, request: RequestFacts) -> Iterator[int]:
        """Ever longer ones, each of which but the last is hot."""
        chain, step = request.chain, max(1, self._step_tokens // request.block_tokens)
        for blocks in range(step, len(chain) + step, step):
            key = chain[min(blocks, len(chain)) - 1]
            yield key
            if key not in self._hot:
                return

    def _candidates(self, key: int, fleet: FleetView, estimates: Estimates) -> tuple[int, int]:
        """The two replicas of one beginning; the only usable one twice."""
        usable = estimates.usable_rows
        first, second = ((row for row in ring.owners(fleet.names, key) if usable[row]) for ring in self._rings)
        one = next(first)
        return one, next((row for row in second if row != one), one)

    def _forget(self, beginnings: list[int]) -> None:
        for key in beginnings:
            self._seen[key] -= 1
            if self._seen[key] < self._shrink:
                self._hot.discard(key)
            if not self._seen[key]:
                del self._seen[key]


def expected_s(row: int, estimates: Estimates) -> float:
    """Estimated first token on `row` by its best path."""
    return estimates.expected_s.item((COLUMN[estimates.path_at(row)], row))
