"""The less loaded of two replicas drawn at random.

Reads    requests booked per replica; no cache, no estimate
Ties     go to the first drawn, so no replica is favoured
Blind to how long each request is, the cache, and the speed of the card
Source   Mitzenmacher, IEEE TPDS 12(10), 2001
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.request import RequestFacts
from estimators.view import Column, FleetView
from policies.base import Choice, Mask, Reason, choice_of


class TwoChoices:
    summary = "the fewer requests in flight of two replicas drawn at random"
    reads = "requests booked per replica"
    source = "Mitzenmacher 2001"
    reads_estimates = False

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        pair = two_drawn(estimates.usable_rows, self._rng)
        return better_of(pair, fleet.booked.astype(np.float64), estimates)


def two_drawn(usable: Mask, rng: np.random.Generator) -> tuple[int, int]:
    """Two different usable rows in the order drawn; the only one twice."""
    rows = usable.nonzero()[0]
    if len(rows) == 1:
        return rows.item(), rows.item()
    first, second = rng.choice(rows, size=2, replace=False).tolist()
    return first, second


def better_of(pair: tuple[int, int], cost: Column, estimates: Estimates) -> Choice:
    """The cheaper of `pair`, the first of equals, with the probability that any pair would have given it."""
    first, second = pair
    row = second if cost[second] < cost[first] else first
    others = cost[estimates.usable_rows]
    rows = len(others)
    if rows == 1:
        return choice_of(row, Reason.LOWER_LOAD, estimates)
    won = np.count_nonzero(others > cost[row]) + (np.count_nonzero(others == cost[row]) - 1) / 2
    return choice_of(row, Reason.LOWER_LOAD, estimates, probability=float(won / (rows * (rows - 1) / 2)))
