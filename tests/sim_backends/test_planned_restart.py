from __future__ import annotations

import asyncio
from typing import Any

from sim_backends.faults import NONE, FaultPlan, Faults, faults_of
from sim_backends.planned_restart import PlannedRestart

TIMEOUT_S = 10.0


class Planned:
    """A plan and its restart, and the down times it has been called with."""

    def __init__(self, **faults: Any) -> None:
        self.plan = FaultPlan(Faults(**faults), seed=1, replica="r")
        self.calls: asyncio.Queue[float] = asyncio.Queue()
        self.restart = PlannedRestart(self.plan, self.calls.put_nowait)
        self.restart.look()

    def set(self, **values: Any) -> None:
        """As the endpoint does: these change, the others stay."""
        self.plan.set(faults_of(values, base=self.plan.now()))
        self.restart.look()

    async def struck(self) -> float:
        return await asyncio.wait_for(self.calls.get(), TIMEOUT_S)


async def test_without_the_fault_no_restart_is_planned() -> None:
    assert Planned(restart_down_s=5.0).restart.due_s is None


async def test_it_strikes_once_with_its_down_time_and_is_off_then() -> None:
    planned = Planned(restart_after_s=0.0, restart_down_s=7.0, error_next=3)
    assert await planned.struck() == 7.0
    assert (planned.restart.due_s, planned.plan.struck) == (None, {"restart": 1})
    assert planned.plan.now() == Faults(restart_down_s=7.0, error_next=3)
    planned.restart.look()
    assert planned.restart.due_s is None


async def test_other_faults_leave_the_count_and_a_new_time_begins_it_anew() -> None:
    planned = Planned(restart_after_s=1000.0)
    due_s = planned.restart.due_s
    assert due_s is not None
    planned.set(error_share=0.5)
    planned.set(restart_after_s=1000.0)
    assert planned.restart.due_s == due_s
    planned.set(restart_after_s=2000.0)
    later_s = planned.restart.due_s
    assert later_s is not None
    assert later_s > due_s + 999.0
    planned.restart.close()


async def test_null_and_the_end_of_all_faults_call_it_off() -> None:
    planned = Planned(restart_after_s=1000.0)
    planned.set(restart_after_s=None)
    assert planned.restart.due_s is None
    planned.set(restart_after_s=1000.0)
    assert planned.restart.due_s is not None
    planned.plan.set(NONE)
    planned.restart.look()
    assert planned.restart.due_s is None


async def test_the_down_time_is_that_of_when_it_strikes() -> None:
    planned = Planned(restart_after_s=1000.0, restart_down_s=1.0)
    planned.set(restart_down_s=9.0, restart_after_s=0.0)
    assert await planned.struck() == 9.0


async def test_it_can_be_planned_again_after_it_has_come() -> None:
    planned = Planned(restart_after_s=0.0)
    await planned.struck()
    planned.set(restart_after_s=0.0)
    await planned.struck()
    assert planned.plan.struck == {"restart": 2}
