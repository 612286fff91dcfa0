"""The least expected money per request that meets its deadlines.

Model    (GPU seconds of this request + own_pace x expected output x pace there + weighted delay of others)
         x price of the replica / P(in time), the probability floored at 0.01. What others lose is seconds of that
         replica too, and an answer holds its memory for as long as it takes. Where no price is known, the seconds
Why own_pace  the share of a decode step falls with the decodes beside it, so alone it fills the fullest replica
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
    """own_pace : weight of how long the answer takes, >= 0
    queue_behind, running_decodes, fetch, joining : weights of what others lose, >= 0; see `price.py`

    Deadlines are 5 s and 100 ms for each further token where neither request nor settings name others.
    """

    summary = "the least money per request that meets its deadlines (5 s, then 100 ms a token, where none are named)"
    reads = "queue, fetch, compute, pace, price of work and price per hour of every replica and path"
    source = "money / P(in time)"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        own_pace: float = 0.3,
        queue_behind: float = 1.0,
        running_decodes: float = 2.0,
        fetch: float = 1.0,
        joining: float = 12.0,
        **common: Unpack[Common],
    ) -> None:
        common.setdefault("slo_ttft_ms", FIRST_TOKEN_MS)
        common.setdefault("slo_tpot_ms", PACE_MS)
        super().__init__(rng, **common)
        self._own_pace = weight("own_pace", own_pace)
        self._price = Price(queue_behind, running_decodes, fetch, joining)

    def value(self, request: RequestFacts, estimates: Estimates) -> Grid:
        own_s = self._own_pace * estimates.output_tokens * estimates.pace_s
        seconds = estimates.gpu_s + own_s + self._price.of(estimates)
        priced = unpriced_last(money_usd(gpu_s=seconds, usd_per_hour=estimates.usd_per_hour))
        money = priced if np.isfinite(priced[estimates.possible]).any() else seconds
        chance = self._deadlines.probability(request, estimates)
        return money if chance is None else per_good_usd(money=money, good=chance)
