"""Leaves alone what keeps failing, and tries it again now and then."""

from __future__ import annotations

from estimators.ranges import require


class Breaker:
    """Open after failures in a row; then one trial after each rest, until one succeeds.

    failures_to_open : >= 1; rest_s : seconds, > 0
    """

    def __init__(self, *, failures_to_open: int = 3, rest_s: float = 5.0) -> None:
        require(failures_to_open >= 1, "failures_to_open", failures_to_open)
        require(rest_s > 0, "rest_s", rest_s)
        self._failures_to_open = failures_to_open
        self._rest_s = rest_s
        self._failures = 0
        self._next_trial_s = float("-inf")

    @property
    def open(self) -> bool:
        """Whether only trials are let through."""
        return self._failures >= self._failures_to_open

    def lets_through(self, now_s: float) -> bool:
        """Whether a call may be made now; a trial counts from here, whether or not its end is ever told."""
        if not self.open:
            return True
        if now_s < self._next_trial_s:
            return False
        self._next_trial_s = now_s + self._rest_s
        return True

    def failed(self, now_s: float) -> bool:
        """A call failed. True when this opened it."""
        was_open = self.open
        self._failures += 1
        if self.open:
            self._next_trial_s = now_s + self._rest_s
        return self.open and not was_open

    def succeeded(self) -> bool:
        """A call succeeded. True when this closed it."""
        was_open = self.open
        self._failures = 0
        return was_open
