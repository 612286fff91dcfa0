"""Scripted replicas, a recording decider and a strict client, on loopback sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec

import uvloop

from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Hold, Refuse, Send
from router.http.contract import Limits, TimeOuts
from router.http.head import RequestHead
from router.http.server import TrafficPort
from router.resume.reasons import WhyNot

VECTORS = Path(__file__).parents[2] / "vectors"
PATIENCE_S = 20.0  # an event that has not come by then will not come
Params = ParamSpec("Params")


def on_uvloop(test: Callable[Params, Coroutine[Any, Any, None]]) -> Callable[Params, None]:
    """Run a test on the loop that production uses, and fail it when it hangs."""

    @functools.wraps(test)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> None:
        async def limited() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test(*args, **kwargs)

        uvloop.run(limited())

    return run


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something holds; the test's own limit ends a vain wait."""
    for _ in iter(holds, True):
        await asyncio.sleep(0.001)


# -- replicas


@dataclass
class Received:
    """A request as a replica saw it."""

    head: bytes
    body: bytes

    @property
    def lines(self) -> list[bytes]:
        return self.head.split(b"\r\n")[1:-2]

    def values(self, name: bytes) -> list[bytes]:
        split = [line.split(b": ", 1) for line in self.lines]
        return [value for key, value in split if key.lower() == name]


Script = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Replica:
    """A raw socket server. It reads requests, notes them, and lets its script write whatever it likes."""

    script: Script
    url: str = ""
    received: list[Received] = field(default_factory=list)
    opened: int = 0
    closed: int = 0  # connections whose end was seen
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def open(self) -> int:
        return self.opened - self.closed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.writers.add(writer)
        working: asyncio.Task[None] | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_declared(head))
                self.received.append(Received(head, body))
                working = asyncio.ensure_future(self._answer(self.received[-1], writer))
                # Reading on shows the peer's leaving while the script is at work.
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            if working is not None:
                working.cancel()
            self.closed += 1
            self.writers.discard(writer)
            writer.close()

    async def _answer(self, received: Received, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self.script(received, writer)


def _declared(head: bytes) -> int:
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lengths[0].split(b":")[1]) if lengths else 0


@contextlib.asynccontextmanager
async def a_replica(script: Script) -> AsyncIterator[Replica]:
    replica = Replica(script)
    server = await asyncio.start_server(replica._serve, "127.0.0.1", 0, limit=2**26)
    replica.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield replica
    finally:
        server.close()
        for writer in list(replica.writers):
            writer.transport.abort()
        await until(lambda: replica.open == 0)


def says(*pieces: bytes) -> Script:
    """Write these bytes, each in a segment of its own when several, and stay open."""

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)

    return script


def says_and_closes(*pieces: bytes) -> Script:
    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        await says(*pieces)(received, writer)
        writer.close()

    return script


async def silence(_: Received, __: asyncio.StreamWriter) -> None:
    """Read the request and say nothing."""


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, after what was written has left."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


def answer(body: bytes = b'{"ok":true}', status: bytes = b"200 OK", *fields: bytes) -> bytes:
    """A whole answer of declared length."""
    head = [b"HTTP/1.1 " + status, b"Content-Type: application/json", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def events(name: str) -> list[bytes]:
    """The events of a recorded stream, each with its blank line."""
    text = (VECTORS / name).read_bytes()
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


def streamed(name: str) -> bytes:
    """A recorded stream as one chunked body."""
    return b"".join(map(chunk, events(name))) + LAST_CHUNK


# -- the decider


@dataclass
class Decisions:
    """Places requests on `urls`, one after the other, and notes all it is told.

    arrival : what `arrived` returns instead
    on_failure : what `failed` returns, call by call: a url to go to, a refusal, or nothing
    on_break : where the rest of a broken stream goes, call by call
    """

    urls: list[str] = field(default_factory=list)
    arrival: list[Action] | None = None
    on_failure: list[str | Refuse] = field(default_factory=list)
    on_break: list[str] = field(default_factory=list)
    explain: str | None = None
    extra_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    heard: list[tuple[Any, ...]] = field(default_factory=list)
    open: set[Send] = field(default_factory=set)
    _turn: count[int] = field(default_factory=count)

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        self.heard.append(("arrived", request.request_id))
        if self.arrival is not None:
            return self.arrival
        return [self._send(request, self.urls[next(self._turn) % len(self.urls)], 1)]

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        assert sent in self.open
        self.heard.append(("first_token", sent.replica))
        return []

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        self._close(sent, "finished", ended)
        return []

    def failed(self, sent: Send, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]:
        if cause is Cause.OVERLOADED and not self.on_failure:
            assert sent in self.open
            self.heard.append(("failed", sent.replica, cause))
            return []  # stays open: its answer is relayed
        self._close(sent, "failed", cause)
        if not self.on_failure or cause is Cause.BROKEN:
            return []
        then = self.on_failure.pop(0)
        return [then] if isinstance(then, Refuse) else [self._send(sent.request, then, sent.attempt + 1)]

    def broke(self, sent: Send, rest: RequestFacts | WhyNot, now_s: float) -> list[Action]:
        self._close(sent, "broke", rest)
        if isinstance(rest, WhyNot) or not self.on_break:
            return []
        return [self._send(rest, self.on_break.pop(0), sent.attempt + 1)]

    def cancelled(self, sent: Send, now_s: float) -> list[Action]:
        self._close(sent, "cancelled")
        return []

    def left(self, hold: Hold, now_s: float, *, cause: Cause | None = None) -> list[Action]:
        raise AssertionError("nobody waits here")

    def due(self, now_s: float) -> list[Action]:
        raise AssertionError("nothing is ever due here")

    next_due_s: float | None = None

    def of(self, kind: str) -> list[Any]:
        """What came with each report of this kind."""
        return [said[-1] for said in self.heard if said[0] == kind]

    @property
    def kinds(self) -> list[str]:
        return [said[0] for said in self.heard]

    def _send(self, request: RequestFacts, url: str, attempt: int) -> Send:
        name = f"r{attempt}"
        send = Send(
            request, 0, name, url, attempt=attempt, extra_headers=list(self.extra_headers), explain=self.explain
        )
        self.open.add(send)
        return send

    def _close(self, sent: Send, kind: str, *what: Any) -> None:
        self.open.remove(sent)  # raises when it was closed before
        self.heard.append((kind, sent.replica, *what))


def facts_of(head: RequestHead, body: bytes) -> RequestFacts | Refuse:
    """A prompt reader that looks at nothing but the id and whether the body asks for a stream."""
    own = head.get(b"x-request-id")
    streams = b'"stream":true' in body
    return RequestFacts((own or b"made-1").decode("latin-1"), "m1", streams=streams, path=head.path)


# -- the port


def here(head: RequestHead) -> tuple[int, bytes]:
    return 200, b'{"path":"%b"}' % head.path.encode()


@contextlib.asynccontextmanager
async def a_port(
    decisions: Decisions,
    *,
    limits: Limits | None = None,
    times: TimeOuts | None = None,
    bugs: int = 0,
    tls: ssl.SSLContext | None = None,
    **parts: Any,
) -> AsyncIterator[TrafficPort]:
    """A started port. On leaving nothing may be held: no exchange, no connection in use, no open `Send`.

    bugs : exceptions of injected parts that the test provokes; `Decisions` raises when a `Send` is closed twice
    """
    parts = {"read_prompt": facts_of, "answer": here} | parts
    port = TrafficPort(decisions, limits=limits, times=times, **parts)
    await port.start("127.0.0.1", 0, tls=tls)
    try:
        yield port
        await until(lambda: port.open_exchanges == port.pool.in_use == port.pool.connecting == 0)
        assert not decisions.open
    finally:
        await port.stop(grace_s=0.0)
    assert port.counts.internal_errors == bugs
    assert port.open_connections == port.pool.idle == 0


# -- the client


@dataclass
class Answer:
    status: int
    fields: list[tuple[bytes, bytes]]
    raw_body: bytes  # framing included
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]


@dataclass
class Client:
    """Writes raw bytes and reads answers strictly: a body that is cut short is an IncompleteReadError."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes, *, bodiless: bool = False) -> Answer:
        self.writer.write(request)
        return await self.read(bodiless=bodiless)

    async def read(self, *, bodiless: bool = False) -> Answer:
        status, fields = await self.read_head()
        raw = body = b""
        known = {name.lower(): value for name, value in fields}
        if bodiless or status in (204, 304):
            pass
        elif b"transfer-encoding" in known:
            raw, body = await self._read_chunks()
        elif b"content-length" in known:
            raw = body = await self.reader.readexactly(int(known[b"content-length"]))
        else:
            raw = body = await self.reader.read()
        return Answer(status, fields, raw, body)

    async def read_head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        assert first.startswith(b"HTTP/1.1 "), first
        pairs = [line.partition(b": ") for line in lines]
        return int(first.split(b" ")[1]), [(name, value) for name, _, value in pairs]

    async def _read_chunks(self) -> tuple[bytes, bytes]:
        raw = body = b""
        while True:
            line = await self.reader.readuntil(b"\r\n")
            data = await self.reader.readexactly(int(line.split(b";")[0], 16) + 2)
            assert data.endswith(b"\r\n")
            raw += line + data
            body += data[:-2]
            if data == b"\r\n":
                return raw, body

    def leave(self, how: str) -> None:
        if how == "reset":
            reset(self.writer)
        else:
            self.writer.close()


@contextlib.asynccontextmanager
async def a_client(port: TrafficPort) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port, limit=2**26)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def post(body: bytes = b"{}", *fields: bytes, target: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST " + target + b" HTTP/1.1", b"Host: gw", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def get(target: bytes, *fields: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", b"Host: gw", *fields]) + b"\r\n\r\n"


async def ask(port: TrafficPort, request: bytes, *, bodiless: bool = False) -> Answer:
    """One request on a connection of its own."""
    async with a_client(port) as client:
        return await client.ask(request, bodiless=bodiless)
