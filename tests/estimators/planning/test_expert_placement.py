"""Experts on CPU or GPU: crossings found by trying every row count, limits, memory."""

from __future__ import annotations

from math import nextafter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.planning.expert_placement import (
    Device,
    Expert,
    Placement,
    expert_of,
    one_after_another,
    resident_bytes,
    residents_that_fit,
)
from estimators.planning.known import DEEPSEEK_V3, QWEN3_235B
from estimators.shapes import QWEN3_8B

EXPERT = expert_of(QWEN3_235B)
GIB = 2.0**30


def a_placement(
    cpu_tflops: float = 1.8, cpu_gb_s: float = 220, gpu_tflops: float = 156, gpu_gb_s: float = 777.5, link: float = 25
) -> Placement:
    return Placement(
        cpu=Device(flops_per_s=cpu_tflops * 1e12, bytes_per_s=cpu_gb_s * 1e9),
        gpu=Device(flops_per_s=gpu_tflops * 1e12, bytes_per_s=gpu_gb_s * 1e9),
        link_bytes_per_s=link * 1e9,
        start_s=5e-6,
    )


def wins_by_trying(placement: Placement, expert: Expert, most: int) -> int | None:
    for rows in range(1, most + 1):
        if placement.on_gpu(expert, rows).total_s < placement.on_cpu(expert, rows).total_s:
            return rows
    return None


rates = st.floats(0.1, 1000)


@given(rates, rates, rates, rates, rates)
@settings(max_examples=60, deadline=None)
def test_the_crossing_is_the_one_found_by_trying(
    cpu_tflops: float, cpu_gb_s: float, gpu_tflops: float, gpu_gb_s: float, link: float
) -> None:
    placement = a_placement(cpu_tflops, cpu_gb_s, gpu_tflops, gpu_gb_s, link)
    found, tried = placement.gpu_wins_from(EXPERT), wins_by_trying(placement, EXPERT, 1500)
    if found is None or found > 1500:
        assert tried is None
    else:
        assert tried == found


def test_a_gpu_that_is_slower_in_everything_never_wins() -> None:
    assert a_placement(gpu_tflops=1.0, gpu_gb_s=100).gpu_wins_from(EXPERT) is None


def test_a_link_as_fast_as_memory_makes_the_gpu_win_from_the_first_row() -> None:
    assert a_placement(link=10_000, cpu_gb_s=50).gpu_wins_from(EXPERT) == 1


def test_between_the_bends_the_gpu_may_win_where_the_cpu_computes_and_the_gpu_still_reads() -> None:
    """Its lead ends again when it computes too: only the first win is told."""
    placement = a_placement(cpu_tflops=1.0, gpu_tflops=1.0, cpu_gb_s=40, gpu_gb_s=600, link=1000)
    assert placement.gpu_wins_from(EXPERT) == wins_by_trying(placement, EXPERT, 2000)


@pytest.mark.parametrize(("tflops", "before"), [(1.8, 71), (21.3, 688)])
def test_one_row_less_is_still_the_cpus(tflops: float, before: int) -> None:
    placement = a_placement(tflops)
    assert placement.on_cpu(EXPERT, before).total_s < placement.on_gpu(EXPERT, before).total_s
    assert placement.on_cpu(EXPERT, before + 1).total_s > placement.on_gpu(EXPERT, before + 1).total_s


@given(rates, rates)
def test_at_the_bound_reading_and_arithmetic_take_equally_long(tflops: float, gb_s: float) -> None:
    device = Device(flops_per_s=tflops * 1e12, bytes_per_s=gb_s * 1e9)
    rows = device.compute_bound_rows(EXPERT)
    assert rows * EXPERT.row_flops / device.flops_per_s == pytest.approx(EXPERT.weight_bytes / device.bytes_per_s)


def test_halved_weights_move_the_bound_to_half_the_rows_and_the_crossing_down() -> None:
    half = expert_of(QWEN3_235B, weight_bytes_per_value=1)
    cpu = a_placement().cpu
    assert cpu.compute_bound_rows(half) == pytest.approx(cpu.compute_bound_rows(EXPERT) / 2)
    small, large = a_placement().gpu_wins_from(half), a_placement().gpu_wins_from(EXPERT)
    assert small is not None
    assert large is not None
    assert small < large


def test_a_far_socket_slows_single_rows_by_its_bandwidth_alone() -> None:
    near, far = (a_placement(cpu_gb_s=gb_s).on_cpu(EXPERT, 1) for gb_s in (220, 125))
    assert far.read_s / near.read_s == pytest.approx(1.76)
    near, far = (a_placement(cpu_gb_s=gb_s).on_cpu(EXPERT, 128) for gb_s in (220, 125))
    assert near.total_s == far.total_s  # AVX-512 computes longer than it reads from either


def test_parts_of_a_path_sum_to_the_whole() -> None:
    """Each part by hand: 16 KiB a row, 36 MiB of weights."""
    cpu, gpu = a_placement().on_cpu(EXPERT, 10), a_placement().on_gpu(EXPERT, 10)
    assert cpu.transfer_s == pytest.approx(10e-6 + 10 * 16_384 / 25e9)
    assert gpu.transfer_s == pytest.approx(5e-6 + 36 * 2**20 / 25e9)
    assert cpu.compute_s == pytest.approx(10 * 2 * 18_874_368 / 1.8e12)
    assert one_after_another([cpu, gpu]) == pytest.approx(cpu.total_s + gpu.total_s)


def test_residents_fit_as_often_as_their_bytes_do() -> None:
    for per_layer in (1, 16, 32, 128):
        room = resident_bytes(QWEN3_235B, per_layer=per_layer)
        assert residents_that_fit(QWEN3_235B, room_bytes=room) == per_layer
        assert residents_that_fit(QWEN3_235B, room_bytes=nextafter(room, 0)) == per_layer - 1
    assert residents_that_fit(QWEN3_235B, room_bytes=1e15) == 128
    assert resident_bytes(QWEN3_235B, per_layer=32) / GIB == pytest.approx(94 * 32 * 36 / 1024)


def test_layers_without_experts_keep_none() -> None:
    assert resident_bytes(DEEPSEEK_V3, per_layer=1) == 58 * 3 * 7168 * 2048 * 2


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="without routed experts"):
        expert_of(QWEN3_8B)
    with pytest.raises(ValueError, match="without routed experts"):
        resident_bytes(QWEN3_8B, per_layer=1)
    with pytest.raises(ValueError, match="outside 0 to 128"):
        resident_bytes(QWEN3_235B, per_layer=129)
    with pytest.raises(ValueError, match="weight_bytes"):
        expert_of(QWEN3_235B, weight_bytes_per_value=0)
    with pytest.raises(ValueError, match="rows"):
        a_placement().on_cpu(EXPERT, 0)
    with pytest.raises(ValueError, match="flops_per_s"):
        Device(flops_per_s=0, bytes_per_s=1)
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        a_placement(link=0)
