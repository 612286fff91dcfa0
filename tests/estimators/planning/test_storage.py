from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.known import PLANNED_CARDS
from estimators.planning.storage import (
    Endurance,
    Saving,
    StorageTier,
    filled_tiers,
    hold_s,
    kv_bytes_per_s,
    needed_bytes,
    rate_to_repay_bytes_per_s,
    read_ahead,
    remote_reads_bytes_per_s,
    saving_over,
)
from estimators.roofline import Roofline
from estimators.shapes import QWEN3_8B

A100 = Roofline.of(QWEN3_8B, PLANNED_CARDS["A100"])
RATES = st.floats(1e6, 1e12)
SECONDS = st.floats(1e-3, 1e6)


def test_a_prefix_hit_lowers_the_rate_of_new_state_less_than_the_hit_itself() -> None:
    """The tokens after a hit still look at the whole prompt, so each takes longer, and state comes more slowly."""
    alone = kv_bytes_per_s(A100, prompt_tokens=2048)
    after_hit = kv_bytes_per_s(A100, prompt_tokens=8192, cached_tokens=6144)
    assert after_hit < alone


def test_the_rate_of_new_state_is_what_one_prompt_leaves_over_what_it_takes() -> None:
    """The other route: bytes per token over seconds per token, from the shape and the peak alone."""
    flops_per_token = QWEN3_8B.linear_flops_per_token + QWEN3_8B.attention_flops_per_pair * 4096 / 2
    expected = QWEN3_8B.kv_bytes_per_token / (flops_per_token / 156e12)
    assert kv_bytes_per_s(A100, prompt_tokens=4096) == pytest.approx(expected, rel=0.01)  # the head is not in it


@given(reuse_s=SECONDS, rate=RATES)
def test_a_tier_of_the_needed_size_holds_exactly_so_long(reuse_s: float, rate: float) -> None:
    capacity = needed_bytes(reuse_after_s=reuse_s, kv_bytes_per_s=rate)
    assert hold_s(capacity_bytes=capacity, kv_bytes_per_s=rate) == pytest.approx(reuse_s)


def test_without_new_state_a_tier_holds_for_ever() -> None:
    assert hold_s(capacity_bytes=1.0, kv_bytes_per_s=0.0) == inf


def test_tiers_are_filled_from_the_nearest_and_overflow_is_left_over() -> None:
    tiers = [StorageTier("hbm", 60.0), StorageTier("host", 250.0, (25.0,)), StorageTier("disk", 3800.0, (7.0, 25.0))]
    assert filled_tiers(tiers, wanted_bytes=400.0) == [60.0, 250.0, 90.0]
    assert filled_tiers(tiers, wanted_bytes=30.0) == [30.0, 0.0, 0.0]
    assert sum(filled_tiers(tiers, wanted_bytes=9999.0)) == 4110.0


def test_links_of_a_tier_are_passed_one_after_another() -> None:
    far = StorageTier("pool", inf, (10.0, 40.0))
    assert far.read_s(80.0) == pytest.approx(8.0 + 2.0)
    assert StorageTier("hbm", 1.0).read_s(80.0) == 0.0


@given(write_s=SECONDS, read_s=SECONDS, compute_s=SECONDS)
def test_the_reuses_to_repay_are_the_first_that_save(write_s: float, read_s: float, compute_s: float) -> None:
    saving = Saving(write_s, read_s, compute_s)
    fewest = saving.reuses_to_repay
    if fewest == inf:
        assert saving.saved_s(10_000) < 0
    elif fewest < 1e9:
        assert saving.saved_s(int(fewest)) > -1e-6 * int(fewest)
        assert saving.saved_s(int(fewest) - 1) <= 1e-6 * int(fewest)


@given(size=st.floats(1e6, 1e12), compute_s=SECONDS, reuses=st.integers(1, 1000))
def test_a_link_at_the_rate_to_repay_neither_saves_nor_loses(size: float, compute_s: float, reuses: int) -> None:
    rate = rate_to_repay_bytes_per_s(size_bytes=size, compute_s=compute_s, reuses=reuses)
    saving = saving_over(size_bytes=size, link_bytes_per_s=rate, compute_s=compute_s)
    assert saving.saved_s(reuses) == pytest.approx(0.0, abs=1e-9 * compute_s * reuses)


def test_a_link_slower_than_computing_never_repays() -> None:
    made = kv_bytes_per_s(A100, prompt_tokens=8192)
    size = float(A100.costs.kv_bytes(8192.0))
    compute_s = A100.prefill_s(new_tokens=8192, cached_tokens=0)
    assert saving_over(size_bytes=size, link_bytes_per_s=0.99 * made, compute_s=compute_s).reuses_to_repay == inf
    assert saving_over(size_bytes=size, link_bytes_per_s=1.5 * made, compute_s=compute_s).reuses_to_repay == 3
    assert saving_over(size_bytes=size, link_bytes_per_s=2.5 * made, compute_s=compute_s).reuses_to_repay == 1


def test_a_disk_written_at_its_share_lasts_exactly_its_years() -> None:
    disk = Endurance(capacity_bytes=4e12, writes_per_day=3.0, years=5.0)
    share = disk.admitted_share(2e9)
    assert share < 1
    assert disk.worn_out_after_days(2e9 * share) == pytest.approx(5 * 365)
    assert disk.admitted_share(1.0) == 1.0


def test_what_a_disk_may_take_in_a_day_is_its_capacity_times_its_writes() -> None:
    assert Endurance(4e12, 3.0, 5.0).bytes_per_s * 86_400 == pytest.approx(12e12)


@given(queue_s=st.floats(0, 10), read_s=st.floats(0, 10))
def test_a_read_ahead_is_hidden_as_far_as_the_queue_is_long(queue_s: float, read_s: float) -> None:
    ahead = read_ahead(host_bytes=100.0, state_bytes=30.0, read_s=read_s, queue_s=queue_s)
    assert ahead.depth == 3
    assert ahead.hidden_s + ahead.exposed_s == pytest.approx(read_s)
    assert (ahead.exposed_s == 0.0) == (queue_s >= read_s)


def test_reading_at_each_step_needs_a_link_that_grows_with_the_steps() -> None:
    assert remote_reads_bytes_per_s(state_bytes=2e9, reads=50, within_s=4.0) == pytest.approx(25e9)
    assert remote_reads_bytes_per_s(state_bytes=2e9, reads=0, within_s=4.0) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: StorageTier("x", 0.0),
        lambda: StorageTier("x", 1.0, (0.0,)),
        lambda: hold_s(capacity_bytes=float("nan"), kv_bytes_per_s=1.0),
        lambda: needed_bytes(reuse_after_s=-1.0, kv_bytes_per_s=1.0),
        lambda: Saving(-1.0, 1.0, 1.0),
        lambda: Endurance(1.0, 0.0, 1.0),
        lambda: rate_to_repay_bytes_per_s(size_bytes=1.0, compute_s=1.0, reuses=0),
    ],
)
def test_what_cannot_be_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="is"):
        wrong()  # type: ignore[operator]
