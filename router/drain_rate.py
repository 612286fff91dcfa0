"""How fast a queue empties, and so how long what is in it will take.

Model     work that left the queue over the time it left in, the last departures only; a queue that stands still
          empties ever slower, as the time goes on while nothing leaves
Valid     calls in order of time. Before the first departures: as fast as the caller supposes
Blind to  why: a fleet that grew shows only when as many have left as are remembered
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 64  # departures: a few seconds of a busy fleet


class DrainRate:
    """Departures of one queue."""

    def __init__(self) -> None:
        self._left: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # (when, work)

    def departed(self, work_s: float, now_s: float) -> None:
        """Work of `work_s` left the queue at `now_s`, to be done."""
        self._left.append((now_s, work_s))

    def emptied(self) -> None:
        """Nothing is left: how long nothing leaves from now on says nothing."""
        self._left.clear()

    def rate(self, now_s: float, *, supposed: float) -> float:
        """Seconds of work that leave in a second, > 0; `supposed` (> 0) until something was seen."""
        if len(self._left) < 2:
            return supposed
        since_s = self._left[0][0]
        work_s = sum(work for _, work in self._left) - self._left[0][1]
        passed_s = now_s - since_s
        return work_s / passed_s if work_s > 0 and passed_s > 0 else supposed
