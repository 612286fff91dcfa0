"""The latest load of every replica, joined from all that report it.

Model     each origin (poll, push, response header) keeps its own last report of a row; a field is the newest one that
          is younger than `fresh_s`, so a header that knows only the queue does not make the rest unknown
Valid     times of one clock, the router's; an origin's next report replaces its last one whole, so what it no longer
          says is unknown again
Blind to  differences between origins: a push and a poll of one engine are two looks at one number
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from router.signals.load import NUMBERS, Load
from router.signals.orca import load_of_headers


class Origin(Enum):
    """Who reported. A closed set: it becomes a metric label."""

    POLL = "poll"
    PUSH = "push"
    RESPONSE = "response"


@dataclass(frozen=True, slots=True)
class _Report:
    load: Load
    asked_s: float
    came_s: float


class LoadBoard:
    """Keeps the reports of `rows` replicas.

    on_load : (row, load, asked_s, came_s) after each report, with everything fresh joined. The times are those of the
        oldest of `running` and `waiting`: when it was asked for, and when it came
    fresh_s : how long a report counts beside newer ones, > 0
    """

    def __init__(
        self, rows: int, on_load: Callable[[int, Load, float, float], object], *, fresh_s: float = 2.0
    ) -> None:
        if rows < 1 or not fresh_s > 0:
            raise ValueError("rows must be at least 1 and fresh_s positive")
        self.counts = dict.fromkeys(Origin, 0)
        self.anomalies = dict.fromkeys(Origin, 0)  # values that could not be used
        self.incomplete = dict.fromkeys(Origin, 0)  # reports that left `running` or `waiting` unknown
        self._on_load = on_load
        self._fresh_s = fresh_s
        self._reports: list[dict[Origin, _Report]] = [{} for _ in range(rows)]

    def forget(self, row: int) -> None:
        """`row` is nobody's, or somebody else's, from now on."""
        self._reports[row] = {}

    def polled(self, row: int, load: Load, asked_s: float, came_s: float) -> None:
        """The answer to a poll sent at `asked_s`."""
        self._take(row, Origin.POLL, _Report(load, asked_s, came_s))

    def pushed(self, row: int, load: Load, now_s: float) -> None:
        """A report the engine sent by itself."""
        self._take(row, Origin.PUSH, _Report(load, now_s, now_s))

    def load_from_response(self, row: int, headers: Iterable[tuple[bytes, bytes]], now_s: float) -> bool:
        """Take in the load report among the headers of a response of `row`; whether there was one."""
        load = load_of_headers(headers)
        if load is None:
            return False
        self._take(row, Origin.RESPONSE, _Report(load, now_s, now_s))
        return True

    def age_s(self, row: int, now_s: float) -> dict[Origin, float]:
        """Age of the last report of `row` by origin; an origin that never reported is absent."""
        return {origin: now_s - report.came_s for origin, report in self._reports[row].items()}

    def _take(self, row: int, origin: Origin, report: _Report) -> None:
        self.counts[origin] += 1
        self.anomalies[origin] += report.load.anomalies
        self.incomplete[origin] += report.load.running is None or report.load.waiting is None
        reports = self._reports[row]
        reports[origin] = report
        if len(reports) == 1:
            self._on_load(row, report.load, report.asked_s, report.came_s)
            return
        by_age = sorted(reports.values(), key=lambda other: other.came_s, reverse=True)
        fresh = [other for other in by_age if report.came_s - other.came_s <= self._fresh_s]
        joined = replace(report.load, anomalies=sum(other.load.anomalies for other in fresh))
        oldest = report
        for name in NUMBERS:
            said_by = next((other for other in fresh if getattr(other.load, name) is not None), None)
            if said_by is None:
                continue
            setattr(joined, name, getattr(said_by.load, name))
            if name in ("running", "waiting") and said_by.came_s < oldest.came_s:
                oldest = said_by
        self._on_load(row, joined, oldest.asked_s, oldest.came_s)
