"""The most free KV memory for each request there, what the oldest waiting one will need taken off.

Model     the largest (free KV - demand of the queue head) / max(1, b), in tokens; demand is the prompt of the oldest
          request whose prefill is not over, since its memory is not in use before it is computed
Reads    KV memory in use as last reported, KV capacity, own bookings
Ties     broken uniformly at random
Blind to the cache, the speed of the card, and what was placed since the last report but for its count and the head.
         Replicas that do not report use what is booked there; of unknown capacity counts as the mean of the known,
         and where none is known, the fewest requests decide
Source   Sun et al., Llumnix, OSDI 2024: its dispatch rule alone, no migration
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.queueing import or_mean_of_known
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, choose_replica


class Llumnix:
    summary = "the most free KV memory for each request, less what the queue's head needs"
    reads = "reported use of KV memory, its capacity, requests booked per replica"
    source = "Llumnix, OSDI 2024, dispatch rule only"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        booked = fleet.booked.astype(np.float64)
        if not fleet.knows_capacity:
            return choose_replica(booked, Reason.LOWER_LOAD, estimates, self._rng)
        capacity = or_mean_of_known(fleet.capacity_tokens, estimates.usable_rows)
        by_bookings = fleet.decode_context_tokens * fleet.occupancy
        used = np.where(np.isnan(fleet.kv_used_share), by_bookings, fleet.kv_used_share * capacity)
        freeness = (capacity - used - fleet.head_tokens) / np.maximum(booked, 1.0)
        return choose_replica(-freeness, Reason.LOWER_LOAD, estimates, self._rng)
