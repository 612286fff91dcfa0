"""Where the time of a decision goes, phase by phase, for whoever wants to know; the deciding code reads no clock.

Model     the decision says when it begins something and which phase it has just ended; a shell that wants to know keeps
          a clock, others keep none. A phase can come more than once: a second choice ends a second `CHOOSE`
Valid     one decision at a time, in one thread
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """A closed set: each becomes a metric label and a span."""

    MATCH = "match"  # the prompt's blocks are looked up in the directory
    ESTIMATE = "estimate"  # Q, R and C of every replica and path
    CHOOSE = "choose"  # the rule takes one
    BOOK = "book"  # what was chosen is booked, promised and noted


class Laps:
    """Told by the decision; this one keeps no time."""

    def begin(self) -> None:
        """Something begins now."""

    def end(self, phase: Phase) -> None:
        """`phase` is over, and what follows begins."""


class Lap(NamedTuple):
    """One phase of the last decision, on the clock of `TimedLaps`."""

    phase: Phase
    begun_s: float
    ended_s: float


class TimedLaps(Laps):
    """Keeps the time of each phase. clock : seconds

    took : told each phase's name and how long it took
    """

    def __init__(self, clock: Callable[[], float], took: Callable[[str, float], object]) -> None:
        self._clock = clock
        self._took = took
        self._begun_s = 0.0
        self.last: list[Lap] | None = None  # phases since somebody set it to a list; None: nobody wants them

    def begin(self) -> None:
        self._begun_s = self._clock()

    def end(self, phase: Phase) -> None:
        now_s, begun_s = self._clock(), self._begun_s
        self._begun_s = now_s
        self._took(phase._value_, now_s - begun_s)  # the property of the same name costs five times as much
        if self.last is not None:
            self.last.append(Lap(phase, begun_s, now_s))
