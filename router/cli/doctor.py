"""`tfirst doctor`: would cache-aware routing work with these servers, and if not, which flag is missing?"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop

from router.cli.screen import Screen
from router.doctor.ask import Asker
from router.doctor.examine import Plan, Server, examine
from router.doctor.facts import Facts, as_one_fleet
from router.doctor.judge import findings_of
from router.doctor.show import Report, as_json, print_reports
from router.doctor.tokenizing import local_tokenizer
from router.errors import ConfigError
from router.fleet import ReplicaSpec, check_address, check_url, is_dns, load_fleet
from router.signals.ranks import configured_addresses, rows_by_url
from router.signals.subscriber import Source

_TOGETHER = 8  # servers examined at once


class DoctorCommand:
    name = "doctor"
    help = "ask servers whether cache-aware routing would work with them, and which flag is missing"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Exit status: 0 when cache-aware routing would work with every server, 1 when it would not with one of"
            " them, 2 for a wrong flag or fleet file."
        )
        parser.add_argument("urls", nargs="*", metavar="URL", help="base URLs, for example http://10.0.0.5:8000")
        parser.add_argument("--fleet", type=Path, metavar="FILE", help="examine the replicas of a fleet file instead")
        parser.add_argument("--events", metavar="ADDRESS", help="where one URL publishes, when it cannot say so itself")
        parser.add_argument("--replay", metavar="ADDRESS", help="its replay socket; goes with --events")
        parser.add_argument(
            "--probe",
            action="store_true",
            help="send each server two completions of one token, to see their cache events and usage",
        )
        parser.add_argument(
            "--tokenizer", type=Path, metavar="DIR", help="compare the tokenizer.json in DIR with the engine's tokens"
        )
        parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key the servers want")
        parser.add_argument(
            "--wait", type=_seconds, default=3.0, metavar="S", help="seconds to wait for events (default %(default)g)"
        )
        parser.add_argument(
            "--timeout", type=_seconds, default=5.0, metavar="S", help="of each HTTP request (default %(default)g)"
        )
        parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")

    def run(self, args: argparse.Namespace) -> int:
        servers = servers_of(args.urls, fleet=args.fleet, events=args.events, replay=args.replay)
        encode = None if args.tokenizer is None else local_tokenizer(args.tokenizer)
        plan = Plan(wait_s=args.wait, use_probe=args.probe, encode=encode)
        key = _key_in(args.api_key_env)
        with quiet("router"):  # the findings say it, once and in words
            reports = uvloop.run(examine_all(servers, plan, timeout_s=args.timeout, key=key, rng=random.Random()))
        if args.json:
            print(as_json(reports).decode())
        else:
            print_reports(reports, Screen())
        return 0 if all(report.works for report in reports) else 1


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Only critical messages of the logger `name` and below, for a while."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def servers_of(
    urls: Sequence[str], *, fleet: Path | None = None, events: str | None = None, replay: str | None = None
) -> list[Server]:
    """What to examine, each URL once.

    Raises
    ------
    ConfigError : nothing is named, or the flags do not go together
    """
    if bool(urls) == (fleet is not None):
        raise ConfigError("name the servers: either URL ... or --fleet FILE")
    if fleet is not None:
        if events is not None or replay is not None:
            raise ConfigError("--events and --replay do not go with --fleet: the file holds them")
        file = load_fleet(fleet)
        return _servers_of_fleet(file.replicas, file.block_tokens)
    named = list(dict.fromkeys(map(check_url, urls)))
    if replay is not None and events is None:
        raise ConfigError("--replay goes with --events")
    if events is None:
        return [Server(url=url) for url in named]
    if len(named) > 1:
        raise ConfigError("--events is the address of one server: give one URL")
    check_address("--events", events)
    check_address("--replay", replay)
    return [Server(url=named[0], sources=(Source(events, replay),))]


def _servers_of_fleet(replicas: Sequence[ReplicaSpec], block_tokens: int | None) -> list[Server]:
    servers = []
    names = [replica.url for replica in replicas if is_dns(replica.url or "")]
    if names:
        raise ConfigError(f"{names[0]} stands for many servers: name those to be examined by their URLs")
    for url, rows in rows_by_url([replica.url for replica in replicas]).items():
        try:
            events = configured_addresses({row: replicas[row].events for row in rows}, rows)
            replays = configured_addresses({row: replicas[row].replay for row in rows}, rows)
        except ValueError as exc:
            raise ConfigError(f"replicas of {url} are its ranks, but {exc}") from exc
        sources = tuple(
            Source(events[row], replays.get(row), rank=rank if len(rows) > 1 else None)
            for rank, row in enumerate(rows)
            if row in events
        )
        servers.append(Server(url=url, sources=sources, listed=len(rows), block_tokens=block_tokens))
    return servers


async def examine_all(
    servers: Sequence[Server], plan: Plan, *, timeout_s: float, key: str | None, rng: random.Random
) -> list[Report]:
    """Examine a few servers at a time; reports in the order of `servers`."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    places = asyncio.Semaphore(_TOGETHER)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def one(server: Server) -> Facts:
            asker = Asker(session, server.url, timeout_s=timeout_s, has_key=key is not None)
            async with places:
                return await examine(asker, server, plan, rng)

        together = as_one_fleet(await asyncio.gather(*map(one, servers)))
    return [Report(facts, findings_of(facts)) for facts in together]


def _key_in(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"--api-key-env names the environment variable {variable}, which holds no usable key")
    return key


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


COMMAND = DoctorCommand()
