"""The earliest first token of this request, without fetching and without a price for what it costs others.

Model     the smallest Q + C(n, h). A replica that fetches without being asked does so; the rule does not count on it
Reads    estimated queue and prefill of every replica
Ties     broken uniformly at random
Blind to store, peers and tiers, to requests behind and decodes beside it: near saturation it recomputes elsewhere to
         save its own wait, and burns capacity that everyone behind then lacks
Source   what routers with learned latency predictors converge to
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from estimators.estimates import Estimates
from estimators.paths import COLUMN, Path
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, choose_replica
from policies.symbols import path_without_fetch

_LOCAL = COLUMN[Path.LOCAL]


class GreedyTtft:
    summary = "the smallest queue + prefill: no fetch, no price"
    reads = "estimated queue and prefill of every replica"
    source = "learned latency predictors"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        first_token_s = estimates.queue_s + estimates.prefill_s[_LOCAL]
        choice = choose_replica(first_token_s, Reason.LOWEST_ESTIMATE, estimates, self._rng)
        return replace(choice, path=path_without_fetch(estimates, choice.row))
