"""One fleet file for every command that takes one: those of the documentation and of the demo are played by all."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.cli.main import main

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "loadtest" / "demo" / "fleet.yaml"
IN_DOCS = [path for path in ROOT.glob("docs/**/*.yaml") if "replicas:" in path.read_text(encoding="utf-8")]
FILES = {path.relative_to(ROOT).as_posix(): path for path in (*IN_DOCS, DEMO)}
WORKLOAD = ROOT / "docs" / "planning" / "workload.yaml"
TRACE = ROOT / "loadtest" / "demo" / "traffic.jsonl.gz"
TIMEOUT_S = 20.0


@asynccontextmanager
async def simulated(fleet: Path, written: Path) -> AsyncIterator[None]:
    """`tfirst sim` on free ports, from when it has written where it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.cli.main", "sim", "--fleet", str(fleet)),
        *("--port", "0", "--write-fleet", str(written)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S), "it ended without a word"
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 0


def test_the_planning_page_has_a_fleet_file() -> None:
    assert "docs/planning/fleet.yaml" in FILES


@pytest.mark.parametrize("name", FILES)
def test_a_fleet_file_is_planned_replayed_and_asked_about(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = str(FILES[name])
    assert main(["plan", "--fleet", fleet, "--workload", str(WORKLOAD)]) in (0, 1)
    flags = ["--policy", "e2e", "--requests", "80", "--no-bounds", "--jobs", "1", "--receipts", str(tmp_path)]
    assert main(["replay", "--fleet", fleet, "--trace", str(TRACE), *flags]) == 0
    (receipts,) = tmp_path.glob("*.jsonl")
    assert main(["whatif", str(receipts), "--fleet", fleet, "--policy", "ttft", "--draws", "2"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", FILES)
async def test_a_fleet_file_is_simulated_and_what_that_writes_is_served_and_examined(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "fleet.yaml"
    async with simulated(FILES[name], written):
        assert main(["serve", "--check", "--fleet", str(written)]) == 0
        capsys.readouterr()
        doctor = ["doctor", "--fleet", str(written), "--wait", "0.1", "--json"]
        assert await asyncio.to_thread(main, doctor) in (0, 1)
        assert json.loads(capsys.readouterr().out)
