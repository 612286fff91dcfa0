"""Commands that the pages on planning show: all of them run, and those of an exercise give the numbers it quotes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from router.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = ("calc.md", "exercises.md", "planning.md")
COMMAND = re.compile(r"^    tfirst ((?:calc|plan) .*?)\s*(?:#.*)?$", re.MULTILINE)
NOTHING_HOLDS = {"plan --fleet docs/planning/fleet.yaml --workload docs/planning/mixed.yaml"}


def commands() -> list[str]:
    """Each command once, without those whose output a test of their own looks at: figures, help and plays."""
    found = [
        command for page in PAGES for command in COMMAND.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    ]
    return [one for one in dict.fromkeys(found) if not {"--plot", "--help", "--simulate"} & set(one.split())]


@pytest.mark.parametrize("command", commands())
def test_a_shown_command_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == (1 if command in NOTHING_HOLDS else 0)
    assert capsys.readouterr().out.strip()


def answered(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    assert main([*shlex.split(command), "--json"]) == 0
    return {row["id"]: row["value"] for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("command", "name", "quoted", "within"),
    [
        ("calc deployments --output-tokens 1", "split_per_s", 6.89, 0.005),
        ("calc pools --compute-share 0.4 --memory-share 0.4", "split_per_s", 3.64, 0.005),
        ("calc pools --output-tokens 1025,4097", "split_per_s", 2.06, 0.005),
        ("calc experts --weight-bytes 1", "cpu_compute_bound_rows", 4.1, 0.05),
        ("calc experts --weight-bytes 1 --cpu-tflops 21.3", "gpu_wins_from_rows", 344, 0),
        ("calc tiers --reuse-s 300", "needed_gb_300s", 423, 0.5),
        ("calc preload --new-tokens 128", "layers_to_preload", 25, 0),
        ("calc preload --new-tokens 128", "layerwise_ms", 48.8, 0.05),
        ("calc preload --new-tokens 512", "layerwise_ms", 63.3, 0.05),
        ("calc endurance --new-share 0.5", "admitted_percent", 6.3, 0.05),
        ("calc pages", "patience_ms", 57, 0.5),
        ("calc pages --prompt-tokens 1025", "pages_used", 64, 0),
        ("calc peaks --capacity 4.67", "worst", 76, 0.5),
        ("calc peaks --capacity 4.67", "needed", 10.25, 0.005),
        ("calc peaks --arrivals 17.83,0.634 --capacity 4.126", "worst", 137, 0.5),
        ("calc attention-ffn --state-model deepseek-v3 --output-tokens 4097", "answer_over_handoff", 68, 0.5),
        ("calc pools --state-model deepseek-v3", "decode_with_absorbed_per_s", 4.41, 0.005),
    ],
)
def test_an_exercise_quotes_what_its_command_gives(
    command: str, name: str, quoted: float, within: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(capsys, command)[name] == pytest.approx(quoted, rel=0, abs=within)
