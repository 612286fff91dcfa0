"""`tfirst calc`: work a question of capacity or placement out on paper."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from router.cli.calc.calculator import Calculator, Input
from router.cli.calc.calculators import CALCULATORS
from router.cli.calc.show import as_json, print_answer, print_list, save_plot
from router.errors import ConfigError


class CalcCommand:
    name = "calc"
    help = "work out capacity, placement and break-even points on paper"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Without a name: the list of calculators. Exit status: 0, or 2 for an input that cannot be used."
        )
        parser.set_defaults(calculator=None)
        names = parser.add_subparsers(title="calculators", metavar="NAME")
        for one in CALCULATORS.values():
            sub = names.add_parser(one.name, help=one.summary, description=one.summary)
            sub.set_defaults(calculator=one)
            _configure(sub, one)

    def run(self, args: argparse.Namespace) -> int:
        console = Console()
        if args.calculator is None:
            print_list(CALCULATORS, console)
            return 0
        return _run(args.calculator, args, console)


def _configure(parser: argparse.ArgumentParser, calculator: Calculator) -> None:
    for one in calculator.inputs:
        what = ", ".join(part for part in (one.about, one.unit, one.within) if part)
        about = f"{what} (default {one.default})".replace("%", "%%")
        parser.add_argument(f"--{one.name}", default=one.default, metavar="X", help=about, dest=one.keyword)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="a list of {id, value, unit}")
    if calculator.plots:
        names = [plot.name for plot in calculator.plots]
        what = "; ".join(f"{plot.name}: {plot.about}" for plot in calculator.plots)
        shown.add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw {what}".replace("%", "%%"))
        shown.add_argument("--figure", choices=names, default=names[0], help="which one (default %(default)s)")


def _run(calculator: Calculator, args: argparse.Namespace, console: Console) -> int:
    inputs = {one.keyword: _parsed(one, getattr(args, one.keyword)) for one in calculator.inputs}
    try:
        answer = calculator.answer(**inputs)
        encoded = as_json(answer) if args.json else None
        if calculator.plots and args.plot is not None:
            save_plot(next(plot for plot in calculator.plots if plot.name == args.figure), args.plot, inputs)
    except (ValueError, ArithmeticError) as exc:  # the latter from numbers no machine or model has
        raise ConfigError(f"{calculator.name}: {exc}") from exc
    except MemoryError as exc:
        raise ConfigError(f"{calculator.name}: a count is too large to be worked out in this machine's memory") from exc
    if encoded is not None:
        print(encoded)
    else:
        print_answer(answer, console)
    return 0


def _parsed(one: Input, text: str) -> Any:
    try:
        return one.parse(text)
    except ValueError as exc:
        raise ConfigError(f"--{one.name} is {exc}, not {text!r}") from exc


COMMAND = CalcCommand()
