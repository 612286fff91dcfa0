"""The replica with the fewest requests of ours in flight.

Reads    requests booked per replica
Ties     broken uniformly at random
Blind to how long each request is, the cache, and the speed of the card
Source   common practice
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, choose_replica


class LeastRequest:
    summary = "the fewest requests in flight"
    reads_estimates = False
    reads = "requests booked per replica"
    source = "common practice"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        return choose_replica(fleet.booked.astype(np.float64), Reason.LOWER_LOAD, estimates, self._rng)
