"""What each replica does about a fetch, learned from its first tokens.

Model     each discipline predicts the first token of each fetched request; a discipline is believed once it is clearly
          the likeliest, and only if what was believed before cannot be told from it
Valid     streamed answers; one discipline for each replica
Blind to  engines that change their discipline from request to request
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from estimators.discipline import DisciplineLearner, Seen
from estimators.estimates import Estimates, Estimator
from estimators.first_token import Discipline
from estimators.stored import number
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

    def __init__(
        self, view: FleetView, estimator: Estimator, disturbed: Callable[[int], bool] = lambda row: False
    ) -> None:
        """`disturbed` : whether something else may hold up the prefills of a row now."""
        self._view = view
        self._disturbed = disturbed
        self._estimator = estimator
        self.learners = [self._newcomer(row) for row in range(view.rows)]
        self._turns = [Turns(layers=estimator.layers) for _ in range(view.rows)]
        self._standing: dict[Booking, Standing] = {}
        self._seen: dict[Booking, Seen] = {}  # from the first token to the end of the answer
        self._observed = [0] * view.rows
        self._verdicts: list[Discipline | None] = [None] * view.rows

    def renew(self, row: int) -> None:
        """`row` is that of another replica, as the view says already; nothing is booked there."""
        self.learners[row] = self._newcomer(row)
        self._turns[row] = Turns(layers=self._estimator.layers)
        self._observed[row] = 0
        self._verdicts[row] = None

    def _newcomer(self, row: int) -> DisciplineLearner:
        limit_s = self._view.limit_s.item(row) or USUAL_LIMIT_S
        return DisciplineLearner(layers=self._estimator.layers, limits_s=[limit_s * factor for factor in LIMIT_FACTORS])

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
        if seen is not None and seen.first_token_s > 0 and not self._disturbed(booking.row):
            self._seen[booking] = seen

    def answered(self, booking: Booking, cached_tokens: int | None) -> None:
        """Its answer ended well; cached_tokens as reported, None if they were not.

        Where the report says that no more was reused than HBM had, nothing was fetched: its first token says nothing.
        """
        seen = self._seen.pop(booking, None)
        if seen is None or (cached_tokens is not None and cached_tokens <= booking.forecast.local_tokens):
            return
        row = booking.row
        self.learners[row].observe(seen)
        self._observed[row] += 1
        if self._observed[row] % ASK_EVERY == 0:
            self._take_over(row)

    def _take_over(self, row: int) -> None:
        """Believe a verdict that is sure, and was the same the time before."""
        verdict = self.learners[row].verdict()
        before, self._verdicts[row] = self._verdicts[row], verdict.discipline
        if verdict.discipline is None or verdict.fetches < SURE_AFTER_FETCHES or before is not verdict.discipline:
            return
        if verdict.probability >= SURE_PROBABILITY and self._view.disciplines[row] not in verdict.alike:
            self._view.disciplines[row] = verdict.discipline
            if not np.isnan(verdict.limit_s):
                self._view.limit_s[row] = verdict.limit_s

    def state(self, row: int) -> dict[str, Any]:
        """What is believed of one replica, as plain values."""
        return {"discipline": self._view.disciplines[row].value, "limit_s": float(self._view.limit_s[row])}

    def restore(self, row: int, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave. Raises ValueError for anything else, and then nothing has changed."""
        discipline = Discipline(state["discipline"])
        limit_s = number(state.get("limit_s"), "limit_s", least=0.0)
        self._view.disciplines[row], self._view.limit_s[row] = discipline, limit_s

    def ended(self, booking: Booking) -> None:
        """It ended; without a first token it teaches nothing."""
        self._seen.pop(booking, None)
        standing = self._standing.pop(booking, None)
        if standing is not None:
            self._turns[booking.row].gone(standing)
