"""Columns as a rule knows them that is told of its replicas now and then, as published rules are.

Model     every replica reports at whole multiples of the period, all at once; between two reports the last one stands
Valid     period >= 0; 0 is as if every event were reported. A rule that watches notes every event, so that a report
          says what was so at its own moment and not at the next decision
Blind to  reports that are late or lost
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from estimators.ranges import require
from estimators.view import Column, FleetView


class Reports:
    """What `read` gave at the last multiple of `period_s`. `read` returns arrays of its own, not lent ones."""

    def __init__(self, period_s: float, read: Callable[[FleetView], tuple[Column, ...]]) -> None:
        require(0 <= period_s < float("inf"), "period_s", period_s)
        self._period_s = period_s
        self._read = read
        self._number = 0  # of the last report
        self._latest: tuple[Column, ...] | None = None
        self._reported: tuple[Column, ...] | None = None

    def last(self, fleet: FleetView) -> tuple[Column, ...]:
        """The last report, of this moment at the latest."""
        if self._period_s == 0:
            return self._read(fleet)
        self.arrived(fleet)
        if self._reported is None:  # nothing was ever told: what is so now has been so
            self._latest = self._reported = self._read(fleet)
        return self._reported

    def arrived(self, fleet: FleetView) -> bool:
        """Whether a report has come since the last call."""
        if self._period_s == 0:
            return True
        number = floor(fleet.now_s / self._period_s)
        if number <= self._number:
            return False
        self._number = number
        if self._latest is not None:
            self._reported = self._latest
        return True

    def note(self, fleet: FleetView) -> None:
        """Something happened; `fleet` has it already."""
        if self._period_s > 0:
            self.last(fleet)
            self._latest = self._read(fleet)
