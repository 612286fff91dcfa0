"""What a calculator is: inputs with units and ranges, a function of them, and figures where a curve says more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scalar = float | int | str | bool
Whole = Scalar | Sequence[Scalar] | Sequence[Sequence[Scalar]]


@dataclass(frozen=True, slots=True)
class Input:
    """One flag of a calculator, and the keyword of the same name (dashes as underscores) of its functions.

    default : as a person would type it; parsed like what they type
    unit : "GB/s", "tokens"; empty where there is none
    about : what it is, in lower case
    within : its range as help shows it, "> 0, <= 1"; empty where kinds of values are named in `about`
    parse : text to value; raises `ValueError` with what would be right, as "a number above 0"
    """

    name: str
    default: str
    unit: str
    about: str
    parse: Callable[[str], Any]
    within: str = ""

    @property
    def keyword(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class Value:
    """One result: `name` is its id in `--json`. Lists and grids are for `--json`; tables show them in words."""

    name: str
    value: Whole
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to look at; columns name their unit, as "step, ms"."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Scalar]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a calculator says: values for machines, tables and sentences for people.

    values : shown as a table too, where they are single numbers
    notes : sentences a reader of the numbers must know besides
    """

    values: Sequence[Value]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure: `draw(figure, **inputs)` fills an empty matplotlib figure and imports no matplotlib itself."""

    name: str
    about: str
    draw: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Calculator:
    """One entry of `tfirst calc`.

    answer : takes the inputs as keywords; may raise `ValueError` with one clear sentence
    plots : the first is drawn unless `--figure` names another
    """

    name: str
    summary: str
    inputs: Sequence[Input]
    answer: Callable[..., Answer]
    plots: Sequence[Plot] = ()


def new_axes(figure: Figure, rows: int = 1, *, title: str = "", xlabel: str = "", ylabel: str = "") -> list[Any]:
    """Axes one under another that share what they say; the title stands over the first."""
    axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for one in axes:
        one.set_ylabel(ylabel)
        one.grid(visible=True, alpha=0.3)
    axes[0].set_title(title)
    axes[-1].set_xlabel(xlabel)
    return axes
