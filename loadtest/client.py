"""A client that streams completions and measures what its user would feel.

Question  how long until the first token, how long between tokens, how long in all
Clock     time.perf_counter around the socket: connection set-up and the router are inside
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from loadtest.traffic import TrafficRow, prompt_tokens

DONE = b"data: [DONE]"


class Usage(msgspec.Struct):
    """The part of an answer's `usage` that is reported."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class LastEvent(msgspec.Struct):
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its user saw it; seconds. What did not happen is None; so is `error` of an answered one."""

    request_id: str
    first_token_s: float | None
    ended_s: float | None
    output_tokens: int
    error: str | None

    @property
    def per_token_s(self) -> float | None:
        """Mean time between output tokens, None under two tokens."""
        if self.first_token_s is None or self.ended_s is None or self.output_tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.output_tokens - 1)


def body_of(row: TrafficRow, model: str) -> bytes:
    """A streamed completion. The output's length is told to the simulated engine alone, in a field no router reads."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt_tokens(row),
            "max_tokens": 4096,
            "stream": True,
            "stream_options": {"include_usage": True},
            "sim_output_tokens": max(1, row.output_length),
        }
    )


async def stream(session: aiohttp.ClientSession, url: str, body: bytes, request_id: str) -> Sample:
    """Send one completion and read its stream to the end; never raises for what a server can do wrong."""
    began = time.perf_counter()
    first_s: float | None = None
    tail = b""
    try:
        headers = {"content-type": "application/json", "x-request-id": request_id}
        async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                text = await response.text()
                return Sample(request_id, None, None, 0, f"{response.status}: {text[:200]}")
            async for piece in response.content.iter_any():
                if first_s is None and b"data:" in piece:
                    first_s = time.perf_counter() - began
                tail = (tail + piece)[-2048:]
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as exc:
        return Sample(request_id, first_s, None, 0, f"{type(exc).__name__}: {exc}")
    ended_s = time.perf_counter() - began
    usage = usage_in(tail)
    if DONE not in tail or usage is None:
        return Sample(request_id, first_s, None, 0, "the stream ended without usage and [DONE]")
    return Sample(request_id, first_s, ended_s, usage.completion_tokens, None)


def usage_in(tail: bytes) -> Usage | None:
    """`usage` of the last event before [DONE] in the end of a stream."""
    for line in reversed(tail.split(b"\n")):
        if line.startswith(b"data: {") and b'"usage"' in line:
            try:
                return msgspec.json.decode(line[len(b"data: ") :], type=LastEvent).usage
            except msgspec.DecodeError:
                return None
    return None


async def play(
    url: str, model: str, rows: list[TrafficRow], *, speed: float, on_end: Callable[[Sample], None]
) -> list[Sample]:
    """Send every row at its time divided by `speed`, whether or not earlier ones were answered (open loop)."""
    bodies = [body_of(row, model) for row in rows]
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began = loop.time()

        async def one(index: int) -> Sample:
            await asyncio.sleep(began + rows[index].at_s / speed - loop.time())
            sample = await stream(session, url, bodies[index], f"demo-{index:04d}")
            on_end(sample)
            return sample

        return await asyncio.gather(*(one(index) for index in range(len(rows))))
