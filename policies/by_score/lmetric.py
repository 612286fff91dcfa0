"""LMetric: prefill work there with this prompt, times requests there with this one.

Model     the smallest (P + n - h) (b + 1), P placed and not yet prefilled, uncached part
Reads    cached tokens, own bookings
Ties     broken uniformly at random
Blind to the speed of the card, the length of answers, and where long prompts cost more than their tokens
Source   LMetric, OSDI 2026: a product needs no weights
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, choose_replica
from policies.symbols import cached_tokens


class LMetric:
    summary = "the smallest product of prefill work and requests there"
    reads = "cached tokens, tokens placed and not yet prefilled, requests booked per replica"
    source = "LMetric, OSDI 2026"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        work = fleet.prefill_tokens + request.prompt_tokens - cached_tokens(request, estimates)
        return choose_replica(work * (fleet.booked + 1.0), Reason.BEST_SCORE, estimates, self._rng)
