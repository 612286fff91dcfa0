"""Load that engines send by themselves: SGLang's load socket, a push at each change and at least once a second.

Model     one SUB for all ranks of one endpoint; of each rank only the newest message counts, so a queue that has
          built up is read to its end and told once. The sum over ranks is told while all of them report
Valid     SGLang from 0.5.19 with `--load-publish-endpoint`
Blind to  lost messages: the next one says everything again
Source    recorded payload in tests/vectors
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from router.signals.load import Load, together
from router.signals.load_answers import stat_of
from router.signals.subscriber import Socket, attach, open_subscription, readable
from router.signals.wire import BadFrame, frame

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_MESSAGES_AT_ONCE = 256
_REPORTS_WITHIN_S = 3.0  # a rank that is alive says something each second


class LoadListener:
    """Owner of the subscription to one endpoint's load sockets. `start` inside a running loop, `stop` before it ends.

    addresses : of the ranks' sockets, rank 0 first
    rows : one for each rank, or a single one that stands for all of them
    on_load : (row, load, now_s) after each new report; for a single row with several ranks while all of them report
    context : ZMQ context to share
    """

    def __init__(
        self,
        addresses: Sequence[str],
        topic: str,
        rows: Sequence[int],
        on_load: Callable[[int, Load, float], object],
        *,
        context: zmq.Context[Socket],
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = 1.0,
    ) -> None:
        if not addresses or len(rows) not in (1, len(addresses)):
            raise ValueError("rows must be one, or one for each address")
        self.addresses = tuple(addresses)
        self.messages = 0
        self.bad_frames = 0
        self.errors = 0
        self._topic = topic
        self._rows = tuple(rows)
        self._on_load = on_load
        self._context = context
        self._clock = clock
        self._retry_s = retry_s
        self._latest: dict[int, tuple[Load, float]] = {}  # and when it came
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin listening; the engine need not be there yet."""
        assert self._task is None, "start is called once"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"load {self.addresses[0]}")

    async def stop(self) -> None:
        """End the task and close its socket."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def heard(self, messages: Sequence[list[bytes]]) -> None:
        """Messages that came together, oldest first."""
        fresh: dict[int, Load] = {}
        for frames in messages:
            try:
                rank, load = stat_of(frame(frames)[1])
            except BadFrame:
                self.bad_frames += 1
                continue
            if int(rank) in range(len(self.addresses)):
                self.messages += 1
                fresh[int(rank)] = load
            else:
                self.bad_frames += 1
        now_s = self._clock()
        self._latest |= {place: (load, now_s) for place, load in fresh.items()}
        if len(self._rows) == len(self.addresses):
            for place, load in fresh.items():
                self._on_load(self._rows[place], load, now_s)
        elif fresh:
            alive = [load for load, came_s in self._latest.values() if now_s - came_s <= _REPORTS_WITHIN_S]
            if len(alive) == len(self.addresses):
                self._on_load(self._rows[0], together(alive), now_s)

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except Exception:
                self.errors += 1
                log.exception("load source %s failed; retrying in %g s", self.addresses[0], self._retry_s)
                await asyncio.sleep(self._retry_s)

    async def _listen(self) -> None:
        sub = open_subscription(self._context, self.addresses[0], self._topic)
        try:
            for address in self.addresses:
                attach(sub, address)
            while True:
                with suppress(TimeoutError):
                    await readable(_LOOK_AGAIN_S, sub)
                messages: list[list[bytes]] = []
                with suppress(zmq.Again):
                    while len(messages) < _MESSAGES_AT_ONCE:
                        messages.append(sub.recv_multipart(zmq.NOBLOCK))
                if messages:
                    self.heard(messages)
                await asyncio.sleep(0)
        finally:
            sub.close(linger=0)
