"""Pooled connections on which something came that was meant for an earlier request: no later request pays for it."""

from __future__ import annotations

import asyncio

import pytest

from router.actions import Cause
from tests.router.http.stubs import (
    STREAM_HEAD,
    Decisions,
    Received,
    Script,
    a_port,
    a_replica,
    answer,
    ask,
    chunk,
    on_uvloop,
    post,
    says,
    streamed,
)

TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 4\r\n\r\nlate"
LATE = {
    "a second last chunk": b"0\r\n\r\n",
    "the rest of a body": b'data: {"text":"of an earlier answer"}\n\n',
    "half a head": b"HTTP/1.1 2",
    "rubbish before the answer itself": b"\0\xff" + answer(b"behind rubbish"),
    "a head with two framings": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "408": TIMED_OUT,
    "408 of HTTP/1.0, ended by the connection": b"HTTP/1.0 408 Request Time-out\r\n\r\n<html>late</html>",
    "408 and the answer itself": TIMED_OUT + answer(b"behind 408"),
    "half a 408": TIMED_OUT[:30],
}


def first_then(late: bytes, *, closes: bool) -> tuple[Script, set[asyncio.StreamWriter]]:
    """Answers the first request of each connection, and has `late` on its way when the second one comes."""
    used: set[asyncio.StreamWriter] = set()

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        if writer not in used:
            used.add(writer)
            writer.write(answer(b"own"))
            return
        writer.write(late)
        if closes:
            writer.close()

    return script, used


@pytest.mark.parametrize("what", LATE)
@on_uvloop
async def test_late_bytes_on_a_pooled_connection_cost_the_next_request_nothing(what: str) -> None:
    script, connections = first_then(LATE[what], closes=what.startswith("half"))
    async with a_replica(script) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            answers = [await ask(port, post(b"%d" % number)) for number in range(4)]
            assert port.counts.repeats == 3
        assert [(got.status, got.body) for got in answers] == [(200, b"own")] * 4
        assert len(connections) == 4
        assert [received.body for received in replica.received] == [b"0", b"1", b"1", b"2", b"2", b"3", b"3"]
    assert decisions.kinds == ["arrived", "finished"] * 4


@on_uvloop
async def test_a_request_is_repeated_once_and_then_its_replica_has_failed() -> None:
    heard = 0

    async def well_once(_: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard += 1
        writer.write(answer() if heard == 1 else b"rubbish\r\n\r\n")

    async with a_replica(well_once) as replica, a_replica(says(answer(b"other"))) as other:
        decisions = Decisions([replica.url], on_failure=[other.url])
        async with a_port(decisions) as port:
            await ask(port, post())
            assert (await ask(port, post())).body == b"other"
            assert port.counts.repeats == 1
    assert heard == 3
    assert decisions.of("failed") == [Cause.BAD_ANSWER]


@on_uvloop
async def test_a_408_on_a_new_connection_or_on_one_that_stays_open_is_the_answer() -> None:
    async with a_replica(says(TIMED_OUT)) as replica, a_port(Decisions([replica.url])) as port:
        assert [(await ask(port, post())).status for _ in range(2)] == [408, 408]
        assert (port.counts.repeats, replica.opened) == (0, 2)
    async with a_replica(says(answer(b"slow prompt", b"408 X"))) as replica, a_port(Decisions([replica.url])) as port:
        assert [(await ask(port, post())).body for _ in range(2)] == [b"slow prompt"] * 2
        assert (port.counts.repeats, replica.opened) == (0, 1)


@on_uvloop
async def test_nothing_is_repeated_once_the_answer_has_begun() -> None:
    async def second_breaks(_: Received, writer: asyncio.StreamWriter) -> None:
        if len(replica.received) == 1:
            writer.write(STREAM_HEAD + streamed("sse_chat_stream.txt"))
        else:
            writer.write(STREAM_HEAD + chunk(b"data: 1\n\n") + b"ff\r\nhalf")
            writer.close()

    async with a_replica(second_breaks) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            await ask(port, post(b'{"stream":true}'))
            with pytest.raises(asyncio.IncompleteReadError):
                await ask(port, post(b'{"stream":true}'))
            assert port.counts.repeats == 0
        assert len(replica.received) == 2
    assert decisions.of("failed") == [Cause.BROKEN]
