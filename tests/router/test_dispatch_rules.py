"""What the dispatcher tells rules, and what it makes of their refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.base import Choice, Refused
from policies.by_load.least_request import LeastRequest
from policies.watcher import Watcher
from router.actions import Cause
from router.plain import reads_estimates
from tests.builders import a_request
from tests.router.dispatch_bench import Bench, nothing_is_left, only_refusal, only_send


class Listening(Watcher):
    """The fewest requests, with a list of what it was told."""

    reads_estimates = False

    def __init__(self) -> None:
        self.told: list[tuple[str, int, float]] = []
        self._inner = LeastRequest(np.random.default_rng(1))

    def choose(self, request: Any, fleet: Any, estimates: Any) -> Choice:
        self.told.append(("asked", -1, fleet.now_s))
        return self._inner.choose(request, fleet, estimates)

    def placed(self, placed: Any, fleet: Any, estimates: Any) -> None:
        self.told.append(("placed", placed.row, fleet.now_s))

    def first_token(self, placed: Any, fleet: Any) -> None:
        self.told.append(("first_token", placed.row, fleet.now_s))

    def ended(self, placed: Any, fleet: Any) -> None:
        self.told.append(("ended", placed.row, fleet.now_s))


class Listened(Bench):
    """A bench whose rule listens."""

    def __init__(self, *cards: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rule = Listening()
        monkeypatch.setattr("tests.router.dispatch_bench.build_policy", lambda *_, **__: self.rule)
        super().__init__(*cards)


def test_a_rule_hears_of_each_attempt_of_a_request_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Listened("A100", "A100", monkeypatch=monkeypatch)
    first = bench.send(1.0)
    second = only_send(bench.dispatcher.failed(first, Cause.CONNECT, 1.5))
    bench.dispatcher.first_token(second, 2.0)
    bench.finish(second, 3.0)
    one, other = first.row, second.row
    assert bench.rule.told == [
        ("asked", -1, 1.0),
        ("placed", one, 1.0),
        ("ended", one, 1.5),
        ("asked", -1, 1.5),
        ("placed", other, 1.5),
        ("first_token", other, 2.0),
        ("ended", other, 3.0),
    ]
    assert {one, other} == {0, 1}
    assert nothing_is_left(bench)


def test_a_rule_hears_of_placements_that_others_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What generates nothing is placed by load, and is on the replica all the same."""
    bench = Listened("A100", monkeypatch=monkeypatch)
    bench.dispatcher.cancelled(bench.send(1.0, generates=False), 2.0)
    assert bench.rule.told == [("placed", 0, 1.0), ("ended", 0, 2.0)]


def test_a_rule_that_watches_gets_bookings_to_watch() -> None:
    assert reads_estimates(Listening())
    assert not reads_estimates(LeastRequest(np.random.default_rng(1)))


class Choosy:
    def choose(self, request: Any, fleet: Any, estimates: Any) -> Choice:
        raise Refused("no replica answers within 2 s")


def test_a_refusal_by_the_rule_is_a_429_with_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.router.dispatch_bench.build_policy", lambda *_, **__: Choosy())
    bench = Bench("A100")
    refusal = only_refusal(bench.dispatcher.arrived(a_request(), 1.0))
    assert (refusal.status, refusal.message) == (429, "no replica answers within 2 s")
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.status) == ("refused", 429)
    assert nothing_is_left(bench)
