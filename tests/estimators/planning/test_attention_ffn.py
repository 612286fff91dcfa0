"""Crossings between attention and feed-forward layers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.attention_ffn import Crossing, critical_start_s, layer_crossings
from estimators.planning.known import DEEPSEEK_V3
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B

STATE = costs_of(QWEN3_8B).kv_bytes(8192.0)


def test_a_step_crosses_twice_a_layer_with_one_hidden_vector() -> None:
    crossing = layer_crossings(QWEN3_8B)
    assert (crossing.starts, crossing.payload_bytes) == (72, 72 * 4096 * 2)


@given(st.integers(1, 100_000))
def test_tokens_share_starts_and_add_payload(tokens: int) -> None:
    one, many = layer_crossings(QWEN3_8B), layer_crossings(QWEN3_8B, tokens=tokens)
    assert many.starts == one.starts
    assert many.payload_bytes == tokens * one.payload_bytes


def test_crossings_do_not_depend_on_how_state_is_kept() -> None:
    assert DEEPSEEK_V3.latent is not None
    latent = msgspec.structs.replace(DEEPSEEK_V3.latent, expanded=True)
    expanded = msgspec.structs.replace(DEEPSEEK_V3, latent=latent)
    assert layer_crossings(expanded) == layer_crossings(DEEPSEEK_V3)


@given(st.floats(1e9, 1e12), st.integers(1, 50_000))
def test_at_the_critical_start_both_handoffs_take_equally_long(bytes_per_s: float, tokens: int) -> None:
    state, step = Crossing(tokens * 147_456.0, 1), layer_crossings(QWEN3_8B)
    start_s = critical_start_s(state_bytes=state.payload_bytes, layers=step, bytes_per_s=bytes_per_s)
    if start_s < 0:
        assert state.payload_bytes < step.payload_bytes
        return
    both = [crossing.serial_s(bytes_per_s=bytes_per_s, start_s=start_s) for crossing in (state, step)]
    assert both[0] == pytest.approx(both[1], rel=1e-9)


def test_critical_starts_are_exact_where_the_text_gives_fractions() -> None:
    mla = costs_of(DEEPSEEK_V3).kv_bytes(8192.0)
    start_s = critical_start_s(state_bytes=mla, layers=layer_crossings(QWEN3_8B), bytes_per_s=25e9)
    assert start_s == pytest.approx(23003136 / 71 * 1e-9, rel=1e-9)


def test_a_small_state_and_a_fast_link_leave_less_time_to_start() -> None:
    step = layer_crossings(QWEN3_8B)
    starts = [
        critical_start_s(state_bytes=state, layers=step, bytes_per_s=rate)
        for state, rate in ((STATE, 25e9), (STATE, 50e9), (STATE / 4, 50e9))
    ]
    assert starts == sorted(starts, reverse=True)
    assert critical_start_s(state_bytes=0.0, layers=step, bytes_per_s=25e9) < 0


def test_a_whole_answer_crosses_far_longer_than_one_handoff() -> None:
    """8.1 and 17 times, as the text says."""
    step_s = layer_crossings(QWEN3_8B).serial_s(bytes_per_s=25e9, start_s=5e-6)
    assert 1024 * step_s / (STATE / 25e9) == pytest.approx(8.1, abs=0.05)
    assert 1024 * step_s / (costs_of(DEEPSEEK_V3).kv_bytes(8192.0) / 25e9) == pytest.approx(17, abs=0.1)


def test_impossible_crossings_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens"):
        layer_crossings(QWEN3_8B, tokens=0)
    with pytest.raises(ValueError, match="starts"):
        Crossing(1.0, 0)
    with pytest.raises(ValueError, match="payload_bytes"):
        Crossing(float("nan"), 1)
    with pytest.raises(ValueError, match="bytes_per_s"):
        Crossing(1.0, 1).serial_s(bytes_per_s=0.0, start_s=0.0)
    with pytest.raises(ValueError, match="no start time matters"):
        critical_start_s(state_bytes=1.0, layers=Crossing(1.0, 1), bytes_per_s=1.0)
