"""`tfirst replay`: judge rules on a trace in virtual time, with the router's own dispatcher."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from loadtest.replay.central import ORDERS
from loadtest.replay.flags import DEFAULT_CARDS, DEFAULT_POLICIES, DEFAULT_REPLICAS, add_flags, number
from loadtest.replay.fleets import Fleets, with_blocks
from loadtest.replay.formats import BadTrace, Trace
from loadtest.replay.html_report import middle, render
from loadtest.replay.jobs import Done, Job, Source, fleet_of, play_all, trace_of
from loadtest.replay.measure import Summary, goodput, grouped, hold_against
from loadtest.replay.outputs import Report, Setting, as_csv, as_json, tables
from loadtest.replay.run import Conditions, queued
from loadtest.replay.workload import Demand, part_of
from router.admission import AdmissionConfig
from router.config import PolicyConfig
from router.errors import ConfigError
from router.rules import label, rules_of

EXIT_FAILED, EXIT_USAGE = 1, 2
YARDSTICK = ORDERS[0]  # of placement: played beside the rules, which are held against it
LARGEST_ERROR = 10.0  # standard deviation of the factor on an estimate
NOT_IN_A_FILE_NAME = re.compile(r"[^A-Za-z0-9._=+-]+")


class ReplayCommand:
    """The subcommand, as `router.cli.main` finds it."""

    name = "replay"
    help = "judge rules on a trace: the router's own decisions against simulated engines, in virtual time"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        try:
            return replay(args)
        except BadTrace as exc:
            print(f"tfirst replay: {exc}", file=sys.stderr)
            return EXIT_USAGE


def replay(args: argparse.Namespace) -> int:
    """Play what the flags say, and show it; the exit status."""
    console = Console()
    jobs = jobs_of(args)
    trace = trace_of(jobs[0].source)
    processes = args.jobs or min(os.cpu_count() or 1, len(jobs))
    check_outputs(args)
    with progress_bar(console, jobs, trace) as on_progress:
        done = play_all(jobs, processes, on_progress)
    report = report_of(args, trace, done)
    write_outputs(args, report, done)  # before anything is printed: the reader of a pipe may have gone
    for table in tables(report, console.width):
        console.print(table)
    for sentence in remarks(args, trace, done):
        console.print(sentence)
    return EXIT_FAILED if any(run.refused for run in of_rules(done)) else 0


def of_rules(done: Sequence[Done]) -> list[Summary]:
    """Runs of rules and not of central orders: what these cannot place is not the router's fault."""
    return [one.summary for one in done if one.job.conditions.policy.name not in ORDERS]


def remarks(args: argparse.Namespace, trace: Trace, done: Sequence[Done]) -> Iterator[str]:
    """What a reader of the numbers must know besides, all runs of rules together."""
    missing, cut = (sum(getattr(run, name) for run in of_rules(done)) for name in ("refused", "cut"))
    first, last = args.slice
    if (first, last) != (0, 1):
        yield f"Played were the requests from {first:.0%} to {last:.0%} of the trace."
    if trace.left_out:
        rows = "1 row" if trace.left_out == 1 else f"{trace.left_out} rows"
        yield f"Left out: {rows} of the trace without a prompt or an output."
    if cut:
        yield f"{cut} counted answers were cut short: with their prompts they filled all a replica can hold."
    if missing:
        yield f"{missing} counted requests were not answered."


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Every run that is asked for, checked as far as that needs no playing.

    Raises
    ------
    ConfigError, BadTrace : a flag, the trace or the fleet cannot be used.
    """
    sources = sources_of(args)
    part_of(trace_of(sources[0]).rows, args.slice)  # what is wrong here is said before any process is started
    check_conditions(args)
    fleets = [fleet_of(source) for source in sources]
    directed = is_directed(args, fleets[0])
    prices = tuple(price_of(text, set(fleets[-1].cards)) for text in args.card_price)
    loads: list[float | None] = args.load or [None]
    shown = middle(sources), middle(loads), args.seeds[0]
    return [
        Job(
            source=source,
            demand=demand_of(args, load, seed),
            conditions=conditions_of(args, rule, seed, directed=directed),
            warm_up=args.warm_up,
            deadline_s=args.deadline_s,
            card_prices=prices,
            receipts=receipts_file(args, rule, source, load, seed),
            detail=args.html is not None and (source, load, seed) == shown,
            bounds=not args.no_bounds,
        )
        for source, load, seed, rule in product(sources, loads, args.seeds, rules_played(args))
    ]


def rules_played(args: argparse.Namespace) -> list[PolicyConfig]:
    """The rules that are named, and the yardstick behind them."""
    rules = rules_of(args.policy or [DEFAULT_POLICIES], orders=ORDERS)
    if args.no_bounds or any(rule.name == YARDSTICK for rule in rules):
        return rules
    return [*rules, PolicyConfig(name=YARDSTICK)]


def check_conditions(args: argparse.Namespace) -> None:
    if args.estimator_error > LARGEST_ERROR:
        raise ConfigError(f"--estimator-error {args.estimator_error:g}: more than {LARGEST_ERROR:g} is no estimate")
    if 0 < args.load_report_period_ms < 1:
        raise ConfigError("--load-report-period-ms must be 0 or at least 1")


def demand_of(args: argparse.Namespace, load: float | None, seed: int) -> Demand:
    return Demand(
        args.requests,
        load,
        args.speedup or 1.0,
        seed,
        shared_prefixes=not args.no_shared_prefixes,
        first_tokens_only=args.first_tokens_only,
        part=args.slice,
    )


def sources_of(args: argparse.Namespace) -> list[Source]:
    """The trace with each fleet it is played on: one file, or a fleet for each number of replicas."""
    if args.fleet is not None and (args.replicas is not None or args.cards is not None):
        raise ConfigError("--fleet already says which replicas there are; leave --replicas and --cards out")
    cards = tuple(card.strip() for card in (args.cards or DEFAULT_CARDS).split(",") if card.strip())
    sizes = args.replicas or [max(DEFAULT_REPLICAS, len(cards))]
    if args.cards is None:  # nobody asked for more cards than replicas
        return [Source(args.trace, args.format, args.fleet, size, cards[:size]) for size in sizes]
    return [Source(args.trace, args.format, args.fleet, size, cards) for size in sizes]


def is_directed(args: argparse.Namespace, fleet: Fleets) -> bool:
    """Whether the router decides what is fetched: by the flag, else by the fleet file."""
    return fleet.directed if args.fetch is None else args.fetch == "directed"


def conditions_of(args: argparse.Namespace, rule: PolicyConfig, seed: int, *, directed: bool) -> Conditions:
    return Conditions(
        policy=rule,
        seed=seed,
        event_delay_s=args.event_delay_ms / 1000,
        load_period_s=args.load_report_period_ms / 1000 or None,
        estimator_error=args.estimator_error,
        directed=directed,
        admission=admission_of(args, rule),
    )


def admission_of(args: argparse.Namespace, rule: PolicyConfig) -> AdmissionConfig:
    """The queue that is asked for; a central order is one already."""
    if args.queue == "none" or rule.name in ORDERS:
        return AdmissionConfig()
    return queued(args.queue, max_prefills=args.max_prefills, stretch=args.stretch)


def receipts_file(
    args: argparse.Namespace, rule: PolicyConfig, source: Source, load: float | None, seed: int
) -> Path | None:
    """Where the decisions of one run go; a central order has none."""
    if args.receipts is None or rule.name in ORDERS:
        return None
    on = f"-on{source.replicas}" if len(args.replicas or []) > 1 else ""
    at = "" if load is None else f"-load{load:g}"
    return Path(args.receipts) / f"{NOT_IN_A_FILE_NAME.sub('-', label(rule))}{on}{at}-seed{seed}.jsonl"


def price_of(text: str, cards: set[str]) -> tuple[str, float]:
    """CARD=X as a pair."""
    card, _equals, value = text.partition("=")
    if card not in cards:
        raise ConfigError(f"--card-price {text}: the fleet has no card {card!r}, only {', '.join(sorted(cards))}")
    try:
        return card, number(float, "a price above 0")(value)
    except argparse.ArgumentTypeError as exc:
        raise ConfigError(f"--card-price {text}: {exc}") from exc


@contextmanager
def progress_bar(console: Console, jobs: Sequence[Job], trace: Trace) -> Iterator[Callable[[int, int], None]]:
    """One line for all runs and one for each that is under way, filled as requests arrive."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        demand = jobs[0].demand
        there = round((demand.part[1] - demand.part[0]) * len(trace.rows))
        total = min(demand.requests or there, there)
        everything = progress.add_task(f"{len(jobs)} runs", total=total * len(jobs))
        tasks = [progress.add_task(job.label, total=total, start=False, visible=False) for job in jobs]
        seen = [0] * len(jobs)

        def on_progress(job: int, arrived: int) -> None:
            seen[job] = min(arrived, total)
            progress.start_task(tasks[job])
            progress.update(tasks[job], completed=arrived, visible=arrived < total)
            progress.update(everything, completed=sum(seen))

        yield on_progress


def report_of(args: argparse.Namespace, trace: Trace, done: Sequence[Done]) -> Report:
    sources = list(dict.fromkeys(one.job.source for one in done))
    fleet, conditions = fleet_of(middle(sources)), done[0].job.conditions
    runs = [one.summary for one in done]
    hold_against(runs, YARDSTICK)
    groups = grouped(runs)
    return Report(
        setting=Setting(
            trace=args.trace.name,
            format=trace.format,
            rows=len(trace.rows) + trace.left_out,
            left_out=trace.left_out,
            part=args.slice,
            fleet=args.fleet.name if args.fleet is not None else "made from --replicas and --cards",
            sizes=list(dict.fromkeys(run.replicas for run in runs)),
            replicas=fleet.replicas,
            cards=fleet.cards,
            requests=args.requests,
            speedup=None if args.load else args.speedup or 1.0,
            warm_up=args.warm_up,
            deadline_s=args.deadline_s,
            event_delay_s=conditions.event_delay_s,
            load_period_s=conditions.load_period_s,
            estimator_error=args.estimator_error,
            fetch="directed" if conditions.directed else "engine",
        ),
        runs=runs,
        groups=groups,
        goodput=goodput(groups),
    )


def check_outputs(args: argparse.Namespace) -> None:
    """Find out before a long run, not after it, that its results cannot be written."""
    if args.receipts is not None:
        try:
            args.receipts.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"--receipts {args.receipts}: {exc.strerror}") from exc
    for flag in ("json", "csv", "html"):
        path = getattr(args, flag)
        if path is not None and path.is_dir():
            raise ConfigError(f"--{flag} {path}: it is a folder")
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise ConfigError(f"--{flag} {path}: its folder does not exist or cannot be written")


def write_outputs(args: argparse.Namespace, report: Report, done: Sequence[Done]) -> None:
    if args.json is not None:
        args.json.write_bytes(as_json(report))
    if args.csv is not None:
        args.csv.write_text(as_csv(report.runs), encoding="utf-8")
    if args.html is not None:
        details = [one for one in done if one.result is not None]
        source = details[0].job.source
        engines = with_blocks(fleet_of(source), router_tokens=1, engine_tokens=trace_of(source).block_tokens).engines
        args.html.write_text(render(report, details, engines), encoding="utf-8")


COMMAND = ReplayCommand()
