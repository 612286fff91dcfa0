"""The page of settings is what the types say, and says something of each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from router.config import RouterConfig
from router.config_reference import FILES, file_parts, page, sections
from router.fleet import Fleet

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+?) \| (.*) \|$", re.MULTILINE)


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """Section `inner`: what is inside. More of it."""

    deep: Annotated[float, msgspec.Meta(ge=0, lt=1)]  # how deep
    kind: Literal["a", "b"] = "a"


class Base(msgspec.Struct, kw_only=True):
    """One.

    first, second : two of a kind; None: neither
        on two lines
    """

    first: int | None = None
    second: int | None = None


class Outer(Base, kw_only=True):
    """The file."""

    # said above,
    # over two lines
    above: Annotated[int, msgspec.Meta(ge=1)] = 7  # and beside
    pattern: Annotated[str, msgspec.Meta(pattern="^(a|`)$")] = "a"  # odd | signs
    inner: Inner | None = None
    many: dict[str, Inner] = {}
    listed: list[Inner] = []
    other: Inner = Inner(deep=0.5)  # not what it would be by itself


def rows(text: str) -> dict[str, tuple[str, str, str]]:
    return {name: (what, default, meaning) for name, what, default, meaning in ROW.findall(text)}


def test_the_page_is_what_the_types_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m router.config_reference > docs/settings.md"


@pytest.mark.parametrize(("title", "top"), FILES)
def test_every_setting_has_a_row_that_says_what_it_means(title: str, top: type[msgspec.Struct]) -> None:
    parts = list(file_parts(title, top))
    classes = list(sections(top))
    assert len(parts) == len(classes)
    for part, cls in zip(parts, classes, strict=True):
        shown = rows(part)
        assert list(shown) == list(cls.__struct_fields__)
        assert [name for name, (_, _, meaning) in shown.items() if not meaning.strip()] == []


@pytest.mark.parametrize("top", [RouterConfig, Fleet])
def test_links_lead_to_headings_and_no_heading_is_there_twice(top: type[msgspec.Struct]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = [
        re.sub(r"[^\w -]", "", line).strip().replace(" ", "-").lower() for line in re.findall("^##+ (.*)", text, re.M)
    ]
    assert len(headings) == len(set(headings))
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= set(headings)
    assert all(re.sub(r"[^\w-]", "", path.lower()) in headings for path in sections(top).values() if path)


def test_each_struct_is_shown_once_where_it_is_met_first() -> None:
    assert sections(Outer) == {Outer: "", Inner: "inner"}


def test_a_row_tells_type_limits_default_and_all_that_the_source_says() -> None:
    whole, section = file_parts("File", Outer)
    told = rows(whole)
    assert told["above"] == ("whole number >= 1", "`7`", "said above, over two lines; and beside")
    assert (
        told["first"]
        == told["second"]
        == (
            "whole number or `null`",
            "`null`",
            "two of a kind; `null`: neither on two lines",
        )
    )
    assert told["pattern"] == (r"text like `` ^(a\|`)$ ``", "`a`", r"odd \| signs")
    assert told["inner"] == ("section [`inner`](#inner) or `null`", "`null`", "what is inside")
    assert told["many"][0] == "for each name: section [`inner`](#inner)"
    assert told["listed"][0] == "list of: section [`inner`](#inner)"
    assert told["other"][1] == '`{"deep": 0.5, "kind": "a"}`'
    assert rows(section) == {
        "deep": ("number >= 0, < 1", "required", "how deep"),
        "kind": ("`a`, `b`", "`a`", ""),
    }


def test_defaults_on_the_page_are_those_a_file_without_them_gets() -> None:
    """A second route to the numbers: the rows of plain settings, read as YAML, make the default configuration."""
    top = rows(next(file_parts("Configuration file", RouterConfig)))
    plain: dict[str, Any] = {
        name: msgspec.yaml.decode(default.strip("`")) for name, (_, default, _) in top.items() if default != "its own"
    }
    assert msgspec.convert(plain, RouterConfig) == RouterConfig()
