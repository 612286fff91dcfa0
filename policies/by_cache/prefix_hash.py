"""Requests that begin alike go to the same replica, unless it is over its bound.

Model    consistent hashing with bounded loads: each replica has `virtual_nodes` points on a ring; a prefix
         goes to the first replica clockwise with booked + 1 <= ceil(1.25 (all booked + 1) / N). The SGLang gateway's
         variant sends what the first one has no room for to the least loaded instead of on along the ring
Reads    the first `prefix_tokens` tokens of the prompt, of at least two blocks, requests booked per replica
Ties     of the least loaded broken uniformly at random
Blind to where the prefix really is, what a request costs, and the speed of the card
Source   Mirrokni, Thorup, Zadimoghaddam, SODA 2018
"""

from __future__ import annotations

from math import ceil

import numpy as np

from estimators.estimates import Estimates
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, choice_of, choose_replica
from policies.by_cache.ring import Ring

FEWEST_BLOCKS = 2  # the first block of a chat trace is common to all


class PrefixHash:
    """prefix_tokens : >= 1; load_factor : >= 1; virtual_nodes : >= 1, 100 to 256 spread well

    overflow : "clockwise", or "least_loaded" as the SGLang gateway does
    """

    summary = "consistent hashing of the prompt's beginning, with bounded loads"
    reads = "first tokens of the prompt, requests booked per replica"
    reads_estimates = False
    source = "Mirrokni et al. 2018"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        prefix_tokens: int = 1024,
        load_factor: float = 1.25,
        virtual_nodes: int = 128,
        overflow: str = "clockwise",
    ) -> None:
        require(prefix_tokens >= 1, "prefix_tokens", prefix_tokens)
        require(1 <= load_factor < float("inf"), "load_factor", load_factor)
        require(overflow in ("clockwise", "least_loaded"), "overflow", overflow, "neither clockwise nor least_loaded")
        self._rng = rng
        self._prefix_tokens = prefix_tokens
        self._load_factor = load_factor
        self._ring = Ring(virtual_nodes)
        self._clockwise = overflow == "clockwise"

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        if not request.chain:  # nothing to hash: the prompt is shorter than a block or its tokens are unknown
            return self._least_loaded(Reason.LOWER_LOAD, fleet, estimates)
        usable, booked = estimates.usable_rows, fleet.booked
        bound = ceil(self._load_factor * (int(booked[usable].sum()) + 1) / int(usable.sum()))
        blocks = max(FEWEST_BLOCKS, self._prefix_tokens // request.block_tokens)
        reason = Reason.PREFIX_HASH
        for owner in self._ring.owners(fleet.names, request.chain[min(blocks, len(request.chain)) - 1]):
            if not usable[owner]:
                continue
            if booked[owner] + 1 <= bound:
                return choice_of(owner, reason, estimates)
            reason = Reason.OVERFLOW
            if not self._clockwise:
                return self._least_loaded(reason, fleet, estimates)
        raise AssertionError("some replica is at or under the mean load, and so under its bound")

    def _least_loaded(self, reason: Reason, fleet: FleetView, estimates: Estimates) -> Choice:
        return choose_replica(fleet.booked.astype(np.float64), reason, estimates, self._rng)
