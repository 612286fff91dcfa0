"""Two connections joined raw, once both ends speak a protocol that is not HTTP: a WebSocket, for example.

Model     each connection gets a new protocol that writes what it receives to the other one; a side that does not read
          holds the other's reading back. The end of either side ends both, after what was received is written
Valid     until neither side has sent anything for `idle_s`; then both are closed
Blind to  what is in the bytes; a half-closed connection counts as ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http.deadline import Deadline


class Tunnel:
    """Joins two transports; from then on their former protocols hear of nothing but the connection's loss.

    idle_s : limit of silence
    ended : called once, when the first side is lost or the limit has passed; it closes both sides
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        one: asyncio.Transport,
        other: asyncio.Transport,
        *,
        idle_s: float,
        ended: Callable[[], None],
    ) -> None:
        self._clock = loop.time
        self._idle_s = idle_s
        self._ended: Callable[[], None] | None = ended
        self._deadline = Deadline(loop, self.end)
        self._deadline.set(self._clock() + idle_s)
        _Side(self, one, other)
        _Side(self, other, one)

    def moved(self) -> None:
        self._deadline.at_s = self._clock() + self._idle_s

    def end(self) -> None:
        self._deadline.close()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


class _Side(asyncio.Protocol):
    """Protocol of one of the two transports."""

    def __init__(self, tunnel: Tunnel, transport: asyncio.Transport, other: asyncio.Transport) -> None:
        self._tunnel = tunnel
        self._other = other
        self._former = transport.get_protocol()
        self._write = other.write
        transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        self._tunnel.moved()
        self._write(data)

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnel.end()
        self._former.connection_lost(exc)
