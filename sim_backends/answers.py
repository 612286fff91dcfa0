"""One answer on its way to a client: whole or as a stream, and the ways in which it can break.

Token events are written to the transport as ready-made chunks, all that are due in one write: through
`StreamResponse.write` each token would wake its handler's task first, which costs more than the engine.
A slow reader's bytes wait in the transport, at most one answer's worth.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import NoReturn

from sim_backends.faults import Break, Kind
from sim_backends.openai_wire import StreamText
from sim_backends.requests import Output

_BEFORE_RESET_S = 0.05  # an RST overtakes bytes that have not been read: what was just written gets this long


class Answer:
    """What is known of one answer so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self.cached = 0
        self.reason: str | None = None
        self.lost = False  # its replica died: no more comes
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, output: Output) -> bool:
        self.lost = output.index < 0
        self.tokens += not self.lost
        self.cached = output.cached_tokens
        self.reason = output.finish_reason
        return self.reason is not None

    def flush(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class Stream(Answer):
    """An answer whose tokens go to `transport` as they come."""

    def __init__(self, text: StreamText, transport: asyncio.WriteTransport, *, chunked: bool) -> None:
        super().__init__()
        self._text = text
        self._transport = transport
        self._chunked = chunked
        self._token = _chunk(text.token) if chunked else text.token
        self._waiting = 0
        self._open = False
        self._opening = text.opening

    def open(self) -> None:
        """The head is out: tokens may follow."""
        self._open = True
        if self.tokens:
            self.flush()

    def take(self, output: Output) -> bool:
        super().take(output)
        self._waiting += output.finish_reason is None
        return True

    def flush(self) -> None:
        if self.lost:
            reset(self._transport)
            super().flush()
        if self.lost or not self._open:
            return
        parts = [self._framed(self._opening), self._token * self._waiting]
        self._opening, self._waiting = b"", 0
        if self.reason is not None:
            parts.append(self._framed(self._text.last(self.reason)))
        self._write(b"".join(parts))
        if self.reason is not None:
            super().flush()

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():  # it closes some moments before the handler is cancelled
            self._transport.write(data)

    def _framed(self, data: bytes) -> bytes:
        return _chunk(data) if self._chunked and data else data


class BreakingStream(Stream):
    """A stream that breaks once `after_tokens` tokens are out. Its last token is never among them."""

    def __init__(
        self, text: StreamText, transport: asyncio.WriteTransport, *, chunked: bool, kind: Kind, after_tokens: int
    ) -> None:
        super().__init__(text, transport, chunked=chunked)
        self._kind = kind
        self._left = after_tokens
        self._broken = False

    def open(self) -> None:
        super().open()
        if self._left == 0:
            self.flush()

    def flush(self) -> None:
        if self.lost:
            super().flush()
        if self.lost or not self._open or self._broken:
            return
        if self._waiting < self._left:
            self._left -= self._waiting
            super().flush()
            return
        self._broken = True
        self._write(self._framed(self._opening) + self._token * self._left)
        break_off(self._transport, self._kind)


def break_off(transport: asyncio.WriteTransport, kind: Kind) -> None:
    """End a connection as `kind` says, after what was written to it. A hang leaves it open and silent."""
    if kind is Kind.CUT:
        transport.close()
    elif kind is Kind.RESET:
        asyncio.get_running_loop().call_later(_BEFORE_RESET_S, reset, transport)


def reset(transport: asyncio.WriteTransport) -> None:
    """End a connection with an RST."""
    if not transport.is_closing():
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def break_before_head(transport: asyncio.WriteTransport, broken: Break) -> NoReturn:
    """Answer nothing. Ends by being cancelled, when the connection is gone."""
    break_off(transport, broken.kind)
    await never()


async def never() -> NoReturn:
    """Wait to be cancelled."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody ends this wait but by cancelling it")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
