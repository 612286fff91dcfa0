"""Kinds of inputs: text from the command line to checked values, or a sentence that says what would be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from estimators.hardware import Card
from estimators.model_config import read_config
from estimators.model_keys import ModelConfigError
from estimators.planning.known import MODELS, PLANNED_CARDS, REACHED
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Input

MOST = 1e18  # of anything: beyond it arithmetic fails before a machine is found that has so much
MOST_SEQUENCES = 8192  # in one step: more than any engine runs at once
MOST_CARDS = 65_536  # of one group


def number(
    name: str,
    default: float,
    unit: str,
    about: str,
    *,
    low: float = 0.0,
    high: float = MOST,
    above: bool = False,
) -> Input:
    """A number from `low` to `high`; with `above` it must be more than `low`."""
    within = _within(low, high, above=above)
    return Input(name, f"{default:.12g}", unit, about, lambda text: _number(text, low, high, above=above), within)


def count(name: str, default: int, unit: str, about: str, *, low: int = 0, high: float = MOST) -> Input:
    """A whole number from `low` to `high`."""
    return Input(name, str(default), unit, about, lambda text: _count(text, low, high), _within(low, high))


def numbers(name: str, default: str, unit: str, about: str, *, low: float = 0.0, above: bool = False) -> Input:
    """Several numbers with commas between; at least one."""
    parse = _each(lambda text: _number(text, low, MOST, above=above))
    return Input(name, default, unit, about, parse, _within(low, MOST, above=above))


def counts(name: str, default: str, unit: str, about: str, *, low: int = 0, high: float = MOST) -> Input:
    """Several whole numbers from `low` to `high` with commas between; at least one."""
    return Input(name, default, unit, about, _each(lambda text: _count(text, low, high)), _within(low, high))


def choice(name: str, default: str, about: str, *, of: Sequence[str]) -> Input:
    """One of a few words."""

    def parse(text: str) -> str:
        if text not in of:
            raise ValueError(f"one of {', '.join(of)}")
        return text

    return Input(name, default, "", f"{about}: {', '.join(of)}", parse)


def model(default: str = "qwen3-8b", name: str = "model", about: str = "model") -> Input:
    """A shape known by name, or a Hugging Face config.json."""
    return Input(name, default, "", f"{about}: {', '.join(MODELS)} or the path of a config.json", _model)


def card(name: str, default: str, about: str) -> Input:
    """One kind of card; see `cards` for its ways to be written."""
    return Input(name, default, "", f"{about}: a name, or NAME@TFLOPS/GB_S[/GIB]", _card)


def cards(name: str, default: str, about: str) -> Input:
    """How many of which cards: 4xA100,4xH20 or, with peaks of one's own, 4xMINE@312/2039 (TFLOP/s, GB/s)."""
    help_text = f"{about}: NxCARD,..., a CARD being a name or NAME@TFLOPS/GB_S[/GIB]"
    return Input(name, default, "", help_text, _each(_cards_of_a_kind))


@dataclass(frozen=True, slots=True)
class NamedCard:
    name: str
    card: Card

    def reaching(self, *, compute_share: float, memory_share: float) -> Card:
        """The card when it reaches these shares of its two peaks, each in (0, 1]."""
        return msgspec.structs.replace(self.card, compute_share=compute_share, memory_share=memory_share)


@dataclass(frozen=True, slots=True)
class CardsOfAKind:
    count: int
    kind: NamedCard


def _within(low: float, high: float, *, above: bool = False) -> str:
    return f"{'>' if above else '>='} {low:g}" + (f", <= {high:g}" if high < MOST else "")


def _number(text: str, low: float, high: float, *, above: bool) -> float:
    allowed = f"a number {'above' if above else 'from'} {low:g}{_up_to(high)}"
    try:
        value = float(text)
    except ValueError:
        raise ValueError(allowed) from None
    if value > MOST:
        raise ValueError(f"a number up to {MOST:g}")
    if not low <= value <= high or (above and value == low):  # NaN fails the first
        raise ValueError(allowed)
    return value


def _count(text: str, low: int, high: float) -> int:
    allowed = f"a whole number from {low}{_up_to(high)}"
    try:
        value = int(text)
    except ValueError:
        raise ValueError(allowed) from None
    if value > MOST:
        raise ValueError(f"a whole number up to {MOST:g}")
    if not low <= value <= high:
        raise ValueError(allowed)
    return value


def _up_to(high: float) -> str:
    """What is said of the upper end; nothing where it is that of all numbers."""
    return f" to {high:g}" if high < MOST else ""


def _each(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse_all(text: str) -> tuple[Any, ...]:
        try:
            return tuple(parse(part.strip()) for part in text.split(","))
        except ValueError as exc:
            raise ValueError(f"with commas between: {exc}") from None

    return parse_all


def _model(text: str) -> ModelShape:
    if text in MODELS:
        return MODELS[text]
    try:
        return read_config(Path(text).read_bytes())
    except OSError:
        raise ValueError(f"{', '.join(MODELS)} or the path of a config.json") from None
    except ModelConfigError as exc:
        raise ValueError(f"a model that can be read: {exc}") from None


def _card(text: str) -> NamedCard:
    name, at, peaks = text.partition("@")
    if not at:
        if name not in PLANNED_CARDS:
            raise ValueError(f"NAME@TFLOPS/GB_S[/GIB] or one of {', '.join(PLANNED_CARDS)}")
        return NamedCard(name, PLANNED_CARDS[name])
    parts = [_number(part, 0.0, MOST, above=True) for part in peaks.split("/")]
    if not name or len(parts) not in (2, 3):
        raise ValueError("NAME@TFLOPS/GB_S or NAME@TFLOPS/GB_S/GIB")
    known = PLANNED_CARDS.get(name)
    gib = parts[2] if len(parts) == 3 else known.memory_gib if known is not None else 80.0
    own = Card(peak_tflops=parts[0], memory_gb_s=parts[1], memory_gib=gib, compute_share=REACHED, memory_share=REACHED)
    return NamedCard(name, own)


def _cards_of_a_kind(text: str) -> CardsOfAKind:
    many, times, kind = text.partition("x")
    if not times or not many.isdecimal() or len(many) > len(str(MOST_CARDS)) or not 1 <= int(many) <= MOST_CARDS:
        raise ValueError(f"as 4xA100, with 1 to {MOST_CARDS} cards of a kind")
    return CardsOfAKind(int(many), _card(kind))
