"""A client's connection over real sockets: limits, order, rejection, time-outs."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.http.contract import Limits, TimeOuts
from router.http.head import RequestHead
from tests.router.http.stubs import (
    Decisions,
    Received,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    get,
    on_uvloop,
    post,
    says,
    until,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\n"


@pytest.mark.parametrize("start", [b"GET /", HEAD, HEAD + b"X: "], ids=["target", "name", "value"])
@on_uvloop
async def test_a_head_without_end_is_rejected_before_its_end(start: bytes) -> None:
    async with a_port(Decisions()) as port, a_client(port) as client:
        client.writer.write(start)
        for _ in range(9):
            client.writer.write(b"x" * 10_000)
            await asyncio.sleep(0.001)
        assert (await client.read()).status == 431


@on_uvloop
async def test_a_rejection_reaches_a_client_that_is_still_sending() -> None:
    async with a_port(Decisions(), limits=Limits(max_body_bytes=1000)) as port, a_client(port) as client:
        client.writer.write(HEAD + b"Content-Length: 5000000\r\n\r\n" + bytes(5_000_000))
        got = await client.read()
    assert got.status == 413


@on_uvloop
async def test_errors_on_the_messages_api_have_its_form() -> None:
    async with a_port(Decisions(), limits=Limits(max_body_bytes=10)) as port:
        got = await ask(port, post(bytes(11), b"x-request-id: q1", target=b"/v1/messages"))
    assert json.loads(got.body) == {
        "type": "error",
        "error": {"type": "request_too_large", "message": "The body is larger than 10 bytes."},
        "request_id": "q1",
    }


# -- routes


@on_uvloop
async def test_own_paths_are_answered_here_and_admin_paths_are_not_found() -> None:
    decisions = Decisions()
    async with a_port(decisions) as port, a_client(port) as client:
        health = await client.ask(get(b"/health?verbose=1", b"x-request-id: q1"))
        hidden = await client.ask(get(b"/metrics"))
        head = await client.ask(get(b"/v1/models", method=b"HEAD"), bodiless=True)
        again = await client.ask(get(b"/ready"))
    assert (health.status, health.body) == (200, b'{"path":"/health"}')
    assert health.values(b"x-request-id") == [b"q1"]
    assert (hidden.status, json.loads(hidden.body)["error"]["type"]) == (404, "NotFoundError")
    assert (head.status, head.values(b"content-length")) == (200, [b"21"])
    assert again.body == b'{"path":"/ready"}'
    assert decisions.kinds == []


@on_uvloop
async def test_an_own_answer_that_fails_is_a_500() -> None:
    def fail(_: RequestHead) -> tuple[int, bytes]:
        raise RuntimeError("a bug")

    async with a_port(Decisions(), answer=fail, bugs=2) as port, a_client(port) as client:
        for _ in range(2):
            assert (await client.ask(get(b"/health"))).status == 500


@on_uvloop
async def test_the_absolute_form_of_a_target_is_served_by_its_path() -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port:
        await ask(port, get(b"http://GW:80/v1/thing?x=1"))
    assert replica.received[0].head.startswith(b"GET /v1/thing?x=1 HTTP/1.1\r\n")


# -- order


async def _echo(received: Received, writer: asyncio.StreamWriter) -> None:
    for _ in range(len(received.body) % 3):  # the first are not the fastest
        await asyncio.sleep(0.002)
    writer.write(answer(received.body))


@on_uvloop
async def test_pipelined_requests_are_answered_in_order() -> None:
    bodies = [b"x" * size for size in (5, 3, 4, 0, 1)]
    async with a_replica(_echo) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        client.writer.write(b"".join(post(body) + get(b"/health") for body in bodies) + b"broken\r\n\r\n")
        for body in bodies:
            assert (await client.read()).body == body
            assert (await client.read()).body == b'{"path":"/health"}'
        assert (await client.read()).status == 400
    assert [seen.body for seen in replica.received] == bodies


@on_uvloop
async def test_thousands_of_pipelined_requests_answered_here_cost_no_stack() -> None:
    async with a_port(Decisions()) as port, a_client(port) as client:
        client.writer.write(get(b"/health") * 5000)
        for _ in range(5000):
            assert (await client.read()).status == 200


@on_uvloop
async def test_a_client_that_pipelines_without_end_is_not_read_beyond_the_limit() -> None:
    go_on = asyncio.Event()

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(answer(received.body))

    async with a_replica(script) as replica:
        limits = Limits(max_waiting_requests=4)
        async with a_port(Decisions([replica.url]), limits=limits) as port, a_client(port) as client:
            for number in range(60):
                client.writer.write(post(b"x" * (number % 7)))
                await asyncio.sleep(0.001)
            (connection,) = port._shared.clients
            assert 4 <= len(connection._waiting) < 50
            go_on.set()
            for number in range(60):
                assert (await client.read()).body == b"x" * (number % 7)


@on_uvloop
async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked_in_its_turn() -> None:
    async with a_replica(_echo) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        client.writer.write(post(b"first") + HEAD + b"Content-Length: 6\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.read()).body == b"first"
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"second")
        assert (await client.read()).body == b"second"
    assert replica.received[1].values(b"expect") == []


@pytest.mark.parametrize("body", [b"", b"payload"])
@on_uvloop
async def test_a_wish_to_upgrade_is_ignored_and_the_request_served_whole(body: bytes) -> None:
    """Some client libraries ask every server for HTTP/2 this way, also with a body."""
    wish = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQ"]
    async with a_replica(_echo) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        for _ in range(2):
            assert (await client.ask(post(body, *wish))).body == body
    assert [seen.body for seen in replica.received] == [body, body]
    assert replica.received[0].values(b"upgrade") == replica.received[0].values(b"http2-settings") == []


@on_uvloop
async def test_the_connection_ends_after_the_answer_when_the_client_said_so() -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        got = await client.ask(post(b"{}", b"Connection: close"))
        assert await client.reader.read() == b""
    assert got.values(b"connection") == [b"close"]


# -- time


@on_uvloop
async def test_a_request_that_does_not_arrive_in_time_is_told_so_and_holds_no_replica() -> None:
    times = TimeOuts(request_head_s=0.1, request_body_s=0.1)
    decisions = Decisions()
    async with a_port(decisions, times=times) as port:
        for request in (HEAD, HEAD + b"Content-Length: 100\r\n\r\nslow"):
            async with a_client(port) as client:
                got = await client.ask(request)
                assert (got.status, json.loads(got.body)["error"]["type"]) == (408, "RequestTimeoutError")
    assert decisions.kinds == []


@on_uvloop
async def test_an_idle_connection_is_closed_without_a_word() -> None:
    times = TimeOuts(keep_alive_s=0.1, request_head_s=0.3)
    async with a_port(Decisions(), times=times) as port, a_client(port) as client:
        await client.ask(get(b"/health"))
        assert await client.reader.read() == b""
        async with a_client(port) as silent:
            assert await silent.reader.read() == b""


@on_uvloop
async def test_a_rejected_client_that_stays_is_dropped_after_a_while() -> None:
    async with a_port(Decisions(), times=TimeOuts(linger_s=0.1)) as port, a_client(port) as client:
        await client.ask(b"broken\r\n\r\n")
        await until(lambda: port.open_connections == 0)
