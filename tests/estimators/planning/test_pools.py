"""Pools: limits, laws, and rates reached on a second route."""

from __future__ import annotations

from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.hardware import Card
from estimators.planning.known import DEEPSEEK_V3, PLANNED_CARDS, QWEN3_235B
from estimators.planning.pools import (
    Group,
    StageTimes,
    Work,
    absorbed_call_flops,
    all_splits,
    chunked_prefill,
    colocated_per_s,
    handoffs_per_s,
    per_s,
    piggyback_per_s,
    resident_bytes,
    spare_call_s,
    stage_times,
)
from estimators.shapes import QWEN3_8B

A100, H20 = PLANNED_CARDS["A100"], PLANNED_CARDS["H20"]
REQUEST = Work(new_tokens=8192, output_tokens=1025)
GIB = 2.0**30


def times(prefill_s: float, decode_s: float) -> StageTimes:
    return StageTimes(
        prefill_s=prefill_s,
        decode_s=decode_s,
        step_s=0.1,
        step_compute_s=0.01,
        compute_s=prefill_s + decode_s / 10,
        read_s=decode_s,
        idle_tokens=100,
    )


def on(card: Card, work: Work = REQUEST) -> StageTimes:
    return stage_times(QWEN3_8B, card, work)


def mixed(work: Work = REQUEST) -> list[Group]:
    return [Group(4, on(A100, work)), Group(4, on(H20, work))]


groups_of_cards = st.lists(
    st.builds(
        Group,
        st.integers(0, 4),
        st.builds(times, st.floats(0.01, 10), st.floats(0.01, 10)),
    ),
    min_size=1,
    max_size=3,
)


def test_stage_times_follow_from_the_data_sheet_by_hand() -> None:
    """FLOPs and bytes counted one matrix at a time, not through the shape."""
    layer = 2 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288)  # query, key and value, output, MLP
    head = 2 * 4096 * 151936
    prefill = 8192 * 36 * layer + 36 * 4 * 4096 * 8192**2 / 2 + head
    assert on(A100).prefill_s == pytest.approx(prefill / 156e12, rel=1e-9)
    weights = (36 * layer + head) / 2 * 2  # two FLOPs a weight, two bytes a weight
    kv = 32 * 8704 * 36 * 2 * 1024 * 2
    assert on(A100).step_s == pytest.approx((weights + kv) / 1019.5e9, rel=1e-9)
    assert on(A100).decode_s == pytest.approx(1024 * on(A100).step_s / 32, rel=1e-12)


def test_idle_tokens_just_fill_the_step() -> None:
    one = on(A100)
    assert one.step_compute_s + one.idle_tokens / 8192 * one.prefill_s == pytest.approx(one.step_s, rel=1e-12)
    assert on(A100).idle_tokens == pytest.approx(490, abs=6)
    assert on(H20).idle_tokens == pytest.approx(85, abs=0.5)


def test_ideal_piggyback_gives_the_textbooks_rates() -> None:
    assert piggyback_per_s([Group(8, on(A100))]) == pytest.approx(4.50, abs=0.005)
    assert piggyback_per_s(mixed()) == pytest.approx(4.17, abs=0.005)


def test_the_textbooks_prompt_rides_on_seventeen_steps() -> None:
    chunked = chunked_prefill(on(A100), new_tokens=8192)
    assert chunked.chunks == 17
    assert chunked.first_token_s == pytest.approx(0.94, abs=0.005)
    assert chunked.chunk_tokens * 16 < 8192 <= chunked.chunk_tokens * 17


def test_a_step_without_room_carries_no_prefill() -> None:
    full = msgspec.structs.replace(H20, peak_tflops=1.0)
    with pytest.raises(ValueError, match="nothing can ride along"):
        chunked_prefill(on(full), new_tokens=8192)


@given(groups_of_cards)
def test_piggyback_is_never_slower_than_one_stage_after_the_other_nor_faster_than_its_longer_stage(
    groups: list[Group],
) -> None:
    assert piggyback_per_s(groups) >= colocated_per_s(groups) * (1 - 1e-12)
    assert piggyback_per_s(groups) <= per_s(
        [group.count for group in groups], [max(group.times.prefill_s, group.times.decode_s) for group in groups]
    ) * (1 + 1e-12)


@given(groups_of_cards, st.floats(0.01, 100))
@settings(max_examples=50)
def test_no_integer_split_beats_cards_that_may_be_divided(groups: list[Group], link_per_s: float) -> None:
    """The relaxation: cards sorted by prefill over decode time, divided where both pools are equal.

    Bisection on the rate: at rate x, the cards best at prefill take x requests, the others must decode x.
    """
    best = all_splits(groups, link_per_s=link_per_s).per_s.max()
    order = sorted(groups, key=lambda group: group.times.prefill_s / group.times.decode_s)

    def possible(rate: float) -> bool:
        left, decoded = rate, 0.0
        for group in order:
            prefilled = min(left, group.count / group.times.prefill_s)
            left -= prefilled
            decoded += (group.count - prefilled * group.times.prefill_s) / group.times.decode_s
        return left <= 1e-12 * rate and decoded >= rate * (1 - 1e-9)

    assert best <= link_per_s
    assert best == 0 or possible(best)


def test_equal_cards_gain_nothing_from_a_split() -> None:
    groups = [Group(8, on(A100))]
    assert all_splits(groups).per_s.max() <= colocated_per_s(groups)


def test_every_split_is_the_sum_over_its_cards() -> None:
    splits = all_splits(mixed())
    assert splits.per_s.shape == (5, 5)
    for a100, h20 in np.ndindex(5, 5):
        split = splits.at((a100, h20))
        assert split.prefill_per_s == pytest.approx(a100 / on(A100).prefill_s + h20 / on(H20).prefill_s)
        assert split.decode_per_s == pytest.approx((4 - a100) / on(A100).decode_s + (4 - h20) / on(H20).decode_s)
        assert split.per_s == splits.per_s[a100, h20]


def test_the_neighbours_of_the_best_split_are_slower_as_in_the_text() -> None:
    splits = all_splits(mixed(), link_per_s=20.7)
    assert splits.best == (4, 0)
    assert splits.at((3, 0)).per_s == pytest.approx(3.50, abs=0.005)
    assert splits.at((4, 1)).per_s == pytest.approx(3.42, abs=0.005)
    assert splits.at((4, 0)).limited_by == "decode pool"
    assert splits.at((3, 0)).limited_by == "prefill pool"


def test_a_slow_link_levels_all_better_splits_and_the_roomiest_is_taken() -> None:
    splits = all_splits(mixed(), link_per_s=1.0)
    assert splits.at(splits.best).limited_by == "link"
    assert splits.best == all_splits(mixed()).best
    assert (splits.per_s <= 1.0).all()


def test_hits_move_cards_to_decode_and_short_answers_to_prefill() -> None:
    hit = Work(new_tokens=2048, cached_tokens=6144, output_tokens=1025)
    short = Work(new_tokens=8192, output_tokens=129)
    assert all_splits(mixed(hit)).best == (2, 0)
    assert all_splits(mixed(short)).best == (4, 3)


def test_an_answer_of_one_token_needs_no_decode_and_no_handoff() -> None:
    splits = all_splits(mixed(Work(new_tokens=8192, output_tokens=1)), link_per_s=0.001)
    assert splits.best == (4, 4)
    assert splits.at((4, 4)).per_s == colocated_per_s(mixed(Work(new_tokens=8192, output_tokens=1)))


@given(st.integers(1, 20_000), st.integers(0, 20_000), st.integers(2, 5000), st.integers(1, 256))
@settings(max_examples=60)
def test_more_work_takes_longer_and_parts_stay_within_the_whole(new: int, cached: int, output: int, batch: int) -> None:
    one = on(A100, Work(new_tokens=new, cached_tokens=cached, output_tokens=output, batch=batch))
    more = on(A100, Work(new_tokens=new + 1, cached_tokens=cached, output_tokens=output + 1, batch=batch))
    assert one.prefill_s <= more.prefill_s
    assert one.decode_s < more.decode_s
    assert 0 < one.step_compute_s <= one.step_s
    assert one.piggyback_s <= one.colocated_s * (1 + 1e-9)
    assert one.idle_tokens >= 0


def test_a_larger_batch_shares_the_weights() -> None:
    rates = [on(A100, Work(new_tokens=8192, output_tokens=1025, batch=batch)).decode_s for batch in (1, 8, 64, 512)]
    assert rates == sorted(rates, reverse=True)
    kv_s = 1024 * 8704 * 36 * 4096 / 1019.5e9
    assert rates[-1] == pytest.approx(kv_s, rel=0.05)  # what no batch can share


def test_reading_the_latent_slows_the_decode_pool_by_its_transforms() -> None:
    flops = absorbed_call_flops(DEEPSEEK_V3)
    assert flops == 61 * 2 * 2 * 128 * 128 * 512 == 2_046_820_352
    slowed = stage_times(QWEN3_8B, H20, REQUEST, extra_call_s=flops / 74e12)
    assert 4 / slowed.decode_s == pytest.approx(4.41, abs=0.005)
    assert absorbed_call_flops(QWEN3_8B) == 0
    spare_s = spare_call_s([Group(4, on(H20))], arrival_rps=3.5, calls=1024)
    assert spare_s == pytest.approx(258e-6, abs=0.5e-6)
    at_the_edge = stage_times(QWEN3_8B, H20, REQUEST, extra_call_s=spare_s)
    assert 4 / at_the_edge.decode_s == pytest.approx(3.5, rel=1e-12)


def test_what_a_decode_card_must_hold() -> None:
    assert resident_bytes(QWEN3_8B, REQUEST) / GIB == pytest.approx(56.9, abs=0.05)
    assert resident_bytes(QWEN3_8B, REQUEST, arriving=0) / GIB == pytest.approx(56.9 - 1.125, abs=0.05)


def test_handoffs_are_bytes_over_the_rate() -> None:
    assert handoffs_per_s(link_bytes_per_s=25e9, state_bytes=1.125 * GIB) == pytest.approx(20.7, abs=0.05)
    assert handoffs_per_s(link_bytes_per_s=25e9, state_bytes=1.125 * GIB, moves=2) == pytest.approx(10.3, abs=0.05)


def test_experts_and_tensor_parallel_are_priced_like_online() -> None:
    two = msgspec.structs.replace(QWEN3_235B, shards=msgspec.structs.replace(QWEN3_235B.shards, tensor=2))
    one, half = (stage_times(shape, A100, REQUEST) for shape in (QWEN3_235B, two))
    assert half.prefill_s == pytest.approx(one.prefill_s / 2, rel=1e-9)
    assert half.decode_s < one.decode_s


def test_a_stage_without_work_needs_a_card_and_no_more() -> None:
    """A prompt that is all in a store: one card that takes it up, the others decode."""
    splits = all_splits([Group(2, times(0.0, 1.0)), Group(1, times(0.0, 4.0))])
    assert splits.best == (0, 1)
    assert splits.at((0, 1)).per_s == 2.0
    assert splits.at((0, 0)).per_s == 0.0


def test_pools_without_work_have_no_limit_and_without_cards_no_rate() -> None:
    assert per_s([2], [0.0]) == inf
    assert per_s([0], [0.0]) == 0
    assert per_s([], []) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"new_tokens": 0, "output_tokens": 1},
        {"new_tokens": 1, "output_tokens": 0},
        {"new_tokens": 1, "output_tokens": 1, "cached_tokens": -1},
        {"new_tokens": 1, "output_tokens": 1, "batch": 0},
    ],
)
def test_impossible_work_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Work(**bad)


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        all_splits([])
    with pytest.raises(ValueError, match="count cards in larger units"):
        all_splits([Group(4000, on(A100)), Group(4000, on(H20))])
    with pytest.raises(ValueError, match="no way to split"):
        all_splits(mixed()).at((5, 0))
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        handoffs_per_s(link_bytes_per_s=0.0, state_bytes=1.0)
    with pytest.raises(ValueError, match="more than one kind"):
        spare_call_s(mixed(), arrival_rps=1.0, calls=1)
    with pytest.raises(ValueError, match="extra_call_s"):
        stage_times(QWEN3_8B, A100, REQUEST, extra_call_s=-1.0)
