from __future__ import annotations

from policies.by_load.round_robin import RoundRobin
from tests.builders import a_request
from tests.policies.desk import Desk, rng, some_fleet


def test_replicas_take_turns_whatever_their_load_and_who_is_not_ready_is_skipped() -> None:
    desk = Desk(RoundRobin(rng()), some_fleet(4))
    desk.view.booked[:] = [9, 0, 0, 0]
    assert [desk.ask().row for _ in range(5)] == [0, 1, 2, 3, 0]
    desk.view.ready[1] = False
    assert [desk.ask().row for _ in range(4)] == [2, 3, 0, 2]


def test_a_request_that_is_asked_about_twice_takes_one_turn() -> None:
    desk = Desk(RoundRobin(rng()), some_fleet(3))
    request = a_request()
    assert [desk.ask(request).row for _ in range(3)] == [0, 0, 0]
    desk.view.ready[0] = False
    assert desk.ask(request).row == 1  # the one whose turn it is cannot take it
    desk.view.ready[0] = True
    assert [desk.ask().row for _ in range(3)] == [2, 0, 1]
