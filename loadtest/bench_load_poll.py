"""What polling the load of 64 replicas costs the router.

Question  does polling 64 replicas every 200 ms, a real metrics page each time, cost under 3 % of a core, and does a
          request feel it?
Work      stub engines in another process, each with a port of its own, that answer /health, /v1/models and /metrics
          with a recorded vLLM page (37 kB, two engines) whose numbers change from answer to answer; `tfirst serve` in
          front of them, once polling every 200 ms and once every 60 s; no traffic but a /health every 10 ms
Measure   processor seconds of the router per second, from /proc, after 3 s of start; the difference of the two is what
          polling costs. Time until /health on the traffic port is answered, median and 99th percentile
Pass      median of three differences under 0.03; every replica asked in every period
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import cast

import httptools
import uvloop

PAGE = Path(__file__).parent.parent / "tests" / "vectors" / "metrics_vllm_0.33.0.txt"
LIMIT_SHARE = 0.03
VARIANTS = 16  # different pages a stub gives in turn
SELDOM_S = 60.0
ASK_EVERY_S = 0.01


def answer(body: bytes, kind: str = "text/plain") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def pages() -> list[bytes]:
    """The recorded page with counters and gauges that have moved on."""
    text = PAGE.read_text()
    found = []
    for turn in range(VARIANTS):
        moved = re.sub(r"(_(?:total|sum|count|bucket)\{[^}]*\} )([0-9.]+)$", rf"\g<1>{turn * 7919}.5", text, flags=re.M)
        moved = re.sub(r"(num_requests_(?:running|waiting)\{[^}]*\} )[0-9.]+$", rf"\g<1>{turn}.0", moved, flags=re.M)
        found.append(answer(moved.encode()))
    return found


class Stub(asyncio.Protocol):
    """One connection to a stub engine. `asked` counts /metrics over all of them."""

    asked = 0
    metrics = pages()
    others = {  # noqa: RUF012 (a table, never changed)
        b"/health": answer(b""),
        b"/v1/models": answer(json.dumps({"data": [{"id": "m"}]}).encode(), "application/json"),
        b"/asked": b"",
    }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._turn = 0

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_message_complete(self) -> None:
        if self._path == b"/metrics":
            Stub.asked += 1
            self._turn += 1
            self._transport.write(self.metrics[self._turn % VARIANTS])
        elif self._path == b"/asked":
            self._transport.write(answer(str(Stub.asked).encode()))
        else:
            self._transport.write(self.others.get(self._path, b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"))


async def serve_stubs(count: int) -> None:
    """Serve until the standard input is closed; tell the ports on one line."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Stub, "127.0.0.1", 0) for _ in range(count)]
    print(" ".join(str(server.sockets[0].getsockname()[1]) for server in servers), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def get(port: int, path: str, connection: HTTPConnection | None = None) -> bytes:
    used = connection or HTTPConnection("127.0.0.1", port, timeout=10)
    used.request("GET", path)
    body = used.getresponse().read()
    if connection is None:
        used.close()
    return body


def busy_s(pid: int) -> float:
    """Processor seconds a process has used, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def stubs(count: int) -> Iterator[list[int]]:
    command = [sys.executable, "-m", "loadtest.bench_load_poll", "--serve", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield [int(port) for port in process.stdout.readline().split()]
        finally:
            process.stdin.close()


@contextlib.contextmanager
def router(ports: list[int], period_s: float) -> Iterator[tuple[int, int]]:
    """A router in front of the stubs: its process id and its traffic port."""
    with tempfile.TemporaryDirectory(prefix="bench-load-poll-") as folder:
        config = Path(folder) / "config.json"
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        settings = {"worker_urls": urls, "port": 0, "admin_port": 0, "host": "127.0.0.1", "admin_host": "127.0.0.1"}
        config.write_text(json.dumps({**settings, "load": {"period_s": period_s}}))  # JSON is YAML
        command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(config), "--log-level", "error"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                lines = (process.stdout.readline() for _ in range(3))
                traffic = next(line for line in lines if line.startswith("traffic"))
                yield process.pid, int(traffic.rpartition(":")[2])
            finally:
                process.terminate()


def measured(ports: list[int], *, period_s: float, seconds: float) -> dict[str, float]:
    """Cost and answer times of a router that polls every `period_s`."""
    with router(ports, period_s) as (pid, port):
        time.sleep(3.0)
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        asked, began_s, began_busy_s = int(get(ports[0], "/asked")), time.perf_counter(), busy_s(pid)
        took_s = []
        while (now_s := time.perf_counter()) < began_s + seconds:
            get(port, "/health", connection)
            took_s.append(time.perf_counter() - now_s)
            time.sleep(ASK_EVERY_S)
        wall_s = time.perf_counter() - began_s
        share = (busy_s(pid) - began_busy_s) / wall_s
        asked = int(get(ports[0], "/asked")) - asked
    return {
        "share": share,
        "rounds": asked / len(ports) * period_s / wall_s,
        "health_p50_us": statistics.median(took_s) * 1e6,
        "health_p99_us": statistics.quantiles(took_s, n=100)[98] * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--period-ms", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(serve_stubs(args.serve))
        return 0
    costs, rounds = [], []
    with stubs(args.replicas) as ports:
        for _ in range(3):
            often = measured(ports, period_s=args.period_ms / 1e3, seconds=args.seconds)
            seldom = measured(ports, period_s=SELDOM_S, seconds=args.seconds)
            costs.append(often["share"] - seldom["share"])
            rounds.append(often["rounds"])
            for name, run in (("often ", often), ("seldom", seldom)):
                print(name, "  ".join(f"{key} {value:.4g}" for key, value in run.items()), flush=True)
    cost = statistics.median(costs)
    print(f"polling {args.replicas} replicas every {args.period_ms:g} ms costs {cost:.2%} of a core")
    print(f"limit {LIMIT_SHARE:.0%}; at least {min(rounds):.1%} of the rounds took place")
    return 0 if cost < LIMIT_SHARE and min(rounds) > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
