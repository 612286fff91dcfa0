"""One timer for many limits, on a loop whose clock the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from router.http.deadline import Deadline


class HeldTimer:
    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s, self.call, self.cancelled = at_s, call, False

    def cancel(self) -> None:
        self.cancelled = True


class HeldLoop:
    """Time moves when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[HeldTimer] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, call: Callable[[], None]) -> HeldTimer:
        self.timers.append(HeldTimer(at_s, call))
        return self.timers[-1]

    @property
    def live(self) -> list[HeldTimer]:
        return [timer for timer in self.timers if not timer.cancelled]

    def advance_to(self, now_s: float) -> None:
        while due := [timer for timer in self.live if timer.at_s <= now_s]:
            timer = min(due, key=lambda due_timer: due_timer.at_s)
            self.now_s = timer.at_s
            timer.cancelled = True
            timer.call()
        self.now_s = now_s


def a_deadline() -> tuple[HeldLoop, Deadline, list[float]]:
    loop = HeldLoop()
    fired: list[float] = []
    deadline = Deadline(cast(asyncio.AbstractEventLoop, loop), lambda: fired.append(loop.now_s))
    return loop, deadline, fired


def test_a_limit_that_passes_is_reported_once() -> None:
    loop, deadline, fired = a_deadline()
    deadline.set(5.0)
    loop.advance_to(100.0)
    assert fired == [5.0]
    assert loop.live == []


def test_moving_a_limit_on_makes_no_timer() -> None:
    loop, deadline, fired = a_deadline()
    deadline.set(5.0)
    for at_s in range(6, 1000):
        deadline.at_s = float(at_s)
    assert len(loop.timers) == 1
    loop.advance_to(998.0)
    assert fired == []
    loop.advance_to(999.0)
    assert fired == [999.0]
    assert len(loop.timers) == 2


def test_an_earlier_limit_is_kept_too() -> None:
    loop, deadline, fired = a_deadline()
    deadline.set(600.0)
    deadline.set(75.0)
    deadline.set(650.0)
    deadline.set(80.0)
    loop.advance_to(1000.0)
    assert fired == [80.0]


def test_a_cleared_limit_never_fires_and_can_be_set_again() -> None:
    loop, deadline, fired = a_deadline()
    deadline.set(5.0)
    deadline.clear()
    loop.advance_to(10.0)
    assert (fired, loop.live) == ([], [])
    deadline.set(12.0)
    loop.advance_to(20.0)
    assert fired == [12.0]


def test_after_close_nothing_is_left_and_nothing_can_be_armed() -> None:
    loop, deadline, fired = a_deadline()
    deadline.set(5.0)
    deadline.close()
    deadline.set(1.0)
    loop.advance_to(10.0)
    assert (fired, loop.live) == ([], [])
