from __future__ import annotations

import asyncio

import pytest

from sim_backends.driver import Driver
from sim_backends.requests import Output
from tests.sim_backends.builders import a_request, a_world

TIMEOUT_S = 10.0


class Waiter:
    """Keeps what it is given, flush by flush."""

    def __init__(self) -> None:
        self.flushes: list[list[Output]] = [[]]
        self.over = asyncio.Event()

    def take(self, output: Output) -> bool:
        self.flushes[-1].append(output)
        return True

    def flush(self) -> None:
        if self.flushes[-1][-1].finish_reason:
            self.over.set()
        self.flushes.append([])

    @property
    def outputs(self) -> list[Output]:
        return [output for flush in self.flushes for output in flush]


async def test_outputs_reach_their_waiter_no_earlier_than_their_time() -> None:
    world = a_world("A100", speed=50.0)
    driver = Driver(world, after_wake=lambda: None)
    waiter = Waiter()
    driver.submit(0, a_request(output=20, max_tokens=20), waiter)
    await asyncio.wait_for(waiter.over.wait(), TIMEOUT_S)
    assert [output.index for output in waiter.outputs] == list(range(20))
    assert waiter.outputs[-1].at_s <= driver.clock()
    driver.close()


async def test_a_late_wake_hands_out_all_that_is_due_in_one_flush() -> None:
    clock_s = 100.0
    driver = Driver(a_world("A100"), after_wake=lambda: None, clock=lambda: clock_s)
    waiter = Waiter()
    driver.submit(0, a_request(output=20, max_tokens=20), waiter)
    clock_s = 200.0
    await asyncio.wait_for(waiter.over.wait(), TIMEOUT_S)
    assert [len(flush) for flush in waiter.flushes if flush] == [20]
    assert waiter.outputs[-1].at_s < 101.0
    driver.close()


async def test_an_aborted_request_reaches_nobody_and_the_others_go_on() -> None:
    driver = Driver(a_world("A100", speed=50.0), after_wake=lambda: None)
    gone, stays = Waiter(), Waiter()
    driver.submit(0, a_request(output=500, max_tokens=500, request_id="gone"), gone)
    driver.submit(0, a_request(output=50, max_tokens=50, request_id="stays"), stays)
    driver.abort(0, "gone")
    await asyncio.wait_for(stays.over.wait(), TIMEOUT_S)
    assert (gone.outputs, len(stays.outputs)) == ([], 50)
    assert driver.world.engines[0].counters.finished["abort"] == 1
    driver.close()


async def test_a_closed_driver_wakes_no_more() -> None:
    driver = Driver(a_world("A100", speed=50.0), after_wake=lambda: None)
    waiter = Waiter()
    driver.submit(0, a_request(output=5), waiter)
    driver.close()
    await asyncio.sleep(0)
    assert waiter.outputs == []


async def test_a_failure_in_the_simulation_is_told_and_not_waited_out() -> None:
    def fail() -> None:
        raise AssertionError("impossible state")

    driver = Driver(a_world("A100", speed=50.0), after_wake=fail)
    driver.submit(0, a_request(output=5), Waiter())
    with pytest.raises(AssertionError, match="impossible state"):
        await asyncio.wait_for(driver.broken, TIMEOUT_S)


async def test_a_change_comes_after_what_is_due_and_before_what_is_not() -> None:
    clock_s = 100.0
    driver = Driver(a_world("A100"), after_wake=lambda: None, clock=lambda: clock_s)
    waiter = Waiter()
    driver.submit(0, a_request(output=20, max_tokens=20), waiter)
    clock_s = 200.0
    seen: list[tuple[float, int]] = []
    driver.change(lambda now_s: seen.append((now_s, len(waiter.outputs))))
    assert seen == [(200.0, 20)]
    driver.close()
