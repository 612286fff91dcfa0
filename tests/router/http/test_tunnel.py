"""WebSockets and what looks like them: joined raw, held back, counted, ended."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import cast

import pytest

from router.actions import Cause, Ended
from router.http.contract import Limits, TimeOuts
from tests.router.http.stubs import (
    Client,
    Decisions,
    Received,
    a_client,
    a_port,
    a_replica,
    answer,
    get,
    on_uvloop,
    post,
    reset,
    says,
    until,
)

WISH = (
    b"Connection: keep-alive, Upgrade",
    b"Upgrade: WebSocket",
    b"Sec-WebSocket-Key: a2V5",
    b"Sec-WebSocket-Version: 13",
)
ASK = get(b"/v1/realtime?model=m1", *WISH)
AGREED = (
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nSec-WebSocket-Accept: x\r\n\r\n"
)
TLS = Path(__file__).parent / "tls"


class EchoReplica:
    """Agrees to switch and sends back whatever comes; a line `bye` ends it."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.writer: asyncio.StreamWriter
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        try:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(AGREED + b"hello ")
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
                if data.endswith(b"bye"):
                    break
        except OSError:
            pass
        finally:
            self.ended.set()
            writer.close()


async def an_echo() -> tuple[EchoReplica, asyncio.Server, str]:
    replica = EchoReplica()
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
    return replica, server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def switched(client: Client) -> dict[bytes, bytes]:
    client.writer.write(ASK)
    status, fields = await client.read_head()
    assert status == 101
    assert await client.reader.readexactly(6) == b"hello "
    return {name.lower(): value for name, value in fields}


@on_uvloop
async def test_bytes_pass_both_ways_and_the_request_is_open_until_the_client_leaves() -> None:
    replica, server, url = await an_echo()
    decisions = Decisions([url])
    async with a_port(decisions) as port, a_client(port) as client:
        fields = await switched(client)
        assert (fields[b"connection"], fields[b"upgrade"]) == (b"Upgrade", b"websocket")
        assert fields[b"sec-websocket-accept"] == b"x"
        for size in (1, 70_000, 3):
            client.writer.write(bytes(range(256)) * size)
            assert await client.reader.readexactly(256 * size) == bytes(range(256)) * size
        assert (port.open_exchanges, port.pool.in_use, decisions.kinds) == (1, 1, ["arrived"])
        client.writer.close()
        await replica.ended.wait()
        await until(lambda: port.open_connections == port.pool.in_use == 0)
    server.close()
    assert decisions.of("finished") == [Ended(101)]
    lines = replica.heads[0].split(b"\r\n")
    assert lines[0] == b"GET /v1/realtime?model=m1 HTTP/1.1"
    assert b"Connection: Upgrade" in lines
    assert b"Upgrade: websocket" in lines
    assert b"Sec-WebSocket-Key: a2V5" in lines
    assert sum(line.lower().startswith((b"connection:", b"upgrade:")) for line in lines) == 2


@pytest.mark.parametrize("how", ["end", "reset"])
@on_uvloop
async def test_the_end_of_the_replica_ends_the_client_after_its_last_words(how: str) -> None:
    replica, server, url = await an_echo()
    decisions = Decisions([url])
    async with a_port(decisions) as port, a_client(port) as client:
        await switched(client)
        if how == "end":
            client.writer.write(b"bye")
            assert await client.reader.read(3) == b"bye"
        else:
            reset(replica.writer)
        assert await client.reader.read() == b""
        await until(lambda: port.pool.in_use == 0)
    server.close()
    assert decisions.of("finished") == [Ended(101)]


@on_uvloop
async def test_what_the_client_says_before_the_answer_reaches_the_replica_after_it() -> None:
    _, server, url = await an_echo()
    async with a_port(Decisions([url])) as port, a_client(port) as client:
        client.writer.write(post(b"{}", b"Connection: keep-alive", target=b"/health").replace(b"POST", b"GET") + ASK)
        client.writer.write(b"\x81\x05early")
        assert (await client.read()).status == 200
        assert (await client.read_head())[0] == 101
        assert await client.reader.readexactly(13) == b"hello \x81\x05early"
    server.close()


@pytest.mark.parametrize("tail", [b"", get(b"/health"), get(b"/health")[:20]])
@on_uvloop
async def test_another_answer_is_an_ordinary_one_and_the_connection_goes_on(tail: bytes) -> None:
    no = answer(b"{}", b"426 Upgrade Required")
    async with a_replica(says(no)) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            got = await client.ask(ASK + tail)
            assert (got.status, got.body) == (426, b"{}")
            client.writer.write(get(b"/health")[len(tail) :] if len(tail) < 30 else b"")
            assert (await client.read()).status == 200
            assert port.pool.idle == 1
    assert decisions.of("finished")[0].status == 426


@on_uvloop
async def test_garbage_behind_a_wish_that_was_declined_is_refused() -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        assert (await client.ask(ASK + b"\x81\x05early\r\n\r\n")).status == 200
        assert (await client.read()).status == 400
        assert await client.reader.read() == b""


@pytest.mark.parametrize("target", [b"/health", b"/metrics"])
@on_uvloop
async def test_paths_that_are_not_relayed_are_not_tunnelled(target: bytes) -> None:
    async with a_port(Decisions()) as port, a_client(port) as client:
        for _ in range(2):
            assert (await client.ask(get(target, *WISH))).status == (200 if target == b"/health" else 404)


SAID = {
    "another protocol": AGREED.replace(b"websocket", b"h2c"),
    "no protocol": AGREED.replace(b"upgrade: websocket\r\n", b""),
    "not HTTP": b"\x81\x05hello",
}


@pytest.mark.parametrize("case", SAID)
@on_uvloop
async def test_a_switch_to_anything_else_is_no_answer(case: str) -> None:
    async with a_replica(says(SAID[case])) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            assert (await client.ask(ASK)).status == 502
    assert decisions.of("failed") == [Cause.BAD_ANSWER]


NO_WEBSOCKET = {
    "a body": post(b"abc", *WISH),
    "no word in Connection": get(b"/v1/realtime", b"Upgrade: websocket"),
    "HTTP/1.0": b"GET /v1/realtime HTTP/1.0\r\n" + b"\r\n".join(WISH) + b"\r\n\r\n",
    "two protocols": get(b"/v1/realtime", b"Connection: upgrade", b"Upgrade: websocket, h2c"),
}


@pytest.mark.parametrize("case", NO_WEBSOCKET)
@on_uvloop
async def test_other_wishes_are_plain_requests(case: str) -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        assert (await client.ask(NO_WEBSOCKET[case])).status == 200
    assert replica.received[0].values(b"upgrade") == []


@on_uvloop
async def test_silence_on_both_sides_ends_the_tunnel_and_talk_on_one_keeps_it() -> None:
    replica, server, url = await an_echo()
    decisions = Decisions([url])
    async with a_port(decisions, times=TimeOuts(stall_s=0.3)) as port, a_client(port) as client:
        await switched(client)
        for _ in range(8):
            await asyncio.sleep(0.06)
            replica.writer.write(b".")
            assert await client.reader.readexactly(1) == b"."
        assert await client.reader.read() == b""
        await replica.ended.wait()
        await until(lambda: port.pool.in_use == 0)
    server.close()
    assert decisions.of("finished") == [Ended(101)]


@on_uvloop
async def test_a_side_that_does_not_read_holds_the_other_back() -> None:
    """The replica sends without end to a client that does not read; then the client does, and all arrives."""
    sent = 0
    total = 200 * 65536

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(AGREED)
        while sent < total:
            writer.write(bytes(65536))
            sent += 65536
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with a_port(Decisions([url])) as port, a_client(port) as client:
        transport = cast(asyncio.Transport, client.writer.transport)
        transport.pause_reading()
        client.writer.write(ASK)
        await until(lambda: sent > 0)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < total
        (connection,) = port._shared.clients
        assert connection._open_transport().get_write_buffer_size() < 2**20
        transport.resume_reading()
        assert (await client.read_head())[0] == 101
        assert len(await client.reader.read()) == total
        await until(lambda: port.pool.in_use == 0)
    server.close()


@on_uvloop
async def test_a_client_that_talks_before_the_answer_is_not_read_beyond_the_limit() -> None:
    go_on = asyncio.Event()

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(answer())

    limits = Limits(max_waiting_bytes=1000)
    async with (
        a_replica(script) as replica,
        a_port(Decisions([replica.url]), limits=limits) as port,
        a_client(port) as client,
    ):
        client.writer.write(ASK + bytes(5_000_000))
        await until(lambda: len(port._shared.clients) == 1)
        (connection,) = port._shared.clients
        await until(lambda: connection._reading_stopped)
        assert len(connection._assembler.held or b"") < 2**20
        go_on.set()
        assert [(await client.read()).status for _ in range(2)] == [200, 431]


@on_uvloop
async def test_a_stop_waits_for_tunnels_and_then_cuts_them() -> None:
    replica, server, url = await an_echo()
    decisions = Decisions([url])
    async with a_port(decisions) as port, a_client(port) as client:
        await switched(client)
        await port.stop(grace_s=0.05)
        with pytest.raises(ConnectionResetError):
            await client.reader.read()
        await replica.ended.wait()
    server.close()
    assert decisions.kinds == ["arrived", "failed"]


@on_uvloop
async def test_a_tunnel_goes_through_tls_on_both_sides() -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    replica = EchoReplica()
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0, ssl=serving)
    decisions = Decisions([f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    async with a_port(decisions, tls=serving, upstream_tls=trusting) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=trusting)
        client = Client(reader, writer)
        await switched(client)
        client.writer.write(bytes(300_000))
        assert await client.reader.readexactly(300_000) == bytes(300_000)
        client.writer.write(b"bye")
        assert await client.reader.read() == b"bye"
        writer.close()
        await until(lambda: port.open_connections == 0)
    server.close()
    assert decisions.of("finished") == [Ended(101)]
