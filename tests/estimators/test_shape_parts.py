"""Formats, latents, recurrent layers, experts and stages, each by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.shape_parts import (
    FP8,
    Experts,
    Latent,
    NumberFormat,
    Recurrent,
    active_experts,
    plain_format,
    stage_layers,
)


def test_mxfp4_takes_four_and_a_quarter_bits() -> None:
    assert NumberFormat(bits=4, scale_bits=8, group=32).bytes_per_value * 8 == 4.25


@given(bits=st.integers(1, 32), group=st.integers(1, 512), scale=st.integers(1, 32), values=st.integers(1, 4096))
def test_a_vector_by_itself_never_takes_less_than_its_part_of_a_large_matrix(
    bits: int, group: int, scale: int, values: int
) -> None:
    stored = NumberFormat(bits=bits, scale_bits=scale, group=group)
    assert stored.vector_bytes(values) >= values * stored.bytes_per_value - 1e-9
    whole_groups = group * 8  # whole groups and whole bytes: then both are the same
    assert stored.vector_bytes(whole_groups) == pytest.approx(whole_groups * stored.bytes_per_value)


@pytest.mark.parametrize(("scale_bits", "group"), [(16, None), (0, 32)])
def test_scales_and_their_group_come_together(scale_bits: int, group: int | None) -> None:
    with pytest.raises(ValueError, match="group"):
        NumberFormat(bits=4, scale_bits=scale_bits, group=group)


def test_one_byte_values_are_fp8_and_wider_ones_bf16_arithmetic() -> None:
    assert plain_format(1) == FP8
    assert [plain_format(width).math for width in (2, 4)] == ["bf16", "bf16"]


V3 = Latent(rank=512, rope=64, nope=128, value=128, query_rank=1536)


def test_deepseek_v3_attention_has_187_million_weights_a_layer() -> None:
    """Added up from the tensors of its checkpoint: q_a, q_b, kv_a, kv_b, o."""
    tensors = 7168 * 1536 + 1536 * 24576 + 7168 * 576 + 512 * 32768 + 16384 * 7168
    assert V3.weights(hidden=7168, heads=128) == tensors == 187_105_280


def test_a_latent_without_compressed_queries_projects_them_directly() -> None:
    """DeepSeek-V2-Lite: q, kv_a, kv_b, o of 16 heads."""
    lite = Latent(rank=512, rope=64, nope=128, value=128)
    assert lite.weights(hidden=2048, heads=16) == 2048 * 3072 + 2048 * 576 + 512 * 4096 + 2048 * 2048


def test_the_compact_form_costs_a_decode_step_of_v3_2_05_gflops_for_each_token() -> None:
    """The textbook's figure for the query transform and the value recovery of 61 layers (section 9.2.3)."""
    assert 61 * V3.expansion_flops(128) == 2_046_820_352


def test_a_mamba_2_block_is_counted_by_the_same_keys() -> None:
    """Mamba-2 2.7B: inner width 5120 in 80 heads of 64, one group, state 128; in_proj has 2 x 5120 + 2 x 128 + 80."""
    block = Recurrent(key_heads=1, key_dim=128, value_heads=80, value_dim=64)
    one_scalar_a_head_more = 2560 * 80  # the gated delta rule has two for each head, Mamba-2 one
    assert block.weights(2560) - one_scalar_a_head_more == 2560 * (2 * 5120 + 2 * 128 + 80) + 5120 * 2560
    assert block.state_bytes(2) == 80 * 64 * 128 * 4 + 3 * (5120 + 256) * 2


def test_more_experts_chosen_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="chosen"):
        Experts(count=8, chosen=9, intermediate=64)


@given(count=st.integers(1, 512), tokens=st.integers(0, 4096), data=st.data())
def test_active_experts_grow_with_tokens_and_stay_within_all_experts(
    count: int, tokens: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(1, count))
    here, next_one = (active_experts(count=count, chosen=chosen, tokens=t) for t in (tokens, tokens + 1))
    assert 0.0 <= here <= next_one <= count
    assert here <= tokens * chosen + 1e-9
    assert active_experts(count=count, chosen=chosen, tokens=1) == pytest.approx(chosen)


@pytest.mark.parametrize("tokens", [-1.0, float("nan"), float("inf")])
def test_a_token_count_that_is_no_count_is_refused_by_name(tokens: float) -> None:
    with pytest.raises(ValueError, match="tokens"):
        active_experts(count=8, chosen=2, tokens=tokens)


@given(layers=st.integers(1, 200), data=st.data())
def test_stages_hold_every_layer_once_and_differ_by_one_at_most(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    sizes = stage_layers(layers=layers, stages=stages)
    assert (len(sizes), sum(sizes)) == (stages, layers)
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the last stage has the output head besides"


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline"):
        stage_layers(layers=3, stages=4)
