"""Any replica, drawn uniformly at random.

Reads    which replicas are ready; no load, no cache, no estimate
Blind to everything else: queues are as long as chance makes them
Source   common practice; the rule every other one has to beat
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, draw


class Uniform:
    summary = "any replica, uniformly at random"
    reads = "which replicas are ready"
    source = "common practice"
    reads_estimates = False

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        return draw(estimates.usable_rows, Reason.DRAWN, estimates, self._rng)
