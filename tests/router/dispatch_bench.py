"""For tests: a dispatcher without a socket, and what it hands out."""

from __future__ import annotations

from typing import Any

import numpy as np

from estimators.estimates import Estimator
from estimators.first_token import Discipline
from estimators.paths import Path
from estimators.prefetch import PrefetchSpace
from estimators.routes import Held
from estimators.shapes import QWEN3_8B
from policies.base import Choice, Reason
from policies.by_load.least_request import LeastRequest
from router.actions import Action, Ended, Refuse, Send
from router.bookings import Booking
from router.dispatch import Dispatcher
from router.placing import Placement, Replica
from router.plugins import build_policy
from router.receipts import Candidate, Receipt
from tests.builders import MODEL, NoHoldings, a_fleet, a_request, an_estimator, held
from tests.router.learning_bench import a_doubt

FETCHED_BYTES = 8192 * QWEN3_8B.kv_bytes_per_token  # 512 blocks


class Bench:
    """A dispatcher with its receipts, all replicas up.

    doubts : it learns how estimates fail; room_bytes : for fetches on each replica
    """

    def __init__(
        self,
        *cards: str,
        policy: str = "ttft",
        where: Held | None = None,
        network_bytes_per_s: float | None = None,
        say_models: int | None = None,
        discipline: Discipline = Discipline.OVERLAPPED,
        doubts: bool = False,
        room_bytes: float | None = None,
        estimator: Estimator | None = None,
        **changes: Any,
    ) -> None:
        self.view = a_fleet(*cards, discipline=discipline)
        self.view.ready[:] = False
        self.receipts: list[Receipt] = []
        rows = self.view.rows
        self.estimator = estimator or an_estimator(
            rows=rows, network_bytes_per_s=network_bytes_per_s, doubt=a_doubt(self.view) if doubts else None
        )
        if room_bytes is not None:
            self.estimator.space = PrefetchSpace([room_bytes] * rows)
        self.dispatcher = Dispatcher(
            replicas=[Replica(name, f"http://{name}:8000") for name in self.view.names],
            view=self.view,
            holdings=NoHoldings(where or held([0] * rows)),
            estimator=self.estimator,
            policy=build_policy(policy, {}, seed=1),
            policy_name=policy,
            by_load=LeastRequest(np.random.default_rng(1)),
            on_receipt=self.receipts.append,
            epoch_s=1000.0,
            **changes,
        )
        for row in range(rows if say_models is None else say_models):
            self.dispatcher.replica_up(row, frozenset({MODEL}), 0.0)

    def send(self, now_s: float = 0.0, **changes: Any) -> Send:
        return only_send(self.dispatcher.arrived(a_request(**changes), now_s))

    def report(self, row: int, *, running: float | None, waiting: float | None, sent_s: float, **more: Any) -> None:
        self.dispatcher.load_reported(row, running=running, waiting=waiting, sent_s=sent_s, now_s=sent_s + 0.1, **more)

    def finish(self, sent: Send, now_s: float, **changes: Any) -> None:
        ended = Ended(**{"status": 200, "output_tokens": 100, **changes})
        assert self.dispatcher.finished(sent, ended, now_s) == []

    def chosen(self, now_s: float = 0.0, **changes: Any) -> Candidate:
        """What is expected of one more request, which is then cancelled."""
        sent = self.send(now_s, **changes)
        self.dispatcher.cancelled(sent, now_s)
        assert isinstance(sent.placement, Placement)
        assert sent.placement.receipt.choice is not None
        return sent.placement.receipt.choice

    def on_links(self, now_s: float) -> list[float]:
        return [float(left) for left in self.estimator.routes.table.outstanding_bytes(now_s)]

    @property
    def room_taken(self) -> list[float]:
        assert self.estimator.space is not None
        return [float(held) for held in self.estimator.space.outstanding_bytes]


def only_send(actions: list[Action]) -> Send:
    (action,) = actions
    assert isinstance(action, Send), action
    return action


def only_refusal(actions: list[Action]) -> Refuse:
    (action,) = actions
    assert isinstance(action, Refuse), action
    return action


def booking_of(sent: Send) -> Booking:
    assert isinstance(sent.placement, Placement)
    return sent.placement.booking


def nothing_is_left(bench: Bench) -> bool:
    view = bench.view
    columns = (
        view.booked,
        view.prefill_tokens,
        *view.waiting,
        view.head_compute_s,
        view.head_tokens,
        view.decode_batch,
        view.decode_context_tokens,
        view.decode_read_tokens,
        view.remaining_tokens,
    )
    return all(np.all(np.abs(column) < 1e-9) for column in columns) and bool(np.all(view.head_ends_s == -np.inf))


class Takes:
    """A policy that takes one candidate, whatever it costs."""

    def __init__(self, row: int, path: Path) -> None:
        self._choice = Choice(row, path, Reason.LOWEST_ESTIMATE)

    def choose(self, *facts: object) -> Choice:
        return self._choice
