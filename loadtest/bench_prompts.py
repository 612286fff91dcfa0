"""What long prompts do to everybody else on the router's event loop.

Question  do health checks and running streams wait while prompts of a million token ids or 5 MB of text arrive? And how
          long does one body keep the loop at most: a text full of escapes that goes on as ids, a field that is absurdly
          long, a long post of cache events?
Work      a stub engine in this process that streams an event with its time every 50 ms, and answers everything else at
          once; `tfirst serve` in front of it in a process of its own, one core of two; 50 streams; then 20 clients at a
          time sending long prompts over and over. For the second question one body after the other and no streams; the
          stub tokenises, one id for four characters
Measure   time until /health on the traffic port is answered, asked every 50 ms from another process; delay between an
          event's time and its arrival at the client (the first line is without long prompts); how those were answered.
          For the second question the longest that /health takes when it is asked all the time: the largest gap, with
          what the machine adds to it (the first line is without bodies)
Pass      /health p99 under 200 ms and none over 1 s; events p99 under 250 ms; no gap over 100 ms; every body answered
          with 200, and the texts as ids
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

STREAMS, AT_ONCE = 50, 20
EVENT_EVERY_S = PROBE_EVERY_S = 0.05
CLOSE_PROBE_EVERY_S = 0.002
HEALTH_P99_S, HEALTH_MOST_S, EVENT_P99_S, GAP_S = 0.2, 1.0, 0.25, 0.1
ADMIN_KEY = "bench"
KIB = 1024
MOST_IDS = 1_000_000


@dataclass
class Engine:
    """The stub: where it is, and how many prompts came as ids."""

    url: str = ""
    as_ids: int = 0
    list_of_ids: bytes = b",".join(b"%d" % (100_000 + at % 50_000) for at in range(MOST_IDS))  # of six digits each

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A stream of events with their times, or an answer at once; long bodies are thrown away unread."""
        size, start = 0, b""
        async for piece in request.content.iter_any():
            size += len(piece)
            start += piece if size < 64 * KIB else b""
        if b'"stream": true' not in start[:200]:
            self.as_ids += b'"prompt":[' in start[:64]
            usage = usage_of(json.loads(start)["prompt"]) if size < 64 * KIB else None
            answer = {"id": "x", "object": "text_completion", "choices": [], "received": size, "usage": usage}
            return web.json_response(answer)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"data: %.6f\n\n" % time.monotonic())
                await asyncio.sleep(EVENT_EVERY_S)
        return response

    async def tokenize(self, request: web.Request) -> web.Response:
        tokens = usage_of(json.loads(await request.read())["prompt"])["prompt_tokens"]
        ids = self.list_of_ids[: 7 * tokens - 1]
        return web.Response(body=b'{"tokens":[%s]}' % ids, content_type="application/json")


def usage_of(prompt: str | list[int]) -> dict[str, int]:
    return {"prompt_tokens": len(prompt) if isinstance(prompt, list) else max(1, len(prompt) // 4)}


@contextlib.asynccontextmanager
async def an_engine() -> AsyncIterator[Engine]:
    app, engine = web.Application(client_max_size=1 << 30), Engine()
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_post("/tokenize", engine.tokenize)
    app.router.add_get("/health", lambda request: web.Response())  # type: ignore[arg-type, return-value]
    app.router.add_get("/v1/models", lambda request: web.json_response({"data": [{"id": "m"}]}))  # type: ignore[arg-type, return-value]
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def a_router(engine: str, **settings: Any) -> Iterator[tuple[str, str]]:
    """Its traffic and its admin port."""
    with tempfile.TemporaryDirectory(prefix="bench-prompts-") as folder:
        config = Path(folder) / "config.json"
        ports = {"port": 0, "admin_port": 0, "host": "127.0.0.1", "admin_host": "127.0.0.1"}
        config.write_text(json.dumps({"worker_urls": [engine], **ports, **settings}))
        command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(config), "--log-level", "error"]
        environment = {**os.environ, "BENCH_ADMIN_KEY": ADMIN_KEY}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                said = dict(line.split()[:2] for line in (process.stdout.readline() for _ in range(3)))
                yield said["traffic"], said["admin"]
            finally:
                process.terminate()


async def follow(session: aiohttp.ClientSession, url: str, delays_s: list[float]) -> None:
    body = json.dumps({"stream": True, "model": "m", "prompt": [1, 2, 3]})
    async with session.post(f"{url}/v1/completions", data=body) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                delays_s += [time.monotonic() - float(line[6:])]


async def send_long(session: aiohttp.ClientSession, url: str, body: bytes, until_s: float, statuses: list[int]) -> None:
    while time.monotonic() < until_s:
        async with session.post(f"{url}/v1/completions", data=body) as response:
            await response.read()
            statuses.append(response.status)


def probe(url: str, seconds: float, every_s: float) -> None:
    """Ask /health for a while from a process of its own; print how long each answer took."""

    async def ask() -> list[float]:
        took_s: list[float] = []
        async with aiohttp.ClientSession() as session:
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                began_s = time.monotonic()
                async with session.get(f"{url}/health") as response:
                    await response.read()
                took_s.append(time.monotonic() - began_s)
                await asyncio.sleep(every_s)
        return took_s[1:]  # the first had to connect

    print(json.dumps(uvloop.run(ask())))


async def start_probe(url: str, seconds: float, every_s: float) -> asyncio.subprocess.Process:
    times = ("--seconds", str(seconds), "--every", str(every_s))
    command = (sys.executable, "-m", "loadtest.bench_prompts", "--probe", url, *times)
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def measured(url: str, body: bytes | None, seconds: float) -> tuple[list[float], list[float], list[int]]:
    """Health and event delays, and statuses of the long prompts (none without a body)."""
    delays_s: list[float] = []
    statuses: list[int] = []
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        streams = [asyncio.ensure_future(follow(session, url, delays_s)) for _ in range(STREAMS)]
        await asyncio.sleep(1.0)
        delays_s.clear()
        prober = await start_probe(url, seconds, PROBE_EVERY_S)
        if body is not None:
            ends_s = time.monotonic() + seconds
            await asyncio.gather(*(send_long(session, url, body, ends_s, statuses) for _ in range(AT_ONCE)))
        printed, _ = await prober.communicate()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return json.loads(printed), delays_s, statuses


def p99(values_s: list[float]) -> float:
    return statistics.quantiles(values_s, n=100, method="inclusive")[98]


async def run_long_prompts(seconds: float) -> bool:
    head = {"model": "m", "max_tokens": 4}
    works: dict[str, bytes | None] = {
        "nothing else": None,
        "a million ids (7.9 MB)": json.dumps({**head, "prompt": list(range(100_000, 1_100_000))}).encode(),
        "5 MB of text": json.dumps({**head, "prompt": "to be or not " * 400_000}).encode(),
        "400,000 ids (3.2 MB)": json.dumps({**head, "prompt": list(range(100_000, 500_000))}).encode(),
    }
    good = True
    async with an_engine() as engine:
        with a_router(engine.url) as (url, _):
            await asyncio.sleep(2.0)
            for name, body in works.items():
                health_s, delays_s, statuses = await measured(url, body, seconds)
                print(
                    f"{name:24} /health p50 {statistics.median(health_s) * 1e3:6.2f} ms "
                    f" p99 {p99(health_s) * 1e3:7.2f} ms  most {max(health_s) * 1e3:7.2f} ms  "
                    f" events p99 {p99(delays_s) * 1e3:7.2f} ms "
                    f"  long prompts {len(statuses)}, {statuses.count(200)} answered",
                    flush=True,
                )
                good = good and p99(health_s) < HEALTH_P99_S and max(health_s) < HEALTH_MOST_S
                good = good and p99(delays_s) < EVENT_P99_S and statuses.count(200) == len(statuses)
    return good


def a_push(at: int, source: str, blocks_in_batch: int) -> bytes:
    """The next 38,400 blocks of one publisher, 4 MB. at : which post it is, from 0"""

    def stored(first: int) -> dict[str, Any]:
        hashes = list(range(10**9 + first, 10**9 + first + 64))
        ids = [100 + (token * 7 + at) % 50_000 for token in range(first * 16, first * 16 + 1024)]
        parent = hashes[0] - 1 if first % 38_400 else None
        known = {"token_ids": ids, "block_size": 16, "lora_id": None, "parent_block_hash": parent}
        return {"type": "BlockStored", "block_hashes": hashes, **known}

    events = [stored(first) for first in range(at * 38_400, (at + 1) * 38_400, 64)]
    step = blocks_in_batch // 64
    batches = [events[start : start + step] for start in range(0, len(events), step)]
    numbered = [{"seq": at * len(batches) + number, "events": batch} for number, batch in enumerate(batches, 1)]
    push = {"source": source, "incarnation": blocks_in_batch, "batches": numbered}
    return json.dumps(push, separators=(",", ":")).encode()


def odd_bodies() -> dict[str, bytes | None]:
    head = b'{"model":"m","max_tokens":1,"prompt":"'
    arguments = b'hi","chat_template_kwargs":{"a":[' + b"1," * (10 * KIB * KIB) + b"1]}}"
    return {
        "nothing": None,
        "text of 3.7 MiB, all escapes, as ids": head + b'\\"' * (1900 * KIB) + b'"}',
        "text of 3.7 MiB, plain, as ids": head + b"abc " * (950 * KIB) + b'"}',
        "text of 240 KiB, all escapes, as ids": head + b'\\"' * (120 * KIB) + b'"}',
        "20 MiB of chat_template_kwargs": head + arguments,
        "session_id of 60 MiB": head + b'hi","session_id":"' + b"s" * (60 * KIB * KIB) + b'"}',
    }


async def largest_gap(
    url: str, seconds: float, sends: Callable[[int], Awaitable[int]] | None
) -> tuple[float, list[int]]:
    """Longest time until /health was answered, and the statuses of what was sent meanwhile."""
    statuses: list[int] = []
    prober = await start_probe(url, seconds, CLOSE_PROBE_EVERY_S)
    await asyncio.sleep(0.5)
    ends_s = time.monotonic() + seconds - 1.0
    while sends is not None and time.monotonic() < ends_s:
        statuses.append(await sends(len(statuses)))
    printed, _ = await prober.communicate()
    return max(json.loads(printed)), statuses


async def run_gaps(seconds: float) -> bool:
    prompts = {"source": "tokenize", "forward_tokens": True, "timeout_s": 20.0}
    good = True
    async with an_engine() as engine, aiohttp.ClientSession() as session:
        with a_router(engine.url, prompts=prompts, admin_key_env="BENCH_ADMIN_KEY") as (url, admin):

            async def complete(body: bytes, _: int = 0) -> int:
                async with session.post(f"{url}/v1/completions", data=body) as response:
                    await response.read()
                    return response.status

            async def push(blocks_in_batch: int, at: int) -> int:
                body, headers = a_push(at, replica, blocks_in_batch), {"authorization": f"Bearer {ADMIN_KEY}"}
                async with session.post(f"{admin}/events", data=body, headers=headers) as response:
                    await response.read()
                    return response.status

            await asyncio.sleep(2.0)
            async with session.get(f"{admin}/fleet") as response:
                replica = (await response.json())["replicas"][0]["name"]
            await complete(b'{"model":"m","prompt":"so that the router finds out who agrees"}')
            for name, body in odd_bodies().items():
                before = engine.as_ids
                sends = None if body is None else partial(complete, body)
                gap_s, statuses = await largest_gap(url, seconds, sends)
                good = told(name, gap_s, statuses) and good
                good = good and (engine.as_ids - before == len(statuses)) is name.endswith("as ids")
            for blocks in (64, 38_400):
                gap_s, statuses = await largest_gap(url, seconds, partial(push, blocks))
                good = told(f"4 MB of events, {blocks} blocks a batch", gap_s, statuses) and good
    return good


def told(name: str, gap_s: float, statuses: list[int]) -> bool:
    """Whether that is good."""
    print(
        f"{name:38} largest gap {gap_s * 1e3:7.1f} ms   sent {len(statuses)}, {statuses.count(200)} answered",
        flush=True,
    )
    return gap_s < GAP_S and statuses.count(200) == len(statuses)


async def run(seconds: float) -> bool:
    gaps_are_good = await run_gaps(seconds)
    return await run_long_prompts(seconds) and gaps_are_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind of body")
    parser.add_argument("--gaps", action="store_true", help="the second question alone")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--every", type=float, default=PROBE_EVERY_S, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe is not None:
        probe(args.probe, args.seconds, args.every)
        return 0
    return 0 if uvloop.run((run_gaps if args.gaps else run)(args.seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
