"""Damaged messages on real sockets, from clients and from replicas: always an answer or an end, never a wrong one.

Question   does any damage to valid messages, cut anywhere, leave a connection hanging, reach a replica as other
           requests than the router placed, or reach a client as the answer to another request
Seeds      fixed; some hundred connections of each kind
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from router.http.contract import Limits, TimeOuts
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Decisions,
    Received,
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
)

SHORT = TimeOuts(
    first_byte_s=0.2,
    stall_s=0.2,
    request_head_s=0.2,
    request_body_s=0.2,
    keep_alive_s=0.2,
    pool_idle_s=0.2,
    linger_s=0.1,
)
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUESTS = [
    post(b'{"model":"m1","prompt":[1,2,3]}', b"X-A: 1", b"Content-Type: application/json"),
    CHUNKED + chunk(b'{"model":"m1"') + chunk(b',"stream":true}') + LAST_CHUNK,
    get(b"/v1/models?x=%20", b"Connection: keep-alive"),
    get(b"/v1/thing", b"Connection: Upgrade", b"Upgrade: websocket"),
    post(b"ab", b"Connection: close"),
    b"POST /v1/completions HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc",
]
ANSWERS = [
    answer(b'{"usage":{"prompt_tokens":3}}', b"200 OK", b"X-A: 1"),
    STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + LAST_CHUNK,
    STREAM_HEAD + chunk(b"data: 1\n\n") + b"0\r\nX-Sum: 1\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(b"{}"),
    b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\n\r\n",
]
SPICE = [
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";a=b", b"0\r\n\r\n", b"\r\n\r\n", b"-", b"+", b"\xff", b"0x"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: other\r\n", b"Connection: upgrade\r\n"),
    *(
        b"GET /smuggled HTTP/1.1\r\nHost: gw\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"ffffffffffffffff",
    ),
]


def damaged(chance: random.Random, message: bytes) -> bytes:
    """One to three places of a message changed."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(message) + 1)
        to = min(len(message), at + chance.choice([0, 0, 1, 1, 4, 20]))
        put = chance.choice([b"", chance.choice(SPICE), chance.randbytes(2), message[at:to] * 2])
        message = message[:at] + put + message[to:]
    return message


def in_pieces(chance: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(5)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]


async def at_most(width: int, work: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    gate = asyncio.Semaphore(width)

    async def one(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with gate:
            await job()

    await asyncio.gather(*map(one, work))


async def said_until_the_end(port_number: int, pieces: list[bytes]) -> bytes:
    """Everything the port says to a client that sends these pieces and then waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_number)
    seen = b""
    with suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        while data := await reader.read(65536):
            seen += data
    writer.close()
    return seen


@on_uvloop
async def test_damaged_requests_are_placed_whole_or_not_at_all_and_every_connection_ends() -> None:
    chance = random.Random("requests")
    sent = [b"".join(chance.choices(REQUESTS, k=chance.choice([1, 1, 2, 3]))) for _ in range(600)]
    pieces = [in_pieces(chance, damaged(chance, message)) for message in sent]
    said: list[bytes] = []

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer())

    async with a_replica(script) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, times=SHORT, limits=Limits(max_body_bytes=10_000)) as port:

            async def visit(number: int) -> None:
                said.append(await said_until_the_end(port.port, pieces[number]))

            await at_most(100, [partial(visit, number) for number in range(len(pieces))])
            refused = port.counts.rejected
    ends = [kind for kind in decisions.kinds if kind in ("finished", "failed", "cancelled")]
    assert len(ends) == decisions.kinds.count("arrived") > 100
    # A client that was refused leaves; what it had placed may be cancelled before the replica has read it.
    assert decisions.kinds.count("finished") <= len(replica.received) <= decisions.kinds.count("arrived")
    assert refused[400] > 100
    assert sum(answers.count(b"HTTP/1.1 200 ") for answers in said) >= decisions.kinds.count("finished")
    assert all(not answers or answers.startswith(b"HTTP/1.1 ") for answers in said)
    for seen in replica.received:
        assert re.match(rb"[A-Z-]+ [/*][!-~]* HTTP/1\.1\r\nHost: 127\.0\.0\.1:\d+\r\n", seen.head), seen.head
        assert len(seen.values(b"content-length")) <= 1
        assert seen.values(b"transfer-encoding") == []
        assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r[^\n]|[^\r]\n", seen.head), seen.head


@pytest.mark.parametrize("split", [False, True])
@on_uvloop
async def test_damaged_answers_end_and_never_answer_another_request(split: bool) -> None:
    """Bytes that come with an answer and behind it are noticed; later ones may meet the next request on the way."""
    chance = random.Random(f"answers {split}")

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        if received.body.startswith(b"echo"):
            writer.write(answer(received.body))
            return
        message = damaged(chance, chance.choice(ANSWERS))
        for piece in in_pieces(chance, message) if split else [message]:
            writer.write(piece)
            await asyncio.sleep(0)
        then = chance.randrange(3)
        if then == 0:
            writer.close()
        elif then == 1:
            reset(writer)

    async with a_replica(script) as replica, a_port(Decisions([replica.url]), times=SHORT) as port:

        async def visit(number: int) -> None:
            seen = await said_until_the_end(port.port, [post(b"damaged", b"Connection: close")])
            assert not seen or seen.startswith(b"HTTP/1.1 ")
            body = b"echo %d" % number
            got = await ask(port, post(body))
            assert split or got.body == body

        await at_most(30, [partial(visit, number) for number in range(400)])


@on_uvloop
async def test_noise_is_answered_or_cut() -> None:
    chance = random.Random("noise")
    async with a_port(Decisions(), times=SHORT) as port:
        for _ in range(60):
            noise = chance.randbytes(chance.randrange(1, 400))
            async with a_client(port) as client:
                client.writer.write(noise)
                seen = await client.reader.read()
            assert not seen or seen.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))
