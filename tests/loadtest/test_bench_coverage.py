"""The benchmark of coverage, on a slice small enough for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.replay.bench_coverage import ENOUGH, Line, main

TRACE = Path(__file__).parents[2] / "loadtest" / "demo" / "traffic.jsonl.gz"


def test_it_prints_every_prompt_length_of_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(TRACE), "--requests", "120", "--replicas", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("< 16384") == 3
    assert printed.endswith("passes\n")


@pytest.mark.parametrize(
    ("requests", "p90", "p99", "passes"),
    [(ENOUGH, 0.9, 0.99, True), (ENOUGH, 0.9, 0.98, False), (ENOUGH, 0.95, 0.99, False), (ENOUGH - 1, 0.5, 0.5, True)],
)
def test_a_share_outside_its_band_fails_once_enough_was_seen(
    requests: int, p90: float, p99: float, passes: bool
) -> None:
    assert Line(0.5, 0, "< 1024", requests, p90, p99).passes is passes
