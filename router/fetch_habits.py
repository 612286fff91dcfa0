"""What each replica does about a fetch, learned from its first tokens.

Model     each discipline predicts the first token of each fetched request; a discipline is believed once it is clearly
          the likeliest, and only if what was believed before cannot be told from it
Valid     streamed answers; one discipline for each replica
Blind to  engines that change their discipline from request to request
"""

from __future__ import annotations

import numpy as np

from estimators.discipline import DisciplineLearner
from estimators.estimates import Estimates, Estimator
from estimators.turns import Standing, Turns
from estimators.view import FleetView
from policies.base import Choice
from router.bookings import Booking

SURE_AFTER_FETCHES = 30.0  # seen before a replica's discipline is believed
SURE_PROBABILITY = 0.95
LIMIT_FACTORS = (0.5, 1.0, 2.0, 5.0, 10.0)  # of the configured patience: what a time-limited engine may have instead
USUAL_LIMIT_S = 0.1
ASK_EVERY = 10  # fetches: evidence is added up in batches, and asking costs more than observing


class FetchHabits:
    """What each replica does about a fetch, learned from its first tokens, and written to the fleet view once sure."""

    def __init__(self, view: FleetView, estimator: Estimator) -> None:
        self._view = view
        self._estimator = estimator
        self.learners = [
            DisciplineLearner(layers=estimator.layers, limits_s=[limit_s * factor for factor in LIMIT_FACTORS])
            for limit_s in np.where(view.limit_s > 0, view.limit_s, USUAL_LIMIT_S).tolist()
        ]
        self._turns = [Turns(layers=estimator.layers) for _ in range(view.rows)]
        self._standing: dict[Booking, Standing] = {}
        self._seen = [0] * view.rows

    def placed(self, booking: Booking, choice: Choice, estimates: Estimates, now_s: float) -> None:
        """It was sent; what its fetch and its prefill would take under each discipline is worked out now."""
        fetch = self._estimator.fetch_alone(estimates, choice.path, choice.row, now_s)
        in_turn = self._estimator.fetch_alone(
            estimates, choice.path, choice.row, now_s + float(estimates.queue_s[choice.row])
        )
        self._standing[booking] = self._turns[booking.row].placed(
            now_s,
            rest=self._estimator.rest_of(estimates, choice.path, choice.row, self._view),
            fetch_s=fetch[0],
            fetch_in_turn_s=in_turn[0],
            in_turn_at_s=float(estimates.queue_s[choice.row]),
            first_byte_s=fetch[1],
        )

    def first_token(self, booking: Booking, now_s: float) -> None:
        """Its first token came."""
        standing = self._standing.pop(booking, None)
        seen = None if standing is None else self._turns[booking.row].first_token(standing, now_s)
        if seen is None or seen.first_token_s <= 0:
            return
        learner = self.learners[booking.row]
        learner.observe(seen)
        self._seen[booking.row] += 1
        if self._seen[booking.row] % ASK_EVERY == 0:
            self._take_over(booking.row, learner)

    def _take_over(self, row: int, learner: DisciplineLearner) -> None:
        verdict = learner.verdict()
        if verdict.discipline is None or verdict.fetches < SURE_AFTER_FETCHES:
            return
        if verdict.probability >= SURE_PROBABILITY and self._view.disciplines[row] not in verdict.alike:
            self._view.disciplines[row] = verdict.discipline
            if not np.isnan(verdict.limit_s):
                self._view.limit_s[row] = verdict.limit_s

    def ended(self, booking: Booking) -> None:
        """It ended; without a first token it teaches nothing."""
        standing = self._standing.pop(booking, None)
        if standing is not None:
            self._turns[booking.row].gone(standing)
