"""Rules that take the candidate with the smallest expected time, over all replicas and paths.

Reads    every estimate: queue, fetch, compute, pace, price of work
Source   T_first = max(Q, R) + C: AI Infra textbook, section 9.5.4; price of work: docs/objectives.md
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, choose_candidate, choose_of_few


class FirstToken:
    """Smallest expected T_first of this request: pure and selfish, for comparison and for idle fleets."""

    summary = "the earliest first token of this request (selfish)"
    reads = "queue, fetch and compute of every replica and path"
    source = "T_first = max(Q, R) + C"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        few = estimates.few
        if few is not None:
            return choose_of_few([one.expected_s for one in few], few, self._rng)
        return choose_candidate(estimates.expected_s, estimates, self._rng)


class EndToEnd:
    """Smallest expected completion of this request plus the delay it causes others.

    own_pace : weight of this request's own decode time, >= 0
    queue_behind, running_decodes : weights of what others lose, >= 0; zero makes it selfish. Chunked prefill hides
        most of a running decode's stand-still, hence the small default
    """

    summary = "the earliest completion of this request, plus the delay it causes others"
    reads = "queue, fetch, compute, decode pace and price of work of every replica and path"
    source = "T_first + output x pace + price of work"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        own_pace: float = 0.3,
        queue_behind: float = 1.0,
        running_decodes: float = 0.1,
    ) -> None:
        for name, weight in (
            ("own_pace", own_pace),
            ("queue_behind", queue_behind),
            ("running_decodes", running_decodes),
        ):
            require(0 <= weight < float("inf"), name, weight)
        self._rng = rng
        self._own_pace = own_pace
        self._queue_behind = queue_behind
        self._running_decodes = running_decodes

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        few, paced_tokens = estimates.few, self._own_pace * estimates.output_tokens
        if few is not None:
            queue_behind, running_decodes = self._queue_behind, self._running_decodes
            values = [
                expected_s + paced_tokens * pace_s + queue_behind * queue_s + running_decodes * decode_s
                for _, _, expected_s, pace_s, queue_s, decode_s in few
            ]
            return choose_of_few(values, few, self._rng)
        value_s = (
            estimates.expected_s
            + paced_tokens * estimates.pace_s
            + self._queue_behind * estimates.queue_price_s
            + self._running_decodes * estimates.decode_price_s
        )
        return choose_candidate(value_s, estimates, self._rng)
