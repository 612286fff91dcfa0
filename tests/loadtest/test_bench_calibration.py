from __future__ import annotations

from itertools import pairwise

import pytest

from loadtest.replay.bench_calibration import (
    Disturbance,
    Errors,
    Line,
    Seen,
    at_rate,
    conversations,
    errors_of,
    misread,
    one_at_a_time,
    play,
)
from loadtest.replay.fleets import of_cards
from loadtest.replay.run import Conditions
from loadtest.traffic import TOKENS_PER_ID
from router.config import PolicyConfig
from router.receipts import Candidate, Receipt

TAKING_TURNS = Conditions(policy=PolicyConfig(name="round_robin"))


def a_receipt(number: int, predicted_s: float, observed_s: float, replica: str = "a", local_tokens: int = 0) -> Receipt:
    candidate = Candidate(
        replica=replica,
        path="local" if local_tokens else "recompute",
        queue_s=0.0,
        fetch_s=0.0,
        compute_s=predicted_s,
        first_token_s=predicted_s,
        expected_s=predicted_s,
        hit_probability=1.0,
        local_tokens=local_tokens,
        fetched_tokens=0,
        pace_s=0.1,
        queue_price_s=0.0,
        decode_price_s=0.0,
    )
    return Receipt(
        request_id=f"replay-{number}",
        arrived_at=float(number),
        endpoint="/v1/completions",
        model="m",
        prompt_tokens=1000,
        prompt_exact=True,
        streamed=True,
        policy="p",
        candidates=[candidate],
        chosen=0,
        outcome="ok",
        first_token_s=observed_s,
        ended_s=observed_s + 1.0,
        output_tokens=11,
    )


def test_a_turn_of_a_conversation_repeats_what_was_said_before() -> None:
    rows = conversations(400, 3)
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    for row in rows:
        assert len(row.hash_ids) == -(-row.input_length // TOKENS_PER_ID)
        full = tuple(row.hash_ids[: row.input_length // TOKENS_PER_ID])
        repeats += any(full[:length] in seen for length in range(5, len(full) + 1))
        seen.add(full)
    assert repeats > 100
    assert conversations(400, 3) == rows != conversations(400, 4)


def test_a_rate_is_that_of_the_whole_run_and_one_at_a_time_leaves_long_gaps() -> None:
    rows = at_rate(conversations(101, 1), 4.0)
    assert rows[-1].at_s == pytest.approx(25.0)
    idle = one_at_a_time(rows)
    assert {later.at_s - row.at_s for row, later in pairwise(idle)} == {15.0}


def test_a_misread_fleet_is_faster_for_the_router_and_the_same_for_the_engines() -> None:
    fleets = of_cards(2, ["A100", "H20"])
    wrong = misread(fleets, 3.0)
    assert wrong.engines == fleets.engines
    for card in ("A100", "H20"):
        assert wrong.router.card(card).flops_per_s == pytest.approx(3.0 * fleets.router.card(card).flops_per_s)


def test_errors_count_from_the_request_after_the_watched_ones_of_each_replica() -> None:
    receipts = [a_receipt(i, 1.1, 1.0, replica="ab"[i % 2]) for i in range(10)]
    assert len(errors_of(Seen(receipts), watched=3).all) == 4
    assert len(errors_of(Seen(receipts), watched=3, from_index=2).all) == 2
    assert len(errors_of(Seen(receipts, {"replay-9"}), watched=3).all) == 3


def test_errors_are_relative_signed_and_by_path() -> None:
    receipts = [a_receipt(0, 1.1, 1.0), a_receipt(1, 0.4, 0.5, local_tokens=900)]
    errors = errors_of(Seen(receipts), watched=0)
    assert errors.by_path == {"recompute": [pytest.approx(0.1)], "local": [pytest.approx(-0.2)]}
    assert errors.median() == pytest.approx(0.15)
    assert errors.bias() == pytest.approx(-0.05)
    assert errors_of(Seen(receipts), watched=0, whole=True).by_path["recompute"] == [pytest.approx(2.1 / 2.0 - 1.0)]


def test_a_line_fails_by_its_worst_path_and_when_nothing_counts() -> None:
    good, bad = [0.01] * 9, [0.5]
    assert not list(Line("loaded", 1.0, "0.3", Errors({"local": good}), 0.1).failures())
    said = list(Line("r", 1.0, "0.3", Errors({"local": good, "remote": bad}), 0.1).failures())
    assert len(said) == 1
    assert "remote" in said[0]
    assert list(Line("r", 1.0, "0.3", Errors({}), 0.1).failures())


def test_all_requests_end_once_whatever_disturbs_them() -> None:
    rows = at_rate(conversations(120, 2), 2.0)
    for disturbance in (Disturbance(outlier_share=0.2), Disturbance(slower_from=60), Disturbance(whole=True)):
        seen = play(of_cards(2, ["A100"]), rows, TAKING_TURNS, disturbance)
        assert [receipt.outcome for receipt in seen.receipts] == ["ok"] * 120
        assert (len(seen.outliers) > 5) == (disturbance.outlier_share > 0)
        assert {receipt.streamed for receipt in seen.receipts} == {not disturbance.whole}


def test_an_outlier_is_heard_late_and_never_after_its_answer() -> None:
    rows = at_rate(conversations(120, 2), 0.2)
    plain, late = (
        {receipt.request_id: receipt for receipt in seen.receipts}
        for seen in (
            play(of_cards(1, ["A100"]), rows, TAKING_TURNS, Disturbance()),
            play(of_cards(1, ["A100"]), rows, TAKING_TURNS, Disturbance(outlier_share=1.0)),
        )
    )
    for request_id, receipt in late.items():
        first_s, before_s = receipt.first_token_s, plain[request_id].first_token_s
        assert first_s is not None
        assert before_s is not None
        assert receipt.ended_s is not None
        assert first_s == pytest.approx(min(50.0 * before_s, receipt.ended_s))


def test_a_slow_down_doubles_first_tokens_from_its_request_on() -> None:
    rows = one_at_a_time(conversations(40, 2))
    plain, slow = (
        [receipt.first_token_s or 0.0 for receipt in play(of_cards(1, ["A100"]), rows, TAKING_TURNS, one).receipts]
        for one in (Disturbance(), Disturbance(slower_from=20))
    )
    ratios = [after / before for before, after in zip(plain, slow, strict=True)]
    assert ratios[:20] == [1.0] * 20
    assert ratios[20:] == pytest.approx([2.0] * 20, rel=0.1)
