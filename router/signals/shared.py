"""One socket that carries the events of several publishers: told apart by topic and data-parallel rank.

Model     engines that dial their router (llm-d) all reach one bound SUB; each publisher numbers its own batches, so
          there is one `Stream` for each (topic, rank), made when it is first heard. A replica has one publisher: when
          it is heard under another topic or rank, that is a new process, and what the old one said is forgotten
Valid     publishers that differ in topic or in the batch's rank; two that agree in both look like restarts of one, and
          so do two of one replica
Blind to  history: nobody behind a shared socket can be asked to replay, so what was missed before is missing until
          the publisher clears itself or starts anew
Source    llm-d's topics `kv@<host>:<port>@<model>`; vLLM's `data_parallel_rank` in each batch
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import zmq

from router.signals.stream import Stream
from router.signals.subscriber import Socket, attach, open_subscription, readable
from router.signals.wire import BadFrame, decode, frame

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_MESSAGES_AT_ONCE = 32  # then other tasks get the loop

Key = tuple[str, int | None]


class SharedSubscriber:
    """Owner of one shared subscription. `start` inside a running loop, `stop` before the loop ends.

    address : bound where it has a wildcard, else connected
    topic : prefix of the topics wanted
    stream_of : (topic, rank) -> the publisher's stream, named like its replica; None while it is not known whose events
        these are
    context : ZMQ context to share
    """

    def __init__(
        self,
        address: str,
        topic: str,
        stream_of: Callable[[str, int | None], Stream | None],
        *,
        context: zmq.Context[Socket],
        retry_s: float = 1.0,
    ) -> None:
        self.address = address
        self.bound: str | None = None  # tells the port a wildcard became
        self.streams: dict[Key, Stream] = {}  # one for each replica heard
        self.bad_frames = 0
        self.unrouted = 0  # batches of a publisher nobody knows
        self.replaced = 0  # replicas heard under another key than before
        self.errors = 0
        self._topic = topic
        self._stream_of = stream_of
        self._context = context
        self._retry_s = retry_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin listening; no publisher need exist yet."""
        assert self._task is None, "start is called once"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"shared events {self.address}")

    async def stop(self) -> None:
        """End the task and close its socket. What was applied stays applied."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def drop(self, name: str) -> None:
        """The replica called `name` is gone: its stream is dropped."""
        for key in [key for key, stream in self.streams.items() if stream.name == name]:
            del self.streams[key]

    def heard(self, frames: list[bytes]) -> None:
        """One message, whoever sent it."""
        try:
            seq, payload = frame(frames)
            batch = decode(payload)
            topic = frames[0].decode() if len(frames) > 2 else ""
        except (BadFrame, UnicodeDecodeError):
            self.bad_frames += 1  # nobody's: the rank that would name its stream is in what cannot be read
            return
        stream = self._stream(topic, batch.rank)
        if stream is None:
            self.unrouted += 1
            return
        stream.count(batch)
        stream.sequence.connected = True
        stream.heard(seq, batch)

    def _stream(self, topic: str, rank: int | None) -> Stream | None:
        stream = self.streams.get((topic, rank))
        if stream is None:
            stream = self._stream_of(topic, rank)
            if stream is not None:
                stream = self.streams[topic, rank] = self._taken_over(stream)
        return stream

    def _taken_over(self, new: Stream) -> Stream:
        """The stream its replica has so far, emptied and without its key, so that counters go on; else `new`."""
        key = next((key for key, stream in self.streams.items() if stream.name == new.name), None)
        if key is None:
            return new
        self.replaced += 1
        if self.replaced == 1:
            log.warning("%s was heard as %s before: what it said so far is forgotten", new.name, key)
        known = self.streams.pop(key)
        known.forget()
        return known

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except Exception:
                self.errors += 1
                log.exception("shared event socket %s failed; retrying in %g s", self.address, self._retry_s)
                for stream in self.streams.values():
                    stream.forget()
                    stream.sequence.history_lost()
                await asyncio.sleep(self._retry_s)

    async def _listen(self) -> None:
        sub = open_subscription(self._context, self.address, self._topic)
        try:
            attach(sub, self.address)
            self.bound = sub.getsockopt_string(zmq.LAST_ENDPOINT)
            while True:
                with suppress(TimeoutError):
                    await readable(_LOOK_AGAIN_S, sub)
                with suppress(zmq.Again):
                    for _ in range(_MESSAGES_AT_ONCE):
                        self.heard(sub.recv_multipart(zmq.NOBLOCK))
                await asyncio.sleep(0)
        finally:
            sub.close(linger=0)
