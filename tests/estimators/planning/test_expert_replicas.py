"""Copies of hot experts and padded rows."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.expert_placement import Device
from estimators.planning.expert_replicas import (
    Replication,
    Tile,
    batches_to_repay,
    card_s,
    expert_traffic_bytes,
    matrix_traffic_bytes,
    padding,
    replica_bytes,
    replicate,
)
from estimators.planning.known import DEEPSEEK_V3, QWEN3_235B
from estimators.shapes import QWEN3_8B

TILE = Tile(rows=64, columns=128)
H100 = Device(flops_per_s=494.7e12, bytes_per_s=1675e9)
COMPUTE_BOUND = Device(flops_per_s=1e9, bytes_per_s=1e15)


def copied(rows: list[int], copies: int, device: Device = H100, link: float = 450e9) -> Replication:
    return replicate(QWEN3_235B, rows, copies=copies, device=device, tile=TILE, link_bytes_per_s=link, start_s=5e-6)


def test_the_textbooks_saving_comes_out_of_the_tiles_to_the_byte() -> None:
    one = copied([128] * 8, 7)
    assert one.saved_s == pytest.approx(402_784_256 / 1675e9, rel=1e-12)
    assert one.before_s * 1675e9 == pytest.approx(921e6, abs=0.5e6)
    assert one.copy_s == pytest.approx(0.62220256e-3, rel=1e-12)
    assert copied([128] * 8, 7, link=50e9).copy_s == pytest.approx(5.31982304e-3, rel=1e-12)


def test_gains_are_those_of_the_text() -> None:
    near, far = copied([128] * 8, 7), copied([128] * 8, 7, link=50e9)
    gains_ms = [one.gain_s(batches) * 1e3 for one in (near, far) for batches in (16, 64)]
    assert gains_ms == pytest.approx([3.2, 14.8, -1.5, 10.1], abs=0.05)


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 300))
def test_traffic_is_counted_as_tiles_are_played_one_by_one(rows: int, tile_rows: int, tile_columns: int) -> None:
    inner, columns, loads = 7, 200, 0
    for top in range(0, rows, tile_rows):
        loads += inner * columns  # the weights once for this row tile
        for left in range(0, columns, tile_columns):
            loads += min(tile_rows, rows - top) * inner  # its inputs again for each column tile
            loads += min(tile_rows, rows - top) * min(tile_columns, columns - left)  # and its outputs
    traffic = matrix_traffic_bytes(
        rows, inner=inner, columns=columns, tile=Tile(tile_rows, tile_columns), value_bytes=2
    )
    assert traffic == 2 * loads


def test_a_tile_as_large_as_the_product_moves_everything_once() -> None:
    assert matrix_traffic_bytes(10, inner=20, columns=30, tile=Tile(10, 30), value_bytes=2) == 2 * (600 + 200 + 300)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_more_rows_never_move_less(rows: int, more: int) -> None:
    assert expert_traffic_bytes(QWEN3_235B, rows, TILE) <= expert_traffic_bytes(QWEN3_235B, rows + more, TILE)


def test_where_arithmetic_rules_a_copy_takes_exactly_its_half() -> None:
    """Second route: 8 x 128 rows become 576, whatever the tiles."""
    one = copied([128] * 8, 7, COMPUTE_BOUND)
    assert one.before_s == pytest.approx(1024 * 2 * 18_874_368 / 1e9)
    assert one.after_s / one.before_s == pytest.approx(576 / 1024)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.data())
def test_copies_never_slow_the_batch_and_more_of_them_never_less_fast(rows: list[int], data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, len(rows)))
    fewer, more = copied(rows, copies - 1), copied(rows, copies)
    assert more.after_s <= fewer.after_s * (1 + 1e-12)
    assert more.after_s <= more.before_s * (1 + 1e-12)
    assert more.copy_s > fewer.copy_s


def test_no_copies_change_nothing() -> None:
    one = copied([100, 50], 0)
    assert (one.saved_s, one.copy_s, one.pays_after) == (0.0, 0.0, None)


@given(st.floats(0, 100), st.floats(0.001, 10))
def test_the_first_batch_that_pays_is_the_first_with_a_gain(cost_s: float, saved_s: float) -> None:
    first = batches_to_repay(cost_s=cost_s, saved_s=saved_s)
    assert first is not None
    assert first >= 1
    assert first * saved_s > cost_s * (1 - 1e-12)
    assert (first - 1) * saved_s <= cost_s * (1 + 1e-12)


def test_a_gain_of_exactly_nothing_has_not_paid_yet() -> None:
    assert batches_to_repay(cost_s=1.0, saved_s=0.5) == 3
    assert batches_to_repay(cost_s=1.0, saved_s=0.0) is None
    assert batches_to_repay(cost_s=1.0, saved_s=-0.5) is None


def test_replicas_cost_memory_where_they_are() -> None:
    mib = 2.0**20
    assert replica_bytes(QWEN3_235B) == 3384 * mib
    assert replica_bytes(QWEN3_235B, layers=8) == 288 * mib
    assert replica_bytes(DEEPSEEK_V3) == 58 * 3 * 7168 * 2048 * 2


@given(st.lists(st.integers(0, 200), min_size=1, max_size=16), st.integers(1, 64))
def test_padding_adds_less_than_a_tile_for_each_matrix_with_rows(rows: list[int], tile_rows: int) -> None:
    made = padding(rows, tile_rows=tile_rows)
    assert made.useful == sum(rows)
    assert made.useful <= made.tiles < made.useful + tile_rows * (sum(each > 0 for each in rows) or 1)
    assert made.tiles <= made.equal
    assert made.tiles % tile_rows == made.equal % tile_rows == 0


def test_tiles_of_one_row_pad_nothing() -> None:
    assert padding([5, 0, 3], tile_rows=1).tiles == 8


def test_the_textbooks_paddings_are_three_and_a_half_and_four_times_the_useful_rows() -> None:
    made = padding([32, 16, 8, 4, 2, 1, 1, 0], tile_rows=32)
    assert (made.tiles / made.useful, made.equal / made.useful) == (3.5, 4.0)


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="copies"):
        copied([128], 2)
    with pytest.raises(ValueError, match="empty"):
        copied([], 0)
    with pytest.raises(ValueError, match="without routed experts"):
        expert_traffic_bytes(QWEN3_8B, 1, TILE)
    with pytest.raises(ValueError, match="without routed experts"):
        replica_bytes(QWEN3_8B)
    with pytest.raises(ValueError, match="layers"):
        replica_bytes(QWEN3_235B, layers=95)
    with pytest.raises(ValueError, match="rows"):
        card_s(QWEN3_235B, [-1], device=H100, tile=TILE)
    with pytest.raises(ValueError, match="columns"):
        Tile(1, 0)
    with pytest.raises(ValueError, match="tile_rows"):
        padding([1], tile_rows=0)
    with pytest.raises(ValueError, match="rows"):
        padding([-1], tile_rows=1)


def test_eight_bit_experts_are_copied_in_half_the_time_less_the_starts() -> None:
    assert QWEN3_235B.experts is not None
    one_byte = msgspec.structs.replace(QWEN3_235B, value_bytes=1)
    whole, half = (
        replicate(shape, [128], copies=1, device=H100, tile=TILE, link_bytes_per_s=50e9, start_s=0.0).copy_s
        for shape in (QWEN3_235B, one_byte)
    )
    assert half == pytest.approx(whole / 2)
