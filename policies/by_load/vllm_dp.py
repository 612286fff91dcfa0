"""vLLM's balancer of data-parallel ranks: 4 x queued + running, by counters that are a moment old.

Model     the smallest 4 q + r of the last report; between reports each own choice counts as one more queued there
Reads    requests queued and running, as reported every `period_s`
Ties     broken uniformly at random (at the source: the first rank from the client's own on)
Blind to the cache, the length of prompts, and the speed of the card
Source   vLLM, v1/engine/core_client.py, DPLBAsyncMPClient; the coordinator publishes counters every 100 ms
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import Column, FleetView
from policies.base import Choice, Reason, choose_replica
from policies.reports import Reports
from policies.symbols import queued, running
from policies.watcher import Placed, Watcher


class VllmDataParallel(Watcher):
    """waiting_weight : of a queued request beside a running one, >= 0; period_s : of the counters, >= 0"""

    summary = "the smallest 4 x queued + running, counters 100 ms old"
    reads = "requests queued and running, as reported now and then"
    source = "vLLM data-parallel balancer"

    def __init__(self, rng: np.random.Generator, *, waiting_weight: float = 4.0, period_s: float = 0.1) -> None:
        require(0 <= waiting_weight < float("inf"), "waiting_weight", waiting_weight)
        self._rng = rng
        self._weight = waiting_weight
        self._reports = Reports(period_s, lambda fleet: (queued(fleet), running(fleet)))
        self._own: Column = np.empty(0)  # choices since the last report

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        self._refresh(fleet)
        waiting, running_ = self._reports.last(fleet)
        score = self._weight * (waiting + self._own) + running_
        return choose_replica(score, Reason.LOWER_LOAD, estimates, self._rng)

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        self._refresh(fleet)
        self._own[placed.row] += 1.0
        self._reports.note(fleet)

    def first_token(self, placed: Placed, fleet: FleetView) -> None:
        self._refresh(fleet)
        self._reports.note(fleet)

    def ended(self, placed: Placed, fleet: FleetView) -> None:
        self._refresh(fleet)
        self._reports.note(fleet)

    def _refresh(self, fleet: FleetView) -> None:
        if self._reports.arrived(fleet) or len(self._own) != fleet.rows:
            self._own = np.zeros(fleet.rows)
