"""What the pages for readers point at is there: files, headings, settings, subcommands, limits."""

from __future__ import annotations

import inspect
import re
import tomllib
from functools import cache
from pathlib import Path

import msgspec
import pytest

from router.config import RouterConfig, fleet_of, parse_config
from router.directory import Directory
from router.doctor import flags
from router.doctor.facts import Engine

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for folder in (".", "docs", "docs/decisions", "deploy", "router/signals")
    for path in (ROOT / folder).glob("*.md")
)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^(```.*?^```|    [^\n]*)$", re.MULTILINE | re.DOTALL)

# The first word of a section and another thing: files of the code, fields of /fleet.
ELSEWHERE = {
    "discovery.leaving",
    "discovery.py",
    "discovery.sources",
    "load.py",
    "receipts.dropped",
    "receipts.trouble",
}


@cache
def headings(path: Path) -> frozenset[str]:
    """Anchors of a page, as GitHub makes them."""
    lines = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S), re.M
    )
    return frozenset(
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)).lower().replace(" ", "-")
        for line in lines
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), name
        assert not anchor or anchor in headings(target), f"{name}#{anchor}"


def settings() -> dict[str, set[str]]:
    """Names of the settings of each section that is there by default."""
    plain = msgspec.to_builtins(RouterConfig())
    return {name: set(section) for name, section in plain.items() if isinstance(section, dict) and section}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.stem)
def test_every_setting_a_page_names_with_its_section_is_one(page: Path) -> None:
    known = settings()
    for section, name in re.findall(r"`([a-z_]+)\.([a-z_]+)(?::[^`]*)?`", page.read_text(encoding="utf-8")):
        if section in known and f"{section}.{name}" not in ELSEWHERE:
            assert name in known[section], f"{section}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_a_page_shows_is_one_of_ours(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"^    tfirst ([a-z]+)", text, re.MULTILINE)) <= set(
        project["entry-points"]["tfirst.commands"]
    )
    assert set(re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)
    for module in re.findall(r"python -m ((?:router|loadtest|sim_backends)[\w.]+)", text):
        where = ROOT / module.replace(".", "/")
        assert where.with_suffix(".py").exists() or (where / "__main__.py").exists(), module


def test_limits_of_the_directory_are_those_the_page_on_sizes_names() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    limits = inspect.signature(Directory).parameters
    for name in ("source_limit", "cap"):
        assert f"{limits[name].default:,}" in page, name


def test_every_page_for_readers_is_listed_in_the_readme() -> None:
    listed = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in listed] == []


def test_the_way_to_two_servers_shows_the_flags_the_doctor_asks_for() -> None:
    page = " ".join((ROOT / "docs" / "start.md").read_text(encoding="utf-8").replace("\\\n", " ").split())
    commands: dict[Engine, str] = {"vllm": "vllm serve ", "sglang": "python -m sglang.launch_server "}
    for engine, command in commands.items():
        shown = page.partition(command)[2].partition(" | ")[0]
        events, _, more = flags.EVENTS[engine].partition("}' ")
        assert events in shown, engine
        assert more in shown, engine
        assert flags.CACHED_TOKENS[engine] in shown, engine
    assert flags.LOAD["sglang"] in page


def test_the_configuration_on_the_way_there_is_one() -> None:
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [len(fleet_of(parse_config(text)).replicas) for text in shown] == [2]
