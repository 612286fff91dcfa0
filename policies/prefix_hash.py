"""Requests that begin alike go to the same replica, unless it is over its bound.

Model    consistent hashing with bounded loads: each replica has `virtual_nodes` points on a ring; a prefix
         goes to the first replica clockwise with booked + 1 <= ceil(1.25 (all booked + 1) / N)
Reads    the first `prefix_tokens` tokens of the prompt, requests booked per replica
Blind to where the prefix really is, what a request costs, and the speed of the card
Source   Mirrokni, Thorup, Zadimoghaddam, SODA 2018
"""

from __future__ import annotations

from math import ceil

import numpy as np
import xxhash

from estimators.estimates import Estimates
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView, is_nobody
from policies.base import Choice, Reason, choose_replica


class PrefixHash:
    """prefix_tokens : >= 1; at least two blocks of 512, since the first of a chat trace is common to all."""

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
    ) -> None:
        require(prefix_tokens >= 1, "prefix_tokens", prefix_tokens)
        require(load_factor >= 1, "load_factor", load_factor)
        require(virtual_nodes >= 1, "virtual_nodes", virtual_nodes)
        self._rng = rng
        self._prefix_tokens = prefix_tokens
        self._load_factor = load_factor
        self._virtual_nodes = virtual_nodes
        self._ring_of: tuple[str, ...] = ()
        self._points = np.empty(0, dtype=np.uint64)
        self._owners = np.empty(0, dtype=np.intp)

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        if not request.chain:  # nothing to hash: the prompt is shorter than a block or its tokens are unknown
            return choose_replica(fleet.booked.astype(np.float64), Reason.LOWER_LOAD, estimates, self._rng)
        if fleet.names != self._ring_of:
            self._build_ring(fleet.names)
        usable = estimates.usable_rows
        ready = int(usable.sum())
        bound = ceil(self._load_factor * (int(fleet.booked[usable].sum()) + 1) / ready)
        blocks = max(1, self._prefix_tokens // request.block_tokens)
        key = request.chain[min(blocks, len(request.chain)) - 1]
        first = int(np.searchsorted(self._points, np.uint64(key)))
        reason = Reason.PREFIX_HASH if ready > 1 else Reason.ONLY_READY
        for owner in np.roll(self._owners, -first):
            if usable[owner]:
                if fleet.booked[owner] + 1 <= bound:
                    return Choice(int(owner), estimates.path_at(int(owner)), reason)
                reason = Reason.OVERFLOW
        raise AssertionError("some replica is at or under the mean load, and so under its bound")

    def _build_ring(self, names: tuple[str, ...]) -> None:
        points = [
            (xxhash.xxh3_64_intdigest(f"{name}/{node}".encode()), row)
            for row, name in enumerate(names)
            if not is_nobody(name)  # else the share of who comes next in the ring would be larger
            for node in range(self._virtual_nodes)
        ]
        points.sort()
        self._points = np.array([point for point, _ in points], dtype=np.uint64)
        self._owners = np.array([row for _, row in points], dtype=np.intp)
        self._ring_of = names
