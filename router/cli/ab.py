"""`tfirst ab`: which arm of an experiment is better, from its receipts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from router.cli.screen import Screen
from router.errors import ConfigError
from router.receipts.reading import read_receipts
from router.study.ab import METRICS, WORDS, Comparison, Rules, amount, before_change, comparisons
from router.study.ab_page import draw, render


class AbCommand:
    name = "ab"
    help = "compare the arms of an experiment by its receipts, and say what may be concluded"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "The test may be looked at as often as one likes. Exit status: 0, or 2 when a file cannot be used or has"
            " no two arms."
        )
        parser.add_argument("files", nargs="+", type=Path, metavar="RECEIPTS", help="rotated files are read too")
        parser.add_argument("--metric", choices=tuple(METRICS), default="first_token", help="default %(default)s")
        parser.add_argument("--control", metavar="ARM", help="what others are compared with (default: first by name)")
        parser.add_argument("--alpha", type=between(0.0, 1.0), default=0.05, metavar="P", help="default %(default)g")
        parser.add_argument(
            "--effect",
            type=between(0.0, 100.0),
            default=0.1,
            metavar="SHARE",
            help="difference the test is sharpest for, of the mean (default %(default)g)",
        )
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the bootstrap (default 0)")
        parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
        parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")
        parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture; needs tfirst[plots]")

    def run(self, args: argparse.Namespace) -> int:
        if args.seed < 0:
            raise ConfigError("--seed must be 0 or more")
        kept = read_receipts(args.files)
        rules = Rules(alpha=args.alpha, effect=args.effect, seed=args.seed)
        found = comparisons(kept.receipts, args.metric, args.control, rules)
        if args.html is not None:
            try:
                args.html.write_text(render(found))
            except OSError as exc:
                raise ConfigError(f"--html {args.html}: {exc.strerror}") from exc
        if args.png is not None:
            draw(found, args.png)
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(found)).decode())
            return 0
        console = Screen()
        for one in found:
            show(one, console)
        if kept.passed_over:
            print(kept.passed_over)
        return 0


def between(low: float, high: float) -> Callable[[str], float]:
    """A converter for argparse: a number between both, ends excluded."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low
        if not low < value < high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number between {low:g} and {high:g}")
        return value

    return convert


def show(one: Comparison, console: Console) -> None:
    """Print one arm against the control."""
    sizes = (
        f"{one.control}: {one.control_requests} requests of {one.control_units} units;"
        f" {one.arm}: {one.arm_requests} of {one.arm_units}"
    )
    console.print(f"\n{sizes}", highlight=False)
    if one.before_change:
        console.print(before_change(one), highlight=False, soft_wrap=True)
    console.print(
        f"checks: sample ratio p = {one.ratio_p_value:.2g}, mix of prompt lengths p = {one.mix_p_value:.2g}",
        highlight=False,
    )
    table = Table(title=WORDS[one.metric], title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (one.control, one.arm, "difference", f"{1 - one.alpha:.0%} from", "to"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(each.statistic, each) for each in one.differences]
    rows += [(f"mean, {bucket.name} tokens", bucket.difference) for bucket in one.buckets]
    for name, each in rows:
        values = (each.control, each.arm, each.difference, each.low, each.high)
        table.add_row(name, *(amount(one.metric, value) for value in values))
    console.print(table)
    console.print(one.verdict, highlight=False, soft_wrap=True)


COMMAND = AbCommand()
