"""State, pairs and reads against counts one token and one layer at a time."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.shape_costs import ShapeCosts, costs_of
from estimators.shape_parts import Experts, Latent, NumberFormat, Recurrent, Shards
from estimators.shapes import QWEN3_8B, Kind, ModelShape

LATENT = Latent(rank=512, rope=64, nope=128, value=128, query_rank=1536)
RECURRENT = Recurrent(key_heads=2, key_dim=8, value_heads=4, value_dim=8)
EXPERTS = Experts(count=128, chosen=8, intermediate=768)


def a_shape(pattern: tuple[Kind, ...] = ("full",), *, window: int | None = None, **others: object) -> ModelShape:
    """A small model with this pattern of layers."""
    plain = {"layers": 12, "hidden": 64, "intermediate": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "vocab": 1000}
    recurrent = {"recurrent": RECURRENT} if "recurrent" in pattern else {}
    return ModelShape(name="m", pattern=pattern, window=window, **{**plain, **recurrent, **others})  # type: ignore[arg-type]


GEMMA_LIKE = a_shape(("window", "window", "window", "window", "window", "full"), window=64)
HYBRID = a_shape(("recurrent", "recurrent", "recurrent", "full"))
THREE_KINDS = a_shape(("recurrent", "window", "full"), window=10)
ALL = [QWEN3_8B, a_shape(("window",), window=32), GEMMA_LIKE, HYBRID, THREE_KINDS, a_shape(latent=LATENT)]
tokens = st.integers(min_value=0, max_value=300)


def counted_bytes(shape: ModelShape, stop: int, start: int = 0) -> int:
    """Bytes that must come, layer by layer and token by token, to stand at `stop` when [0, start) is there."""
    token_bytes, total = shape.layer_kv_bytes(), 0
    for kind in shape.kinds:
        if kind == "recurrent":
            total += shape.layer_state_bytes if stop > start else 0
        else:
            oldest = 0 if kind == "full" else max(0, stop - (shape.window or 0))
            total += sum(token_bytes for token in range(start, stop) if token >= oldest)
    return total


def counted_pairs(shape: ModelShape, new: int, cached: int) -> float:
    """Pairs of every attention layer, each new token seeing half of itself, averaged over those layers."""
    seen = 0.0
    for kind in shape.kinds:
        if kind != "recurrent":
            sees = math.inf if kind == "full" else float(shape.window or 0)
            seen += sum(min(sees, position + 0.5) for position in range(cached, cached + new))
    return seen / shape.attention_layers


@pytest.mark.parametrize("shape", ALL)
@given(start=tokens, more=tokens)
def test_what_a_fetch_moves_equals_a_count_layer_by_layer(shape: ModelShape, start: int, more: int) -> None:
    moved = costs_of(shape).kv_bytes_between(float(start), float(start + more))
    assert moved == pytest.approx(counted_bytes(shape, start + more, start))


@pytest.mark.parametrize("shape", [shape for shape in ALL if shape.latent is None])
@given(new=tokens, cached=tokens)
def test_attention_pairs_equal_a_count_layer_by_layer(shape: ModelShape, new: int, cached: int) -> None:
    assert costs_of(shape).pairs(float(new), float(cached)) == pytest.approx(counted_pairs(shape, new, cached))


@pytest.mark.parametrize("shape", ALL)
@given(context=tokens)
def test_a_whole_state_is_a_fetch_from_nothing(shape: ModelShape, context: int) -> None:
    costs = costs_of(shape)
    assert costs.kv_bytes(float(context)) == costs.kv_bytes_between(0.0, float(context))


@pytest.mark.parametrize("shape", ALL)
@given(start=tokens, first=tokens, second=tokens)
def test_fetching_in_two_steps_never_moves_less_than_at_once(
    shape: ModelShape, start: int, first: int, second: int
) -> None:
    costs, middle, stop = costs_of(shape), float(start + first), float(start + first + second)
    at_once = costs.kv_bytes_between(float(start), stop)
    assert costs.kv_bytes_between(float(start), middle) + costs.kv_bytes_between(middle, stop) >= at_once


@pytest.mark.parametrize("shape", [shape for shape in ALL if shape.latent is None])
@given(cached=tokens, first=tokens, second=tokens)
def test_two_parts_of_a_prefill_are_as_many_pairs_as_the_whole(
    shape: ModelShape, cached: int, first: int, second: int
) -> None:
    costs = costs_of(shape)
    apart = costs.pairs(float(first), float(cached)) + costs.pairs(float(second), float(cached + first))
    assert apart == pytest.approx(costs.pairs(float(first + second), float(cached)))


@pytest.mark.parametrize("shape", ALL)
def test_state_and_reads_never_shrink_as_a_context_grows(shape: ModelShape) -> None:
    costs = costs_of(shape)
    for fewer, more in pairwise(float(n) for n in range(300)):
        assert costs.kv_bytes(fewer) <= costs.kv_bytes(more)
        assert costs.read_tokens(fewer) <= costs.read_tokens(more)


def test_the_state_of_window_layers_stops_growing_at_the_window() -> None:
    costs = costs_of(a_shape(("window",), window=32))
    assert costs.kv_bytes(31.0) < costs.kv_bytes(32.0) == costs.kv_bytes(1e6)


def test_the_state_of_recurrent_layers_is_there_from_the_first_token_and_stays() -> None:
    costs = costs_of(HYBRID)
    attention_only = costs_of(a_shape(layers=3))
    for context in (1.0, 100.0, 1e6):
        assert costs.kv_bytes(context) - attention_only.kv_bytes(context) == costs.state_bytes > 0
    assert costs.kv_bytes(0.0) == 0.0


@pytest.mark.parametrize("window", [300, 10_000])
def test_a_window_longer_than_the_context_changes_nothing(window: int) -> None:
    wide, full = costs_of(a_shape(("window", "full"), window=window)), costs_of(a_shape())
    assert wide.kv_bytes(300.0) == full.kv_bytes(300.0)
    assert wide.pairs(100.0, 200.0) == full.pairs(100.0, 200.0)
    assert wide.read_tokens(300.0) == 300.0


def test_a_window_of_one_lets_each_token_see_itself_alone() -> None:
    """Beyond the first token, each new one makes exactly one pair."""
    assert costs_of(a_shape(("window",), window=1)).pairs(50.0, 10.0) == 50.0


@pytest.mark.parametrize("shape", ALL)
def test_arrays_give_what_single_numbers_give(shape: ModelShape) -> None:
    costs = costs_of(shape)
    new, cached = np.array([[1.0, 100.0], [40.0, 7.0]]), np.array([[0.0], [250.0]])
    grids = (costs.pairs(new, cached), costs.kv_bytes(new), costs.kv_bytes_between(cached, new))
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        here, before = float(new[row, column]), float(cached[row, 0])
        alone = (costs.pairs(here, before), costs.kv_bytes(here), costs.kv_bytes_between(before, here))
        assert tuple(grid[row, column] for grid in grids) == alone


def test_a_fetch_that_would_bring_nothing_new_moves_nothing() -> None:
    for shape in ALL:
        assert costs_of(shape).kv_bytes_between(50.0, 20.0) == 0.0


def test_dense_full_attention_is_the_plain_product() -> None:
    costs = costs_of(QWEN3_8B)
    assert costs.plain
    assert costs.kv_bytes(8192.0) == 8192 * QWEN3_8B.kv_bytes_per_token
    assert costs.pairs(256.0, 8192.0) == 256 * 8192 + 256 * 256 / 2
    assert costs.read_tokens(8704.0) == 8704.0
    assert costs.untouched_share(1.0) == 0.0


# Latent attention


def latent_flops(shape: ModelShape, pairs: float) -> float:
    return pairs * shape.attention_flops_per_pair


def test_cached_latents_are_expanded_once_for_a_long_prefill() -> None:
    """Counted by its matrices: each cached token through the up-projection of every layer."""
    shape = a_shape(latent=LATENT, heads=128)
    costs = costs_of(shape)
    extra = latent_flops(shape, costs.pairs(4096.0, 8192.0) - (4096 * 8192 + 4096**2 / 2))
    assert extra == pytest.approx(12 * 8192 * 2 * 512 * 128 * (128 + 128))


def test_a_short_prefill_works_on_the_latents_as_they_are() -> None:
    """A pair on the latent costs 2 x (576 + 512) a head where the expanded one costs 2 x (192 + 128)."""
    costs = costs_of(a_shape(latent=LATENT, heads=128))
    assert costs.pairs(1.0, 8192.0) == pytest.approx((8192 + 0.5) * (576 + 512) / (192 + 128))


@given(total=st.integers(min_value=2, max_value=20_000), share=st.floats(min_value=0.0, max_value=1.0))
def test_a_cached_token_is_never_dearer_than_a_computed_one(total: int, share: float) -> None:
    """Expanding a latent costs less than making it: a longer hit is never more work."""
    shape = a_shape(latent=LATENT, heads=128, hidden=7168)
    costs = costs_of(shape)
    cached = float(int(share * (total - 2)))
    work = [
        (total - c) * shape.linear_flops_per_token + latent_flops(shape, costs.pairs(total - c, c))
        for c in (cached, cached + 1.0)
    ]
    assert work[1] < work[0]


def test_expanded_latents_need_no_expansion_and_are_shared_by_heads() -> None:
    expanded = msgspec.structs.replace(LATENT, expanded=True)
    costs = costs_of(a_shape(latent=expanded))
    assert costs.pairs(10.0, 100.0) == 10 * 100 + 50
    assert costs.kv_bytes(1.0) == 12 * 8 * (192 + 128) * 2
    halves = costs_of(a_shape(latent=expanded, shards=Shards(tensor=2)))
    assert halves.gpu_kv_bytes(1.0) == costs.kv_bytes(1.0) / 2


# Experts


@pytest.mark.parametrize("batch", [1, 7, 20, 64])
def test_the_share_of_experts_touched_matches_draws(batch: int) -> None:
    """Seeded draws of 8 different experts of 128 for each token; the mean of 300 steps has an error of 0.2 points."""
    drawn = np.argpartition(np.random.default_rng(5).random((300, batch, 128)), 8, axis=2)[:, :, :8]
    touched = float(np.mean([len(np.unique(step)) for step in drawn])) / 128
    share = costs_of(a_shape(experts=EXPERTS)).untouched_share(float(batch))
    assert 1.0 - share == pytest.approx(touched, abs=0.01)


def test_one_token_touches_exactly_the_experts_it_chooses() -> None:
    assert 1.0 - costs_of(a_shape(experts=EXPERTS)).untouched_share(1.0) == pytest.approx(8 / 128)


# Shards


@pytest.mark.parametrize(("tensor", "heads_kept"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_kv_heads_are_shared_until_each_gpu_has_one_and_copied_beyond(tensor: int, heads_kept: int) -> None:
    costs = costs_of(a_shape(shards=Shards(tensor=tensor)))
    assert costs.gpu_kv_bytes(1.0) == 12 * 2 * heads_kept * 16 * 2
    assert costs.kv_bytes(1.0) == 12 * 2 * 4 * 16 * 2, "the state itself is one copy"


def test_latents_are_kept_whole_by_every_gpu_of_a_tensor_group() -> None:
    whole, shared = costs_of(a_shape(latent=LATENT)), costs_of(a_shape(latent=LATENT, shards=Shards(tensor=8)))
    assert shared.gpu_kv_bytes(100.0) == whole.kv_bytes(100.0)


@pytest.mark.parametrize("pipeline", [1, 2, 3, 5, 12])
def test_the_fullest_stage_of_a_pipeline_has_at_least_its_part_and_all_have_the_whole(pipeline: int) -> None:
    costs = costs_of(a_shape(shards=Shards(pipeline=pipeline)))
    assert costs.gpu_kv_bytes(100.0) >= costs.kv_bytes(100.0) / pipeline
    assert costs.gpu_kv_bytes(100.0) == math.ceil(12 / pipeline) * costs.kv_bytes(100.0) / 12


def test_which_stage_is_fullest_depends_on_the_context() -> None:
    """The first stage has window layers only, the second full ones: short contexts fill both alike, long ones not."""
    shape = a_shape(("window",) * 3 + ("full",) * 2, window=10, layers=5, shards=Shards(pipeline=2))
    costs = costs_of(shape)
    layer = float(shape.layer_kv_bytes())
    assert costs.gpu_kv_bytes(10.0) == 30 * layer
    assert costs.gpu_kv_bytes(100.0) == 200 * layer


def test_a_recurrent_state_is_shared_by_the_gpus_of_a_tensor_group() -> None:
    whole, shared = costs_of(HYBRID), costs_of(msgspec.structs.replace(HYBRID, shards=Shards(tensor=4)))
    assert shared.gpu_kv_bytes(1e6) == whole.gpu_kv_bytes(1e6) / 4


# Formats


def test_fp8_kv_is_half_of_bf16_and_int4_a_quarter_and_its_scales() -> None:
    sizes = [
        costs_of(msgspec.structs.replace(QWEN3_8B, kv=kv)).kv_bytes(1.0)
        for kv in (None, NumberFormat(bits=8), NumberFormat(bits=4, scale_bits=32, group=128))
    ]
    assert sizes == [144 * 1024, 72 * 1024, 2 * 36 * 8 * (64 + 4)]


def test_a_decode_step_reads_and_writes_a_recurrent_state() -> None:
    costs = costs_of(HYBRID)
    assert costs.read_tokens(1000.0) == pytest.approx(1000 + 2 * costs.state_bytes / costs.kv_bytes_per_token)


def test_costs_are_a_value() -> None:
    assert isinstance(costs_of(QWEN3_8B), ShapeCosts)
    assert costs_of(QWEN3_8B) == costs_of(msgspec.structs.replace(QWEN3_8B, name="another"))
