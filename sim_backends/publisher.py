"""ZMQ sockets that announce cache events: one PUB and one replay ROUTER a replica, one PUB for the store.

Source    vLLM 0.9 to 0.33, vllm/distributed/kv_events.py (ZmqEventPublisher): frames, sequence numbers, replay
          protocol, in both of its framings; SGLang's publisher is a copy of it.
          Unlike it publishing goes on while a long replay is answered; a reply holds what was there when it began
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

import zmq
import zmq.asyncio

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
BUFFER_BATCHES = 10_000
HIGH_WATER_MARK = 100_000
_REPLAYS_PER_TURN = 100
_REBIND_S = 5.0  # ZMQ lets go of an address some moments after its socket was closed
_REBIND_EVERY_S = 0.01

_LOG = logging.getLogger(__name__)


class PortTaken(OSError):
    """An address that was asked for cannot be bound."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen on {address}: {reason}")
        self.address = address


@dataclass(slots=True)
class Published:
    """What a publisher has sent: the next sequence number, and how many messages."""

    next_seq: int
    messages: int = 0


def bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> str:
    """Bind and return the address with its real port. Raises PortTaken."""
    try:
        socket.bind(address)
    except zmq.ZMQError as exc:
        raise PortTaken(address, exc.strerror or str(exc)) from exc
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


class Publisher:
    """A PUB socket with sequence numbers. Sending never waits: beyond the high-water mark a reader loses messages."""

    def __init__(self, context: zmq.asyncio.Context, *, address: str, topic: str = "", first_seq: int = 0) -> None:
        """`address` as ZMQ writes it, `tcp://127.0.0.1:*` for a port the system gives."""
        # A plain socket, which sends without waiting, but the context's own, so that ending the context closes it.
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUB, socket_class=zmq.Socket)  # type: ignore[arg-type,assignment]
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self.address = bind(self._socket, address)
        except PortTaken:
            self._socket.close()
            raise
        self.topic = topic
        self._topic_frame = topic.encode()
        self.published = Published(next_seq=first_seq)

    def publish(self, payload: bytes) -> int:
        """Send one payload; returns its sequence number."""
        seq = self.number()
        self.send(seq, payload)
        return seq

    def number(self) -> int:
        """Take the next sequence number, for a payload that is sent later or never."""
        seq = self.published.next_seq
        self.published.next_seq = seq + 1
        return seq

    def send(self, seq: int, payload: bytes) -> None:
        """Send under a number taken before."""
        self._socket.send_multipart([self._topic_frame, seq.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self.published.messages += 1

    def close(self) -> None:
        self._socket.close()


class ReplayingPublisher:
    """A Publisher that keeps its last batches and sends them again to who asks. Owns one task."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        address: str,
        replay_address: str,
        topic: str = "",
        buffer_batches: int = BUFFER_BATCHES,
        topic_in_replay: bool = True,
    ) -> None:
        """`topic_in_replay` False is the older framing, without a topic frame in replies."""
        self._context = context
        self._topic_frames = [topic.encode()] if topic_in_replay else []
        self._end_frames = [b""] if topic_in_replay else []
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._task: asyncio.Task[None] | None = None
        self.topic = topic
        self._live: Publisher
        self._router: zmq.asyncio.Socket
        self._open(address, replay_address)

    def _open(self, address: str, replay_address: str) -> None:
        live = Publisher(self._context, address=address, topic=self.topic)
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.SNDHWM, self.buffer_batches + 1000)  # a full reply fits before its reader reads
        router.setsockopt(zmq.LINGER, 0)
        try:
            self.replay_address = bind(router, replay_address)
        except PortTaken:
            router.close()
            live.close()
            raise
        self.address = live.address
        self._live, self._router = live, router

    @property
    def buffer_batches(self) -> int:
        return self._buffer.maxlen or 0

    def start(self) -> None:
        """Begin to answer replay requests on the running loop."""
        self._task = asyncio.create_task(self._answer_replays())

    def publish(self, payload: bytes) -> None:
        self.send(self.number(payload), payload)

    def number(self, payload: bytes, *, replayable: bool = True) -> int:
        """Take the next sequence number for a payload that is sent later or never."""
        seq = self._live.number()
        if replayable:
            self._buffer.append((seq, payload))
        return seq

    def send(self, seq: int, payload: bytes) -> None:
        """Send live under a number taken before."""
        self._live.send(seq, payload)

    async def restart(self) -> None:
        """What a new process does: drop all readers and the buffer, listen on the same addresses, count from 0.

        Nothing may be published meanwhile. Raises PortTaken if an address was taken by somebody else.
        """
        await self.close()
        self._buffer.clear()
        deadline_s = time.monotonic() + _REBIND_S
        while True:
            try:
                self._open(self.address, self.replay_address)
                break
            except PortTaken:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(_REBIND_EVERY_S)
        self.start()

    async def close(self) -> None:
        """Stop the task and close the sockets."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._router.close()
        self._live.close()

    async def _answer_replays(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            try:
                await self._replay(frames)
            except zmq.ZMQError as exc:  # this reader is gone; the next one is served
                _LOG.warning("replay stopped: %s", exc)

    async def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            _LOG.warning("replay request with %d frames ignored", len(frames))
            return
        reader, _empty, start = frames
        first = int.from_bytes(start, "big")
        wanted = [(seq, payload) for seq, payload in self._buffer if seq >= first]
        for number, (seq, payload) in enumerate(wanted, start=1):
            await self._router.send_multipart([reader, b"", *self._topic_frames, seq.to_bytes(8, "big"), payload])
            if number % _REPLAYS_PER_TURN == 0:
                await asyncio.sleep(0)  # the engines of this process share the loop
        await self._router.send_multipart([reader, b"", *self._end_frames, END_OF_REPLAY, b""])
