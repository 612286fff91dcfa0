"""Wall time for a world: one timer that wakes when something is due and hands outputs to their waiters.

One timer serves all engines of the process, because they share the store's link and its order of time. The loop's
timers have a grain of a millisecond; a late wake hands out several tokens at once, and virtual time, which the
outputs carry, does not drift.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from math import ceil
from typing import Protocol

from sim_backends.requests import EngineRequest, Output
from sim_backends.world import World

_GRAIN_S = 1e-3


class Waiter(Protocol):
    """Who waits for a request's tokens."""

    def take(self, output: Output) -> bool:
        """Note one output; True asks for `flush` once all outputs of this wake are noted."""
        ...

    def flush(self) -> None: ...


class Driver:
    """Drives `world` on the running loop. `after_wake` is called after each advance, for event publishing."""

    def __init__(
        self,
        world: World,
        *,
        after_wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world = world
        self.clock = clock
        self._after_wake = after_wake
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[str, Waiter] = {}
        self._timer: asyncio.Handle | None = None
        self._timer_due_s = 0.0
        self._closed = False
        self.broken: asyncio.Future[None] = self._loop.create_future()  # ends with what went wrong, if anything does
        self._arm()

    def submit(self, row: int, request: EngineRequest, waiter: Waiter) -> None:
        """Start a request; its outputs go to `waiter`. Raises requests.RequestRefused, lifecycle.NotServing."""
        self.world.submit(row, request, self.clock())
        self._waiters[request.request_id] = waiter
        self._arm()

    def abort(self, row: int, request_id: str) -> None:
        """End a request nobody waits for any more. Without effect when it is over."""
        if self._waiters.pop(request_id, None) is not None:
            self.world.abort(row, request_id, self.clock())
            self._arm()

    def change(self, what: Callable[[float], None]) -> None:
        """Change something in the world between two moments; `what` is told the time. All that is due comes first."""
        now_s = self.clock()
        self._hand_out(self.world.advance(now_s))
        what(now_s)
        self._after_wake()
        self._arm()

    def close(self) -> None:
        """Stop waking. Waiters get nothing more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        due_s = self.world.next_due_s()
        if self._closed or due_s is None:
            return
        if self._timer is not None:
            if self._timer_due_s <= due_s:
                return
            self._timer.cancel()
        self._timer_due_s = due_s
        wait_s = due_s - self.clock()
        if wait_s <= 0.0:
            self._timer = self._loop.call_soon(self._wake)
        else:  # rounded up: a timer that fires early would spin until it is due
            self._timer = self._loop.call_later(ceil(wait_s / _GRAIN_S) * _GRAIN_S, self._wake)

    def _wake(self) -> None:
        self._timer = None
        try:
            self._hand_out(self.world.advance(self.clock()))
            self._after_wake()
        except Exception as exc:  # the top of this loop: without it all clients would wait for ever
            self.close()
            self.broken.set_exception(exc)
            return
        self._arm()

    def _hand_out(self, outputs: Iterable[Output]) -> None:
        waiters = self._waiters
        touched: dict[str, Waiter] = {}
        for output in outputs:
            waiter = waiters.get(output.request_id)
            if waiter is None:  # its client left; the engine was told
                continue
            if waiter.take(output):
                touched[output.request_id] = waiter
            if output.finish_reason is not None:
                del waiters[output.request_id]
        for waiter in touched.values():
            waiter.flush()
