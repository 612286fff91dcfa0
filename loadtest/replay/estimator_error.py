"""An estimator that is wrong by a stated share, to see which rules survive it.

Model     all times of a replica (Q, R, C and the T_first made of them) multiplied by one factor, drawn anew for each
          replica and decision: log-normal with mean 1 and the stated standard deviation. What the policy sees is also
          what is booked and what calibration learns from: an estimator that is wrong is wrong everywhere in the router
Valid     share >= 0; 0 changes nothing
Blind to  errors that last: every draw is independent of the one before, so no replica is misjudged for long
"""

from __future__ import annotations

from math import log, sqrt
from typing import Any

import numpy as np

from estimators.estimates import Estimates, Estimator, Surroundings
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.routes import Held
from estimators.view import FleetView


class WrongEstimator(Estimator):
    """`inner` with errors. share : standard deviation of the factor, >= 0; chance : the stream it draws from"""

    def __init__(self, inner: Estimator, *, share: float, chance: np.random.Generator) -> None:
        require(0 <= share < float("inf"), "share", share)
        self._inner = inner
        self._sigma = sqrt(log(1.0 + share * share))
        self._chance = chance

    def __getattr__(self, name: str) -> Any:
        """Everything but `estimate` is the inner one's, its links included."""
        return getattr(self._inner, name)

    def estimate(
        self, request: RequestFacts, held: Held, view: FleetView, around: Surroundings, now_s: float
    ) -> Estimates:
        right = self._inner.estimate(request, held, view, around, now_s)
        draws = self._chance.standard_normal(view.rows)
        factor = np.exp(self._sigma * draws - 0.5 * self._sigma**2)
        return right.changed(
            queue_s=right.queue_s * factor,
            fetch_s=right.fetch_s * factor,
            ready_s=right.ready_s * factor,
            prefill_s=right.prefill_s * factor,
            compute_s=right.compute_s * factor,
            first_token_s=right.first_token_s * factor,
            stored_s=right.stored_s * factor,
        )
