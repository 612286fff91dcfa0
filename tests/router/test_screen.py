"""What commands print of others' words."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from router.cli.screen import Screen, printable


def shown(text: str) -> str:
    """As a line, as a cell and as a header."""
    console = Screen(file=io.StringIO(), width=200)
    table = Table(box=None)
    table.add_column(text)
    table.add_row(text)
    console.print(text)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("text", ["[red]x[/red]", "[/]", "a[/b]", "[link=http://h]x[/link]", ":smile:", r"\[x"])
def test_brackets_and_colons_are_text_and_no_markup(text: str) -> None:
    assert shown(text).count(text) == 3


@given(st.text(max_size=20))
def test_nothing_that_is_shown_can_command_a_terminal(text: str) -> None:
    assert all(sign.isprintable() or sign == "\n" for sign in shown(text))


@given(st.text(max_size=50))
def test_what_can_be_printed_stays_as_it_is_and_nothing_gets_lost(text: str) -> None:
    told = printable(text)
    assert len(told) == len(text)
    assert all(after in (before, "\N{REPLACEMENT CHARACTER}") for before, after in zip(text, told, strict=True))
    assert printable(told) == told
