"""The traffic port as a whole: start, stop, counts."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from router.http.server import TrafficPort
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Decisions,
    Received,
    a_client,
    a_port,
    a_replica,
    chunk,
    facts_of,
    get,
    here,
    on_uvloop,
    post,
    says,
    silence,
    until,
)


@on_uvloop
async def test_a_stop_lets_streams_end_and_takes_nobody_new() -> None:
    go_on = asyncio.Event()

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await go_on.wait()
        writer.write(LAST_CHUNK)

    async with a_replica(script) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as idle, a_client(port) as client:
            await idle.ask(get(b"/health"))
            number = port.port
            client.writer.write(post())
            status, _ = await client.read_head()
            stopping = asyncio.ensure_future(port.stop(grace_s=10.0))
            assert await idle.reader.read() == b""
            with pytest.raises(OSError, match=r".*"):
                await asyncio.open_connection("127.0.0.1", number)
            assert not stopping.done()
            go_on.set()
            assert (await client.reader.read()).endswith(LAST_CHUNK)
            await stopping
    assert status == 200
    assert decisions.kinds == ["arrived", "finished"]


@on_uvloop
async def test_what_outlasts_the_grace_is_cut_visibly() -> None:
    async with a_replica(says(STREAM_HEAD + chunk(b"data: 1\n\n"))) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            client.writer.write(post())
            await client.read_head()
            await client.reader.readexactly(len(chunk(b"data: 1\n\n")))
            await port.stop(grace_s=0.05)
            with pytest.raises(ConnectionResetError):
                await client.reader.read()
            await until(lambda: replica.open == 0)
    assert decisions.kinds == ["arrived", "failed"], "its client did not leave"


@on_uvloop
async def test_counts_follow_connections_and_exchanges() -> None:
    async with a_replica(silence) as replica, a_port(Decisions([replica.url])) as port:
        async with a_client(port) as client:
            await client.ask(get(b"/health"))
            assert (port.open_connections, port.open_exchanges, port.pool.in_use) == (1, 0, 0)
            client.writer.write(post())
            await until(lambda: port.pool.in_use == 1)
            assert port.open_exchanges == 1
        await until(lambda: port.open_connections == port.open_exchanges == port.pool.in_use == 0)


@on_uvloop
async def test_an_address_in_use_is_an_error_at_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = TrafficPort(Decisions(), read_prompt=facts_of, answer=here)
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what is asserted
            await port.start("127.0.0.1", taken.getsockname()[1])
        await port.stop(grace_s=0.0)
    assert caught.value.errno == errno.EADDRINUSE


@on_uvloop
async def test_no_delay_is_set_on_both_sides() -> None:
    async with a_replica(silence) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        client.writer.write(post())
        await until(lambda: port.pool.in_use == 1)
        transports = [client_side._transport for client_side in port._shared.clients]
        transports += [replica_side._transport for replica_side in port.pool._open]
        for transport in transports:
            assert transport is not None
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert len(transports) == 2
