"""What the calculators of pools and experts say: the textbook's further numbers, and laws under other inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.cli.calc import calculators
from router.cli.main import main


def values(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["calc", *arguments, "--json"]) == 0
    return {row["id"]: row["value"] for row in json.loads(capsys.readouterr().out)}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["calc", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "name", "expected", "tolerance"),
    [
        (["pools", "--cards=8xA100"], "piggyback_per_s", 4.50, 0.005),
        (["pools"], "piggyback_per_s", 4.17, 0.005),
        (["pools", "--cached-tokens=6144", "--new-tokens=2048"], "colocated_per_s", 4.90, 0.005),
        (["pools", "--state-model=deepseek-v3"], "absorbed_gflop_a_call", 2.05, 0.005),
        (["pools", "--state-model=deepseek-v3"], "decode_with_absorbed_per_s", 4.41, 0.005),
        (["pools", "--state-model=deepseek-v3"], "spare_us_a_call", 258, 0.5),
        (["pools", "--arrival-rps=4.55"], "link_needed_gb_s", 5.5, 0.05),
        (["pools", "--arrival-rps=4.55", "--state-model=deepseek-v3"], "link_needed_gb_s", 2.6, 0.05),
        (["pools", "--link-gb-s=1.207959552"], "split_per_s", 1.0, 1e-9),
        (["attention-ffn"], "answer_over_handoff", 8.1, 0.05),
        (["attention-ffn", "--state-model=deepseek-v3"], "answer_over_handoff", 17, 0.1),
        (["attention-ffn"], "affordable_ms", 6, 1e-9),
        (["attention-ffn"], "prefill_ms", 193, 1),
        (["experts", "--weight-bytes=1"], "cpu_compute_bound_rows", 4.1, 0.05),
        (["expert-skew"], "random_skew_ep8", 1.04, 0.005),
        (["expert-skew"], "random_skew_ep256", 1.52, 0.01),
        (["expert-skew", "--group-rows=2048,2048,2048,2048"], "pipelined_ms", 0.581, 0.0005),
        (["expert-skew", "--group-rows=2048,2048,2048,2048"], "exchange_break_even", 1.49, 0.005),
        (["padding"], "equal_rows", 256, 0),
    ],
)
def test_numbers_of_the_text_come_out(
    capsys: pytest.CaptureFixture[str], arguments: list[str], name: str, expected: float, tolerance: float
) -> None:
    assert values(capsys, *arguments)[name] == pytest.approx(expected, rel=0, abs=tolerance)


def test_idle_tokens_of_both_cards_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "pools")
    assert "84.76" in shown
    assert "487.6" in shown


def test_answers_of_one_length_are_a_mixture_of_that_length(capsys: pytest.CaptureFixture[str]) -> None:
    once, twice = (values(capsys, "pools", f"--output-tokens={text}") for text in ("1025", "1025,1025"))
    assert twice["splits_per_s"] == [pytest.approx(row) for row in once["splits_per_s"]]


def test_a_mixture_lies_between_its_lengths_and_may_want_another_split(capsys: pytest.CaptureFixture[str]) -> None:
    short, mixed, long = (values(capsys, "pools", f"--output-tokens={text}") for text in ("1025", "1025,4097", "4097"))
    assert long["split_per_s"] < mixed["split_per_s"] < short["split_per_s"]
    assert (short["split_prefill_cards"], mixed["split_prefill_cards"]) == ([4, 0], [2, 0])
    per_request_s = [1 / each["colocated_per_s"] for each in (short, mixed, long)]
    assert per_request_s[0] < per_request_s[1] < per_request_s[2]


def test_answers_of_one_token_hand_nothing_over(capsys: pytest.CaptureFixture[str]) -> None:
    half = values(capsys, "pools", "--output-tokens=1,1025", "--link-gb-s=1")
    all_of_them = values(capsys, "pools", "--link-gb-s=1")
    assert half["split_limited_by"] == all_of_them["split_limited_by"] == "link"
    assert half["split_per_s"] == pytest.approx(2 * all_of_them["split_per_s"])
    assert "no decode pool" in said(capsys, "pools", "--output-tokens=1")


def test_what_does_not_fit_or_keep_up_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "pools", "--cards=4xL4", "--batch=64")
    assert "does not fit L4" in shown
    assert "No way to use these cards keeps up" in shown
    assert "does not fit" in said(capsys, "expert-replicas", "--room-mib=32")
    assert "does not fit" not in said(capsys, "expert-replicas")


def test_a_map_of_three_kinds_of_cards_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra `plots`) is not installed")
    assert main(["calc", "pools", "--cards=1xA100,1xH20,1xL4", "--plot", str(tmp_path / "map.png")]) == 2
    assert "one or two kinds" in capsys.readouterr().err
    assert main(["calc", "pools", "--cards=8xA100", "--plot", str(tmp_path / "bars.png")]) == 0


def test_models_without_experts_are_refused_where_experts_are_placed(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("experts", "expert-skew", "expert-replicas"):
        assert name in calculators.CALCULATORS
        assert main(["calc", name, "--model=qwen3-8b"]) == 2
        assert "without routed experts" in capsys.readouterr().err


def test_a_kernel_ten_times_faster_moves_the_crossing_up(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (values(capsys, "experts", f"--cpu-tflops={tflops}") for tflops in ("1.8", "21.3"))
    assert (slow["gpu_wins_from_rows"], fast["gpu_wins_from_rows"]) == (72, 689)
    assert values(capsys, "experts", "--gpu=SLOW@1/100")["gpu_wins_from_rows"] == "never"


def test_rows_of_no_group_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["expert-skew", "--group-rows=0,0"], ["padding", "--rows=0"]):
        assert main(["calc", *arguments]) == 2
        assert "are all 0" in capsys.readouterr().err
