"""Leaves alone for a while what fails constantly.

Model     `most` failures in a row begin a rest; when it is over the next try counts alone: its failure begins a rest
          twice as long, up to a limit, its success ends all that
Valid     times of one clock, in order
"""

from __future__ import annotations

from math import inf

FIRST_REST_S, LONGEST_REST_S = 5.0, 80.0
MOST_FAILURES = 4  # in a row: less and a few blocks that were just evicted would look like an engine that does not obey


class Rests:
    """One adapter. `until_s` is when it may be used again; -inf while it may."""

    def __init__(self, most: int = MOST_FAILURES) -> None:
        self.until_s = -inf
        self._most = most
        self._failures = 0
        self._rest_s = FIRST_REST_S

    def usable(self, now_s: float) -> bool:
        return now_s >= self.until_s

    def worked(self) -> None:
        self.until_s, self._failures, self._rest_s = -inf, 0, FIRST_REST_S

    def failed(self, now_s: float) -> bool:
        """Whether that was one too many, so that a rest begins now. What was begun before a rest cannot lengthen it."""
        self._failures += 1
        if self._failures < self._most or now_s < self.until_s:
            return False
        self.until_s = now_s + self._rest_s
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s)
        return True
