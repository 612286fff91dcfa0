"""How right estimates were, on receipts whose answer is known."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path

import msgspec
import numpy as np
import pytest

from router.cli.main import main
from router.receipts import Receipt
from router.study.calibration import OVERRIDDEN, calibration_of
from router.study.groups import LENGTH_EDGES, length_group, length_name, per_token_s
from tests.router.receipts.builders import a_candidate, a_receipt


def lognormal_receipts(count: int, seed: int = 5) -> list[Receipt]:
    """First tokens with a log-normal error around the expectation, and its true quantiles in the receipts."""
    rng = np.random.default_rng(seed)
    receipts = []
    for index in range(count):
        expected_s = 0.1 + rng.random()
        choice = a_candidate(
            replica=f"r{index % 2}",
            path="local" if index % 3 else "recompute",
            expected_s=expected_s,
            first_token_p90_s=expected_s * float(np.exp(0.2 * 1.2816)),
            first_token_p99_s=expected_s * float(np.exp(0.2 * 2.3263)),
        )
        first_s = expected_s * float(np.exp(0.2 * rng.standard_normal()))
        receipts.append(a_receipt(index, candidates=[choice], first_token_s=first_s + 3.0, placed_s=3.0))
    return receipts


def test_right_quantiles_cover_what_they_claim_and_an_unbiased_estimate_shows_no_bias() -> None:
    """5000 draws: two standard deviations of a share of 0.9 are 0.9 %, of the median 0.7 %."""
    whole = calibration_of(lognormal_receipts(5000)).whole
    assert whole.covered_p90 == pytest.approx(0.9, abs=0.015)
    assert whole.covered_p99 == pytest.approx(0.99, abs=0.005)
    assert whole.bias == pytest.approx(0.0, abs=0.01)
    assert whole.error == pytest.approx(0.2 * 0.6745, abs=0.01)  # half of a normal lies within 0.6745 deviations


def test_groups_partition_the_requests() -> None:
    found = calibration_of(lognormal_receipts(300))
    for groups in (found.by_replica, found.by_path, found.by_length):
        assert sum(group.requests for group in groups) == found.whole.requests == 300
    assert [group.name for group in found.by_path] == ["local", "recompute"]


def test_failed_cancelled_and_unstreamed_requests_are_counted_but_judge_no_estimate() -> None:
    receipts = [a_receipt(0), a_receipt(1, outcome="failed"), a_receipt(2, first_token_s=None)]
    receipts.append(a_receipt(3, candidates=[], chosen=None, outcome="refused"))
    found = calibration_of(receipts)
    assert (found.requests, found.whole.requests) == (4, 1)
    assert found.outcomes == {"failed": 1, "ok": 2, "refused": 1}


def test_lines_that_are_there_for_what_became_of_their_request_do_not_count() -> None:
    receipts = lognormal_receipts(50)
    late = [a_receipt(900 + n, first_token_s=99.0, late=True, sampled=False) for n in range(50)]
    assert calibration_of(receipts + late) == calibration_of(receipts)


def test_regret_is_told_by_arm_and_unknown_where_there_was_no_other_candidate() -> None:
    receipts = [a_receipt(index, arm="a", regret_s=value) for index, value in enumerate((-0.1, 0.2, 0.5))]
    receipts += [a_receipt(9, arm="b")]
    one, other = calibration_of(receipts).regret
    assert (one.name, one.requests, one.p50_s) == ("a", 3, 0.2)
    assert one.mean_s == pytest.approx(0.2)
    assert one.regretted == pytest.approx(2 / 3)
    assert (other.name, other.requests) == ("b", 0)
    assert isnan(other.mean_s)


def test_requests_whose_client_chose_the_rule_are_in_no_arms_regret() -> None:
    receipts = [a_receipt(0, arm="a", regret_s=0.1), a_receipt(1, arm="a", regret_s=9.0, override=True)]
    assert [(one.name, one.mean_s) for one in calibration_of(receipts).regret] == [(OVERRIDDEN, 9.0), ("a", 0.1)]


def test_each_length_is_in_one_group_and_names_say_which() -> None:
    groups = [length_group(tokens) for tokens in (0, LENGTH_EDGES[0] - 1, LENGTH_EDGES[0], 10**6)]
    assert groups == [0, 0, 1, len(LENGTH_EDGES)]
    assert len({length_name(group) for group in range(len(LENGTH_EDGES) + 1)}) == len(LENGTH_EDGES) + 1


def test_pace_needs_two_tokens_and_a_good_end() -> None:
    assert per_token_s(a_receipt(first_token_s=1.0, ended_s=3.0, output_tokens=5)) == 0.5
    assert per_token_s(a_receipt(output_tokens=1)) is None
    assert per_token_s(a_receipt(first_token_s=1.0, ended_s=3.0, output_tokens=None, events=5)) == 0.5
    assert per_token_s(a_receipt(output_tokens=None, events=None)) is None
    assert per_token_s(a_receipt(output_tokens=5, outcome="failed")) is None


def test_the_command_prints_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    lines = [msgspec.json.encode(receipt) for receipt in lognormal_receipts(40)]
    path.write_bytes(b"\n".join([*lines, b"cut of"]))
    assert main(["receipts", str(path)]) == 0
    text = capsys.readouterr().out
    assert "40 requests: 40 ok" in text
    assert "by replica" in text
    assert "1 line is no receipt and was passed over" in text
    assert main(["receipts", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_replica"][0]["requests"] == 20
