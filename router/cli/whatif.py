"""`tfirst whatif`: what another rule would have done with the requests of some receipts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from router.cli.screen import Screen
from router.errors import ConfigError
from router.fleet import Fleet, check_fleet, completed, one_line
from router.receipts.reading import read_receipts
from router.rules import rules_of
from router.study.bars import seconds
from router.study.whatif.answer import Answer, what_if

MOST_DRAWS = 1000  # of which the interval is known to a few percent


class WhatIfCommand:
    name = "whatif"
    help = "estimate what another rule would have done with the requests of some receipts"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Queues are simulated anew with replicas as fast as the receipts say. Exit status: 0, or 2 when a file"
            " cannot be used, holds too few streams that were answered well, or there is no such policy."
        )
        parser.add_argument("files", nargs="+", type=Path, metavar="RECEIPTS", help="rotated files are read too")
        parser.add_argument(
            "--policy",
            action="append",
            required=True,
            metavar="A,B:X=1,Y=2",
            help="rules of `tfirst policies`, settings behind a colon; may be repeated",
        )
        parser.add_argument("--fleet", type=Path, metavar="FILE", help="fleet file of the router that wrote them")
        parser.add_argument("--draws", type=int, default=10, metavar="N", help="simulations each (default %(default)s)")
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of ties and draws (default 0)")
        parser.add_argument("--json", action="store_true", help="print all numbers as JSON")

    def run(self, args: argparse.Namespace) -> int:
        if not 2 <= args.draws <= MOST_DRAWS:
            raise ConfigError(f"--draws must be from 2 to {MOST_DRAWS}")
        if args.seed < 0:
            raise ConfigError("--seed must be 0 or more")
        rules = rules_of(args.policy)
        fleet = None if args.fleet is None else fleet_file(args.fleet)
        kept = read_receipts(args.files)
        with progress_of(len(rules) * args.draws) as on_drawn:
            answers = [
                what_if(kept.receipts, rule, fleet=fleet, draws=args.draws, seed=args.seed, on_drawn=on_drawn)
                for rule in rules
            ]
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(answers)).decode())
            return 0
        show(answers, Screen())
        if kept.passed_over:
            print(kept.passed_over)
        return 0


@contextmanager
def progress_of(simulations: int) -> Iterator[Callable[[], None]]:
    """How far it is, where somebody can see it: many receipts take minutes. Call what comes for each simulation."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulations", total=simulations)
        yield lambda: progress.advance(task)


def fleet_file(path: Path) -> Fleet:
    """A fleet file, whose replicas need no URL here: nobody calls them. Raises ConfigError as `load_fleet` does."""
    try:
        raw = completed(msgspec.yaml.decode(path.read_bytes()), path.parent)
        fleet = msgspec.convert(raw, Fleet)
        replicas = [
            msgspec.structs.replace(replica, url=replica.url or f"http://whatif:{index + 1}")
            for index, replica in enumerate(fleet.replicas)
        ]
        fleet = msgspec.structs.replace(fleet, replicas=replicas)
        check_fleet(fleet)
    except OSError as exc:
        raise ConfigError(f"fleet file {path}: {exc.strerror}") from exc
    except (msgspec.DecodeError, ConfigError) as exc:
        raise ConfigError(f"fleet file {path}: {one_line(exc)}") from exc
    return fleet


def show(answers: list[Answer], console: Console) -> None:
    """Print what was and what would have been."""
    first = answers[0]
    console.print(
        f"{first.requests} requests; mean first token as it was {seconds(first.observed_s)},"
        f" {first.reused_before:.0%} of prompt tokens reused in the model. With another rule, and how many would run on"
        " the same replica:",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("policy", overflow="fold")  # settings can be many
    for name in ("first token", "90 % from", "to", "reused", "same", "method"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in answers:
        times = [seconds(value_s) for value_s in (one.mean_s, one.low_s, one.high_s)]
        table.add_row(one.policy, *times, f"{one.reused:.0%}", f"{one.agrees:.0%}", one.method)
    console.print(table)
    for one in answers:
        busiest = max(one.placed.items(), key=lambda pair: pair[1])
        refused = f" It would have refused {one.refused}." if one.refused else ""
        console.print(
            f"{one.sentence} It would have sent {busiest[1]:.0%} of the requests to {busiest[0]}.{refused}",
            highlight=False,
            soft_wrap=True,
        )


COMMAND = WhatIfCommand()
