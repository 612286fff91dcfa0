from __future__ import annotations

import logging
from typing import Any

import pytest

from policies.by_load.uniform import Uniform
from policies.watcher import Watcher
from router.bookings import Ledger
from router.telling import Telling, telling
from tests.policies.desk import Desk, rng, some_fleet


class Clumsy(Watcher):
    """Fails whenever it is told anything."""

    def placed(self, placed: Any, fleet: Any, estimates: Any) -> None:
        raise KeyError("placed")

    def first_token(self, placed: Any, fleet: Any) -> None:
        raise KeyError("first_token")

    def ended(self, placed: Any, fleet: Any) -> None:
        raise ZeroDivisionError


def test_a_rule_that_fails_when_told_costs_no_booking_and_is_logged_once_for_each_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk(Uniform(rng()), some_fleet(2))
    watcher = telling(Clumsy())
    assert watcher is not None
    desk._ledger = Ledger(desk.view, watcher=watcher)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            sent = desk.place(1)
            desk.first_token(sent, 1.0)
            desk.end(sent, 2.0)
    assert desk.view.booked.sum() == desk.view.prefill_tokens.sum() == desk.view.decode_batch.sum() == 0
    assert watcher.failures == 9
    assert [record.message.split(" told of ")[1].split(";")[0] for record in caplog.records] == [
        "placed",
        "first_token",
        "ended",
    ]


def test_nobody_is_told_where_no_rule_watches() -> None:
    assert telling(Uniform(rng()), object()) is None
    assert isinstance(telling(Uniform(rng()), Watcher()), Telling)
