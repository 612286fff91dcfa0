"""Clients that leave, clients that do not read, and what is left afterwards, over real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.http.contract import Limits, TimeOuts
from tests.router.http.stubs import (
    STREAM_HEAD,
    Decisions,
    Received,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    chunk,
    on_uvloop,
    post,
    says,
    silence,
    until,
)

ASKS_STREAM = b'{"stream":true}'


# -- the client leaves


@pytest.mark.parametrize("how", ["end", "reset"])
@pytest.mark.parametrize("phase", ["silent", "held head", "head only", "mid-stream"])
@on_uvloop
async def test_a_client_that_leaves_ends_its_replicas_work_at_once(phase: str, how: str) -> None:
    head = b"" if phase == "silent" else STREAM_HEAD
    body = chunk(b"data: 1\n\n") if phase == "mid-stream" else b""
    target = b"/v1/new-thing" if phase == "head only" else b"/v1/completions"  # of a generation the head is held
    async with a_replica(says(head + body) if head else silence) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            for _ in range(5):
                async with a_client(port) as client:
                    client.writer.write(post(ASKS_STREAM, target=target))
                    await until(lambda: replica.open == 1)
                    if head and phase != "held head":
                        await client.read_head()
                    if body:
                        await client.reader.readexactly(len(body))
                    client.leave(how)
                    await until(lambda: replica.open == 0)
            assert port.pool.idle == 0, "a half-read connection is never pooled"
    kinds = ["arrived", "first_token", "cancelled"] if body else ["arrived", "cancelled"]
    assert decisions.kinds == kinds * 5


@on_uvloop
async def test_a_client_that_leaves_while_a_connection_is_made_stops_the_attempt() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        decisions = Decisions([f"http://127.0.0.1:{full.getsockname()[1]}"])
        async with a_port(decisions) as port, a_client(port) as client:
            client.writer.write(post())
            await until(lambda: port.pool.connecting == 1)
            client.leave("end")
            await until(lambda: port.pool.connecting == 0)
        for filler in fillers:
            filler.close()
    assert decisions.kinds == ["arrived", "cancelled"]


# -- bounds


@on_uvloop
async def test_a_slow_reader_holds_back_the_replica_instead_of_filling_memory() -> None:
    total = 64 * 1024 * 1024
    written = 0

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        block = bytes(64 * 1024)
        while written < total:
            writer.write(block)
            written += len(block)
            await writer.drain()

    async with a_replica(script) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(post())
        await until(lambda: written > 0)
        stalled = -1
        while stalled != written:  # until nothing moves any more
            stalled = written
            await asyncio.sleep(0.2)
        assert written < total / 2, "what is under way fits in socket buffers and two bounded ones"
        assert max(c._transport.get_write_buffer_size() for c in port._shared.clients if c._transport) < 2**20
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await client.read()).body) == total


@on_uvloop
async def test_a_client_that_never_reads_is_cut_and_is_not_the_replicas_failure() -> None:
    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(bytes(64 * 1024)))
            await writer.drain()

    async with a_replica(script) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, times=TimeOuts(stall_s=0.3)) as port, a_client(port) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.writer.write(post())
            await until(lambda: decisions.kinds == ["arrived", "cancelled"])
            await until(lambda: replica.open == 0)


@on_uvloop
async def test_a_body_at_the_limit_passes_whole() -> None:
    body = bytes(1_000_000)
    limits = Limits(max_body_bytes=len(body))
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url]), limits=limits) as port:
        assert (await ask(port, post(body))).status == 200
        assert (await ask(port, post(body + b"x"))).status == 413
    assert [len(seen.body) for seen in replica.received] == [len(body)]
