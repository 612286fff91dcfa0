"""Imports point one way, as the table of the design says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED: dict[str, set[str]] = {
    "estimators": set(),
    "policies": {"estimators"},
    "router": {"policies", "estimators"},
    "sim_backends": set(),
    "loadtest": set(),
}
EVERYTHING = ROOT / "loadtest" / "replay"  # joins all packages
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "asyncio", "secrets"}


def imported_packages(path: Path) -> set[str]:
    """Top-level names a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package: str) -> None:
    forbidden = (ALLOWED.keys() | {"tests"}) - ALLOWED[package] - {package}
    files = [path for path in (ROOT / package).rglob("*.py") if EVERYTHING not in path.parents]
    assert files
    for path in files:
        assert not imported_packages(path) & forbidden, path


def test_nothing_outside_replay_imports_replay() -> None:
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            if EVERYTHING not in path.parents:
                assert "loadtest.replay" not in path.read_text(), path


@pytest.mark.parametrize("package", ["estimators", "policies"])
def test_rules_read_no_clock_and_draw_no_chance_of_their_own(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not imported_packages(path) & CLOCKS_AND_CHANCE, path
        assert not any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(ast.parse(path.read_text()))), path


@pytest.mark.parametrize("path", ["router/dispatch.py", "router/assemble.py", "router/bookings.py"])
def test_the_deciding_core_touches_no_socket_loop_or_clock(path: str) -> None:
    outside = {"time", "datetime", "asyncio", "socket", "aiohttp", "zmq", "httptools", "uvloop", "random"}
    assert not imported_packages(ROOT / path) & outside
