"""One timer for all the limits of a connection, without timer churn.

A limit is a number, `at_s`, that may be moved on for the price of an assignment. The timer behind it stays where
it is; when it fires it looks at the number and either reports or sleeps on. A timer is only made anew for a limit
earlier than the one it waits for, so a connection that serves request after request arms about one a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf


class Deadline:
    """Calls `expired` once the loop's clock has passed `at_s`.

    at_s : seconds on the loop's clock. Assign to it directly only to move it later; else use `set`
    """

    __slots__ = ("_armed_s", "_expired", "_loop", "_timer", "at_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self.at_s = inf
        self._loop = loop
        self._expired = expired
        self._armed_s = inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        self.at_s = at_s
        if at_s < self._armed_s:
            self._arm(at_s)

    def clear(self) -> None:
        """No limit until the next `set`; a timer already under way stays, and finds nothing."""
        self.at_s = inf

    def close(self) -> None:
        """Nothing will be called any more, and nothing is left in the loop."""
        self.at_s = inf
        self._armed_s = -inf  # no later `set` can arm it
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = at_s
        self._timer = self._loop.call_at(at_s, self._fired)

    def _fired(self) -> None:
        self._timer, self._armed_s = None, inf
        if self.at_s <= self._loop.time():
            self.at_s = inf
            self._expired()
        elif self.at_s < inf:
            self._arm(self.at_s)
