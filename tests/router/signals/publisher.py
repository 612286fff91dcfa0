"""A publisher on loopback with the frames engines use; its own code, so it can also misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio

END = b"\xff" * 8


def payload_of_rank(rank: int | None, *events: object, ts_s: float = 1.0) -> bytes:
    """A batch of one data-parallel rank."""
    return msgspec.msgpack.encode([ts_s, list(events), rank])


class Publisher:
    """PUB socket and replay ROUTER of one engine process. Use as an async context manager.

    port, replay_port : 0 for a free port; give the ports of an earlier process to stand in its place
    new_framing : replay replies carry a topic frame (vLLM from 0.26)
    answers : False makes the replay socket accept requests and stay silent
    """

    def __init__(
        self, *, port: int = 0, replay_port: int = 0, topic: bytes = b"", new_framing: bool = True, answers: bool = True
    ) -> None:
        self.topic = topic
        self.history: list[tuple[int, bytes]] = []
        self.requests: list[int] = []
        self.port = port
        self.replay_port = replay_port
        self._new_framing = new_framing
        self._answers = answers
        self.replays_all = False  # True makes it ignore the number asked for

    async def __aenter__(self) -> Publisher:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # XPUB shows subscriptions, so a test can wait for them
        self._router = self._context.socket(zmq.ROUTER)
        self.port = await bind(self._pub, self.port)
        self.replay_port = await bind(self._router, self.replay_port)
        self._task = asyncio.create_task(self._serve_replay())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the process early; leaving the context then does nothing more."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    async def subscribed(self) -> None:
        await asyncio.wait_for(self._pub.recv(), 5)

    async def publish(self, seq: int, payload: bytes, *, keep: bool = True, send: bool = True) -> None:
        """Send a batch and keep it for replay; `send=False` loses it on the way, `keep=False` in the window."""
        if send:
            await self.send_raw([self.topic, seq.to_bytes(8, "big"), payload])
        if keep:
            self.history.append((seq, payload))

    async def send_raw(self, frames: list[bytes]) -> None:
        await self._pub.send_multipart(frames)

    async def _serve_replay(self) -> None:
        while True:
            identity, empty, start = await self._router.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            if not self._answers:
                continue
            head = [identity, empty, self.topic] if self._new_framing else [identity, empty]
            for seq, payload in self.history:
                if self.replays_all or seq >= self.requests[-1]:
                    await self._router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([*([identity, empty, b""] if self._new_framing else head), END, b""])


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; a test that waits for ever fails."""
    never = asyncio.Event()
    async with asyncio.timeout(10):
        while not condition():
            with suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), 0.005)


async def bind(socket: zmq.asyncio.Socket, port: int) -> int:
    """Bind to `port`, or to a free one. A port just given up may need a moment until it can be bound again."""
    if not port:
        return socket.bind_to_random_port("tcp://127.0.0.1")
    for _ in range(200):
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError:
            await asyncio.sleep(0.01)
        else:
            return port
    raise AssertionError(f"port {port} stayed in use")
