"""What the calculators of storage, recovery, starts and deployments say, asked for as a person would."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.cli.main import main


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["calc", *arguments, "--json"]) == 0
    return {row["id"]: row["value"] for row in json.loads(capsys.readouterr().out)}


def test_a_prefix_hit_is_cleared_at_three_times_by_who_prefills(capsys: pytest.CaptureFixture[str]) -> None:
    hit = said(capsys, "deployments", "--cached-tokens", "6144")
    assert hit["replicas_per_s"] == pytest.approx(4.90, abs=0.006)
    assert hit["replicas_drained_at_s"] == pytest.approx(35.1, abs=0.06)
    assert hit["split_drained_at_s"] == pytest.approx(26.0, abs=0.06)
    kept = said(capsys, "deployments", "--cached-tokens", "6144", "--prefill", "4,0")
    assert kept["split_drained_at_s"] == pytest.approx(43.2, abs=0.06)


@pytest.mark.parametrize(("state", "pairs"), [("qwen3-8b", 6.9), ("deepseek-v3", 14.5)])
def test_pairs_that_share_a_state_are_limited_by_three_moves(
    state: str, pairs: float, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, "deployments", "--reuses", "1", "--state-model", state)
    assert found["split_store_link_per_s"] == pytest.approx(pairs, abs=0.05)


def test_replicas_leave_59_requests_after_a_minute_and_a_full_batch_fits_the_h20(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = said(capsys, "deployments")
    assert plain["replicas_backlog_then"] == pytest.approx(59, abs=0.5)
    assert plain["resident_gib"] == pytest.approx(56.9, abs=0.05)
    assert plain["replicas_drained_at_s"] == "never"


@pytest.mark.parametrize(("state", "gib"), [("qwen3-8b", 41.6), ("deepseek-v3", 19.8)])
def test_a_compact_state_leaves_half_of_a_batchs_memory(
    state: str, gib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, "deployments", "--state-model", state)
    assert found["batch_states_gib"] == pytest.approx(gib, abs=0.06)


def test_a_link_as_wide_as_the_state_makes_one_request_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = said(capsys, "deployments", "--link-gb-s", "1.207959552")
    assert narrow["split_per_s"] == pytest.approx(1.0)


def test_a_minute_of_memory_needs_so_much_and_fills_the_nearest_first(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = said(capsys, "tiers", "--reuse-s", "300")
    assert tiers["needed_gb_300s"] == pytest.approx(300 * tiers["new_state_gb_s"])
    assert tiers["hbm_hold_s"] < tiers["host_hold_s"] < 300 < tiers["disk_hold_s"]
    halved = said(capsys, "tiers", "--new-share", "0.5")
    assert halved["host_hold_s"] == pytest.approx(2 * tiers["host_hold_s"])


def test_nothing_new_is_held_for_ever_and_cannot_wear_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "tiers", "--new-share", "0")["host_hold_s"] == "for ever"
    assert main(["calc", "endurance", "--new-share", "0"]) == 2
    assert "nothing is written" in capsys.readouterr().err


def test_a_slow_link_is_never_worth_writing_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "reuse", "--write-gb-s", "1.25", "--read-gb-s", "1.25")["reuses_to_repay"] == "never"
    assert said(capsys, "reuse", "--write-gb-s", "2", "--read-gb-s", "2")["reuses_to_repay"] == 3


def test_more_new_tokens_need_fewer_layers_before(capsys: pytest.CaptureFixture[str]) -> None:
    few, many, all_hidden = (said(capsys, "preload", "--new-tokens", tokens) for tokens in ("128", "256", "512"))
    assert few["layers_to_preload"] > many["layers_to_preload"] > all_hidden["layers_to_preload"]
    assert all_hidden["buffer_mb"] == 0


def test_a_log_saves_most_of_a_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "resume")
    assert found["replayed_tokens"] == 1024
    assert found["ready_ms"] / 1e3 < 0.02 * found["without_log_s"]


def test_bunched_arrivals_need_more_than_their_mean(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "peaks")
    assert found["needed"] > found["mean_arrivals"]
    held = said(capsys, "peaks", "--capacity", str(found["needed"]))
    assert held["worst"] == pytest.approx(20.0)
    assert main(["calc", "peaks", "--durations-s", "1,2", "--arrivals", "1"]) == 2
    assert "names 2 stretches" in capsys.readouterr().err


def test_a_copy_at_the_rate_of_growth_never_catches_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "migration", "--copy-gb-s", "25,0.1")["caught_up_s"][1] == "never"


def test_early_preparation_hides_the_transfer(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "switch", "--early-share", "1")
    assert found["overlapped_s"] == pytest.approx([9.0, 9.0], abs=0.01)


def test_a_tail_needs_more_certainty_than_a_mean(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "route", "--queue-a-ms", "80")
    assert found["hit_probability_needed"] == pytest.approx(0.07, abs=0.001)
    assert found["quantile_ms"][1] == pytest.approx(967, abs=0.6)
    assert found["quantile_ms"][2] == pytest.approx(110.9, abs=0.06)
    assert main(["calc", "route", "--hit-probability", "1.5"]) == 2


def test_only_good_answers_are_divided_by(capsys: pytest.CaptureFixture[str]) -> None:
    whole, quarter = (said(capsys, "cost", "--good-share", share)["per_thousand_good"] for share in ("1", "0.25"))
    assert quarter == pytest.approx([4 * price for price in whole])


@pytest.mark.parametrize(
    ("prefill", "words"),
    [("9,0", "at least one has to prefill"), ("1", "names 1 kinds of cards"), ("x", "a whole number for each kind")],
)
def test_roles_that_cannot_be_are_one_sentence(prefill: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calc", "deployments", "--prefill", prefill]) == 2
    assert words in capsys.readouterr().err
