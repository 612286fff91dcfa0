from __future__ import annotations

from typing import Any

import pytest

from policies.base import Reason
from policies.by_load.prequal import Prequal
from tests.policies.desk import Desk, rng, some_fleet


def probed(desk: Desk, now_s: float) -> None:
    """A placement on the last replica, ended at once, that probes; twice, so that all of a small fleet are."""
    for _ in range(2):
        desk.end(desk.place(desk.view.rows - 1, now_s=now_s), now_s)


def answers(desk: Desk, row: int, took_s: float) -> None:
    sent = desk.place(row, now_s=0.0)
    desk.first_token(sent, took_s)
    desk.end(sent, took_s)


def test_with_fewer_than_two_answers_chance_decides() -> None:
    choice = Desk(Prequal(rng()), some_fleet(4)).ask()
    assert (choice.reason, choice.probability) == (Reason.DRAWN, 0.25)


def test_of_those_with_few_requests_in_flight_the_fastest_is_taken() -> None:
    desk = Desk(Prequal(rng(), probes=3), some_fleet(3))
    for row, took_s in enumerate((3.0, 1.0, 2.0)):
        answers(desk, row, took_s)
    desk.view.booked[:] = [1, 2, 2]
    probed(desk, 10.0)
    assert desk.ask(now_s=10.5).row == 1


def test_a_fast_replica_over_the_quantile_of_requests_in_flight_is_not_taken() -> None:
    desk = Desk(Prequal(rng(), probes=3), some_fleet(3))
    for row, took_s in enumerate((0.5, 1.0, 2.0)):
        answers(desk, row, took_s)
    desk.view.booked[0] = 50
    probed(desk, 10.0)
    assert desk.ask(now_s=10.5).row == 1


def test_when_uses_have_made_all_hot_the_fewest_in_flight_decides() -> None:
    """theta is of the answers as they came, so uses since can put every entry over it."""
    desk = Desk(Prequal(rng(), probes=2), some_fleet(2))
    probed(desk, 10.0)
    policy = desk.policy
    assert isinstance(policy, Prequal)
    for row, uses in ((0, 3), (1, 2)):
        policy._pool[row].in_flight = 2 + uses  # at most two were answered
    assert desk.ask(now_s=10.1).row == 1


def test_answers_are_dropped_after_a_second() -> None:
    desk = Desk(Prequal(rng(), probes=2), some_fleet(2))
    desk.view.booked[0] = 5
    probed(desk, 10.0)
    assert desk.ask(now_s=11.0).reason is Reason.LOWER_LOAD
    assert desk.ask(now_s=11.001).reason is Reason.DRAWN


def test_a_use_adds_one_request_to_the_answer_used() -> None:
    policy = Prequal(rng(), probes=1)
    desk = Desk(policy, some_fleet(8))
    desk.place(0, now_s=1.0)
    (answer,) = policy._pool.values()
    before = answer.in_flight
    policy._use(answer.row)
    assert (answer.in_flight, answer.answered) == (before + 1, before)


@pytest.mark.parametrize(("replicas", "uses"), [(8, float("inf")), (16, float("inf")), (64, 1.6), (1000, 1.03)])
def test_the_budget_of_uses_is_the_published_one_and_unlimited_in_small_fleets(replicas: int, uses: float) -> None:
    assert Prequal(rng())._budget(replicas) == pytest.approx(uses, rel=0.01)


def test_in_a_large_fleet_an_answer_goes_after_its_uses_and_the_pool_stays_bounded() -> None:
    policy = Prequal(rng(), slack=0.0)  # one use each
    desk = Desk(policy, some_fleet(64))
    for number in range(60):
        choice = desk.ask(now_s=1.0 + number / 1000)
        probes = set(policy._pool)
        desk.place(choice.row, now_s=1.0 + number / 1000)
        assert len(policy._pool) <= 16
        if choice.row in probes and choice.row in policy._pool:  # used up, and asked again since
            assert policy._pool[choice.row].at_s == 1.0 + number / 1000


def test_the_latency_of_an_answer_is_that_at_about_its_load() -> None:
    policy = Prequal(rng())
    desk = Desk(policy, some_fleet(2))
    for _ in range(5):
        answers(desk, 0, 1.0)  # alone there
    desk.view.booked[0] = 10
    for _ in range(5):
        answers(desk, 0, 4.0)
    assert policy._latency_s(0, 1) == 1.0
    assert policy._latency_s(0, 12) == 4.0
    assert policy._latency_s(1, 0) != policy._latency_s(1, 0)  # unknown


@pytest.mark.parametrize("bad", [{"pool": 1}, {"probes": 0}, {"keep_s": 0.0}, {"hot": 1.1}, {"remove": -1}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Prequal(rng(), **bad)
