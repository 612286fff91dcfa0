"""What a request and a streamed piece cost in the proxy's own process, beside nginx and the Rust routers.

Question  is this router's relay, and its decision, cheaper than every Rust router's; does a first byte come as soon,
          and does memory stay where it was?
Work      four stub engines and the clients on one core, each proxy on the other (`--core`), one of them busy at a time.
          16 connections (`--connections`) send chat requests of 64 B, 32 kB and 256 kB, of which a quarter of the text
          is new within a family of four; 100 streams of pieces 10 ms apart; requests one at a time; 5,000 open streams;
          prompts of 1 MB beside /health every 2 ms. This router decides once by guesses at caches and once with the
          engines' events, which tell it nothing of text. Seeds are fixed. A first run of each case warms up
Measure   utime and stime of the proxy's process and its children, from /proc, over whole answers; rounds take turns
          over the proxies, and medians are given, as microseconds and as ratios to nginx in the same run. What else
          runs on the machine moves processor time by a few per cent through caches; it moves first bytes far more
Pass      the targets in `LIMITS`; and each below every peer's figure for the same work
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import uvloop

from loadtest.proxy_bench import bodies
from loadtest.proxy_bench.judge import Row, failures, table
from loadtest.proxy_bench.load import closed_loop, first_bytes, slowest_health, streams
from loadtest.proxy_bench.process import NotStarted, busy_s, resident_mib
from loadtest.proxy_bench.proxies import NGINX, OURS, PEERS, Proxy, Running, Setting, install_peers, skipped, started

REPLICAS, CONNECTIONS = 4, 16
STREAMS, EVERY_S = 100, 0.010
OPEN_STREAMS, OPEN_PIECES, OPEN_EVERY_S = 5000, 12, 1.0

RELAY = {"policy": {"name": "round_robin"}, "prompts": {"source": "none"}}
RELAYING = (
    Proxy("tfirst round_robin", OURS, config=RELAY),
    Proxy("nginx", NGINX),
    *(Proxy(f"{peer} round_robin", peer, policy="round_robin") for peer in PEERS),
)
DECIDING = (
    Proxy("tfirst e2e", OURS, decides=True),
    Proxy("tfirst e2e, events", OURS, decides=True, events=True),
    *(Proxy(f"{peer} cache_aware", peer, decides=True, policy="cache_aware") for peer in PEERS),
)


@contextlib.contextmanager
def stubs(core: int, every_s: float = EVERY_S) -> Iterator[list[int]]:
    """The engines' ports."""
    with stubs_with_events(core, every_s) as (ports, _):
        yield ports


@contextlib.contextmanager
def stubs_with_events(core: int, every_s: float = EVERY_S) -> Iterator[tuple[list[int], list[int]]]:
    """The engines' ports, and those of their cache events."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "loadtest.proxy_bench.stub"]
    command += ["--replicas", str(REPLICAS), "--every-ms", str(every_s * 1e3)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            ports, events = ([int(port) for port in process.stdout.readline().split()] for _ in range(2))
            yield ports, events
        finally:
            process.stdin.close()


@contextlib.contextmanager
def all_started(proxies: Sequence[Proxy], setting: Setting) -> Iterator[list[Running]]:
    """Those that can be had, running; the others are named with the reason."""
    with contextlib.ExitStack() as stack:
        up = []
        for proxy in proxies:
            reason = skipped(proxy, setting)
            if reason is None:
                try:
                    up.append(stack.enter_context(started(proxy, setting)))
                    continue
                except NotStarted as exc:
                    reason = str(exc)
            print(f"skipped {proxy.name}: {reason}", flush=True)
        yield up


async def per_request(
    proxy: Running, requests: Sequence[bytes], *, seconds: float, seed: int, connections: int = CONNECTIONS
) -> float:
    """Processor microseconds of one request."""
    began_s = busy_s(proxy.family)
    tally = await closed_loop(proxy.port, requests, connections=connections, seconds=seconds, seed=seed)
    if tally.wrong:
        raise RuntimeError(f"{proxy.proxy.name}: {tally.wrong} answers were wrong (status {tally.status})")
    return 1e6 * (busy_s(proxy.family) - began_s) / tally.answered


async def per_piece(proxy: Running, *, seconds: float) -> float:
    """Processor microseconds of one piece, the requests of their streams included."""
    pieces = max(2, round(seconds / EVERY_S))
    began_s = busy_s(proxy.family)
    tally = await streams(proxy.port, bodies.a_stream(pieces), count=STREAMS, over_s=0.2, limit_s=60 + 3 * seconds)
    if tally.wrong or tally.answered != STREAMS:
        raise RuntimeError(f"{proxy.proxy.name}: {tally.wrong} of {STREAMS} streams broke (status {tally.status})")
    return 1e6 * (busy_s(proxy.family) - began_s) / (STREAMS * pieces)


class Bench:
    """Runs measures in rounds over proxies that take turns, and keeps every row."""

    def __init__(self, setting: Setting, *, rounds: int, seconds: float, connections: int = CONNECTIONS) -> None:
        self.setting, self.rounds, self.seconds, self.connections = setting, rounds, seconds, connections
        self.rows: list[Row] = []

    def note(self, proxy: str, measure: str, value: float, turn: int = 0) -> None:
        self.rows.append(Row(proxy=proxy, measure=measure, turn=turn, value=value))

    async def requests(self, proxies: Sequence[Running], kind: str, requests: Sequence[bytes]) -> None:
        """`kind` in microseconds, for each of the proxies."""
        for turn in range(-1, self.rounds):  # the first warms up
            for proxy in proxies:
                seconds = self.seconds if turn >= 0 else min(self.seconds, 1.0)
                value = await per_request(proxy, requests, seconds=seconds, seed=turn, connections=self.connections)
                if turn >= 0:
                    self.note(proxy.proxy.name, kind, value, turn)
        self.tell(kind)

    async def pieces(self, proxies: Sequence[Running]) -> None:
        for turn in range(self.rounds):
            for proxy in proxies:
                self.note(proxy.proxy.name, "piece, us", await per_piece(proxy, seconds=2 * self.seconds), turn)
        self.tell("piece, us")

    async def first_bytes(self, proxies: Sequence[Running]) -> None:
        """What each adds to the first byte of a small answer, against the replica itself, in the same turn."""
        ports = [self.setting.replicas[0], *(proxy.port for proxy in proxies)]
        for turn in range(self.rounds):
            direct, *through = await first_bytes(ports, bodies.chats(bodies.SMALL)[0], times=200)
            for proxy, taken in zip(proxies, through, strict=True):
                self.note(proxy.proxy.name, "added first byte, ms", 1e3 * (median(taken) - median(direct)), turn)
        self.tell("added first byte, ms")

    def tell(self, measure: str) -> None:
        print(table(self.rows, [measure]), flush=True)


async def compare(bench: Bench, proxies: Sequence[Running], prefix: str) -> None:
    """The three sizes through proxies that do the same work."""
    for name, length in (("64 B", bodies.SMALL), ("32 kB", bodies.MEDIUM), ("256 kB", bodies.LARGE)):
        await bench.requests(proxies, f"{prefix} {name}, us", bodies.chats(length))


async def relaying(bench: Bench) -> None:
    with all_started(RELAYING, bench.setting) as proxies:
        for proxy in proxies:
            if proxy.proxy.kind == OURS:
                bench.note(proxy.proxy.name, "idle, MiB", resident_mib(proxy.family))
        await bench.first_bytes(proxies)
        await compare(bench, proxies, "relay")
        await bench.pieces(proxies)


async def deciding(bench: Bench) -> None:
    receipts = Proxy(
        "tfirst e2e, all receipts",
        OURS,
        decides=True,
        config={"receipts": {"path": str(bench.setting.folder / "receipts.jsonl"), "share": 1.0}},
    )
    with all_started((*DECIDING, receipts), bench.setting) as proxies:
        await compare(bench, proxies, "decide")
        ours = [proxy for proxy in proxies if proxy.proxy.kind == OURS][:1]
        await bench.requests(ours, "decide 2,000 token ids, us", bodies.token_ids(2000))


async def tokenising(bench: Bench) -> None:
    from loadtest.proxy_bench.tokenizer import write_tokenizer

    folder = write_tokenizer(bench.setting.folder / "tokenizer", bodies.texts(bodies.MEDIUM))
    config = {"prompts": {"source": "local", "tokenizer": str(folder), "check": False}}
    proxy = Proxy("tfirst e2e, local tokenizer", OURS, decides=True, config=config)
    with all_started([proxy], bench.setting) as proxies:
        for name, length in (("64 B", bodies.SMALL), ("32 kB", bodies.MEDIUM)):
            await bench.requests(proxies, f"second turn {name}, tokenised, us", bodies.second_turns(length))


async def soaking(bench: Bench, soak_s: float) -> None:
    """Memory after a warm-up, and how much more it is after the soak."""
    requests = [*bodies.chats(bodies.SMALL), *bodies.chats(bodies.MEDIUM), bodies.a_stream(2)]
    with all_started(DECIDING[:1], bench.setting) as proxies:
        for proxy in proxies:
            before = 0.0
            for turn, seconds in enumerate((soak_s / 2, soak_s)):
                await closed_loop(proxy.port, requests, connections=CONNECTIONS, seconds=seconds, seed=turn)
                resident = resident_mib(proxy.family)
                bench.note(proxy.proxy.name, f"after {seconds:.0f} s, MiB", resident)
                grown, before = resident - before, resident
            bench.note(proxy.proxy.name, "grown in the soak, MiB", grown)
    bench.tell("grown in the soak, MiB")


async def holding(bench: Bench) -> None:
    """All of 5,000 streams open at once, and each ended well."""
    ours = DECIDING[0]
    with stubs(1 - bench.setting.core, OPEN_EVERY_S) as replicas:
        setting = Setting(bench.setting.folder, replicas, None, bench.setting.core)
        with all_started([ours], setting) as proxies:
            for proxy in proxies:
                opening_s = OPEN_EVERY_S * (OPEN_PIECES - 4)  # the first is still open when the last one opens
                request = bodies.a_stream(OPEN_PIECES)
                running = streams(proxy.port, request, count=OPEN_STREAMS, over_s=opening_s, limit_s=120.0)
                bench.note(ours.name, "of 5,000 open streams ended well", (await running).answered)
    bench.tell("of 5,000 open streams ended well")


async def gaps(bench: Bench) -> None:
    """How long /health waits while prompts of 1 MB come and go, one connection sending them."""
    request = bodies.chats(bodies.HUGE, variants=4)[0]
    with all_started(DECIDING[:1], bench.setting) as proxies:
        for proxy in proxies:
            for turn in range(bench.rounds):
                took_s, tally = await slowest_health(proxy.port, request, busy=1, seconds=2 * bench.seconds)
                if tally.wrong:
                    raise RuntimeError(f"{tally.wrong} long prompts were answered wrongly (status {tally.status})")
                took_s.sort()
                bench.note(proxy.proxy.name, "health beside 1 MB, p99 ms", 1e3 * took_s[len(took_s) * 99 // 100], turn)
                bench.note(proxy.proxy.name, "health beside 1 MB, most ms", 1e3 * took_s[-1], turn)
    print(table(bench.rows, ["health beside 1 MB, p99 ms", "health beside 1 MB, most ms"]), flush=True)


PARTS = ("relay", "decide", "tokenise", "soak", "hold", "gaps")


async def run(bench: Bench, parts: Sequence[str], soak_s: float) -> None:
    """The parts, one after another, each with proxies of its own."""
    for part, measure in (
        ("relay", relaying),
        ("decide", deciding),
        ("tokenise", tokenising),
        ("hold", holding),
        ("gaps", gaps),
    ):
        if part in parts:
            await measure(bench)
    if "soak" in parts:
        await soaking(bench, soak_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement (default 1.5)")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="that send requests at once (default 16)")
    parser.add_argument("--soak-s", type=float, default=40.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--peers-venv", type=Path, help="environment for the Rust routers, made when it is not there")
    parser.add_argument("--core", type=int, default=1, help="of the proxies; engines and clients get another")
    parser.add_argument("--out", type=Path, help="write every row to this file, as JSON")
    args = parser.parse_args()
    if args.peers_venv is not None:
        install_peers(args.peers_venv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # inherited; a proxy holds two sockets for each stream
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {args.core} or {args.core})
    near = min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench-proxy-") as name, stubs_with_events(near) as (replicas, publishers):
        setting = Setting(Path(name), replicas, args.peers_venv, args.core, publishers=publishers)
        bench = Bench(setting, rounds=args.rounds, seconds=args.seconds, connections=args.connections)
        try:
            uvloop.run(run(bench, args.parts, args.soak_s))
        finally:
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps([row.as_values() for row in bench.rows], indent=0))
    print(table(bench.rows))
    wrong = failures(bench.rows)
    print("\n".join(wrong) or "passes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
