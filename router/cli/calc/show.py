"""Answers on the screen, as JSON and as figures."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from math import inf, isnan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from router.cli.calc.calculator import Answer, Calculator, Plot, Scalar, Table, Value
from router.errors import ConfigError

INCHES = (8.0, 5.0)
DOTS_PER_INCH = 150


def as_json(answer: Answer) -> str:
    """A list of {id, value, unit}; what has no limit is null, as JSON knows no infinity."""
    values = [{"id": one.name, "value": one.value, "unit": one.unit} for one in answer.values]
    return msgspec.json.format(msgspec.json.encode(values, enc_hook=_plain), indent=1).decode()


def _plain(one: Any) -> Any:
    """Numbers and arrays of numpy, which pass for floats everywhere but in JSON."""
    if isinstance(one, np.generic | np.ndarray):
        return one.tolist()
    raise TypeError(f"{type(one).__name__} is no value of an answer")


def print_answer(answer: Answer, console: Console) -> None:
    single = [one for one in answer.values if isinstance(one.value, Scalar)]
    if single:
        console.print(_values(single))
    for table in answer.tables:
        console.print(_table(table))
    for note in answer.notes:
        console.print(note)


def print_list(calculators: Mapping[str, Calculator], console: Console) -> None:
    table = RichTable(box=None, pad_edge=False, show_header=False)
    for one in calculators.values():
        table.add_row(one.name, one.summary)
    console.print(table)
    console.print("\n`tfirst calc NAME --help` shows its inputs; --json prints values, --plot FILE.png draws.")


def save_plot(plot: Plot, path: Path, inputs: Mapping[str, Any]) -> None:
    """Draw into `path`; the suffix says in which format.

    Raises
    ------
    ConfigError : matplotlib is missing, or the file cannot be written as that
    """
    try:
        figure_class = import_module("matplotlib.figure").Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'tfirst[plots]'") from None
    figure = figure_class(figsize=INCHES, layout="constrained")
    plot.draw(figure, **inputs)
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--plot {path}: {exc}") from exc


def number_text(value: Scalar) -> str:
    """As people read it: four figures, whole numbers whole."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value == inf:
        return "no limit"
    if isnan(value):
        return "-"
    if isinstance(value, int) or (value == round(value) and abs(value) < 1e12):
        return f"{round(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _values(values: list[Value]) -> RichTable:
    table = RichTable(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for one in values:
        assert isinstance(one.value, Scalar)
        table.add_row(one.name.replace("_", " "), number_text(one.value), one.unit)
    return table


def _table(content: Table) -> RichTable:
    table = RichTable(title=content.title, title_justify="left")
    for index, column in enumerate(content.columns):
        is_text = all(isinstance(row[index], str) for row in content.rows)
        table.add_column(column, justify="left" if is_text else "right")
    for row in content.rows:
        table.add_row(*map(number_text, row))
    return table
