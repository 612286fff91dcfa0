"""The flags of `tfirst replay`, and what turns their text into values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path

from loadtest.replay.formats import FORMATS
from loadtest.replay.workload import PARTS
from router.admission import AdmissionConfig
from router.config import LoadConfig

DEFAULT_REPLICAS, DEFAULT_CARDS = 4, "A100,H20"
DEFAULT_POLICIES = "round_robin,ttft,e2e"

EPILOG = """\
examples:
  tfirst replay --trace trace.jsonl --replicas 16 --cards A100 --load 0.7 --policy round_robin,ttft,e2e
  tfirst replay --trace trace.jsonl --replicas 4,8,16,64 --load 0.5,0.7,0.9 --seeds 0,1,2 --html report.html
  tfirst replay --trace trace.jsonl --slice train --load 0.8 --policy 'e2e:queue_behind=0.5,e2e:queue_behind=2'
  tfirst replay --trace burst.csv --fleet fleet.yaml --requests 3000 --speedup 4 --estimator-error 0.2

The policies are those of `tfirst policies`, with settings behind a colon, and central_fcfs and central_sjf: one queue
before all replicas, which no router can be. central_fcfs is played beside the others unless --no-bounds is given.
Numbers are those of cards of normal speed, whatever `speed` the fleet file has.

exit status: 0 every rule answered every request, 1 some were not answered, 2 a wrong flag, trace or fleet file
"""

Group = argparse._ArgumentGroup  # argparse has no public name for it


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    _traffic_flags(parser.add_argument_group("traffic"))
    _fleet_flags(parser.add_argument_group("fleet (a file, or replicas and cards)"))
    _rule_flags(parser.add_argument_group("rules"))
    _condition_flags(parser.add_argument_group("conditions"))
    _output_flags(parser.add_argument_group("output"))


def _traffic_flags(group: Group) -> None:
    group.add_argument("--trace", type=Path, required=True, metavar="FILE", help="requests to play, gzipped or not")
    group.add_argument("--format", choices=FORMATS, help="of the trace (default: found from its first line)")
    group.add_argument(
        "--slice",
        type=part,
        default=(0.0, 1.0),
        metavar="A-B",
        help="only these shares of its requests in order of arrival, 0-1 is all; train is "
        "{:g}-{:g}, test {:g}-{:g}".format(*PARTS["train"], *PARTS["test"]),
    )
    group.add_argument(
        "--requests",
        type=number(int, "a whole number of at least 1"),
        metavar="N",
        help="about N, in whole conversations drawn by the seed (default all)",
    )
    group.add_argument(
        "--no-shared-prefixes", action="store_true", help="every prompt its own: the control in which no cache can help"
    )
    group.add_argument(
        "--first-tokens-only",
        action="store_true",
        help="every answer one token long: the control in which placement of prefills is all",
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
        "--replicas",
        type=numbers(int, "whole numbers of at least 1"),
        metavar="N,..",
        help=f"how many, or several numbers to sweep (default {DEFAULT_REPLICAS})",
    )
    group.add_argument("--cards", metavar="A,..", help=f"their cards, in equal runs (default {DEFAULT_CARDS})")
    group.add_argument(
        "--card-price", action="append", default=[], metavar="CARD=X", help="money per hour, for the cost per request"
    )


def _rule_flags(group: Group) -> None:
    group.add_argument(
        "--policy",
        action="append",
        metavar="A,B:X=1,Y=2",
        help=f"rules, settings behind a colon; may be repeated (default {DEFAULT_POLICIES})",
    )
    group.add_argument(
        "--no-bounds", action="store_true", help="without central_fcfs and the lower bound of the mean beside them"
    )


def _condition_flags(group: Group) -> None:
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
    group.add_argument(
        "--queue",
        choices=("none", "fcfs", "wspt"),
        default="none",
        help="requests wait in the engines (none, the default), or in the router by arrival or by expected work",
    )
    group.add_argument(
        "--max-prefills",
        type=number(int, "a whole number of at least 1"),
        default=1,
        metavar="N",
        help="with --queue: requests before their first token on each replica (default 1)",
    )
    group.add_argument(
        "--stretch",
        type=at_least_0,
        default=AdmissionConfig().stretch,
        metavar="X",
        help=f"of --queue wspt: age that a second of work weighs, seconds (default {AdmissionConfig().stretch:g})",
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
    with suppress(ValueError):
        if float(text) == 0.0:
            return 0.0
    return number(float, "a number of at least 0")(text)


def share(text: str) -> float:
    """A converter for argparse: 0 <= share < 1."""
    value = at_least_0(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share below 1")
    return value


def part(text: str) -> tuple[float, float]:
    """A converter for argparse: a name of PARTS, or A-B with 0 <= A < B <= 1."""
    if text in PARTS:
        return PARTS[text]
    first, _dash, last = text.partition("-")
    try:
        ends = float(first), float(last)
    except ValueError:
        ends = (1.0, 0.0)
    if not 0 <= ends[0] < ends[1] <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {', '.join(PARTS)} or A-B with 0 <= A < B <= 1")
    return ends
