"""A low tail: the smallest quantile of the first token, plus what the choice costs others on average.

Model    quantile of T_first, as issued, + the price of work as for `e2e`. A 90 % hit with a slow miss has a fine mean
         and a terrible p99
Reads    queue, fetch, compute, hit probability, residuals, price of work
Blind to tails of what others lose: their mean counts
Source   AI Infra textbook, section 9.5.4 (a two-point first token)
"""

from __future__ import annotations

from typing import Unpack

import numpy as np

from estimators.candidates import Grid
from estimators.estimates import Estimates
from estimators.likely import quantile_s
from estimators.ranges import require
from estimators.request import RequestFacts
from policies.objectives.objective import Common, Measured
from policies.objectives.price import Price


class Quantile(Measured):
    """quantile : of the first token, within (0, 1)
    queue_behind, running_decodes, fetch : weights of what others lose, >= 0; see `price.py`
    """

    summary = "the smallest p99 (or other quantile) of the first token, plus the mean price of work"
    reads = "queue, fetch, compute, hit probability, residuals and price of work of every replica and path"
    source = "AI Infra textbook, section 9.5.4"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        quantile: float = 0.99,
        queue_behind: float = 1.0,
        running_decodes: float = 0.1,
        fetch: float = 1.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(rng, **common)
        require(0 < quantile < 1, "quantile", quantile)
        self._quantile = quantile
        self._price = Price(queue_behind, running_decodes, fetch)

    def value(self, request: RequestFacts, estimates: Estimates) -> Grid:
        return quantile_s(estimates, self._quantile) + self._price.of(estimates)
