"""The same simulated fleet behind each router that can be had, the same seeded load, one table.

Question  what do users, engines and the machine see of each router: first tokens, prompt tokens not computed, errors,
          and what the router itself takes
Work      a fresh `tfirst sim` of the demo's four replicas for each router and round; the demo's trace as chat texts,
          open loop at the trace's own times (through `--speed`). Then stub engines that answer at once: requests of
          64 B and 32 kB on 16 connections, 100 streams of pieces 10 ms apart, first bytes of single requests
Seed      none is drawn: rows, texts and moments are the trace's; the simulated engines draw from seed 0
Arrivals  the trace's moments, sent whether or not earlier requests were answered
Warm-up   one request through each router; caches begin empty for all, and filling them is part of the load
Pass      every router that is there answers every request; exit status 1 when ours does not. Peers are not judged

Engines and clients are on one core, the routers on the other (`--core`). Each router has the rule that its pages
recommend for shared prompts. Ours runs twice: with the fleet file (cards, links, cache events) and the engines'
`/tokenize`, and with nothing but addresses, which is all that the peers are given.

    python -m loadtest.peers --peers-venv peers         # installs what can be had of them into ./peers first
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import tempfile
import urllib.error
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import uvloop

from loadtest.bench_proxy import per_piece, per_request, stubs
from loadtest.demo.processes import DemoError, get_text, wait_for
from loadtest.demo.processes import started as tfirst_started
from loadtest.demo.report import Tokens, tokens_of
from loadtest.peer_runs.contenders import contenders, version_of
from loadtest.peer_runs.load import play
from loadtest.peer_runs.tables import Measured, Relayed, Served, comparison, markdown
from loadtest.proxy_bench import bodies
from loadtest.proxy_bench.load import first_bytes
from loadtest.proxy_bench.process import NotStarted, busy_s, family_of, resident_mib
from loadtest.proxy_bench.proxies import (
    OURS,
    Proxy,
    Running,
    Setting,
    install_litellm,
    install_peers,
    skipped,
    started,
)
from loadtest.scenarios.goodput import Sample, figures
from loadtest.scenarios.prompts import Row, read_rows

DEMO = Path(__file__).parent / "demo"
FIRST_BYTES = 200
EXIT_STOPPED = 130  # as shells give for Ctrl-C


class _Replica(msgspec.Struct):
    url: str


class _Model(msgspec.Struct):
    name: str


class _Fleet(msgspec.Struct):
    """What is needed of a fleet file whose addresses are filled in."""

    speed: float
    model: _Model
    replicas: list[_Replica]


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent to each router. speed : of the simulated hardware, and of the trace with it"""

    rows: Sequence[Row]
    fleet: Path
    speed: float


@contextlib.contextmanager
def simulated_fleet(load: Load, folder: Path) -> Iterator[tuple[Path, _Fleet]]:
    """A fresh fleet: its file with addresses, and what that says."""
    resolved, log = folder / "fleet.yaml", folder / "sim.log"
    resolved.unlink(missing_ok=True)
    options = ["--fleet", str(load.fleet), "--speed", str(load.speed), "--port", "0", "--write-fleet", str(resolved)]
    with tfirst_started(log, "sim", *options) as process:
        wait_for(resolved.exists, process, log, "the simulated fleet")
        yield resolved, msgspec.yaml.decode(resolved.read_bytes(), type=_Fleet)


def serve(at: int, load: Load, setting: Setting) -> Served:
    """One round of the contender at that place, behind a fleet of its own."""
    with simulated_fleet(load, setting.folder) as (path, fleet):
        urls = [replica.url for replica in fleet.replicas]
        ports = [int(url.rpartition(":")[2]) for url in urls]
        where = Setting(setting.folder, ports, setting.peers_venv, setting.core, fleet.model.name)
        with started(contenders(path)[at], where) as router:
            began_s = busy_s(router.family)
            target = f"http://127.0.0.1:{router.port}"
            samples = uvloop.run(play(target, fleet.model.name, load.rows, factor=fleet.speed))
            family = family_of(router.family[0])
            tokens = tokens_of([get_text(f"{url}/metrics") for url in urls])
            return served(
                samples,
                tokens=tokens,
                cpu_s=busy_s(family) - began_s,
                memory_mib=resident_mib(family),
            )


def served(samples: Sequence[Sample], *, tokens: Tokens, cpu_s: float, memory_mib: float) -> Served:
    """What a round says."""
    told = figures(samples, span_s=1.0)
    return Served(
        first_token_mean_s=told.first_token_s[0],
        first_token_p50_s=told.first_token_s[1],
        first_token_p99_s=told.first_token_s[2],
        end_mean_s=told.end_s[0],
        end_p99_s=told.end_s[2],
        reused_share=tokens.reused_share,
        own_share=tokens.own_share,
        errors=told.errors,
        cpu_s_per_1000=1e3 * cpu_s / len(samples),
        resident_mib=memory_mib,
        late_s=told.late_s,
        first_error=next((sample.error for sample in samples if sample.error is not None), None),
    )


async def relay(router: Running, replica: int, *, seconds: float, turn: int) -> Relayed:
    """One round before stub engines; a peer that breaks off keeps what it had by then."""
    found = Relayed()
    try:
        direct, through = await first_bytes([replica, router.port], bodies.chats(bodies.SMALL)[0], times=FIRST_BYTES)
        found = msgspec.structs.replace(found, added_first_byte_s=median(through) - median(direct))
        small = await per_request(router, bodies.chats(bodies.SMALL), seconds=seconds, seed=turn)
        found = msgspec.structs.replace(found, cpu_s_per_1000_small=small / 1e3)
        long = await per_request(router, bodies.chats(bodies.MEDIUM), seconds=seconds, seed=turn)
        found = msgspec.structs.replace(found, cpu_s_per_1000_long=long / 1e3)
        piece = await per_piece(router, seconds=2 * seconds)
        found = msgspec.structs.replace(found, cpu_s_per_100k_chunks=piece / 10)
    except (RuntimeError, OSError) as exc:
        print(f"  broke off: {exc}", flush=True)
    return found


def compare(load: Load | None, setting: Setting, args: argparse.Namespace) -> list[Measured]:
    """Rounds over the routers in turn, behind the fleet and then before the stubs."""
    measured = [Measured(name=proxy.name) for proxy in contenders(setting.folder)]
    for one, proxy in zip(measured, contenders(setting.folder), strict=True):
        one.missing = skipped(proxy, setting) if _asked_for(one.name, args.only) else "not asked for"
        if one.missing is None:
            one.version = version_of(proxy, setting.peers_venv)
    if load is not None:
        _behind_the_fleet(measured, load, setting, args.rounds)
    _before_stubs(measured, setting, args)
    return measured


def _asked_for(name: str, words: Sequence[str] | None) -> bool:
    return words is None or any(word in name for word in words)


def _behind_the_fleet(measured: Sequence[Measured], load: Load, setting: Setting, rounds: int) -> None:
    for turn in range(rounds):
        for at, one in enumerate(measured):
            if one.missing is None:
                try:
                    one.served.append(serve(at, load, setting))
                except (NotStarted, DemoError, urllib.error.URLError, OSError) as exc:
                    one.missing = str(exc)
                print(f"round {turn + 1}: {one.name}: {one.missing or told(one.served[-1])}", flush=True)


def told(one: Served) -> str:
    reused = f"{one.reused_share:.1%} reused, {one.own_share:.1%} of that own"
    return f"first token {one.first_token_mean_s:.3f} s, {reused}, {one.errors} errors"


def _before_stubs(measured: Sequence[Measured], setting: Setting, args: argparse.Namespace) -> None:
    """Ours is there once: a fleet file changes nothing that stubs could show."""
    known = {one.name: one for one in measured}
    with stubs(min(os.sched_getaffinity(0))) as replicas:
        where = Setting(setting.folder, replicas, setting.peers_venv, setting.core)
        for proxy in contenders(None):
            one = known[proxy.name]
            if one.missing is None:
                try:
                    _relay_rounds(one, proxy, where, args)
                except NotStarted as exc:
                    one.missing = str(exc)


def _relay_rounds(one: Measured, proxy: Proxy, where: Setting, args: argparse.Namespace) -> None:
    with started(proxy, where) as router:
        for turn in range(-1, args.relay_rounds):  # the first warms up
            seconds = args.seconds if turn >= 0 else min(args.seconds, 0.5)
            found = uvloop.run(relay(router, where.replicas[0], seconds=seconds, turn=turn))
            if turn >= 0:
                one.relayed.append(found)
        print(f"relayed through {proxy.name}", flush=True)


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-venv", type=Path, help="environment for the peers, made when it is not there")
    parser.add_argument("--installed", action="store_true", help="install nothing: take what is in --peers-venv")
    parser.add_argument("--traffic", type=Path, default=DEMO / "traffic.jsonl.gz", help="default: the demo's")
    parser.add_argument("--fleet", type=Path, default=DEMO / "fleet.yaml", help="default: the demo's")
    parser.add_argument("--requests", type=int, default=200, help="the first so many (default %(default)s)")
    parser.add_argument("--speed", type=float, default=4.0, help="of the simulated hardware (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="behind the fleet (default %(default)s)")
    parser.add_argument("--relay-rounds", type=int, default=3, help="before stubs (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement before stubs")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="routers whose name has one of these words")
    parser.add_argument("--relay-only", action="store_true", help="without the simulated fleet")
    parser.add_argument("--core", type=int, default=1, help="of the routers; engines and clients get another")
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as a page has it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser_of().parse_args(arguments)
    if args.peers_venv is not None and not args.installed:
        install_peers(args.peers_venv)
        install_litellm(args.peers_venv)
    # Told to end in any way, also where a shell has it ignore Ctrl-C, it ends what it started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {args.core} or {args.core})
    try:
        return run(args)
    except KeyboardInterrupt:
        print("stopped before the table was whole; the lines above are what was measured", file=sys.stderr)
        return EXIT_STOPPED


def run(args: argparse.Namespace) -> int:
    """Measure, tell, and judge ours; leaves the process itself as it is."""
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        setting = Setting(Path(name), [], args.peers_venv, args.core)
        load = None if args.relay_only else Load(read_rows(args.traffic)[: args.requests], args.fleet, args.speed)
        measured = compare(load, setting, args)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(msgspec.json.encode(measured))
    print(markdown(measured) if args.markdown else comparison(measured))
    ours = [one for one, proxy in zip(measured, contenders(Path()), strict=True) if proxy.kind == OURS]
    return 0 if all(_whole(one) for one in ours if _asked_for(one.name, args.only)) else 1


def _whole(one: Measured) -> bool:
    """Whether it took part and answered everything."""
    return one.missing is None and not any(turn.errors for turn in one.served)


if __name__ == "__main__":
    sys.exit(main())
