"""Every replica in turn.

Reads    which replicas are ready; no load, no cache, no estimate
Blind to everything else: a slow card gets as much work as a fast one
Source   common practice
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from estimators.estimates import Estimates
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason


class RoundRobin:
    summary = "every replica in turn"
    reads = "which replicas are ready"
    source = "common practice"
    reads_estimates = False

    def __init__(self, rng: np.random.Generator) -> None:
        self._last = self._before = -1
        self._asked: RequestFacts | None = None

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        if request is not self._asked:  # asked twice for one request, with fewer to choose from, it takes one turn
            self._asked, self._before = request, self._last
        usable = estimates.ready_rows
        place = bisect_right(usable, self._before)
        row = usable[place] if place < len(usable) else usable[0]
        self._last = row
        reason = Reason.NEXT_IN_TURN if len(usable) > 1 else Reason.ONLY_READY
        return Choice(row, estimates.path_at(row), reason)
