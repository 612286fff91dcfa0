"""`tfirst receipts`: how right the estimates of the receipts in a file were."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import isnan
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from router.cli.screen import Screen
from router.receipts.reading import read_receipts
from router.study.bars import seconds
from router.study.calibration import Calibration, Rightness, calibration_of


class ReceiptsCommand:
    name = "receipts"
    help = "say how right the estimates in receipts were: error, coverage of quantiles, regret"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "Exit status: 0, or 2 when a file cannot be read or holds no receipt."
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="receipts; rotated files are read too")
        parser.add_argument("--json", action="store_true", help="print all numbers as JSON")

    def run(self, args: argparse.Namespace) -> int:
        kept = read_receipts(args.files)
        found = calibration_of(kept.receipts)
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(found)).decode())
            return 0
        show(found, Screen())
        if kept.passed_over:
            print(kept.passed_over)
        return 0


def show(found: Calibration, console: Console) -> None:
    """Print all tables."""
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes.items())
    late = "" if isnan(found.late) else f"; {found.late:.1%} of the first tokens were late"
    console.print(f"{found.requests} requests: {outcomes}{late}", highlight=False)
    table = Table(title="first token against its estimate", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for name in ("requests", "bias", "error", "p90 covers", "p99 covers"):
        table.add_column(name, justify="right", no_wrap=True)
    sections: Sequence[tuple[str, Sequence[Rightness]]] = (
        ("", [found.whole]),
        ("by replica", found.by_replica),
        ("by path", found.by_path),
        ("by prompt tokens", found.by_length),
    )
    for title, rows in sections:
        if title and rows:
            table.add_row(title, style="bold")
        for row in rows:
            table.add_row(
                f"  {row.name}" if title else row.name,
                str(row.requests),
                share(row.bias, signed=True),
                share(row.error),
                share(row.covered_p90),
                share(row.covered_p99),
            )
    console.print(table)
    _show_regret(found, console)


def share(value: float, *, signed: bool = False) -> str:
    """A share as percent; "-" where it is not known.

    >>> [share(0.0712), share(0.0712, signed=True), share(float("nan"))]
    ['7.1 %', '+7.1 %', '-']
    """
    return "-" if isnan(value) else f"{value * 100:{'+' if signed else ''}.1f} %"


def _show_regret(found: Calibration, console: Console) -> None:
    table = Table(title="regret by arm", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for name in ("requests", "mean", "p50", "p90", "regretted"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.regret:
        times = [("-" if isnan(value_s) else seconds(value_s)) for value_s in (row.mean_s, row.p50_s, row.p90_s)]
        table.add_row(row.name, str(row.requests), *times, share(row.regretted))
    console.print(table)


COMMAND = ReceiptsCommand()
