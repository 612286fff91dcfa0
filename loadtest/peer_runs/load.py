"""A trace's requests as chat texts, sent at their own times, and what came back.

Model     an open loop over kept connections: each request is sent when it is due, whether or not earlier ones were
          answered, and asks for exactly the trace's number of tokens
Valid     replicas that keep to `ignore_eos`; an answer of another length is an error, since a router that loses the
          field would be compared over less work
Clock     time.perf_counter around the socket, from when a request was due
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter

import aiohttp
import msgspec

from loadtest.scenarios.goodput import Sample
from loadtest.scenarios.prompts import Row, due, row_messages
from loadtest.scenarios.stream_times import StreamTimes

LIMIT_S = 300.0  # for one answer, most


def body_of(row: Row, model: str, *, salt: str = "") -> bytes:
    """A streamed chat request."""
    return msgspec.json.encode(
        {
            "model": model,
            "messages": row_messages(row, salt=salt),
            "max_tokens": max(1, row.output_length),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, times: StreamTimes) -> None:
    """Send one request and read it to its end; what a server can do wrong is in `times`."""
    try:
        headers = {"content-type": "application/json"}
        async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
            if response.status != 200:
                times.error = f"{response.status}: {(await response.text(errors='replace'))[:200]}"
                return
            async for line in response.content:
                times.line(line, perf_counter())
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as exc:  # ValueError: a line without end
        times.error = f"{type(exc).__name__}: {exc}"
    times.ended()


async def play(url: str, model: str, rows: Sequence[Row], *, factor: float) -> list[Sample]:
    """Send every row at its time divided by `factor`."""
    bodies = [body_of(row, model) for row in rows]
    timeout, connector = aiohttp.ClientTimeout(total=LIMIT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began_s = perf_counter()

        async def one(at_s: float, row: Row, body: bytes) -> Sample:
            await asyncio.sleep(max(0.0, began_s + at_s - perf_counter()))
            late_s, times = perf_counter() - began_s - at_s, StreamTimes(began_s + at_s)
            await ask(session, url, body, times)
            return sample_of(times, at_s=at_s, end_s=perf_counter() - times.began_s, late_s=late_s, row=row)

        jobs = zip(due(rows, factor), bodies, strict=True)
        return await asyncio.gather(*(one(at_s, row, body) for (at_s, row), body in jobs))


def sample_of(times: StreamTimes, *, at_s: float, end_s: float, late_s: float, row: Row) -> Sample:
    """What is kept of one request."""
    wanted = max(1, row.output_length)
    error = times.error
    if error is None and times.output_tokens != wanted:
        error = f"{times.output_tokens} tokens came, {wanted} were asked for"
    return Sample(
        name="trace",
        at_s=at_s,
        first_token_s=times.first_token_s,
        per_token_s=times.per_token_s,
        longest_gap_s=times.longest_gap_s,
        end_s=end_s,
        output_tokens=times.output_tokens,
        prompt_tokens=times.prompt_tokens,
        cached_tokens=times.cached_tokens,
        error=error,
        late_s=late_s,
    )
