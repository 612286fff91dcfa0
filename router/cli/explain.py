"""`tfirst explain`: why one request ran where it did, drawn on one time axis."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.cli.screen import Screen
from router.receipts import Candidate, Receipt
from router.receipts.reading import find_receipt
from router.study import bars
from router.study.explain import what_came, why

STYLES = {bars.QUEUE: "yellow", bars.FETCH: "cyan", bars.BOTH: "magenta", bars.COMPUTE: "green"}
DEFAULT_FILE = Path("receipts.jsonl")
MOST_SHOWN = 24  # candidates; beyond, a screen holds no more
LEAST_WIDTH, MOST_WIDTH = 12, 72
LEAST_NAME, MOST_NAME = 4, 16  # columns of a replica's name, or a path's
NUMBERS, FEW_NUMBERS = ("first", "mean", "hit"), ("first",)  # at the end of a line
BESIDE, FEW_BESIDE = 25, 13  # columns of a line that are neither names nor the bar
ROOM_FOR_ALL = 60  # columns of the terminal


class ExplainCommand:
    name = "explain"
    help = "say why a request ran where it did: its candidates as bars on one time axis"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "Exit status: 0, or 2 when there is no such file or no receipt of that request in it."
        parser.add_argument(
            "request_id", metavar="REQUEST_ID", help="x-request-id of the request, as its answer has it"
        )
        parser.add_argument(
            "--receipts", type=Path, default=DEFAULT_FILE, metavar="FILE", help="default %(default)s; rotated files too"
        )
        parser.add_argument("--all", action="store_true", help=f"show all candidates, not the best {MOST_SHOWN}")

    def run(self, args: argparse.Namespace) -> int:
        show(find_receipt([args.receipts], args.request_id), Screen(), every=args.all)
        return 0


def show(receipt: Receipt, console: Console, *, every: bool = False) -> None:
    """Draw one receipt."""
    prompt = f"{receipt.prompt_tokens} prompt tokens{'' if receipt.prompt_exact else ' (guessed)'}"
    arm = f", arm {receipt.arm}" if receipt.arm else ""
    console.print(f"{receipt.request_id}  {receipt.model}  {prompt}  policy {receipt.policy}{arm}", highlight=False)
    if receipt.candidates:
        shown = ordered(receipt)
        _draw(receipt, shown if every else shown[:MOST_SHOWN], console)
        unnamed = (receipt.possible or len(shown)) - len(shown)
        hidden = 0 if every else max(0, len(shown) - MOST_SHOWN)
        if hidden:
            console.print(f"{hidden} more are named; --all shows them", highlight=False)
        if unnamed > 0:
            console.print(f"{unnamed} more were possible; the receipt names only the best", highlight=False)
    console.print(why(receipt), highlight=False, soft_wrap=True)
    console.print(what_came(receipt), highlight=False, soft_wrap=True)


def ordered(receipt: Receipt) -> list[Candidate]:
    """The chosen candidate, then the others by when their first token was expected."""
    choice = receipt.choice
    others = [one for one in receipt.candidates if one is not choice]
    others.sort(key=lambda one: one.expected_s)
    return others if choice is None else [choice, *others]


def _draw(receipt: Receipt, shown: list[Candidate], console: Console) -> None:
    numbers, beside = (NUMBERS, BESIDE) if console.width >= ROOM_FOR_ALL else (FEW_NUMBERS, FEW_BESIDE)
    most = max(LEAST_NAME, min(MOST_NAME, (console.width - beside - LEAST_WIDTH) // 2))
    names = sum(min(most, max(map(len, column))) for column in _names(shown))
    width = max(LEAST_WIDTH, min(MOST_WIDTH, console.width - beside - names))
    observed_s = receipt.waited_s
    longest_s = max([one.first_token_s for one in shown] + [observed_s or 0.0])
    axis_s = bars.axis_end_s(max(longest_s, 1e-4))
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for name, mark in (("  replica", 2), ("path", 0)):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=most + mark)
    table.add_column("", no_wrap=True, width=width)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for one in shown:
        chosen = one is receipt.choice
        drawn = _coloured(bars.bar(one, axis_s=axis_s, width=width))
        if chosen and observed_s is not None:
            _mark(drawn, observed_s / axis_s, width)
        told = bars.seconds(one.first_token_s), bars.seconds(one.expected_s), f"{one.hit_probability:.0%}"
        table.add_row(
            f"{'▶' if chosen else ' '} {one.replica}",  # one column: a narrow terminal cuts the name, not the mark
            one.path,
            drawn,
            *told[: len(numbers)],
            style="bold" if chosen else "",
        )
    for line in bars.axis(axis_s, width):
        table.add_row("", "", Text(line))
    console.print(_legend(came=observed_s is not None))
    console.print(table)


def _names(shown: list[Candidate]) -> tuple[list[str], list[str]]:
    """Replicas and paths, each with what stands above them."""
    return ["replica", *(one.replica for one in shown)], ["path", *(one.path for one in shown)]


def _coloured(drawn: str) -> Text:
    text = Text()
    for cell in drawn:
        text.append(cell, style=STYLES.get(cell, ""))
    return text


def _mark(drawn: Text, share: float, width: int) -> None:
    """When the first token really came."""
    at = min(width - 1, max(0, int(share * width)))
    drawn.plain = f"{drawn.plain[:at]}◆{drawn.plain[at + 1 :]}"
    drawn.stylize("bold red", at, at + 1)


def _legend(*, came: bool) -> Text:
    text = Text()
    for sign, words in bars.WORDS.items():
        text.append(sign, style=STYLES[sign])
        text.append(f" {words}   ")
    text.append("▶ chosen")
    if came:
        text.append("   ◆", style="bold red")
        text.append(" when its first token came")
    return text


COMMAND = ExplainCommand()
