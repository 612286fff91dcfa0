"""Where commands print what files and servers say: as text, which can neither style nor command the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text


class Screen(Console):
    """A console for words of others: brackets in them are no markup, and control characters are shown as marks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text):  # a mark for each character, so styles stay in place
            clean = renderable.copy()
            clean.plain = printable(renderable.plain)
            return super().render(clean, options)
        return super().render(renderable, options)

    def out(self, *objects: Any, **options: Any) -> None:
        super().out(*(printable(str(one)) for one in objects), **options)


def printable(text: str) -> str:
    r"""The same with a mark for every character that is none, line ends apart.

    >>> printable("a\x1b[31m\x9b\tb\nc")
    'a�[31m��b\nc'
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)
