"""Late binding: what is placed where and when, and that nothing is lost or won on the way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadtest.replay.bounds import best_possible_s, ideal_cached_tokens
from loadtest.replay.central import ORDERS, Central, central
from loadtest.replay.results import Result
from loadtest.traffic import TrafficRow
from tests.loadtest.bounds_cases import BLOCK, a_fleet, random_rows, unlike


def play(order: str, rows: list[TrafficRow], *cards: str, **engine: Any) -> Result:
    return central(a_fleet(*cards, **engine), rows, order=order, tokens_per_id=BLOCK)


@pytest.mark.parametrize("order", ORDERS)
def test_every_request_is_answered_once_and_as_long_as_asked(order: str) -> None:
    rows = random_rows(5, requests=60, longest=3000, gap_s=0.05, output=9)
    result = play(order, rows, "A100", "H20")
    assert result.answered.all()
    assert result.output_tokens.tolist() == [row.output_length for row in rows]
    assert (result.ended_s >= result.first_token_s).all()
    assert set(result.row.tolist()) == {0, 1}


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_cached_is_what_the_perfect_cache_has_wherever_the_request_runs(order: str) -> None:
    rows = random_rows(6, requests=40, longest=3000, gap_s=0.05)
    result = play(order, rows, "A100", "A100", "A100")
    ideal = ideal_cached_tokens(rows, block_tokens=BLOCK, tokens_per_id=BLOCK)
    assert ideal.any()
    assert result.cached_tokens.tolist() == ideal.tolist()


def test_first_come_keeps_the_order_and_shortest_first_lets_the_short_one_pass() -> None:
    rows = [unlike(0.0, 2048, 1), unlike(0.01, 6000, 2), unlike(0.02, 300, 3)]
    fcfs, sjf = (play(order, rows, "A100") for order in ORDERS)
    assert fcfs.first_token_s[1] < fcfs.first_token_s[2]
    assert sjf.first_token_s[2] < sjf.first_token_s[1]
    assert sjf.first_token_s.mean() < fcfs.first_token_s.mean()


def test_prefills_of_one_replica_follow_one_another_without_a_gap_though_decodes_run() -> None:
    """By hand: three prefills of one step each; the second step carries the first one's decode, and so on."""
    rows = [unlike(0.0, 2000, number, output=50) for number in (1, 2, 3)]
    result = play("central_fcfs", rows, "A100")
    alone_s = best_possible_s(a_fleet("A100"), rows[:1], tokens_per_id=BLOCK)[0]
    assert result.first_token_s[0] == pytest.approx(alone_s, rel=1e-9)
    assert result.first_token_s[1] == pytest.approx(2 * alone_s, rel=0.01)
    assert result.first_token_s[2] == pytest.approx(3 * alone_s, rel=0.01)


def test_a_request_goes_to_the_card_that_is_fastest_for_it_and_waits_for_none() -> None:
    result = play("central_fcfs", [unlike(0.0, 2000, 1), unlike(0.001, 2000, 2)], "H20", "A100")
    assert result.row.tolist() == [1, 0]


def test_a_slow_replica_is_the_last_to_get_work_and_gets_it_when_the_others_are_taken() -> None:
    """An A100 four times slower than it should be is behind an H20, which has half its peak."""
    fleet = a_fleet("A100", "H20")
    sick = msgspec.structs.replace(fleet.replicas[0], slow=4.0)
    fleet = msgspec.structs.replace(fleet, replicas=[sick, fleet.replicas[1]])
    rows = [unlike(0.0, 2000, 1), unlike(0.001, 2000, 2)]
    result = central(fleet, rows, order="central_fcfs", tokens_per_id=BLOCK)
    assert result.row.tolist() == [1, 0]


def test_a_request_is_bound_only_when_a_replica_is_free() -> None:
    """Two long prefills hold both replicas; the third goes to whichever ends first, which is not known on arrival."""
    rows = [unlike(0.0, 9000, 1), unlike(0.0, 4000, 2), unlike(0.1, 500, 3)]
    result = play("central_fcfs", rows, "A100", "A100")
    assert result.row[2] == result.row[1] != result.row[0]


def test_a_full_batch_of_decodes_is_not_free() -> None:
    """One request at a time: the fast card still decodes when the second one comes."""
    rows = [unlike(0.0, 200, 1, output=100), unlike(0.5, 200, 2)]
    result = play("central_fcfs", rows, "A100", "H20", max_running=1)
    assert result.ended_s[0] > 0.5
    assert result.row.tolist() == [0, 1]


def test_a_replica_without_blocks_for_the_prompt_does_not_take_it() -> None:
    """A fast card with memory for some 19,000 tokens beside the weights, 12,000 of them in use by a decode."""
    fleet = a_fleet("A100", "H20")
    small = msgspec.structs.replace(fleet.cards["A100"], memory_gib=20.0)
    fleet = msgspec.structs.replace(fleet, cards=fleet.cards | {"A100": small})
    rows = [unlike(0.0, 12_000, 1, output=300), unlike(5.0, 12_000, 2), unlike(5.0, 1_000, 3)]
    result = central(fleet, rows, order="central_fcfs", tokens_per_id=BLOCK)
    assert result.ended_s[0] > 5.0
    assert result.row.tolist() == [0, 1, 0]


def test_a_prompt_that_fits_nowhere_is_left_unanswered_and_holds_nobody_up() -> None:
    rows = [unlike(0.0, 200_000, 1), unlike(0.0, 500, 2)]
    result = play("central_fcfs", rows, "A100")
    assert result.answered.tolist() == [False, True]
    assert result.row.tolist() == [-1, 0]


def test_a_long_answer_is_not_cut_and_one_that_outgrows_a_replica_is_said_to_be() -> None:
    rows = [unlike(0.0, 600, 1, output=9000), unlike(0.0, 131_000, 2, output=500)]
    result = play("central_fcfs", rows, "A100", "A100")
    assert result.output_tokens.tolist() == [9000, 72]
    assert result.cut.tolist() == [False, True]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="central_sjf"):
        Central(a_fleet("A100"), [unlike(0.0, 100, 1)], order="lifo", tokens_per_id=BLOCK)


def test_speed_of_the_fleet_file_changes_nothing() -> None:
    rows = random_rows(7, requests=20, longest=3000, gap_s=0.05)
    slow, fast = (
        central(a_fleet("A100", speed=speed), rows, order="central_fcfs", tokens_per_id=BLOCK) for speed in (1.0, 8.0)
    )
    assert slow.first_token_s.tolist() == fast.first_token_s.tolist()


def test_every_rank_of_a_replica_is_an_engine_of_its_own() -> None:
    one = a_fleet("A100")
    two_ranks = msgspec.structs.replace(one, replicas=[msgspec.structs.replace(one.replicas[0], ranks=2)])
    rows = [unlike(0.0, 2000, 1), unlike(0.0, 2000, 2)]
    result = central(two_ranks, rows, order="central_fcfs", tokens_per_id=BLOCK)
    assert result.row.tolist() == [0, 0]
    assert result.first_token_s[0] == result.first_token_s[1]


def test_replicas_that_only_prefill_are_refused() -> None:
    fleet = a_fleet("A100", "A100")
    split = [msgspec.structs.replace(fleet.replicas[0], role="prefill"), fleet.replicas[1]]
    with pytest.raises(ValueError, match="only one"):
        Central(msgspec.structs.replace(fleet, replicas=split), [unlike(0.0, 100, 1)], order="central_fcfs")
