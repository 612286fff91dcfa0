"""Always where most of the prompt is cached, however long the queue there.

Reads    cached tokens per replica, requests booked per replica
Ties     of equal prefixes go to the fewest requests, then to chance
Blind to how long that queue is: whoever holds a prefix that all prompts share gets all of them. For comparison only
Source   AI Infra textbook, section 5.3, "KV affinity": where the KV is, by a global directory of it
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, draw, smallest
from policies.symbols import cached_tokens


class KvAffinity:
    summary = "the longest cached prefix, whatever the queue there"
    reads = "cached tokens and requests booked per replica"
    source = "AI Infra textbook, section 5.3: KV affinity"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        longest = smallest(-cached_tokens(request, estimates), estimates.usable_rows)
        fewest = smallest(fleet.booked.astype(np.float64), longest)
        return draw(fewest, Reason.LONGEST_PREFIX, estimates, self._rng)
