"""What the document on the page says is so."""

from __future__ import annotations

import re
from pathlib import Path

from router.page import live, server

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "page.md").read_text(encoding="utf-8")


def test_the_bounds_told_are_those_kept() -> None:
    assert f"the first {live.PER_SECOND} decisions whole and {live.PER_SECOND} more" in TEXT
    assert f"{live.KEPT} of either kind" in TEXT
    assert f"last {live.LINES:,} placed requests" in TEXT
    assert live.STEP_S * live.STEPS == 15 * 60
    assert f"in steps of {live.STEP_S} s" in TEXT
    assert f"{server.MOST_WATCHERS}\nopen pages" in TEXT
    assert f"last {server.POINTS} requests" in TEXT


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[[^]]+\]\((pictures/[^)]+)\)", TEXT)
    assert len(pictures) == 2
    for name in pictures:
        content = (DOCS / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) < 200_000


def test_names_on_the_page_are_those_the_text_uses() -> None:
    shown = (Path(server.__file__).parent / "static" / "index.html").read_text(encoding="utf-8")
    for words in ("Work ahead", "Find", "failed, late or asked about", "Paths over time", "Arms", "Pause"):
        assert words in shown
        assert words.lower() in TEXT.lower()
