"""What one client may make the router hold: bodies, connections, bytes under way."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.actions import Refuse
from router.http.contract import Limits, TimeOuts
from router.http.head import RequestHead
from tests.router.http.stubs import (
    Decisions,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    chunk,
    get,
    on_uvloop,
    post,
    says,
    until,
)

MIB = 2**20
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_long_context_with_images_fits_into_the_defaults() -> None:
    assert Limits().max_body_bytes == 64 * MIB


@pytest.mark.parametrize("framing", ["declared", "chunks"])
@pytest.mark.parametrize("size", [MIB, MIB + 1, 3 * MIB, 3 * MIB + 1])
@on_uvloop
async def test_bodies_pass_whole_up_to_the_limit_and_not_at_all_beyond(framing: str, size: int) -> None:
    body = bytes(range(251)) * (size // 251 + 1)
    body = body[:size]
    pieces = [body[at : at + 50_000] for at in range(0, size, 50_000)]
    request = post(body) if framing == "declared" else CHUNKED + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    limits = Limits(max_body_bytes=3 * MIB)
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url]), limits=limits) as port:
        got = await ask(port, request)
        if size <= 3 * MIB:
            assert got.status == 200
            assert [seen.body for seen in replica.received] == [body]
        else:
            assert (got.status, json.loads(got.body)["error"]["type"]) == (413, "RequestTooLargeError")
            assert replica.opened == 0
            assert port.counts.rejected == {413: 1}


@on_uvloop
async def test_a_body_for_a_replica_that_does_not_read_is_held_once() -> None:
    """Nothing more of that client is read meanwhile than may wait, and all arrives in the end."""
    body = bytes(16 * MIB)
    go_on = asyncio.Event()
    got = 0

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        await go_on.wait()
        await reader.readuntil(b"\r\n\r\n")
        while got < len(body):
            got += len(await reader.read(MIB))
        writer.write(answer(b"{}", b"200 OK", b"Connection: close"))
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with a_port(Decisions([url])) as port, a_client(port) as client:
        client.writer.write(post(body) + get(b"/health") + post(body))
        await until(lambda: port.pool.in_use == 1)
        (upstream,) = port.pool._open
        (connection,) = port._shared.clients
        await until(lambda: connection._reading_stopped)
        assert 0 < upstream._open_transport().get_write_buffer_size() <= len(body) + 1000
        assert connection._assembler.pending_bytes < 2 * MIB
        go_on.set()
        statuses = [(await client.read()).status for _ in range(2)]
        got = 0
        statuses.append((await client.read()).status)
    server.close()
    assert statuses == [200, 200, 200]


@on_uvloop
async def test_connections_of_one_address_are_limited_and_the_others_go_on() -> None:
    limits = Limits(max_connections_per_client=2)
    async with a_port(Decisions(), limits=limits, times=TimeOuts(linger_s=0.1)) as port:
        async with a_client(port) as one, a_client(port) as other:
            assert [(await client.ask(get(b"/health"))).status for client in (one, other)] == [200, 200]
            async with a_client(port) as third:
                got = await third.ask(get(b"/health"))
                assert (got.status, got.values(b"connection")) == (429, [b"close"])
                assert json.loads(got.body)["error"]["type"] == "RateLimitError"
                assert await third.reader.read() == b""
            assert port.counts.rejected == {429: 1}
            assert (await one.ask(get(b"/health"))).status == 200
        await until(lambda: port.open_connections == 0)
        assert (await ask(port, get(b"/health"))).status == 200
        await until(lambda: port.open_connections == 0)
        assert port._shared.per_client == {}


@on_uvloop
async def test_a_field_of_the_routers_own_replaces_the_clients() -> None:
    async with a_replica(says(answer())) as replica:
        decisions = Decisions([replica.url], extra_headers=[(b"X-data-parallel-rank", b"3")])
        async with a_port(decisions) as port:
            await ask(port, post(b"{}", b"x-Data-Parallel-Rank: 0", b"X-DATA-PARALLEL-RANK: 1"))
    assert replica.received[0].values(b"x-data-parallel-rank") == [b"3"]


@on_uvloop
async def test_what_a_replica_says_of_the_router_is_not_believed() -> None:
    forged = answer(b"{}", b"200 OK", b"X-TFirst-Replica: forged", b"x-tfirst-explain: forged")
    async with a_replica(says(forged)) as replica, a_port(Decisions([replica.url])) as port:
        got = await ask(port, post())
    assert got.values(b"x-tfirst-replica") == [b"r1"]
    assert got.values(b"x-tfirst-explain") == []


@on_uvloop
async def test_who_is_not_admitted_is_refused_before_the_body_is_held() -> None:
    """Once by the head of a body that is still to come, once for each whole request."""

    def admit(head: RequestHead) -> Refuse | None:
        return None if head.get(b"authorization") == b"Bearer k" else Refuse(401, "AuthenticationError", "No key.")

    async with a_replica(says(answer())) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, admit=admit) as port, a_client(port) as client:
            assert (await client.ask(post())).status == 401
            assert (await client.ask(post(b"{}", b"Authorization: Bearer k"))).status == 200
            got = await client.ask(post(bytes(100))[:-50])
            assert (got.status, got.values(b"connection")) == (401, [b"close"])
            assert port.counts.rejected == {401: 2}
    assert len(replica.received) == 1


@on_uvloop
async def test_who_is_not_admitted_is_not_asked_for_a_body() -> None:
    refuse = Refuse(401, "AuthenticationError", "No key.")
    async with a_port(Decisions(), admit=lambda _: refuse) as port, a_client(port) as client:
        assert (await client.ask(post(bytes(9), b"Expect: 100-continue")[:-9])).status == 401


@on_uvloop
async def test_fields_that_are_not_for_replicas_stay_here_and_via_goes_on() -> None:
    drops = frozenset({b"authorization", b"cookie"})
    async with (
        a_replica(says(answer())) as replica,
        a_port(Decisions([replica.url]), drops=drops, via=b"1.1 tfirst") as port,
    ):
        await ask(port, post(b"{}", b"AUTHORIZATION: Bearer k", b"Cookie: a", b"Cookie: b", b"Via: 1.0 first"))
    (seen,) = replica.received
    assert seen.values(b"authorization") == seen.values(b"cookie") == []
    assert seen.values(b"via") == [b"1.0 first", b"1.1 tfirst"]
