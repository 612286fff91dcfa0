"""For tests: a ledger and what learns from it, without a dispatcher around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimates
from estimators.first_token import Discipline
from estimators.hit_probability import HitProbability
from estimators.paths import COLUMN, Path
from estimators.request import RequestFacts
from estimators.routes import Held
from estimators.spread import ResidualSpread
from estimators.tiers import Tier
from estimators.view import FleetView
from policies.base import Choice, Reason
from router.actions import Ended
from router.bookings import Booking, Ledger
from router.learning import Learning
from router.prompts import CharactersPerToken
from tests.builders import a_fleet, a_request, an_estimator, held


def a_doubt(view: FleetView) -> Doubt:
    """Nothing learned yet."""
    return Doubt(HitProbability(view.names), ResidualSpread(view.names), Conformal(LEVELS))


class LearningBench:
    """A ledger and what learns from it, told in the order a dispatcher does. One A100 when no card is named.

    doubts : it learns how estimates fail; without, `doubt` learns nothing
    """

    def __init__(
        self,
        *cards: str,
        doubts: bool = True,
        names: list[str] | None = None,
        network_bytes_per_s: float = 25e9,
        discipline: Discipline = Discipline.OVERLAPPED,
        learn_disciplines: bool = False,
    ) -> None:
        self.view = a_fleet(*(cards or ("A100",)), names=names, discipline=discipline)
        rows = self.view.rows
        self.doubt = a_doubt(self.view)
        self.estimator = an_estimator(
            rows=rows,
            network_bytes_per_s=network_bytes_per_s,
            doubt=self.doubt if doubts else None,
            engine_decides=False,
        )
        self.characters = CharactersPerToken()
        self.ledger = Ledger(self.view)
        self.learning = Learning(
            self.view, self.estimator, self.characters, [0.5] * rows, learn_disciplines=learn_disciplines
        )

    def estimate(self, request: RequestFacts, now_s: float, where: Held | None = None) -> Estimates:
        around = self.learning.surroundings(request, self.view.rows, now_s)
        return self.estimator.estimate(request, where or held([0] * self.view.rows), self.view, around, now_s)

    def place(
        self,
        now_s: float = 0.0,
        *,
        row: int = 0,
        path: Path = Path.RECOMPUTE,
        where: Held | None = None,
        prompt_tokens: int = 8448,
        **facts: Any,
    ) -> Booking:
        request = a_request(prompt_tokens, **facts)
        self.learning.arrived(request, now_s)
        estimates = self.estimate(request, now_s, where)
        reused = float(estimates.reused_tokens[COLUMN[path], row])
        choice = Choice(row, path, Reason.LOWEST_ESTIMATE)
        booking = self.ledger.place(
            request,
            choice,
            estimates,
            now_s,
            own_work_s=self.estimator.work_s(row, prompt_tokens - reused, reused, self.view),
            remaining_tokens=self.learning.remaining_tokens(request),
        )
        self.learning.placed(booking, choice, estimates, now_s)
        return booking

    def first_token(self, booking: Booking, now_s: float) -> None:
        self.learning.first_token(booking, now_s)
        self.ledger.first_token(booking, now_s)

    def answer(self, booking: Booking, now_s: float, **ended: Any) -> None:
        self.learning.answered(booking, Ended(**{"status": 200, "output_tokens": 100, **ended}), now_s)
        self.end(booking, now_s)

    def end(self, booking: Booking, now_s: float) -> None:
        self.learning.ended(booking, now_s)
        self.ledger.release(booking, now_s)

    def taught(self, seconds: float, *, count: int = 30, row: int = 0, start_s: float = 0.0, **facts: Any) -> None:
        """`count` requests alone on `row`, each with its first token after `seconds`."""
        for index in range(count):
            now_s = start_s + 100.0 * index
            booking = self.place(now_s, row=row, **facts)
            self.first_token(booking, now_s + seconds)
            self.answer(booking, now_s + seconds + 5.0, cached_tokens=0)

    def compute_s(self, row: int = 0, tokens: int = 8448) -> float:
        return float(self.estimate(a_request(tokens), 1e6).compute_s[COLUMN[Path.RECOMPUTE], row])

    def output_tokens(self, **facts: Any) -> float:
        return self.learning.surroundings(a_request(**facts), 1, 1e6).output_tokens

    def survival(self, row: int = 0, tier: Tier = Tier.HBM) -> float:
        """Probability that a copy of unknown age is there."""
        ages_s = np.full(self.view.rows, np.nan)
        return float(self.doubt.hits.survival(tier, ages_s, 1e3)[row])
