"""The earliest completion of this request, plus the delay it causes others.

Model    expected T_first + own_pace x expected output x pace there
             + running_decodes x delay of running decodes + fetch x utilisation x duration of the fetch
             + queue_behind x delay of later requests + joining x delay of those who come while the queue lasts,
               or while no replica is free + levelling x what those lose who would have taken a short queue
                                           + backlog x what all lose who come while there are queues
Reads    every estimate: queue, fetch, compute, pace, price of work
Blind to requests whose answers are longer or shorter than such requests usually are
Source   price of work: `estimators/price.py`; weights: docs/results.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from estimators.candidates import Few, Grid
from estimators.estimates import Estimates
from estimators.request import RequestFacts
from policies.objectives.objective import Common, Measured
from policies.objectives.price import Price, weight


class EndToEnd(Measured):
    """own_pace : weight of this request's own decode time, >= 0
    queue_behind, running_decodes, fetch, joining, levelling, backlog : weights of what others lose, >= 0; zero makes it
        selfish. Chunked prefill hides most of a running decode's stand-still, hence the small default; the last three:
        `price.py`
    """

    summary = "the earliest completion of this request, plus the delay it causes others"
    reads = "queue, fetch, compute, decode pace and price of work of every replica and path"
    source = "T_first + output x pace + price of work"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        own_pace: float = 0.25,
        queue_behind: float = 1.0,
        running_decodes: float = 0.3,
        fetch: float = 1.0,
        joining: float = 16.0,
        levelling: float = 6.0,
        backlog: float = 0.03,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(rng, **common)
        self._own_pace = weight("own_pace", own_pace)
        self._price = Price(queue_behind, running_decodes, fetch, joining, levelling, backlog)

    def value(self, request: RequestFacts, estimates: Estimates) -> Grid:
        own_s = self._own_pace * estimates.output_tokens * estimates.pace_s
        return estimates.expected_s + own_s + self._price.of(estimates)

    def value_of_few(self, estimates: Estimates, few: Sequence[Few]) -> list[float]:
        own = self._own_pace * estimates.output_tokens
        prices_s = self._price.of_few(estimates, few)
        return [one.expected_s + own * one.pace_s + price_s for one, price_s in zip(few, prices_s, strict=True)]
