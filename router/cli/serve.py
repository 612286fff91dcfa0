"""`tfirst serve`: run the router."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from rich.table import Table

import router
from router.admission import AdmissionConfig
from router.assemble import experiments_of
from router.beside_events import check_other_tiers
from router.cli.screen import Screen
from router.config import RouterConfig, fleet_of, load_config
from router.errors import ConfigError
from router.fleet import Fleet, is_dns
from router.gateway import Gateway, admin_key
from router.http.tls import server_context
from router.keys import load_keys
from router.outbound import Outbound
from router.prompts.production import check_prompts
from router.rules import label, rule_of
from router.sources import event_addresses
from router.telemetry import logs
from router.telemetry.config import TracingConfig

CUT_SHORT = 130  # exit status when a second signal ended it, as shells give for Ctrl-C


class ServeCommand:
    name = "serve"
    help = "run the router in front of replicas"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Exit status: 0 after a clean stop (SIGTERM or Ctrl-C; a second signal ends at once), 1 when an address"
            " cannot be had, 2 for a wrong flag, configuration or fleet file. SIGHUP reads the files of client keys and"
            " of the certificate again, and the arms of an experiment."
        )
        where = parser.add_argument_group("where the replicas are (exactly one; --config may hold it)")
        where.add_argument(
            "--worker-urls", nargs="+", metavar="URL", help="base URLs, for example http://10.0.0.5:8000"
        )
        where.add_argument("--fleet", type=Path, metavar="FILE", help="fleet file: cards, links, store, replicas")
        parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file; flags win over it")
        parser.add_argument(
            "--policy",
            metavar="NAME[:X=1,Y=2]",
            help="routing rule, see `tfirst policies`, settings behind a colon (default e2e)",
        )
        parser.add_argument("--host", help="address of the traffic port (default 0.0.0.0)")
        parser.add_argument("--port", type=int, help="traffic port (default 30000; 0: the system chooses)")
        parser.add_argument("--admin-host", help="address of the admin port (default 0.0.0.0)")
        parser.add_argument("--admin-port", type=int, help="metrics and probes (default 29000; 0: the system chooses)")
        parser.add_argument("--receipts", metavar="FILE", help="append every decision to FILE as JSON lines")
        parser.add_argument("--seed", type=int, help="of every draw by chance (default 0)")
        parser.add_argument("--check", action="store_true", help="validate, print what would be done, and exit")
        parser.add_argument(
            "--log-level", choices=logs.LEVELS, default="info", help="default info; debug: every request"
        )
        parser.add_argument("--log-format", choices=logs.FORMATS, default="text", help="default text")

    def run(self, args: argparse.Namespace) -> int:
        logs.set_up(args.log_level, args.log_format)
        config = config_of(args)
        fleet = fleet_of(config)
        if fleet.fetch.by == "directed" and not fleet.says_how_told:
            raise ConfigError("fetch.by is directed, but the fleet file does not say how replicas are told: add `told`")
        experiments_of(config)  # its rules can be built
        if args.check:
            return show_plan(config, fleet)
        return uvloop.run(serve(config, fleet, partial(config_of, args)))


def config_of(args: argparse.Namespace) -> RouterConfig:
    """The configuration file, if any, with the flags laid over it."""
    config = load_config(args.config) if args.config is not None else RouterConfig()
    changes: dict[str, object] = {
        key: value
        for key in ("host", "port", "admin_host", "admin_port", "seed")
        if (value := getattr(args, key)) is not None
    }
    if args.worker_urls is not None and args.fleet is not None:
        raise ConfigError("--worker-urls and --fleet both say where the replicas are; give one")
    if args.worker_urls is not None:
        changes.update(worker_urls=args.worker_urls, fleet=None)
    if args.fleet is not None:
        changes.update(fleet=str(args.fleet), worker_urls=None)
    if args.policy is not None and args.policy != config.policy.name:  # by its name alone: with the file's settings
        changes["policy"] = rule_of(args.policy)
    if args.receipts is not None:
        changes["receipts"] = msgspec.structs.replace(config.receipts, path=args.receipts)
    for flag, number in (("--port", args.port), ("--admin-port", args.admin_port)):
        if number is not None and not 0 <= number <= 65535:
            raise ConfigError(f"{flag} must be from 0 to 65535")
    if args.seed is not None and args.seed < 0:
        raise ConfigError("--seed must be 0 or more")
    return msgspec.structs.replace(config, **changes)


def show_plan(config: RouterConfig, fleet: Fleet) -> int:
    """Print what `serve` would do with this configuration, once it is known that it could."""
    check_parts(config, fleet)
    lines, table = plan_lines(config, fleet), replica_table(fleet)
    console = Screen()  # brackets of an address, a path or a list are no markup
    for line in lines:
        console.print(line)
    console.print(table)
    console.print("The configuration is valid.")
    return 0


def check_parts(config: RouterConfig, fleet: Fleet) -> None:
    """What `serve` itself would only meet on its way.

    Raises
    ------
    ConfigError : a key, a file, a folder or a package is missing, or something cannot be used
    """
    Outbound(config, fleet)
    if config.tls is not None:
        server_context(config.tls)
    check_other_tiers(config.other_tiers, fleet)
    check_prompts(config.prompts)
    receipts = config.receipts.path
    if receipts is not None and (Path(receipts).is_dir() or not os.access(Path(receipts).absolute().parent, os.W_OK)):
        raise ConfigError(f"receipts cannot be written to {receipts}")
    if config.tracing.endpoint is not None:
        from router.telemetry.provider import exporter_class  # the SDK takes a tenth of a second

        exporter_class()


def plan_lines(config: RouterConfig, fleet: Fleet) -> list[str]:
    """What `serve` would do, by subject."""
    keys = None if config.client_keys is None else load_keys(Path(config.client_keys))
    posting = admin_key(config) is not None
    lines = [f"policy    {label(config.policy)}"]
    if config.experiment is not None:
        arms = ", ".join(f"{name} ({label(arm.policy)})" for name, arm in config.experiment.arms.items())
        lines.append(f"arms      {arms}, by {config.experiment.assign_by}")
    lines += [
        f"traffic   {config.host}:{config.port}{' with TLS' if config.tls is not None else ''}",
        f"clients   {'anybody: no client_keys' if keys is None else f'with a key: {len(keys)} known'}",
        f"admin     {config.admin_host}:{config.admin_port}",
        f"prompts   {config.prompts.source}",
        f"queue     {queue_in_words(config.admission)}",
        f"POST      /events {'with the admin key' if posting else 'refused: no admin_key_env'}",
        f"follows   {', '.join(followed(config, fleet)) or 'nothing: the replicas stay as they are'}",
        f"spans     {spans_in_words(config.tracing)}",
        f"receipts  {config.receipts.path or 'not written'}",
        f"store     {fleet.store.events or 'without events' if fleet.store else 'none'}",
    ]
    if fleet.says_how_told:
        lines += [f"told      {replica.name}: {fleet.told_of(replica).shown}" for replica in fleet.replicas]
    return lines


def replica_table(fleet: Fleet) -> Table:
    """Where the replicas are, and what is known of each."""
    addresses = event_addresses(fleet)
    table = Table(title="replicas", title_justify="left")
    for column in ("name", "url", "card", "cache events"):
        table.add_column(column, overflow="fold")
    for row, replica in enumerate(fleet.replicas):
        table.add_row(
            replica.name,
            replica.url,
            replica.card or "unknown: neutral start values, learned from traffic",
            addresses.get(row, "asked of the replica"),
        )
    return table


def queue_in_words(config: AdmissionConfig) -> str:
    """What `admission` does, for an operator."""
    if not config.limits:
        return "none: admission names no limit"
    limits = {"in flight": config.max_in_flight, "before their first token": config.max_prefills}
    most = " and ".join(f"{limit} {where}" for where, limit in limits.items() if limit is not None)
    return f"by {config.order}, at most {config.max_queued} requests, beside {most} on each replica"


def spans_in_words(tracing: TracingConfig) -> str:
    """Where `tracing` sends spans, for an operator."""
    if tracing.endpoint is None:
        return "none: tracing names no endpoint"
    return f"of {tracing.share:.0%} of requests, and of what clients sample, to {tracing.endpoint}"


def followed(config: RouterConfig, fleet: Fleet) -> list[str]:
    """What replicas can come and go by while the router runs."""
    names = [replica.url for replica in fleet.replicas if replica.url and is_dns(replica.url)]
    watched = ["the fleet file"] if config.fleet is not None and config.discovery.watch_fleet else []
    return [*watched, *names, *(["POST /replicas"] if config.admin_key_env is not None else [])]


async def serve(config: RouterConfig, fleet: Fleet, read: Callable[[], RouterConfig]) -> int:
    """Run until a signal; a second one ends without waiting for streams. read : the configuration anew"""
    loop = asyncio.get_running_loop()
    asked, again = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (again if asked.is_set() else asked).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    gateway = Gateway(config, fleet)
    loop.add_signal_handler(signal.SIGHUP, gateway.reload, read)  # before the start: unhandled it would end the process
    await gateway.start()
    replicas = "1 replica" if gateway.replicas == 1 else f"{gateway.replicas} replicas"
    print(f"tfirst {router.__version__}: {replicas}, policy {config.policy.name}")
    scheme = "http" if config.tls is None else "https"
    print(f"traffic {scheme}://{config.host}:{gateway.traffic_port}")
    print(f"admin   http://{config.admin_host}:{gateway.admin_port}", flush=True)
    await asked.wait()
    stopping = asyncio.ensure_future(gateway.stop())
    hurry = asyncio.ensure_future(again.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurried = not stopping.done()
    if hurried:
        gateway.cut()
    hurry.cancel()
    await stopping
    return CUT_SHORT if hurried else 0


COMMAND = ServeCommand()
