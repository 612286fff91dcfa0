from __future__ import annotations

from typing import Any

from policies.by_load.uniform import Uniform
from policies.watcher import Watcher, watcher_of
from tests.policies.desk import Desk, rng, some_fleet


class Listener(Watcher, Uniform):
    """Writes down what it is told."""

    def __init__(self) -> None:
        Uniform.__init__(self, rng())
        self.told: list[tuple[Any, ...]] = []

    def placed(self, placed: Any, fleet: Any, estimates: Any) -> None:
        booked, tokens = fleet.booked.item(placed.row), fleet.prefill_tokens.item(placed.row)
        self.told.append(("placed", placed, fleet.now_s, booked, tokens))

    def first_token(self, placed: Any, fleet: Any) -> None:
        self.told.append(("first_token", placed, fleet.now_s, fleet.prefill_tokens.item(placed.row)))

    def ended(self, placed: Any, fleet: Any) -> None:
        self.told.append(("ended", placed, fleet.now_s, fleet.booked.item(placed.row)))


def test_a_rule_is_told_of_a_placement_its_first_token_and_its_end_with_columns_that_have_them() -> None:
    listener = Listener()
    desk = Desk(listener, some_fleet(2))
    sent = desk.place(1, now_s=5.0)
    desk.first_token(sent, 6.5)
    desk.end(sent, 9.0)
    assert listener.told == [
        ("placed", sent, 5.0, 1, 8448.0),
        ("first_token", sent, 6.5, 0.0),
        ("ended", sent, 9.0, 0),
    ]


def test_a_request_that_never_answers_is_ended_once_and_has_no_first_token() -> None:
    listener = Listener()
    desk = Desk(listener, some_fleet(1))
    sent = desk.place(0)
    desk.end(sent, 2.0)
    desk.end(sent, 3.0)
    desk.first_token(sent, 4.0)
    assert [told[0] for told in listener.told] == ["placed", "ended"]
    assert desk.view.prefill_tokens[0] == 0


def test_being_asked_tells_nobody_anything() -> None:
    listener = Listener()
    Desk(listener, some_fleet(3)).ask()
    assert listener.told == []


def test_several_rules_are_all_told_and_those_that_do_not_watch_are_not() -> None:
    one, other = Listener(), Listener()
    watcher = watcher_of(one, Uniform(rng()), other)
    assert watcher is not None
    desk = Desk(one, some_fleet(1))
    sent = desk.place(0)
    one.told.clear()
    watcher.placed(sent, desk.view, desk.estimates(sent.request))
    watcher.first_token(sent, desk.view)
    watcher.ended(sent, desk.view)
    assert one.told == other.told
    assert len(one.told) == 3
    assert watcher_of(Uniform(rng())) is None
    assert watcher_of(one) is one
