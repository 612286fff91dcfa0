"""The least expected money per request that meets its deadlines.

Model    (C + held x (T_first + expected output x pace there) + weighted delay of others) x price of the replica
         / P(in time), the probability floored at 0.01. What others lose is seconds of that replica too. Where no price
         is known, the seconds
Why held a request has a slot and memory of its replica from its arrival until its end, and is charged for a fixed share
         of the replica meanwhile. Its true share of the decode steps falls with the decodes beside it: a rule that
         counts that fills the fullest replica, and one that does not count its own wait queues it where that is cheap
Reads    queue, fetch, compute, pace, decodes, price of work, and price per hour of every replica
Blind to cards that are paid while idle, see `estimators/cost.py`; money for bytes on links
Source   `estimators/cost.py`, `estimators/price.py`
"""

from __future__ import annotations

from typing import Unpack

import numpy as np

from estimators.candidates import Grid
from estimators.cost import money_usd, per_good_usd, unpriced_last
from estimators.estimates import Estimates
from estimators.request import RequestFacts
from policies.objectives.objective import Common, Measured
from policies.objectives.price import Price, weight

# Without deadlines every answer counts however late, and all would wait for the cheapest card.
FIRST_TOKEN_MS, PACE_MS = 5000.0, 100.0


class Cost(Measured):
    """held : share of a replica that a request is charged for while it is there, >= 0
    queue_behind, running_decodes, fetch, joining, levelling, backlog : weights of what others lose, >= 0: `price.py`

    Deadlines are 5 s and 100 ms for each further token where neither request nor settings name others.
    """

    summary = "the least money per request that meets its deadlines (5 s, then 100 ms a token, where none are named)"
    reads = "queue, fetch, compute, pace, price of work and price per hour of every replica and path"
    source = "money / P(in time)"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        held: float = 0.3,
        queue_behind: float = 1.0,
        running_decodes: float = 0.5,
        fetch: float = 1.0,
        joining: float = 12.0,
        levelling: float = 2.0,
        backlog: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        common.setdefault("slo_ttft_ms", FIRST_TOKEN_MS)
        common.setdefault("slo_tpot_ms", PACE_MS)
        super().__init__(rng, **common)
        self._held = weight("held", held)
        self._price = Price(queue_behind, running_decodes, fetch, joining, levelling, backlog)

    def value(self, request: RequestFacts, estimates: Estimates) -> Grid:
        there_s = estimates.expected_s + estimates.output_tokens * estimates.pace_s
        seconds = estimates.compute_s + self._held * there_s + self._price.of(estimates)
        priced = unpriced_last(money_usd(gpu_s=seconds, usd_per_hour=estimates.usd_per_hour))
        money = priced if np.isfinite(priced[estimates.possible]).any() else seconds
        chance = self._deadlines.probability(request, estimates)
        return money if chance is None else per_good_usd(money=money, good=chance)
