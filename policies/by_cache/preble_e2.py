"""Exploit the longest cached prefix when it is most of the prompt, else explore: the least work of late.

Model     h/n > 0.5 somewhere: the longest prefix, of equal ones the least work. Else the smallest of work placed in the
          last `window_s` (prefill of what was not cached, and output x decode pace, as estimated when it was placed)
          plus the value of what would be evicted: the oldest blocks beyond the free memory, each its prefill time
          times its uses in the window over all uses there
Reads    cached tokens, estimates of what it placed, KV capacity; its own record of the blocks sent there
Ties     broken uniformly at random
Blind to when work is done (three minutes of it count alike), what engines really evict, and eviction at all where the
         KV capacity is not known. A block's time is matrix work alone: no attention
Source   Srivatsa et al., Preble, ICLR 2025, algorithm E2; eviction simplified
"""

from __future__ import annotations

from collections import deque
from math import ceil, isnan

import numpy as np

from estimators.estimates import Estimates
from estimators.paths import COLUMN
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import Column, FleetView
from policies.base import Choice, Reason, choose_replica, draw, smallest
from policies.by_cache.remembered import Remembered
from policies.newcomers import Newcomers
from policies.symbols import cached_tokens
from policies.watcher import Placed, Watcher

INDEX_TOKENS = 2**24  # remembered of a replica whose capacity is not known


class PrebleE2(Watcher):
    """window_s : work of so long counts, > 0; exploit_share : of the prompt, above which the cache is followed, 0..1"""

    summary = "the longest cached prefix when over half of the prompt, else the least work of late"
    reads = "cached tokens, estimates of what was placed in the last minutes, KV capacity"
    source = "Preble, ICLR 2025"

    def __init__(self, rng: np.random.Generator, *, window_s: float = 180.0, exploit_share: float = 0.5) -> None:
        require(0 < window_s < float("inf"), "window_s", window_s)
        require(0 <= exploit_share <= 1, "exploit_share", exploit_share)
        self._rng = rng
        self._window_s = window_s
        self._exploit_share = exploit_share
        self._newcomers = Newcomers()
        self._latest: deque[tuple[Placed, float]] = deque()  # in order of time, with the seconds of work
        self._work_s: Column = np.empty(0)
        self._sent: list[Remembered] = []

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        self._meet(fleet)
        self._forget(fleet.now_s)
        usable, cached = estimates.usable_rows, cached_tokens(request, estimates)
        longest = smallest(-cached, usable)
        if cached[longest][0] > self._exploit_share * request.prompt_tokens:
            least = smallest(self._work_s, longest)
            return draw(least, Reason.LONGEST_PREFIX, estimates, self._rng)
        cost_s = self._work_s + self._evicted_s(request, fleet, cached)
        return choose_replica(cost_s, Reason.NO_PREFIX, estimates, self._rng)

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        self._meet(fleet)
        self._forget(fleet.now_s)
        row = placed.row
        decode_s = placed.output_tokens * estimates.pace_s.item(row)
        work_s = estimates.prefill_s.item((COLUMN[placed.path], row)) + decode_s
        self._latest.append((placed, work_s))
        self._work_s[row] += work_s
        sent, capacity = self._sent[row], fleet.capacity_tokens.item(row)
        tokens = INDEX_TOKENS if isnan(capacity) else capacity
        sent.most_blocks = max(1.0, tokens // placed.request.block_tokens)
        sent.add(placed.request.chain)

    def _evicted_s(self, request: RequestFacts, fleet: FleetView, cached: Column) -> Column:
        """Value of what each replica would evict to make room for what it has not cached, seconds."""
        block_s = request.block_tokens * fleet.linear_s_per_token
        value_s = np.zeros(fleet.rows)
        for row, sent in enumerate(self._sent):
            capacity = fleet.capacity_tokens.item(row)
            if isnan(capacity):
                continue
            needed = ceil((request.prompt_tokens - cached.item(row)) / request.block_tokens)
            evicted = needed - (int(capacity // request.block_tokens) - len(sent))
            if evicted > 0 and sent.total_uses:
                value_s[row] = block_s.item(row) * sent.uses_of_oldest(evicted) / sent.total_uses
        return value_s

    def _forget(self, now_s: float) -> None:
        while self._latest and self._latest[0][0].placed_at_s < now_s - self._window_s:
            placed, work_s = self._latest.popleft()
            self._work_s[placed.row] = max(0.0, self._work_s.item(placed.row) - work_s)
            self._sent[placed.row].forget_use(placed.request.chain)

    def _meet(self, fleet: FleetView) -> None:
        newcomers = self._newcomers.rows(fleet)
        if not newcomers:
            return
        if len(self._sent) != fleet.rows:
            self._work_s = np.zeros(fleet.rows)
            self._sent = [Remembered(1)] * fleet.rows
        self._latest = deque(one for one in self._latest if one[0].row not in newcomers)
        for row in newcomers:
            self._work_s[row] = 0.0
            self._sent[row] = Remembered(1)
