"""What the port holds for peers that do not keep up: counted in its own buffers and in its transports', at every turn.

The bound of one direction of one connection is what its transport takes before it says so, and what one read brings.
Under TLS uvloop has a plain transport below, whose buffer, with a bound of its own, it does not show.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.http.client import ClientConnection
from router.http.contract import Limits
from router.http.exchange import Exchange
from router.http.head import RequestHead
from router.http.server import TrafficPort
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Client,
    Decisions,
    Received,
    a_port,
    a_replica,
    chunk,
    get,
    on_uvloop,
    post,
    silence,
    until,
)

KIB, MIB = 1024, 1024 * 1024
ONE_READ = 257 * KIB  # at most, of uvloop, with what TLS adds
HIGH_WATER = {"plain": 64 * KIB, "tls": 512 * KIB}  # of uvloop's transports
SMALL_SOCKET = 16 * KIB  # so that what is held is held by the router
TLS = Path(__file__).parent / "tls"


def head_bytes(head: RequestHead) -> int:
    return len(head.target) + sum(len(name) + len(value) for _, name, value in head.headers)


def held_for(client: ClientConnection) -> int:
    """Bytes of one client's requests and answers."""
    assembler, exchange = client._assembler, client._exchange
    held = client._open_transport().get_write_buffer_size() + assembler.pending_bytes + len(assembler._raw)
    held += len(assembler.held or b"") + sum(head_bytes(head) + len(body) for head, body in assembler.complete)
    if isinstance(exchange, Exchange):
        held += len(exchange._body) + len(exchange._outlet._held)
    return held


def held_by(port: TrafficPort) -> int:
    """Bytes of all clients, and what is still to be sent to replicas."""
    to_replicas = (each._open_transport().get_write_buffer_size() for each in port.pool._open)
    return sum(map(held_for, port._shared.clients)) + sum(to_replicas)


@contextlib.asynccontextmanager
async def the_most_held(port: TrafficPort) -> AsyncIterator[list[int]]:
    """One number: the most that was held at any turn of the loop so far."""
    most = [0]

    async def watch() -> None:
        while True:
            most[0] = max(most[0], held_by(port))
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    try:
        yield most
    finally:
        watching.cancel()


@contextlib.asynccontextmanager
async def clients_of(
    port: TrafficPort, count: int, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[Client]]:
    """Connected, with small buffers in the sockets of both ends, and reading only when the test does."""
    clients = []
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_SOCKET)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port.port))
        name = None if tls is None else "127.0.0.1"
        streams = await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=name, limit=KIB)
        clients.append(Client(*streams))
    await until(lambda: port.open_connections == count)
    for connection in port._shared.clients:
        own: Any = connection._open_transport().get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_SOCKET)
    try:
        yield clients
    finally:
        for client in clients:
            client.writer.transport.abort()


# -- a fast stream to a slow client

PIECES, PIECE_BYTES = 256, 16 * KIB  # 4 MiB in all
PIECE = [chunk(b"%08d" % number * (PIECE_BYTES // 8)) for number in range(PIECES)]
STREAM = b"".join(PIECE) + LAST_CHUNK


async def streams_fast(_: Received, writer: asyncio.StreamWriter) -> None:
    for data in (STREAM_HEAD, *PIECE, LAST_CHUNK):
        writer.write(data)
        await writer.drain()


@pytest.mark.parametrize("how", ["plain", "tls"])
@on_uvloop
async def test_of_fast_streams_to_many_slow_clients_little_is_held_and_nothing_lost(how: str) -> None:
    count, serving, trusting = 16, None, None
    if how == "tls":
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
        trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    async with (
        a_replica(streams_fast) as replica,
        a_port(Decisions([replica.url]), tls=serving) as port,
        clients_of(port, count, tls=trusting) as clients,
        the_most_held(port) as most,
    ):
        for client in clients:
            client.writer.write(post())
        await until(lambda: all(client.paused for client in port._shared.clients))
        assert all(connection._paused for connection in port.pool._open), "who reads on has to hold what comes"
        assert 0 < most[0] <= count * (HIGH_WATER[how] + ONE_READ)
        for client in clients[:3]:
            await client.read_head()
            assert await client.reader.readexactly(len(STREAM)) == STREAM
        assert most[0] <= count * (HIGH_WATER[how] + ONE_READ)


# -- fast uploads to a slow replica


@contextlib.contextmanager
def nobody_reads() -> Any:
    """URL of an endpoint that takes connections and never a byte from them."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_SOCKET)
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def in_chunks(body: bytes) -> bytes:
    pieces = b"".join(chunk(body[at : at + PIECE_BYTES]) for at in range(0, len(body), PIECE_BYTES))
    return b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + LAST_CHUNK


@pytest.mark.parametrize("framed", [post, in_chunks])
@on_uvloop
async def test_of_uploads_to_a_replica_that_does_not_read_one_copy_is_held(framed: Any) -> None:
    count, size = 8, 12 * MIB
    request = framed(bytes(size))
    with nobody_reads() as url:
        async with a_port(Decisions([url])) as port, clients_of(port, count) as clients:
            tracemalloc.start()
            try:
                for client in clients:
                    client.writer.write(request)
                await until(lambda: port.pool.in_use == count)
                now, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            exchanges: list[Any] = [client.exchange for client in port._shared.clients]
            held = sum(len(exchange._body) for exchange in exchanges)
            assert held == count * size, "each body, kept because its replica may have to be replaced"
            assert now < held + count * ONE_READ, "what is still to be sent is that copy and no other"
            assert most < 2 * held, "and bodies on their way in are not gathered twice"


# -- requests that nobody asked for yet

HEAD_BYTES = 32 * KIB


@on_uvloop
async def test_of_requests_sent_ahead_a_limited_part_is_held_for_each_client() -> None:
    count, ahead, requests = 16, 128 * KIB, 4
    flood = {
        "whole ones": post() + post(bytes(8 * KIB)) * 512,
        "a large one": post() + post(bytes(4 * MIB)),
        "large heads": post() + get(b"/v1/x", b"X: " + b"x" * (HEAD_BYTES - KIB)) * 100,
        "bytes of another protocol": get(b"/v1/realtime", b"Connection: upgrade", b"Upgrade: websocket")
        + bytes(4 * MIB),
    }
    async with a_replica(silence) as replica:
        limits = Limits(max_waiting_bytes=ahead, max_waiting_requests=requests)
        async with (
            a_port(Decisions([replica.url]), limits=limits) as port,
            clients_of(port, count) as clients,
            the_most_held(port) as most,
        ):
            for number, client in enumerate(clients):
                client.writer.write(list(flood.values())[number % len(flood)])
            ends: list[Any] = [client._open_transport() for client in port._shared.clients]
            await until(lambda: not any(end.is_reading() for end in ends))
            assert 0 < most[0] < count * (ahead + requests * HEAD_BYTES + ONE_READ)
            port.cut()  # who is not read cannot be seen leaving


# -- a tunnel


@pytest.mark.parametrize("slow", ["client", "replica"])
@on_uvloop
async def test_of_a_tunnel_whose_one_end_does_not_read_little_is_held(slow: str) -> None:
    flooding = asyncio.Event()

    async def switches(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        if slow == "client":
            writer.write(bytes(8 * MIB))
        else:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        flooding.set()

    async with (
        a_replica(switches) as replica,
        a_port(Decisions([replica.url])) as port,
        clients_of(port, 1) as (client,),
        the_most_held(port) as most,
    ):
        client.writer.write(get(b"/v1/realtime", b"Connection: upgrade", b"Upgrade: websocket"))
        await flooding.wait()
        if slow == "replica":
            await client.read_head()
            client.writer.write(bytes(16 * MIB))
        await until(lambda: most[0] > HIGH_WATER["plain"])
        reader = port.pool._open if slow == "client" else port._shared.clients
        (connection,) = reader
        transport: Any = connection._open_transport()
        await until(lambda: not transport.is_reading())
        assert most[0] <= HIGH_WATER["plain"] + ONE_READ
        port.cut()
