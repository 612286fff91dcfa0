"""`tfirst replay`: judge rules on a trace in virtual time, with the router's own dispatcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import inf
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from loadtest.replay.central import ORDERS
from loadtest.replay.fleets import Fleets, with_blocks
from loadtest.replay.formats import FORMATS, BadTrace, Trace
from loadtest.replay.html_report import detail_load, render
from loadtest.replay.jobs import Done, Job, Source, fleet_of, play_all, trace_of
from loadtest.replay.measure import goodput, grouped
from loadtest.replay.outputs import Report, Setting, as_csv, as_json, tables
from loadtest.replay.run import Conditions
from loadtest.replay.workload import Demand
from router.config import LoadConfig, PolicyConfig
from router.errors import ConfigError
from router.plugins import build_policy

EXIT_FAILED, EXIT_USAGE = 1, 2
DEFAULT_REPLICAS, DEFAULT_CARDS = 4, "A100,H20"

EPILOG = """\
examples:
  tfirst replay --trace trace.jsonl --replicas 16 --cards A100 --load 0.7 --policy round_robin,ttft,e2e
  tfirst replay --trace trace.jsonl --fleet fleet.yaml --load 0.5,0.7,0.9 --seeds 0,1,2 --html report.html
  tfirst replay --trace burst.csv --requests 3000 --speedup 4 --estimator-error 0.2

The policies are those of `tfirst policies`, and central_fcfs and central_sjf: one queue before all replicas, which
no router can be. Numbers are those of cards of normal speed, whatever `speed` the fleet file has.

exit status: 0 every request was answered, 1 some were not, 2 a wrong flag, trace or fleet file
"""


LARGEST_ERROR = 10.0  # standard deviation of the factor on an estimate


class ReplayCommand:
    """The subcommand, as `router.cli.main` finds it."""

    name = "replay"
    help = "judge rules on a trace: the router's own decisions against simulated engines, in virtual time"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = EPILOG
        _traffic_flags(parser.add_argument_group("traffic"))
        _fleet_flags(parser.add_argument_group("fleet (a file, or replicas and cards)"))
        _condition_flags(parser.add_argument_group("rules and conditions"))
        _output_flags(parser.add_argument_group("output"))

    def run(self, args: argparse.Namespace) -> int:
        try:
            return replay(args)
        except BadTrace as exc:
            print(f"tfirst replay: {exc}", file=sys.stderr)
            return EXIT_USAGE


Group = argparse._ArgumentGroup  # argparse has no public name for it


def _traffic_flags(group: Group) -> None:
    group.add_argument("--trace", type=Path, required=True, metavar="FILE", help="requests to play, gzipped or not")
    group.add_argument("--format", choices=FORMATS, help="of the trace (default: found from its first line)")
    group.add_argument(
        "--requests",
        type=number(int, "a whole number of at least 1"),
        metavar="N",
        help="about N, in whole conversations drawn by the seed (default all)",
    )
    group.add_argument(
        "--no-shared-prefixes", action="store_true", help="every prompt its own: the control in which no cache can help"
    )
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--load", type=numbers(float, "loads above 0"), metavar="X,..", help="ideal cached load, or several to sweep"
    )
    pace.add_argument(
        "--speedup", type=number(float, "a number above 0"), metavar="X", help="the trace X times faster (default 1)"
    )
    group.add_argument(
        "--seeds",
        "--seed",
        type=numbers(int, "seeds of at least 0", low=0),
        default=[0],
        metavar="S,..",
        help="of draws, engines and rules; several give intervals (default 0)",
    )


def _fleet_flags(group: Group) -> None:
    group.add_argument("--fleet", type=Path, metavar="FILE", help="fleet file, as for `tfirst sim` and `tfirst serve`")
    group.add_argument(
        "--replicas", type=number(int, "a whole number of at least 1"), metavar="N", help=f"default {DEFAULT_REPLICAS}"
    )
    group.add_argument("--cards", metavar="A,..", help=f"their cards, in equal runs (default {DEFAULT_CARDS})")
    group.add_argument(
        "--card-price", action="append", default=[], metavar="CARD=X", help="money per hour, for the cost per request"
    )


def _condition_flags(group: Group) -> None:
    group.add_argument("--policy", default="round_robin,ttft,e2e", metavar="A,..", help="default round_robin,ttft,e2e")
    period_ms = LoadConfig().period_s * 1000
    group.add_argument(
        "--event-delay-ms", type=at_least_0, default=0.0, metavar="X", help="of cache events (default 0)"
    )
    group.add_argument(
        "--load-report-period-ms",
        type=at_least_0,
        default=period_ms,
        metavar="X",
        help=f"0: none (default {period_ms:g})",
    )
    group.add_argument(
        "--estimator-error", type=at_least_0, default=0.0, metavar="SHARE", help="standard deviation, 0.2 is 20 %%"
    )
    group.add_argument(
        "--fetch", choices=("engine", "directed"), help="who decides what is fetched (default: as the fleet file says)"
    )
    group.add_argument("--warm-up", type=share, default=0.15, metavar="SHARE", help="not counted (default 0.15)")
    group.add_argument(
        "--deadline-s",
        type=number(float, "a number above 0"),
        default=5.0,
        metavar="X",
        help="of the first token (default 5)",
    )


def _output_flags(group: Group) -> None:
    group.add_argument(
        "--jobs", type=number(int, "a whole number of at least 1"), metavar="N", help="processes at a time"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="all numbers")
    group.add_argument("--csv", type=Path, metavar="FILE", help="a line for each run")
    group.add_argument("--html", type=Path, metavar="FILE", help="a report with plots")
    group.add_argument("--receipts", type=Path, metavar="DIR", help="every decision, a file for each run")


def number(kind: Callable[[str], float], what: str, low: float = 0.0) -> Callable[[str], float]:
    """A converter for argparse: a finite number above `low`."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = low
        if not low < value < inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


def numbers(kind: Callable[[str], float], what: str, low: float | None = None) -> Callable[[str], list[float]]:
    """A converter for argparse: several numbers with commas, above 0, or from `low` on when it is given."""

    def convert(text: str) -> list[float]:
        try:
            values = list(dict.fromkeys(kind(part) for part in text.split(",")))
        except ValueError:
            values = []
        if not values or not all((value > 0 if low is None else value >= low) and value < inf for value in values):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}")
        return values

    return convert


def at_least_0(text: str) -> float:
    """A converter for argparse: a finite number, 0 or more."""
    if text.lstrip("+").rstrip("0.") == "":
        return 0.0
    return number(float, "a number of at least 0")(text)


def share(text: str) -> float:
    """A converter for argparse: 0 <= share < 1."""
    value = at_least_0(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share below 1")
    return value


def replay(args: argparse.Namespace) -> int:
    """Play what the flags say, and show it; the exit status."""
    console = Console()
    jobs = jobs_of(args)
    trace = trace_of(jobs[0].source)
    processes = args.jobs or min(os.cpu_count() or 1, len(jobs))
    check_outputs(args)
    with progress_bar(console, jobs, trace) as on_progress:
        done = play_all(jobs, processes, on_progress)
    report = report_of(args, jobs[0], trace, done)
    write_outputs(args, report, done)  # before anything is printed: the reader of a pipe may have gone
    for table in tables(report, console.width):
        console.print(table)
    missing = sum(one.summary.refused for one in done)
    for sentence in remarks(trace, done):
        console.print(sentence)
    return EXIT_FAILED if missing else 0


def remarks(trace: Trace, done: Sequence[Done]) -> Iterator[str]:
    """What a reader of the numbers must know besides, all runs together."""
    missing, cut = sum(one.summary.refused for one in done), sum(one.summary.cut for one in done)
    if trace.left_out:
        yield f"{trace.left_out} rows of the trace have no prompt or no output and were left out."
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
    source = source_of(args)
    trace_of(source)  # read here first, so that what is wrong with it is said before any process is started
    fleet = fleet_of(source)
    policies = list(dict.fromkeys(name.strip() for name in args.policy.split(",") if name.strip()))
    if args.estimator_error > LARGEST_ERROR:
        raise ConfigError(f"--estimator-error {args.estimator_error:g}: more than {LARGEST_ERROR:g} is no estimate")
    if 0 < args.load_report_period_ms < 1:
        raise ConfigError("--load-report-period-ms must be 0 or at least 1")
    for name in policies:
        if name not in ORDERS:
            build_policy(name, {}, 0)
    if not policies:
        raise ConfigError("--policy names no policy")
    directed = is_directed(args, fleet)
    loads: list[float | None] = args.load or [None]
    prices = tuple(price_of(text, set(fleet.cards)) for text in args.card_price)
    shown = detail_load(loads)
    return [
        Job(
            source=source,
            demand=Demand(args.requests, load, args.speedup or 1.0, seed, shared_prefixes=not args.no_shared_prefixes),
            conditions=conditions_of(args, policy, seed, directed=directed),
            warm_up=args.warm_up,
            deadline_s=args.deadline_s,
            card_prices=prices,
            receipts=receipts_file(args, policy, load, seed),
            detail=args.html is not None and load == shown and seed == args.seeds[0],
        )
        for load, seed, policy in product(loads, args.seeds, policies)
    ]


def source_of(args: argparse.Namespace) -> Source:
    if args.fleet is not None and (args.replicas is not None or args.cards is not None):
        raise ConfigError("--fleet already says which replicas there are; leave --replicas and --cards out")
    cards = tuple(card.strip() for card in (args.cards or DEFAULT_CARDS).split(",") if card.strip())
    return Source(args.trace, args.format, args.fleet, args.replicas or max(DEFAULT_REPLICAS, len(cards)), cards)


def is_directed(args: argparse.Namespace, fleet: Fleets) -> bool:
    """Whether the router decides what is fetched: by the flag, else by the fleet file."""
    return fleet.directed if args.fetch is None else args.fetch == "directed"


def conditions_of(args: argparse.Namespace, policy: str, seed: int, *, directed: bool) -> Conditions:
    return Conditions(
        policy=PolicyConfig(name=policy),
        seed=seed,
        event_delay_s=args.event_delay_ms / 1000,
        load_period_s=args.load_report_period_ms / 1000 or None,
        estimator_error=args.estimator_error,
        directed=directed,
    )


def receipts_file(args: argparse.Namespace, policy: str, load: float | None, seed: int) -> Path | None:
    if args.receipts is None or policy in ORDERS:
        return None
    at = "" if load is None else f"-load{load:g}"
    return Path(args.receipts) / f"{policy}{at}-seed{seed}.jsonl"


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
    """One line for each run that has begun, filled as its requests arrive."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = jobs[0].demand.requests or len(trace.rows)
        tasks = [progress.add_task(job.label, total=min(total, len(trace.rows)), start=False) for job in jobs]

        def on_progress(job: int, arrived: int) -> None:
            progress.start_task(tasks[job])
            progress.update(tasks[job], completed=arrived)

        yield on_progress


def report_of(args: argparse.Namespace, job: Job, trace: Trace, done: Sequence[Done]) -> Report:
    fleet = fleet_of(job.source)
    runs = [one.summary for one in done]
    groups = grouped(runs)
    return Report(
        setting=Setting(
            trace=args.trace.name,
            format=trace.format,
            rows=len(trace.rows) + trace.left_out,
            left_out=trace.left_out,
            fleet=args.fleet.name if args.fleet is not None else "made from --replicas and --cards",
            replicas=fleet.replicas,
            cards=fleet.cards,
            requests=args.requests,
            speedup=None if args.load else args.speedup or 1.0,
            warm_up=args.warm_up,
            deadline_s=args.deadline_s,
            event_delay_s=job.conditions.event_delay_s,
            load_period_s=job.conditions.load_period_s,
            estimator_error=args.estimator_error,
            fetch="directed" if job.conditions.directed else "engine",
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
        source = done[0].job.source
        engines = with_blocks(fleet_of(source), router_tokens=1, engine_tokens=trace_of(source).block_tokens).engines
        args.html.write_text(render(report, [one for one in done if one.result is not None], engines), encoding="utf-8")


COMMAND = ReplayCommand()
