"""How a backlog grows while nothing is served, and how long it takes to go.

Model     work flows in and out evenly. Over a stretch of time with inflow a and capacity c the backlog changes by
          (a - c) a second and stays at zero once it is there
          start-up: lambda T_s wait when the service begins; mu - lambda of them go a second
Valid     backlogs far above one request; inflow and capacity in one unit (requests, GPU-seconds, bytes) a second
Blind to  chance: near full load a queue stays although nothing was left over from the start
Source    AI Infra textbook, sections 9.6.1 and 9.7.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

from estimators.ranges import require


@dataclass(frozen=True, slots=True)
class StartUp:
    """A service that takes requests from the start and serves them from `ready_s` on. All >= 0.

    arrival_rps : requests that come a second; service_rps : that it can finish a second, once ready
    """

    arrival_rps: float
    service_rps: float
    ready_s: float

    def __post_init__(self) -> None:
        for name in ("arrival_rps", "service_rps", "ready_s"):
            require(0 <= getattr(self, name) < inf, name, getattr(self, name))

    @property
    def waiting(self) -> float:
        """Requests that wait when it is ready."""
        return self.arrival_rps * self.ready_s

    @property
    def drain_s(self) -> float:
        """From ready to no backlog, seconds; inf where it cannot keep up."""
        if self.waiting == 0.0:
            return 0.0
        spare_rps = self.service_rps - self.arrival_rps
        return self.waiting / spare_rps if spare_rps > 0 else inf

    @property
    def drained_at_s(self) -> float:
        """From the start to no backlog, seconds."""
        return self.ready_s + self.drain_s

    def backlog(self, at_s: float) -> float:
        """Requests that wait `at_s` (>= 0) after the start."""
        require(0 <= at_s < inf, "at_s", at_s)
        if at_s <= self.ready_s:
            return self.arrival_rps * at_s
        return max(0.0, self.waiting + (self.arrival_rps - self.service_rps) * (at_s - self.ready_s))


def service_to_drain_rps(*, arrival_rps: float, ready_s: float, by_s: float) -> float:
    """Least service rate with which the backlog is gone `by_s` after the start; by_s > ready_s."""
    require(0 <= arrival_rps < inf, "arrival_rps", arrival_rps)
    require(0 <= ready_s < by_s, "ready_s", ready_s, f"not below {by_s} s, when the backlog is to be gone")
    return arrival_rps * by_s / (by_s - ready_s)


def start_to_drain_s(*, arrival_rps: float, service_rps: float, by_s: float) -> float:
    """Longest start-up after which the backlog is still gone `by_s` (> 0) after the start; 0 where it never is."""
    require(0 < service_rps < inf, "service_rps", service_rps)
    require(0 <= arrival_rps < inf, "arrival_rps", arrival_rps)
    require(0 < by_s < inf, "by_s", by_s)
    return max(0.0, by_s * (1.0 - arrival_rps / service_rps))


def steps_to_repay(*, extra_s: float, saved_per_step_s: float) -> int:
    """Steps after which a longer start has been saved again, e.g. by captured graphs. extra_s >= 0, the other > 0."""
    require(0 <= extra_s < inf, "extra_s", extra_s)
    require(0 < saved_per_step_s < inf, "saved_per_step_s", saved_per_step_s)
    steps = extra_s / saved_per_step_s
    nearest = round(steps)  # 10 s / 0.2 ms is 50,000 and not 50,000.00000000001
    return nearest if abs(steps - nearest) <= 1e-9 * max(1.0, steps) else floor(steps) + 1


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time of even flow. duration_s > 0; inflow, capacity >= 0, of one unit a second"""

    duration_s: float
    inflow: float
    capacity: float

    def __post_init__(self) -> None:
        require(0 < self.duration_s < inf, "duration_s", self.duration_s)
        require(0 <= self.inflow < inf, "inflow", self.inflow)
        require(0 <= self.capacity < inf, "capacity", self.capacity)


def backlog_over(stretches: Sequence[Stretch], *, start: float = 0.0) -> tuple[list[float], list[float]]:
    """Corners of the backlog over time: (seconds, units), from (0, start); straight lines in between."""
    require(0 <= start < inf, "start", start)
    at_s, left = [0.0], [start]
    for stretch in stretches:
        began_s, slope = at_s[-1], stretch.inflow - stretch.capacity
        empty_s = left[-1] / -slope if slope < 0 else inf
        if 0 < empty_s < stretch.duration_s:
            at_s.append(began_s + empty_s)
            left.append(0.0)
        at_s.append(began_s + stretch.duration_s)
        left.append(max(0.0, left[-1] + slope * (at_s[-1] - at_s[-2])) if empty_s > 0 else 0.0)
    return at_s, left


def capacity_for_peaks(stretches: Sequence[Stretch], *, most: float) -> float:
    """Least even capacity with which a repeated cycle never has more than `most` (>= 0) waiting; capacities given are
    not read.

    The worst backlog of an endless repetition is the largest excess of inflow over any run of stretches.
    """
    require(0 <= most < inf, "most", most)
    require(len(stretches) > 0, "stretches", stretches, "empty")
    cycle_s = sum(one.duration_s for one in stretches)
    mean = sum(one.inflow * one.duration_s for one in stretches) / cycle_s
    runs = [run for first in range(len(stretches)) for run in _runs_from(stretches, first)]
    return max(mean, *((work - most) / seconds for seconds, work in runs))


def _runs_from(stretches: Sequence[Stretch], first: int) -> list[tuple[float, float]]:
    """(seconds, work) of 1, 2, ... stretches from `first`, round the cycle once."""
    runs, seconds, work = [], 0.0, 0.0
    for offset in range(len(stretches)):
        one = stretches[(first + offset) % len(stretches)]
        seconds += one.duration_s
        work += one.inflow * one.duration_s
        runs.append((seconds, work))
    return runs
