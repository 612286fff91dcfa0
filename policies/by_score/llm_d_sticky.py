"""llm-d's newer default: stay where nearly all of the prompt is cached, until that costs too many seconds.

Model     replicas with h/n >= `affinity` are kept, unless the best of them would make it wait `penalty_s` longer than
          the best of the others: then all are. Wait is in-flight tokens over the card's peak prefill rate. Of those
          kept the fewest in-flight tokens: prompt tokens, uncached part, placed there and not yet prefilled
Reads    cached tokens, own bookings, the card's roofline
Ties     broken uniformly at random
Blind to running decodes, attention, and how many tokens of this prompt each one would compute
Source   llm-d router: prefix-cache-affinity filter with its TTFT load gate, token-load scorer
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Mask, Reason, choose_replica, draw, smallest
from policies.symbols import cached_tokens, peak_prefill_tokens_per_s


class LlmDSticky:
    """affinity : share of the prompt, 0..1; penalty_s : of waiting for it, >= 0"""

    summary = "the least in-flight tokens of those that have nearly all of the prompt, while they are not much slower"
    reads = "cached tokens, tokens placed and not yet prefilled, peak prefill rate of the card"
    source = "llm-d router, newer default"

    def __init__(self, rng: np.random.Generator, *, affinity: float = 0.8, penalty_s: float = 18.0) -> None:
        require(0 <= affinity <= 1, "affinity", affinity)
        require(0 <= penalty_s < float("inf"), "penalty_s", penalty_s)
        self._rng = rng
        self._affinity = affinity
        self._penalty_s = penalty_s

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        sticky = self._sticky(request, fleet, estimates)
        if sticky is None:
            return choose_replica(fleet.prefill_tokens, Reason.LOWER_LOAD, estimates, self._rng)
        return draw(smallest(fleet.prefill_tokens, sticky), Reason.LONGEST_PREFIX, estimates, self._rng)

    def _sticky(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Mask | None:
        """Replicas worth staying with; None where there is none."""
        usable = estimates.usable_rows
        share = cached_tokens(request, estimates) / max(request.prompt_tokens, 1)
        sticky: Mask = usable & (share >= self._affinity)
        others: Mask = usable & ~sticky
        if not sticky.any():
            return None
        wait_s = fleet.prefill_tokens / peak_prefill_tokens_per_s(fleet)
        if others.any() and wait_s[sticky].min() - wait_s[others].min() > self._penalty_s:
            return None
        return sticky
