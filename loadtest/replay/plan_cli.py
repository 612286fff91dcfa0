"""`tfirst plan`: which deployment of a fleet's cards holds a workload, and what would change that."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from estimators.planning.deployments import RequestKind, kinds_of_lengths
from estimators.planning.plan import Assessment, Question, ranked
from loadtest.replay.bounds import ideal_cached_tokens
from loadtest.replay.flags import number
from loadtest.replay.formats import BadTrace, read_trace
from loadtest.replay.plan_check import Check, Watch, check, check_table, unplayable
from router.cli.plan import (
    as_plain,
    deployment_text,
    kinds_of,
    question_of,
    read_fleet,
    read_workload,
    report_of,
    sentences,
    tables,
)
from router.errors import ConfigError

DEFAULT_TOP, DEFAULT_SECONDS = 8, 240.0
EXIT_NOTHING_HOLDS = 1

EPILOG = """\
example:
  tfirst plan --fleet fleet.yaml --workload workload.yaml --simulate 1

The fleet file is that of `tfirst serve`; its replicas need no addresses. Prices are its cards' `usd_per_hour`, and what
cards reach their `compute_share` and `memory_share`. The workload file names a rate, kinds of requests or a trace, and
targets; see docs/planning.md.

exit status: 0 something holds, 1 nothing does, 2 a wrong flag or file
"""


class PlanCommand:
    """The subcommand, as `router.cli.main` finds it."""

    name = "plan"
    help = "find the deployment that holds a workload at the lowest cost, and what would change that answer"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = EPILOG
        whole = number(int, "a whole number of at least 1")
        parser.add_argument("--fleet", type=Path, required=True, metavar="FILE", help="model, cards, links")
        parser.add_argument("--workload", type=Path, required=True, metavar="FILE", help="load and targets")
        parser.add_argument("--top", type=whole, default=DEFAULT_TOP, metavar="N", help="choices shown (default 8)")
        parser.add_argument("--json", action="store_true", help="everything, as JSON on standard output")
        parser.add_argument(
            "--simulate", type=whole, metavar="N", help="play the first N choices, and say where formula and play part"
        )
        parser.add_argument(
            "--seconds",
            type=number(float, "a number above 0"),
            default=DEFAULT_SECONDS,
            metavar="S",
            help="of arrivals that are played (default 240)",
        )
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the play (default 0)")

    def run(self, args: argparse.Namespace) -> int:
        question = question_from(args.fleet, args.workload)
        try:
            report = report_of(question, ranked(question))
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        console = Console()
        checks = checks_of(question, report.found, args) if args.simulate else []
        if args.json:
            plain = {**as_plain(report), **({"simulated": checks} if args.simulate else {})}
            print(msgspec.json.format(msgspec.json.encode(plain), indent=1).decode())
        else:
            for table in tables(report, top=args.top, width=console.width):
                console.print(table)
            for sentence in sentences(report):
                console.print(sentence)
            if args.simulate:
                show_checks(console, question, report.found, checks)
        return 0 if report.first.holds else EXIT_NOTHING_HOLDS


def question_from(fleet_file: Path, workload_file: Path) -> Question:
    """Both files as one question. Raises ConfigError."""
    fleet, workload = read_fleet(fleet_file), read_workload(workload_file)
    if workload.trace is None:
        assert workload.rate_rps is not None, "checked when it was read"
        return question_of(fleet, workload, kinds_of(workload), workload.rate_rps)
    try:
        kinds, rate_rps = kinds_of_trace(workload_file.parent / workload.trace)
    except BadTrace as exc:
        raise ConfigError(str(exc)) from exc
    return question_of(fleet, workload, kinds, workload.rate_rps or rate_rps)


def kinds_of_trace(path: Path) -> tuple[Sequence[RequestKind], float]:
    """Kinds that stand for a trace's requests, with what one perfect cache would have of each, and its mean rate.

    Raises
    ------
    BadTrace : the file cannot be read, or all of it comes at once and has no rate.
    """
    trace = read_trace(path, None)
    rows = trace.rows
    span_s = rows[-1].at_s - rows[0].at_s
    if span_s <= 0:
        raise BadTrace(path, "all requests come at one moment, so it has no rate")
    tokens = trace.block_tokens
    cached = ideal_cached_tokens(rows, block_tokens=tokens, tokens_per_id=tokens)
    kinds = kinds_of_lengths(
        [row.input_length for row in rows],
        [row.output_length for row in rows],
        [int(one) for one in cached],
    )
    return kinds, (len(rows) - 1) / span_s


def checks_of(question: Question, found: Sequence[Assessment], args: argparse.Namespace) -> list[Check]:
    """The first choices that simulated engines can play, played. Raises ConfigError where the model cannot be."""
    chosen = [one for one in found if unplayable(question.facts, one.deployment) is None][: args.simulate]
    checks = []
    for one in chosen:
        with progress_of(deployment_text(question.facts, one.deployment)) as watch:
            checks.append(check(question, one, seconds=args.seconds, seed=args.seed, watch=watch))
    return checks


@contextmanager
def progress_of(deployment: str) -> Iterator[Watch]:
    """A line for each play of one deployment, where somebody can see it; results on standard output stay whole."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def watch(play: str, ended: int, of: int) -> None:
            if play not in tasks:
                tasks[play] = progress.add_task(f"{deployment}, {play}", total=of)
            progress.update(tasks[play], completed=ended)

        yield watch


def show_checks(console: Console, question: Question, found: Sequence[Assessment], checks: Sequence[Check]) -> None:
    """Each play beside its formula, and which better choices could not be played."""
    for one in checks:
        console.print(check_table(question.facts, one))
        for sentence in one.parts:
            console.print(sentence)
    for choice in found[: len(checks) or 1]:
        why = unplayable(question.facts, choice.deployment)
        if why is not None:
            name = deployment_text(question.facts, choice.deployment)
            console.print(f"Not played: {choice.deployment.organisation.value}, {name}: {why}.")


COMMAND = PlanCommand()
