from __future__ import annotations

from math import exp
from typing import Any

import pytest

from policies.by_load.peak_ewma import PeakEwma
from tests.policies.desk import Desk, rng, some_fleet


def answered(desk: Desk, row: int, *, placed_s: float, took_s: float) -> None:
    sent = desk.place(row, now_s=placed_s)
    desk.first_token(sent, placed_s + took_s)
    desk.end(sent, placed_s + took_s)


def test_a_slow_answer_is_believed_at_once() -> None:
    desk = Desk(PeakEwma(rng()), some_fleet(2))
    answered(desk, 0, placed_s=0.0, took_s=3.0)
    assert {desk.ask(now_s=3.0).row for _ in range(20)} == {1}


def test_a_fast_answer_is_believed_slowly() -> None:
    """After a peak of 4 s, an answer in 1 s that comes 5 s later counts by 1 - exp(-1/2)."""
    policy = PeakEwma(rng())
    desk = Desk(policy, some_fleet(2))
    answered(desk, 0, placed_s=0.0, took_s=4.0)
    answered(desk, 0, placed_s=8.0, took_s=1.0)
    kept = exp(-0.5)
    assert policy._latency_s[0] == pytest.approx(4.0 * kept + 1.0 * (1 - kept))


def test_a_cost_that_nobody_renews_fades_when_it_is_read() -> None:
    """3 s fade in 12 s to less than the start value of a replica that is read just as often does."""
    desk = Desk(PeakEwma(rng()), some_fleet(2))
    answered(desk, 0, placed_s=0.0, took_s=3.0)
    desk.view.booked[1] = 3  # 1 s x 4 pending against 3 s x 1, both fading alike
    assert {desk.ask(now_s=now_s).row for now_s in (3.0, 9.0, 15.0)} == {0}


def test_the_decay_does_not_depend_on_how_often_it_is_read() -> None:
    often, once = PeakEwma(rng()), PeakEwma(rng())
    for policy, reads in ((often, 50), (once, 1)):
        desk = Desk(policy, some_fleet(2))
        for number in range(reads + 1):
            desk.ask(now_s=10.0 * number / reads)
    assert often._latency_s == pytest.approx(once._latency_s)
    assert once._latency_s == pytest.approx(exp(-1.0))


def test_pending_requests_multiply_the_cost() -> None:
    desk = Desk(PeakEwma(rng()), some_fleet(2))
    desk.view.booked[:] = [1, 0]
    assert desk.ask().row == 1


def test_a_request_that_never_answers_teaches_nothing() -> None:
    policy = PeakEwma(rng())
    desk = Desk(policy, some_fleet(2))
    desk.end(desk.place(0), 60.0)
    assert desk.ask(now_s=60.0).probability == 0.5
    assert policy._latency_s.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [{"tau_s": 0.0}, {"start_s": float("nan")}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PeakEwma(rng(), **bad)
