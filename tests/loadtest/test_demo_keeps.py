"""`tfirst demo --keep`: what somebody who wants to look around gets, and that nothing is left of it afterwards."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.demo.processes import get_json, get_text

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"


def printed(process: subprocess.Popen[str], pattern: str) -> str:
    """The first match in what a process prints from here on."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"it ended without printing {pattern}")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_page_is_served_with_traffic_until_it_is_ended_and_then_nothing_is_left(
    tmp_path: Path, how: signal.Signals, status: int
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text((DEMO / "fleet.yaml").read_text().replace("speed: 8", "speed: 50"))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "router.cli.main", "demo", "--keep", "--policies", "e2e", "--requests", "3"),
            *("--fleet", str(fleet), "--keep-files", str(tmp_path / "kept")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        page = printed(process, r"^page\s+(http://127\.0\.0\.1:\d+/)$")
        key = printed(process, r"^admin key\s+(\S+)")
        assert len(key) >= 16
        assert "<title>tfirst</title>" in get_text(page)
        assert len(get_json(f"{page}fleet")["replicas"]) == 4
        assert (tmp_path / "kept" / "keep.yaml").read_text().count(key) == 0
        process.send_signal(how)
        assert process.wait(timeout=30) == status
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(OSError, match="refused"):
        get_text(page)
