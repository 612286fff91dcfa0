"""The restart that a replica's faults ask for: when it comes, and that it comes once.

Model     counts from the moment the fault is set, or from the start; other faults set meanwhile leave it as it is, and
          so does the same time set again. Once it has struck the fault is off
Valid     on a running loop; times in seconds of the wall clock
Blind to  restarts by endpoint, which are none of the plan's
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sim_backends.faults import FaultPlan


class PlannedRestart:
    """Owns at most one timer. `restart` is told for how long the replica is away, and must not block."""

    def __init__(self, plan: FaultPlan, restart: Callable[[float], None]) -> None:
        self._plan = plan
        self._restart = restart
        self._after_s: float | None = None  # as it was when the timer was set
        self._timer: asyncio.TimerHandle | None = None

    @property
    def due_s(self) -> float | None:
        """The loop's time at which it strikes; None while no restart is to come."""
        return None if self._timer is None else self._timer.when()

    def look(self) -> None:
        """The plan's faults have been set: plan what they ask for now."""
        after_s = self._plan.faults.restart_after_s
        if after_s == self._after_s:
            return
        self.close()
        if after_s is not None:
            self._after_s = after_s
            self._timer = asyncio.get_running_loop().call_later(after_s, self._strike)

    def close(self) -> None:
        """No restart comes any more, unless one is planned anew."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._after_s = None

    def _strike(self) -> None:
        down_s = self._plan.faults.restart_down_s
        self.close()
        self._plan.restarted()
        self._restart(down_s)
