"""Heads that come without a body: whose wait for it, whose pass at once, and what a silence behind them means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router.actions import Cause, Ended
from router.http.contract import TimeOuts
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Decisions,
    Received,
    Script,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    chunk,
    get,
    on_uvloop,
    post,
    reset,
    says,
    says_and_closes,
    until,
)

ASKS_STREAM = b'{"stream":true}'
DECLARED = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize("said", [STREAM_HEAD, DECLARED, STREAM_HEAD + b"1f\r\n"], ids=["chunks", "length", "a size"])
@on_uvloop
async def test_a_head_with_nothing_behind_it_is_no_answer_and_another_replica_gives_one(said: bytes) -> None:
    closed_before: list[bool] = []

    async def second(_: Received, writer: asyncio.StreamWriter) -> None:
        closed_before.append(hung.open == 0)
        writer.write(STREAM_HEAD + chunk(b"data: 1\n\n") + LAST_CHUNK)

    async with a_replica(says(said)) as hung, a_replica(second) as well:
        decisions = Decisions([hung.url], on_failure=[well.url])
        async with a_port(decisions, times=TimeOuts(first_byte_s=0.1, stall_s=0.1)) as port:
            got = await ask(port, post(ASKS_STREAM))
    assert (got.status, got.body, got.values(b"x-tfirst-replica")) == (200, b"data: 1\n\n", [b"r2"])
    assert decisions.of("failed") == [Cause.NO_ANSWER]
    assert closed_before == [True]


async def _resets(_: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    await asyncio.sleep(0.05)  # a reset overtakes bytes the peer has not read yet
    reset(writer)


@pytest.mark.parametrize("script", [_resets, says_and_closes(DECLARED), says(STREAM_HEAD, b"zz\r\n")])
@on_uvloop
async def test_a_replica_that_dies_behind_its_head_is_replaced_as_if_it_had_said_nothing(script: Script) -> None:
    async with a_replica(script) as dying, a_replica(says(answer())) as well:
        decisions = Decisions([dying.url], on_failure=[well.url])
        async with a_port(decisions) as port:
            assert (await ask(port, post(ASKS_STREAM))).body == b'{"ok":true}'
    assert decisions.of("failed") == [Cause.BAD_ANSWER]


@on_uvloop
async def test_a_comment_is_a_byte_of_the_body_and_ends_the_wait() -> None:
    comment = chunk(b": keep-alive\n\n")
    async with a_replica(says(STREAM_HEAD + comment)) as replica:
        decisions = Decisions([replica.url], on_failure=["http://127.0.0.1:1"])
        async with a_port(decisions) as port, a_client(port) as client:
            client.writer.write(post(ASKS_STREAM))
            await client.read_head()
            assert await client.reader.readexactly(len(comment)) == comment
            client.leave("reset")
            await until(lambda: decisions.kinds[-1] == "cancelled")


@on_uvloop
async def test_the_head_of_what_is_no_generation_passes_at_once() -> None:
    async with (
        a_replica(says(STREAM_HEAD)) as replica,
        a_port(Decisions([replica.url])) as port,
        a_client(port) as client,
    ):
        client.writer.write(get(b"/v1/new-thing"))
        assert (await client.read_head())[0] == 200


@pytest.mark.parametrize(
    ("head", "bodiless"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", False),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (STREAM_HEAD + LAST_CHUNK, False),
    ],
    ids=["204", "304", "no length", "no chunk"],
)
@on_uvloop
async def test_an_answer_without_a_body_passes_at_once_and_the_connection_goes_on(head: bytes, bodiless: bool) -> None:
    async with a_replica(says(head)) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            for _ in range(2):
                got = await client.ask(post(ASKS_STREAM), bodiless=bodiless)
                assert got.body == b""
                assert got.status == int(head.split(b" ")[1])
    assert [ended.status for ended in decisions.of("finished")] == [got.status] * 2


@pytest.mark.parametrize("protocol", [b"1.0", b"1.1"])
@on_uvloop
async def test_a_held_head_goes_out_with_the_first_byte_to_clients_of_both_protocols(protocol: bytes) -> None:
    go = asyncio.Event()

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await go.wait()
        writer.write(chunk(b"data: 1\n\n") + LAST_CHUNK)

    shown: list[object] = []
    heard: Callable[..., object] = lambda sent, head: shown.append(head)  # noqa: E731
    async with a_replica(script) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, heard=heard) as port, a_client(port) as client:
            request = post(ASKS_STREAM).replace(b"HTTP/1.1", b"HTTP/" + protocol)
            client.writer.write(request)
            await until(lambda: bool(shown))
            assert not client.reader._buffer  # type: ignore[attr-defined]
            go.set()
            assert (await client.read()).body == b"data: 1\n\n"
    assert decisions.of("finished") == [Ended(200)]
