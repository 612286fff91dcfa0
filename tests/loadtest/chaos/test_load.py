"""The chaos run's traffic, and how it tells apart what became of a request, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from loadtest.chaos import load
from loadtest.chaos.load import PREFIX_IDS, PREFIXES, Load, Outcome, Pattern, message_of
from loadtest.traffic import prompt_tokens

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
END = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
REFUSAL = b'{"error":{"message":"no  replica\\nis up"}}'
Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def a_pattern(seed: int = 1) -> Pattern:
    return Pattern(seed=seed, length_s=2.0, rate_rps=5.0)


@asynccontextmanager
async def serving(answer: list[bytes], *, end: str) -> AsyncIterator[str]:
    """A server that reads a request, writes `answer`, and then closes, resets or keeps the connection."""
    kept: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
        for piece in answer:
            writer.write(piece)
            await writer.drain()
        if end == "close":
            writer.close()
        elif end == "reset":
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in kept:
            writer.transport.abort()


async def first_outcome(url: str) -> Outcome | None:
    """How the first request of a load ends."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        made = Load(session, url, "m", Pattern(seed=1, length_s=0.01, rate_rps=100.0), name="x")
        made.begin(first=0)
        async with asyncio.timeout(5.0):
            while not made.answers or made.answers[0].outcome is None:  # noqa: ASYNC110  ends are no events
                await asyncio.sleep(0.002)
        await made.end()
        return made.answers[0].outcome


@pytest.mark.parametrize(
    ("answer", "end", "outcome"),
    [
        ([HEAD, chunk(TOKEN), chunk(END), b"0\r\n\r\n"], "close", Outcome.OK),
        ([HEAD, chunk(TOKEN)], "close", Outcome.CUT),
        ([HEAD, chunk(TOKEN), b"20\r\ndata"], "close", Outcome.CUT),
        ([HEAD, chunk(TOKEN), b"0\r\n\r\n"], "close", Outcome.SHORT),
        ([HEAD, chunk(TOKEN), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"], "close", Outcome.SHORT),
        ([], "close", Outcome.FAILED),
        ([], "reset", Outcome.FAILED),
        ([b"nonsense\r\n\r\n"], "close", Outcome.FAILED),
        (
            [b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(REFUSAL), REFUSAL],
            "close",
            Outcome.REFUSED,
        ),
    ],
)
async def test_how_a_request_ended_is_told_apart(answer: list[bytes], end: str, outcome: Outcome) -> None:
    async with serving(answer, end=end) as url:
        assert await first_outcome(url) is outcome


@pytest.mark.parametrize("answer", [[], [HEAD], [HEAD, chunk(TOKEN)]])
async def test_a_request_that_does_not_end_within_the_limit_hangs(
    answer: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "ANSWER_LIMIT_S", 0.1)
    async with serving(answer, end="keep") as url:
        assert await first_outcome(url) is Outcome.HUNG


async def test_a_request_that_nobody_takes_failed() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    assert await first_outcome(f"http://127.0.0.1:{port}") is Outcome.FAILED


def test_one_seed_gives_one_pattern_and_another_another() -> None:
    rows = [a_pattern().row(number) for number in range(30)]
    assert rows == [a_pattern().row(number) for number in range(30)]
    assert rows != [a_pattern(2).row(number) for number in range(30)]


def test_each_repetition_asks_the_same_work_behind_the_same_prefixes() -> None:
    pattern = a_pattern()
    for index in range(pattern.count):
        first, later = pattern.row(index), pattern.row(index + 3 * pattern.count)
        assert later.at_s - first.at_s == pytest.approx(3 * pattern.length_s)
        assert (later.input_length, later.output_length) == (first.input_length, first.output_length)
        assert later.hash_ids[:PREFIX_IDS] == first.hash_ids[:PREFIX_IDS]


def test_no_two_requests_share_more_than_a_prefix() -> None:
    own = [hash_id for number in range(60) for hash_id in a_pattern().row(number).hash_ids[PREFIX_IDS:]]
    assert len(own) == len(set(own))
    assert min(own) >= PREFIXES * PREFIX_IDS


def test_a_prompt_is_as_long_as_its_row_says() -> None:
    for number in range(10):
        row = a_pattern().row(number)
        assert len(prompt_tokens(row)) == row.input_length


def test_what_an_error_says_is_one_line() -> None:
    assert message_of(REFUSAL) == "no replica is up"
    assert message_of(b"<html>\xff") == "<html>\N{REPLACEMENT CHARACTER}"
