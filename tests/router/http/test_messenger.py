"""Actions go to whom they are for, once, and time is watched while somebody waits. The test holds the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from router.actions import Action, Hold, Refuse, Send
from router.http.contract import Decider
from router.http.messenger import Messenger
from tests.builders import a_request
from tests.router.http.test_deadline import HeldLoop


class Loop(HeldLoop):
    def __init__(self) -> None:
        super().__init__()
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def turn(self) -> None:
        while self.soon:
            self.soon.pop(0)()


class Rules:
    """A decider of which only time and who waits are of interest."""

    next_due_s: float | None = None

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self.then: list[Action] = []

    def due(self, now_s: float) -> list[Action]:
        self.asked_s.append(now_s)
        self.next_due_s = None
        return self.then


class Waiter:
    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.heard: list[object] = []
        self._then = then

    def held(self, hold: Hold) -> None:
        self.heard.append(hold)

    def granted(self, action: Send | Refuse) -> None:
        self.heard.append(action)

    def proceed(self) -> None:
        self.heard.append("proceed")
        self._then()


class Table:
    def __init__(self) -> None:
        self.loop, self.rules, self.errors = Loop(), Rules(), 0
        loop = cast(asyncio.AbstractEventLoop, self.loop)
        self.messenger = Messenger(loop, cast(Decider, self.rules), self.loop.time, self._error)

    def ask(self, waiter: Waiter | None, *actions: Action) -> list[Action] | None:
        return self.messenger.ask(waiter, lambda now_s: list(actions))

    def _error(self) -> None:
        self.errors += 1


def a_refusal(held: Hold | None = None) -> Refuse:
    return Refuse(503, "ServiceUnavailable", "no", held=held)


def a_wait(table: Table, waiter: Waiter) -> Hold:
    hold = Hold(a_request())
    assert table.ask(waiter, hold) == []
    assert hold.owner is waiter
    return hold


def test_who_asks_gets_its_own_actions_and_who_waits_the_others_after_the_question() -> None:
    table, asking, waiting = Table(), Waiter(), Waiter()
    hold = a_wait(table, waiting)
    own, other = a_refusal(), a_refusal(hold)
    assert table.ask(asking, own, other) == [own]
    assert waiting.heard == [hold, other]
    table.loop.turn()
    assert waiting.heard == [hold, other, "proceed"]
    assert asking.heard == []


def test_a_request_that_is_held_and_let_go_in_one_answer_hears_both_in_order() -> None:
    table, waiter = Table(), Waiter()
    hold = Hold(a_request())
    refusal = a_refusal(hold)
    assert table.ask(waiter, hold, refusal) == []
    table.loop.turn()
    assert waiter.heard == [hold, refusal, "proceed"]


def test_what_one_grant_causes_is_carried_without_one_call_inside_another() -> None:
    """A chain of a thousand, each of which makes room for the next, is deeper than any stack."""
    table = Table()
    depth = deepest = 0

    def next_one(waiter: Waiter | None) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        if waiter is not None:
            table.ask(None, a_refusal(holds[id(waiter)]))
        depth -= 1

    waiters: list[Waiter | None] = [None]
    for _ in range(1000):
        follower = waiters[-1]
        waiters.append(Waiter(lambda follower=follower: next_one(follower)))  # type: ignore[misc]
    holds = {id(waiter): a_wait(table, waiter) for waiter in waiters if waiter is not None}
    next_one(waiters[-1])
    table.loop.turn()
    assert all(waiter.heard[-1] == "proceed" for waiter in waiters if waiter is not None)
    assert deepest == 1


def test_one_that_raises_costs_the_others_nothing() -> None:
    table = Table()

    def breaks() -> None:
        raise RuntimeError("a bug in an exchange")

    broken, sound = Waiter(breaks), Waiter()
    holds = [a_wait(table, broken), a_wait(table, sound)]
    table.ask(None, *map(a_refusal, holds))
    with pytest.raises(RuntimeError):
        table.loop.turn()
    table.loop.turn()
    assert sound.heard[-1] == "proceed"


def test_a_decider_that_raises_is_counted_and_nothing_is_done() -> None:
    table = Table()

    def raises(now_s: float) -> list[Action]:
        raise RuntimeError("a bug")

    assert table.messenger.ask(Waiter(), raises) is None
    assert table.errors == 1


@pytest.mark.parametrize("due_s", [5.0, 0.0, -1e9])
def test_what_is_due_is_asked_for_when_it_is_and_soon_when_it_was(due_s: float) -> None:
    table = Table()
    table.rules.next_due_s = due_s
    a_wait(table, Waiter())
    table.loop.advance_to(max(0.0, due_s) + 0.01)
    (asked_s,) = table.rules.asked_s
    assert max(0.0, due_s) <= asked_s <= max(0.0, due_s) + 0.01


def test_a_sooner_wish_moves_the_timer_and_a_later_one_leaves_it() -> None:
    table = Table()
    a_wait(table, Waiter())
    for due_s in (9.0, 3.0, 7.0):
        table.rules.next_due_s = due_s
        table.messenger.look()
    table.loop.advance_to(2.9)
    assert table.rules.asked_s == []
    table.loop.advance_to(3.1)
    assert len(table.rules.asked_s) == 1
    assert len(table.loop.live) == 0


@pytest.mark.parametrize("how", ["nobody came", "granted", "left"])
def test_no_timer_is_made_while_nobody_waits(how: str) -> None:
    table, waiter = Table(), Waiter()
    if how != "nobody came":
        hold = a_wait(table, waiter)
        if how == "granted":
            table.ask(None, a_refusal(hold))
        else:
            table.messenger.leave(waiter, lambda hold, now_s: [], hold)
    table.rules.next_due_s = 1.0
    table.ask(None)
    table.messenger.look()
    assert table.loop.live == []


def test_a_decider_that_raises_when_something_is_due_is_asked_again_and_not_all_the_time() -> None:
    table = Table()
    a_wait(table, Waiter())

    def raises(now_s: float) -> list[Action]:
        table.rules.asked_s.append(now_s)
        raise RuntimeError("a bug")

    table.rules.due = raises  # type: ignore[method-assign]
    table.rules.next_due_s = -1e9
    table.messenger.look()
    table.loop.advance_to(10.0)
    assert 9 <= len(table.rules.asked_s) <= 11


def test_no_timer_runs_after_the_end() -> None:
    table = Table()
    a_wait(table, Waiter())
    table.rules.next_due_s = 1.0
    table.messenger.look()
    table.messenger.stop()
    table.messenger.look()
    assert table.loop.live == []


def test_what_time_causes_reaches_who_waits() -> None:
    table, waiter = Table(), Waiter()
    hold = a_wait(table, waiter)
    table.rules.then, table.rules.next_due_s = [a_refusal(hold)], 1.0
    table.messenger.look()
    table.loop.advance_to(2.0)
    table.loop.turn()
    assert waiter.heard[-1] == "proceed"


def test_a_request_that_waited_is_not_kept_alive_by_what_it_was_granted() -> None:
    table, waiter = Table(), Waiter()
    hold = a_wait(table, waiter)
    table.ask(None, a_refusal(hold))
    assert hold.owner is None
