"""Calls that are due at a virtual time: limits of fetches, start-ups, ends of holds.

Model     a heap of times; equal times in the order they were set
Valid     calls come in order of time; one world has one of these, moved like a link
Blind to  what the calls do
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import inf

Call = Callable[[float], None]


@dataclass(slots=True, eq=False)
class Alarm:
    """One call to come; `off` once it has been made or is not wanted any more."""

    call: Call
    off: bool = False


class Alarms:
    """`due_s` is when `run_due` is wanted; inf while nothing is set."""

    def __init__(self) -> None:
        self.due_s = inf
        self._order = count()
        self._set: list[tuple[float, int, Alarm]] = []

    def at(self, when_s: float, call: Call) -> Alarm:
        """Have `call(when_s)` made at `when_s`, which is not in the past."""
        alarm = Alarm(call)
        heapq.heappush(self._set, (when_s, next(self._order), alarm))
        self._plan()
        return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Without effect when the call has been made."""
        alarm.off = True
        self._plan()

    def run_due(self) -> None:
        """Make the one call due at `due_s`."""
        now_s, _order, alarm = heapq.heappop(self._set)
        alarm.off = True
        self._plan()
        alarm.call(now_s)

    def _plan(self) -> None:
        while self._set and self._set[0][2].off:
            heapq.heappop(self._set)
        self.due_s = self._set[0][0] if self._set else inf
