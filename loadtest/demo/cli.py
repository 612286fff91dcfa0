"""`tfirst demo`: the main job end to end, on real traffic over real sockets."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.client import Sample, play
from loadtest.demo.processes import Addresses, DemoError, get_text, running_fleet
from loadtest.demo.report import Run, comparison, read_receipts, tokens_of
from loadtest.traffic import TrafficRow, read_traffic

HERE = Path(__file__).parent
POLICIES = ("round_robin", "ttft", "e2e")
KEY_ENV = "TFIRST_DEMO_ADMIN_KEY"
TERMINATED = 128 + signal.SIGTERM  # exit status, as shells give it
ROUNDS = 20  # of the traffic while it is kept; then it serves whatever comes


class SpeedOf(msgspec.Struct):
    """What the demo itself needs of a fleet file."""

    class Model(msgspec.Struct):
        name: str

    speed: float
    model: Model


class DemoCommand:
    name = "demo"
    help = "send real traffic through the router to four simulated replicas, once for each of three rules"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--policies", nargs="+", default=list(POLICIES), metavar="NAME", help=f"default: {' '.join(POLICIES)}"
        )
        parser.add_argument(
            "--fleet", type=Path, default=HERE / "fleet.yaml", help="fleet file to simulate (default: the demo's own)"
        )
        parser.add_argument(
            "--traffic", type=Path, default=HERE / "traffic.jsonl.gz", help="requests to send (default: the demo's own)"
        )
        parser.add_argument("--requests", type=int, metavar="N", help="send only the first N requests")
        parser.add_argument(
            "--keep",
            action="store_true",
            help="go on serving by the last rule, with the same traffic again, until Ctrl-C; shows the page's address",
        )
        parser.add_argument("--keep-files", type=Path, metavar="DIR", help="keep logs and receipts in DIR")

    def run(self, args: argparse.Namespace) -> int:
        console = Console()
        try:
            rows = read_traffic(args.traffic)[: args.requests]
            fleet = msgspec.yaml.decode(args.fleet.read_bytes(), type=SpeedOf)
        except (OSError, EOFError, msgspec.DecodeError) as exc:
            print(f"tfirst demo: {' '.join(str(exc).split())}", file=sys.stderr)
            return 2
        try:
            with ended_by_sigterm():
                return self._play(args, rows, fleet, console)
        except Terminated:
            return TERMINATED

    def _play(self, args: argparse.Namespace, rows: list[TrafficRow], fleet: SpeedOf, console: Console) -> int:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tfirst-demo-") as scratch:
            folder = args.keep_files or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                with progress_bar(console) as progress:
                    runs = [run_policy(name, rows, fleet, args.fleet, folder, progress) for name in args.policies]
            except DemoError as exc:
                print(f"tfirst demo: {exc}", file=sys.stderr)
                return 1
            console.print(comparison(runs))
            failed = [sample for run in runs for sample in run.failed]
            console.print(closing_line(runs, failed, time.monotonic() - began))
            if args.keep:
                try:
                    keep_serving(args.policies[-1], rows, fleet, args.fleet, folder, console)
                except DemoError as exc:
                    print(f"tfirst demo: {exc}", file=sys.stderr)
                    return 1
        return 1 if failed else 0


class Terminated(Exception):
    """SIGTERM came, and everything that was running has been ended."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves by the same way as Ctrl-C, past all that ends the fleet and its router: else they would go on.

    Not by an exception of its own: raised in the middle of a transport, the loop would take it for the transport's.
    """
    told: list[int] = []

    def end(signum: int, frame: object) -> None:
        told.append(signum)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored behind `&` in a script
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if not told:
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if told:
        raise Terminated


def progress_bar(console: Console) -> Progress:
    """One line for each run, redrawn while requests end."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def run_policy(
    policy: str, rows: list[TrafficRow], fleet: SpeedOf, fleet_file: Path, folder: Path, progress: Progress
) -> Run:
    """Play `rows` once against a fresh fleet routed by `policy`."""
    task = progress.add_task(f"{policy:<12}", total=len(rows))
    receipts = folder / f"receipts-{policy}.jsonl"
    receipts.unlink(missing_ok=True)

    def on_end(sample: Sample) -> None:
        progress.advance(task)

    with running_fleet(fleet_file, policy, folder) as addresses:
        samples = uvloop.run(play(addresses.traffic, fleet.model.name, rows, speed=fleet.speed, on_end=on_end))
        tokens = tokens_of([get_text(f"{url}/metrics") for url in addresses.replicas])
    return Run(policy, samples, read_receipts(receipts), tokens, fleet.speed)


def keep_serving(
    policy: str, rows: list[TrafficRow], fleet: SpeedOf, fleet_file: Path, folder: Path, console: Console
) -> None:
    """A fresh fleet routed by `policy`, with traffic to look at, until Ctrl-C."""
    os.environ.setdefault(KEY_ENV, secrets.token_urlsafe(12))
    config = folder / "keep.yaml"
    config.write_text(f"admin_key_env: {KEY_ENV}\n")
    try:
        with running_fleet(fleet_file, policy, folder, config=config) as addresses:
            console.print(kept_lines(addresses, policy, os.environ[KEY_ENV]), highlight=False, soft_wrap=True)
            for _ in range(ROUNDS):
                uvloop.run(
                    play(addresses.traffic, fleet.model.name, rows, speed=fleet.speed, on_end=lambda sample: None)
                )
            threading.Event().wait()
    except KeyboardInterrupt:
        console.print("ended")


def kept_lines(addresses: Addresses, policy: str, key: str) -> str:
    """Where to look and where to send requests."""
    return (
        f"\nServing by {policy} until Ctrl-C, with the same traffic again.\n"
        f"page       {addresses.admin}/\n"
        f"traffic    {addresses.traffic}\n"
        f"admin key  {key}   (the page asks for it to drain a replica)"
    )


def closing_line(runs: list[Run], failed: list[Sample], took_s: float) -> str:
    """What happened in one line, and what to try next."""
    if failed:
        return f"[red]{len(failed)} requests were not answered[/red], first: {failed[0].request_id}: {failed[0].error}"
    tfirst = sys.argv[0]
    return (
        f"All {sum(len(run.samples) for run in runs)} requests were answered, in {took_s:.0f} s. Next, in front of your"
        f" own replicas: [bold]{tfirst} serve --worker-urls http://HOST:PORT ...[/bold]"
    )


COMMAND = DemoCommand()
