"""What long prompts do to everybody else on the router's event loop.

Question  do health checks and running streams wait while prompts of a million token ids or 5 MB of text arrive?
Work      a stub engine in this process that streams an event with its time every 50 ms, and answers everything else at
          once; `tfirst serve` in front of it in a process of its own, one core of two; 50 streams; then 20 clients at a
          time sending long prompts over and over
Measure   time until /health on the traffic port is answered, asked every 50 ms from another process; delay between an
          event's time and its arrival at the client (the first line is without long prompts); how those were answered
Pass      /health p99 under 200 ms and none over 1 s; events p99 under 250 ms; every long prompt answered with 200
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

STREAMS, AT_ONCE = 50, 20
EVENT_EVERY_S = PROBE_EVERY_S = 0.05
HEALTH_P99_S, HEALTH_MOST_S, EVENT_P99_S = 0.2, 1.0, 0.25


async def complete(request: web.Request) -> web.StreamResponse:
    """A stream of events with their times, or an answer at once; long bodies are thrown away unread."""
    size, start = 0, b""
    async for piece in request.content.iter_any():
        start = start or piece
        size += len(piece)
    if b'"stream": true' not in start[:200]:
        return web.json_response({"id": "x", "object": "text_completion", "choices": [], "received": size})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b"data: %.6f\n\n" % time.monotonic())
            await asyncio.sleep(EVENT_EVERY_S)
    return response


@contextlib.asynccontextmanager
async def an_engine() -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", lambda request: web.Response())  # type: ignore[arg-type, return-value]
    app.router.add_get("/v1/models", lambda request: web.json_response({"data": [{"id": "m"}]}))  # type: ignore[arg-type, return-value]
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def a_router(engine: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bench-prompts-") as folder:
        config = Path(folder) / "config.json"
        ports = {"port": 0, "admin_port": 0, "host": "127.0.0.1", "admin_host": "127.0.0.1"}
        config.write_text(json.dumps({"worker_urls": [engine], **ports}))
        command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(config), "--log-level", "error"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                lines = (process.stdout.readline() for _ in range(3))
                yield next(line for line in lines if line.startswith("traffic")).split()[1]
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


def probe(url: str, seconds: float) -> None:
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
                await asyncio.sleep(PROBE_EVERY_S)
        return took_s

    print(json.dumps(uvloop.run(ask())))


async def measured(url: str, body: bytes | None, seconds: float) -> tuple[list[float], list[float], list[int]]:
    """Health and event delays, and statuses of the long prompts (none without a body)."""
    delays_s: list[float] = []
    statuses: list[int] = []
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        streams = [asyncio.ensure_future(follow(session, url, delays_s)) for _ in range(STREAMS)]
        await asyncio.sleep(1.0)
        delays_s.clear()
        command = (sys.executable, "-m", "loadtest.bench_prompts", "--probe", url, "--seconds", str(seconds))
        prober = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
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


async def run(seconds: float) -> bool:
    head = {"model": "m", "max_tokens": 4}
    works: dict[str, bytes | None] = {
        "nothing else": None,
        "a million ids (7.9 MB)": json.dumps({**head, "prompt": list(range(100_000, 1_100_000))}).encode(),
        "5 MB of text": json.dumps({**head, "prompt": "to be or not " * 400_000}).encode(),
        "400,000 ids (3.2 MB)": json.dumps({**head, "prompt": list(range(100_000, 500_000))}).encode(),
    }
    good = True
    async with an_engine() as engine:
        with a_router(engine) as url:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind of prompt")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe is not None:
        probe(args.probe, args.seconds)
        return 0
    return 0 if uvloop.run(run(args.seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
