"""Connections under TLS that end without its closing alert: a cut, which nobody may take for an end. Both sides.

The far ends here run TLS by hand over plain sockets: streams of the standard library hide whether the alert came.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from router.actions import Cause
from router.http.contract import TimeOuts
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Decisions,
    Script,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    chunk,
    on_uvloop,
    post,
    says,
    says_and_closes,
    silence,
    until,
)
from tests.router.http.test_bounded_buffers import clients_of

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

CERTIFICATE = Path(__file__).parent / "tls" / "cert.pem"
KEY = Path(__file__).parent / "tls" / "key.pem"
PIECE = chunk(b"data: 1\n\n")
UNDECLARED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def serving() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


@dataclass
class TlsEnd:
    """One end of a connection, with TLS by hand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    context: ssl.SSLContext
    serves: bool
    incoming: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)
    outgoing: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)

    async def shake_hands(self) -> None:
        name = None if self.serves else "127.0.0.1"
        self.tls = self.context.wrap_bio(self.incoming, self.outgoing, server_side=self.serves, server_hostname=name)
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._more()
        self._flush()

    def write(self, data: bytes) -> None:
        self.tls.write(data)
        self._flush()

    async def read(self) -> bytes:
        """The next bytes; b"" for the closing alert. An end without one is a ConnectionResetError."""
        while True:
            try:
                return self.tls.read(65536)
            except ssl.SSLWantReadError:
                await self._more()

    async def read_all(self) -> tuple[bytes, str]:
        """All bytes until the end, and whether that was "whole" or "cut"."""
        seen = b""
        try:
            while data := await self.read():
                seen += data
        except ConnectionResetError:
            return seen, "cut"
        return seen, "whole"

    def say_the_end(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.unwrap()
        self._flush()

    async def _more(self) -> None:
        self._flush()
        data = await self.reader.read(65536)
        if not data:
            raise ConnectionResetError("the end of the connection, and no alert before it")
        self.incoming.write(data)

    def _flush(self) -> None:
        self.writer.write(self.outgoing.read())


@asynccontextmanager
async def a_tls_replica(said: bytes, *, alert: bool) -> AsyncIterator[str]:
    """Answers its one request with `said` and ends the connection. alert : and says so in TLS"""
    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())  # type: ignore[arg-type]
        end = TlsEnd(reader, writer, serving(), serves=True)
        await end.shake_hands()
        request = b""
        while not request.endswith(b"{}"):
            request += await end.read()
        end.write(said)
        if alert:
            end.say_the_end()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*served)


@asynccontextmanager
async def a_tls_client(port: int) -> AsyncIterator[TlsEnd]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    end = TlsEnd(reader, writer, trusting(), serves=False)
    try:
        await end.shake_hands()
        yield end
    finally:
        writer.transport.abort()


# -- a replica's side


@pytest.mark.parametrize(
    "said",
    [
        STREAM_HEAD + PIECE,
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + PIECE,
        UNDECLARED + PIECE,
    ],
    ids=["no last chunk", "less than declared", "undeclared"],
)
@pytest.mark.parametrize("alert", [False, True])
@on_uvloop
async def test_an_answer_cut_under_tls_is_cut_for_the_client_with_all_that_came(said: bytes, alert: bool) -> None:
    undeclared = said.startswith(UNDECLARED)
    async with a_tls_replica(said, alert=alert) as url:
        decisions = Decisions([url])
        async with a_port(decisions, upstream_tls=trusting()) as port, a_client(port) as client:
            client.writer.write(post())
            await client.read_head()
            seen = b""
            reset = False
            try:
                while data := await client.reader.read(65536):
                    seen += data
            except ConnectionResetError:
                reset = True
    assert seen == PIECE
    assert reset == (undeclared and not alert), "the end of the connection is the end of such an answer"
    whole = undeclared and alert
    assert decisions.kinds[-1] == ("finished" if whole else "failed")
    assert decisions.of("failed") == ([] if whole else [Cause.BROKEN])


@pytest.mark.parametrize("said", [answer(), STREAM_HEAD + PIECE + LAST_CHUNK], ids=["declared", "chunks"])
@on_uvloop
async def test_an_answer_that_is_whole_by_its_own_framing_needs_no_alert(said: bytes) -> None:
    async with a_tls_replica(said, alert=False) as url:
        decisions = Decisions([url])
        async with a_port(decisions, upstream_tls=trusting()) as port, a_client(port) as client:
            assert (await client.ask(post())).status == 200
    assert decisions.kinds[-1] == "finished"


@pytest.mark.parametrize(
    ("framed", "alert"),
    [("declared", False), ("declared", True), ("chunks", False), ("chunks", True), ("undeclared", True)],
)
@on_uvloop
async def test_a_slow_client_gets_all_of_an_answer_whose_replica_has_left_behind_it(framed: str, alert: bool) -> None:
    body = b"%07d," * 2**16 % tuple(range(2**16))  # more than one read, and than sockets and transports hold
    said = {
        "declared": answer(body),
        "chunks": STREAM_HEAD + chunk(body) + LAST_CHUNK,
        "undeclared": UNDECLARED + body,
    }[framed]
    async with a_tls_replica(said, alert=alert) as url:
        decisions = Decisions([url])
        async with a_port(decisions, upstream_tls=trusting()) as port, clients_of(port, 1) as (client,):
            client.writer.write(post())
            await until(lambda: all(each.paused for each in port._shared.clients))
            for _ in range(1000):  # turns in which the loop could notice the end
                await asyncio.sleep(0)
            assert (await client.read()).body == body
    assert decisions.kinds[-1] == "finished"


# -- a replica that leaves early


async def _speaks_no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer())
    await reader.read()
    writer.close()


async def _leaves_before_its_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.transport.abort()


async def _leaves_behind_its_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await TlsEnd(reader, writer, serving(), serves=True).shake_hands()
    writer.transport.abort()


async def _says_its_end_behind_its_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    end = TlsEnd(reader, writer, serving(), serves=True)
    await end.shake_hands()
    end.say_the_end()
    writer.close()


async def _never_shakes_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@pytest.mark.parametrize(
    "serve",
    [
        _speaks_no_tls,
        _leaves_before_its_handshake,
        _leaves_behind_its_handshake,
        _says_its_end_behind_its_handshake,
        _never_shakes_hands,
    ],
)
@on_uvloop
async def test_a_replica_that_leaves_around_its_handshake_has_failed_and_leaves_nothing(serve: Serve) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    decisions = Decisions([f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    async with a_port(decisions, upstream_tls=trusting(), times=TimeOuts(connect_s=0.3)) as port:
        assert (await ask(port, post())).status == 502
        await until(lambda: not port.pool._open)
    server.close()
    assert decisions.of("failed") in ([Cause.CONNECT], [Cause.NO_ANSWER])


@on_uvloop
async def test_a_client_that_leaves_during_the_handshake_leaves_nothing() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        begun.set()
        with contextlib.suppress(OSError):
            await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    decisions = Decisions([f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    async with a_port(decisions, upstream_tls=trusting()) as port:
        async with a_client(port) as client:
            client.writer.write(post())
            await begun.wait()
        await ended.wait()
        assert not port.pool._open
    server.close()
    assert decisions.kinds == ["arrived", "cancelled"]


@on_uvloop
async def test_an_address_that_is_not_allowed_sees_no_handshake() -> None:
    seen = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            seen.set_result(await reader.read())
        if not seen.done():
            seen.set_result(b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    decisions = Decisions([f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    async with a_port(decisions, upstream_tls=trusting(), allowed_address=lambda *_: "not there") as port:
        assert (await ask(port, post())).status == 502
        assert await seen == b""
    server.close()
    assert decisions.of("failed") == [Cause.CONNECT]


# -- a client's side

BREAKS: dict[str, tuple[bytes, Script]] = {
    "chunks": (post(), says_and_closes(STREAM_HEAD + PIECE)),
    "declared": (post(), says_and_closes(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + PIECE)),
    "taken off its chunks": (
        b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
        says_and_closes(STREAM_HEAD + PIECE),
    ),
}


@pytest.mark.parametrize("how", BREAKS)
@on_uvloop
async def test_a_client_under_tls_is_not_told_that_a_broken_answer_is_whole(how: str) -> None:
    request, script = BREAKS[how]
    async with (
        a_replica(script) as replica,
        a_port(Decisions([replica.url]), tls=serving()) as port,
        a_tls_client(port.port) as client,
    ):
        client.write(request)
        seen, end = await client.read_all()
    assert b"data: 1\n\n" in seen
    assert LAST_CHUNK not in seen
    assert end == "cut" or how != "taken off its chunks", "without framing the alert alone says that this was all"


@on_uvloop
async def test_a_client_under_tls_is_told_the_end_of_an_answer_that_ends_with_its_connection() -> None:
    async with (
        a_replica(says_and_closes(UNDECLARED + b"all")) as replica,
        a_port(Decisions([replica.url]), tls=serving()) as port,
        a_tls_client(port.port) as client,
    ):
        client.write(post())
        seen, end = await client.read_all()
    assert (seen[-7:], end) == (b"\r\n\r\nall", "whole")


@on_uvloop
async def test_what_a_port_that_stops_cuts_under_tls_is_not_called_whole() -> None:
    decisions = Decisions()
    async with a_replica(says(UNDECLARED + b"some")) as replica:
        decisions.urls.append(replica.url)
        async with a_port(decisions, tls=serving()) as port, a_tls_client(port.port) as client:
            client.write(post())
            assert (await client.read()).endswith(b"some")
            port.cut()
            assert await client.read_all() == (b"", "cut")


@pytest.mark.parametrize(
    "upload",
    [post(b"x" * 100)[:-1], b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\nTransfer-Encoding: chunked\r\n\r\n" + PIECE],
    ids=["declared", "chunks"],
)
@on_uvloop
async def test_an_upload_cut_under_tls_reaches_nobody(upload: bytes) -> None:
    decisions = Decisions()
    async with a_port(decisions, tls=serving()) as port:
        async with a_tls_client(port.port) as client:
            client.write(upload)
            await until(lambda: any(each._assembler.pending_bytes for each in port._shared.clients))
        await until(lambda: port.open_connections == 0)
    assert decisions.kinds == []


@on_uvloop
async def test_a_client_cut_under_tls_while_it_waits_has_left() -> None:
    async with a_replica(silence) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, tls=serving()) as port:
            async with a_tls_client(port.port) as client:
                client.write(post())
                await until(lambda: len(replica.received) == 1)
            await until(lambda: replica.open == 0)
    assert decisions.kinds == ["arrived", "cancelled"]
