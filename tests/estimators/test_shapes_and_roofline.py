from __future__ import annotations

import math

import pytest

from estimators.hardware import CARDS
from estimators.roofline import rates_of
from estimators.shapes import QWEN3_8B, prefill_work
from tests.builders import GIB

A100, H20 = rates_of(QWEN3_8B, CARDS["A100"]), rates_of(QWEN3_8B, CARDS["H20"])


def test_qwen3_8b_keeps_144_kib_of_kv_a_token_and_1_125_gib_of_8192() -> None:
    assert QWEN3_8B.kv_bytes_per_token == 144 * 1024
    assert 8192 * QWEN3_8B.kv_bytes_per_token == 1.125 * GIB


def test_qwen3_8b_has_16_4_gb_of_weights() -> None:
    assert QWEN3_8B.weights_bytes / 1e9 == pytest.approx(16.4, abs=0.05)


@pytest.mark.parametrize(("new", "cached", "tflops"), [(8448, 0, 138.4), (256, 8192, 4.81)])
def test_prefill_flops_match_the_text(new: int, cached: int, tflops: float) -> None:
    work = prefill_work(new_tokens=new, cached_tokens=cached)
    flops = work.tokens * QWEN3_8B.linear_flops_per_token + work.pairs * QWEN3_8B.attention_flops_per_pair
    assert flops / 1e12 == pytest.approx(tflops, abs=0.06)


@pytest.mark.parametrize(("new", "cached", "expected_ms"), [(8192, 0, 856), (8448, 0, 887), (256, 8192, 30.9)])
def test_prefill_times_on_an_a100_match_the_text(new: int, cached: int, expected_ms: float) -> None:
    prefill_s = A100.prefill_s(new_tokens=new, cached_tokens=cached)
    assert prefill_s * 1000 == pytest.approx(expected_ms, rel=2e-3)


def test_an_h20_prefills_8192_tokens_in_1_81_s() -> None:
    assert H20.prefill_s(new_tokens=8192, cached_tokens=0) == pytest.approx(1.81, abs=0.005)


def test_attention_pairs_equal_a_count_one_by_one() -> None:
    """Each new token sees all before it and, on average over the causal triangle, half a token of itself."""
    new, cached = 37, 101
    counted = sum(cached + position + 0.5 for position in range(new))
    assert prefill_work(new_tokens=new, cached_tokens=cached).pairs == pytest.approx(counted)


def test_two_halves_of_a_prefill_are_as_much_work_as_the_whole() -> None:
    whole = prefill_work(new_tokens=3000, cached_tokens=500)
    first = prefill_work(new_tokens=1000, cached_tokens=500)
    rest = prefill_work(new_tokens=2000, cached_tokens=1500)
    assert first.tokens + rest.tokens == whole.tokens
    assert first.pairs + rest.pairs == pytest.approx(whole.pairs)


def test_a_cached_token_is_never_dearer_than_a_computed_one() -> None:
    times_s = [A100.prefill_s(new_tokens=8448 - cached, cached_tokens=cached) for cached in range(0, 8448, 128)]
    assert times_s == sorted(times_s, reverse=True)


def test_a_tiny_prefill_still_reads_the_weights_once() -> None:
    assert A100.prefill_s(new_tokens=1, cached_tokens=0) == A100.weights_s


def test_a_decode_step_costs_the_weights_and_grows_with_context() -> None:
    assert A100.decode_step_s(context_tokens=0) == A100.weights_s
    assert A100.decode_step_s(context_tokens=20_000) > A100.decode_step_s(context_tokens=10_000)


def test_a_fleet_sped_up_eight_times_does_the_same_work_in_an_eighth() -> None:
    fast = rates_of(QWEN3_8B, CARDS["A100"].faster(8))
    slow_s = A100.prefill_s(new_tokens=8192, cached_tokens=0)
    assert fast.prefill_s(new_tokens=8192, cached_tokens=0) == pytest.approx(slow_s / 8)
    assert fast.decode_step_s(context_tokens=5000) == pytest.approx(A100.decode_step_s(context_tokens=5000) / 8)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_count_that_is_negative_infinite_or_nan_is_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match="cached_tokens"):
        prefill_work(new_tokens=1, cached_tokens=bad)
    with pytest.raises(ValueError, match="context_tokens"):
        A100.decode_step_s(context_tokens=bad)


def test_a_prefill_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="new_tokens"):
        A100.prefill_s(new_tokens=0, cached_tokens=100)
