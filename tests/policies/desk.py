"""A desk at which a rule is asked and told as the dispatcher does it, on states made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from estimators.estimates import Estimates, Estimator
from estimators.paths import Path
from estimators.request import RequestFacts
from estimators.routes import Held
from estimators.view import FleetView
from policies.base import Choice, Policy, Reason
from policies.watcher import Watcher
from router.bookings import Booking, Ledger
from tests.builders import a_fleet, a_request, an_estimator, quiet


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def some_fleet(rows: int) -> FleetView:
    """That many idle replicas, all alike."""
    return a_fleet(*["A100"] * rows)


def blocks(*leading: int, store: int = 0, confirmed: list[int] | None = None) -> Held:
    """Leading blocks of the prompt in each replica's HBM, and in the store."""
    return Held(
        local_blocks=np.array(leading, dtype=np.int32),
        store_blocks=store,
        confirmed_blocks=None if confirmed is None else np.array(confirmed, dtype=np.int32),
    )


class Desk:
    """`policy` on `view`. held : where prompts are, until said otherwise"""

    def __init__(
        self, policy: Policy, view: FleetView, held: Held | None = None, estimator: Estimator | None = None
    ) -> None:
        self.policy = policy
        self.view = view
        self.held = held or blocks(*[0] * view.rows)
        self._estimator = estimator or an_estimator(rows=view.rows)
        self._ledger = Ledger(view, watcher=policy if isinstance(policy, Watcher) else None)
        self._sent = 0

    def estimates(self, request: RequestFacts, now_s: float = 0.0) -> Estimates:
        self.view.now_s = now_s
        return self._estimator.estimate(request, self.held, self.view, quiet(), now_s)

    def ask(self, request: RequestFacts | None = None, now_s: float = 0.0) -> Choice:
        """What it would choose; nothing is placed."""
        request = request or a_request()
        return self.policy.choose(request, self.view, self.estimates(request, now_s))

    def send(self, request: RequestFacts | None = None, now_s: float = 0.0) -> Booking:
        """Choose and place."""
        request = request or a_request()
        return self.place(self.ask(request, now_s).row, request, now_s)

    def place(self, row: int, request: RequestFacts | None = None, now_s: float = 0.0) -> Booking:
        """Place on `row`, whatever the rule would say."""
        self._sent += 1
        request = replace(request or a_request(), request_id=f"r-{self._sent}")
        estimates = self.estimates(request, now_s)
        choice = Choice(row, estimates.path_at(row) if estimates.usable_rows[row] else Path.RECOMPUTE, Reason.DRAWN)
        return self._ledger.place(request, choice, estimates, now_s, own_work_s=(0.1, 0.1), remaining_tokens=10.0)

    def first_token(self, booking: Booking, now_s: float) -> None:
        self._ledger.first_token(booking, now_s)

    def end(self, booking: Booking, now_s: float) -> None:
        self._ledger.release(booking, now_s)

    def shares(self, draws: int = 2000, request: RequestFacts | None = None) -> list[float]:
        """How often each replica is chosen."""
        counts = np.zeros(self.view.rows)
        for _ in range(draws):
            counts[self.ask(request).row] += 1
        return [float(count) / draws for count in counts]
