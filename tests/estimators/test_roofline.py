"""Times that follow from shape and card: limits, laws, and what each part of a shape does to them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.hardware import CARDS, Card
from estimators.model_config import read_config
from estimators.roofline import Roofline, rates_of
from estimators.shape_parts import FP8, NumberFormat, Shards
from estimators.shapes import QWEN3_8B, ModelShape

CONFIGS = Path(__file__).parents[1] / "vectors" / "hf_configs"
H200 = CARDS["H200"]
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def model(name: str, **changes: object) -> ModelShape:
    shape = read_config((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return msgspec.structs.replace(shape, **changes)


def test_a_dense_model_takes_the_same_time_by_both_forms() -> None:
    line = Roofline.of(QWEN3_8B, CARDS["A100"])
    assert line.prefill_s(new_tokens=256, cached_tokens=8192) == line.rates.prefill_s(
        new_tokens=256, cached_tokens=8192
    )
    assert line.decode_step_s([8704.0] * 32) == pytest.approx(line.rates.decode_step_s(context_tokens=32 * 8704))


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_prefill_and_a_longer_context_never_take_less(name: str) -> None:
    line = Roofline.of(model(name), H200)
    lengths = [1, 100, 1000, 1024, 1025, 4096, 5000, 30_000]
    prefills = [line.prefill_s(new_tokens=n, cached_tokens=500) for n in lengths]
    steps = [line.decode_step_s([float(n)] * 4) for n in lengths]
    assert prefills == sorted(prefills)
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_hit_of_the_same_prompt_never_takes_longer(name: str) -> None:
    line = Roofline.of(model(name), H200)
    times = [line.prefill_s(new_tokens=8448 - hit, cached_tokens=hit) for hit in range(0, 8448, 128)]
    assert times == sorted(times, reverse=True)


def test_one_new_token_after_a_long_hit_reads_weights_and_context_as_a_decode_step_does() -> None:
    line = Roofline.of(QWEN3_8B, CARDS["A100"])
    assert line.prefill_s(new_tokens=1, cached_tokens=100_000) == pytest.approx(line.decode_step_s([100_001.0]))


# Experts


def test_a_decode_step_of_one_reads_the_chosen_experts_and_a_large_batch_all() -> None:
    shape = model("qwen3_30b_a3b")
    line = Roofline.of(shape, H200)
    outside = shape.step_weights_bytes - shape.routed_bytes
    alone_bytes = line.decode_step_s([0.0]) * H200.bytes_per_s
    assert alone_bytes == pytest.approx(outside + shape.routed_bytes * 8 / 128)
    assert line.rates.weights_s * H200.bytes_per_s == pytest.approx(shape.step_weights_bytes)
    assert line.decode_step_s([0.0] * 256) == pytest.approx(line.rates.weights_s, rel=1e-6)


def test_a_mixture_prefills_as_fast_as_its_active_weights_are_few() -> None:
    """30 billion weights of which 3.3 are active: per token about a tenth of the time of a dense model as large."""
    mixture = rates_of(model("qwen3_30b_a3b"), H200)
    eight = rates_of(QWEN3_8B, H200)
    active = 30.53e9 - 48 * 120 * 3 * 2048 * 768 - 2 * 151936 * 2048
    dense = 8.19e9 - 2 * 151936 * 4096
    assert mixture.linear_s_per_token / eight.linear_s_per_token == pytest.approx(active / dense, rel=0.01)


def test_ranks_that_share_the_experts_read_a_part_of_them_each_and_touch_them_together() -> None:
    """Eight ranks with 4 decodes each touch what one replica with 32 touches, and each reads an eighth of it."""
    shape = model("deepseek_v3")
    alone = Roofline.of(shape, H200)
    rank = Roofline.of(msgspec.structs.replace(shape, shards=Shards(expert_ranks=8)), H200)
    assert rank.costs.untouched_share(4.0) == pytest.approx(alone.costs.untouched_share(32.0))
    assert rank.rates.experts_s * 8 == pytest.approx(alone.rates.experts_s)
    assert rank.rates.weights_s - rank.rates.experts_s == pytest.approx(alone.rates.weights_s - alone.rates.experts_s)
    assert rank.rates.linear_s_per_token == alone.rates.linear_s_per_token


# Windows and states


def test_contexts_beyond_all_windows_cost_a_window_model_nothing_more() -> None:
    line = Roofline.of(model("mistral_7b_v0_1"), H200)
    assert line.decode_step_s([4096.0]) == line.decode_step_s([100_000.0])


def test_a_hybrid_decodes_long_contexts_cheaper_than_its_layers_would_in_full_attention() -> None:
    hybrid = model("gemma_3_27b")
    full = msgspec.structs.replace(hybrid, pattern=("full",), window=None)
    long_s, full_s = (Roofline.of(shape, H200).decode_step_s([100_000.0]) for shape in (hybrid, full))
    weights_s = rates_of(hybrid, H200).weights_s
    assert (long_s - weights_s) / (full_s - weights_s) == pytest.approx((10 * 100_000 + 52 * 1024) / (62 * 100_000))


# Latent attention


def test_a_decode_of_v3_is_bound_by_arithmetic_at_a_smaller_batch_than_its_bytes_suggest() -> None:
    """On the latent, a context token costs 2 x 1088 FLOPs a head; expanded it would be 71 times the bytes instead."""
    rates = rates_of(model("deepseek_v3"), H200)
    flops_per_byte = 61 * 2 * 128 * (576 + 512) / 70_272
    card_flops_per_byte = H200.flops_per_s / H200.bytes_per_s
    assert rates.decode_attention_s_per_pair / rates.context_s_per_token == pytest.approx(
        flops_per_byte / card_flops_per_byte
    )
    gqa = rates_of(QWEN3_8B, H200)
    assert gqa.decode_attention_s_per_pair / gqa.context_s_per_token < 0.05


# Formats


def test_fp8_weights_halve_prefill_on_a_card_with_fp8_and_leave_it_on_one_without() -> None:
    fp8 = msgspec.structs.replace(QWEN3_8B, weights=FP8)
    for card, faster in (("H200", 2.0), ("A100", 1.0)):
        plain, packed = rates_of(QWEN3_8B, CARDS[card]), rates_of(fp8, CARDS[card])
        assert plain.linear_s_per_token / packed.linear_s_per_token == pytest.approx(faster, rel=1e-3)
        assert packed.attention_s_per_pair == plain.attention_s_per_pair
        assert packed.weights_s < 0.6 * plain.weights_s


def test_int4_weights_make_decoding_faster_and_prefill_not() -> None:
    int4 = msgspec.structs.replace(QWEN3_8B, weights=NumberFormat(bits=4, scale_bits=16, group=128))
    plain, packed = rates_of(QWEN3_8B, H200), rates_of(int4, H200)
    assert packed.linear_s_per_token == plain.linear_s_per_token
    assert packed.weights_s < 0.4 * plain.weights_s


# Shards


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallel_divides_every_time_of_a_model_with_enough_kv_heads(tensor: int) -> None:
    one, shared = rates_of(QWEN3_8B, H200), rates_of(sharded(tensor=tensor), H200)
    for field in ("linear_s_per_token", "attention_s_per_pair", "head_s", "weights_s", "context_s_per_token"):
        assert getattr(shared, field) * tensor == pytest.approx(getattr(one, field)), field


def test_beyond_one_kv_head_for_each_gpu_reads_of_the_context_stop_getting_faster() -> None:
    eight, sixteen = (rates_of(sharded(tensor=tensor), H200) for tensor in (8, 16))
    assert sixteen.context_s_per_token == eight.context_s_per_token
    assert sixteen.weights_s < eight.weights_s


@pytest.mark.parametrize("pipeline", [2, 4])
def test_a_pipeline_is_no_faster_for_one_step_and_nears_its_width_for_many(pipeline: int) -> None:
    one, piped = Roofline.of(QWEN3_8B, H200), Roofline.of(sharded(pipeline=pipeline), H200)
    alone_s = one.prefill_s(new_tokens=8192, cached_tokens=0)
    times_s = [piped.prefill_s(new_tokens=8192, cached_tokens=0, steps=steps) for steps in (1, 2, 8, 1000)]
    # The head, which only the last stage has, does not get faster: 0.001 of this prefill.
    assert times_s[0] == pytest.approx(alone_s, rel=1e-3)
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[-1] == pytest.approx(alone_s / pipeline, rel=5e-3)


def test_a_decode_step_passes_every_stage_and_reads_all_weights_once() -> None:
    assert rates_of(sharded(pipeline=4), H200).weights_s == rates_of(QWEN3_8B, H200).weights_s


def sharded(*, tensor: int = 1, pipeline: int = 1) -> ModelShape:
    return msgspec.structs.replace(QWEN3_8B, shards=Shards(tensor=tensor, pipeline=pipeline))


# Cards


@given(speed=st.floats(min_value=0.1, max_value=20.0), batch=st.integers(1, 64), context=st.integers(0, 20_000))
def test_a_card_twice_as_fast_takes_half_as_long(speed: float, batch: int, context: int) -> None:
    shape = model("gpt_oss_20b")
    plain, fast = Roofline.of(shape, H200), Roofline.of(shape, H200.faster(speed))
    contexts = [float(context)] * batch
    assert fast.decode_step_s(contexts) * speed == pytest.approx(plain.decode_step_s(contexts))
    assert fast.prefill_s(new_tokens=batch, cached_tokens=context) * speed == pytest.approx(
        plain.prefill_s(new_tokens=batch, cached_tokens=context)
    )


def test_a_large_batch_on_a_card_with_little_arithmetic_is_bound_by_it() -> None:
    slow = Card(peak_tflops=10, memory_gb_s=4000, memory_gib=80)
    rates = rates_of(QWEN3_8B, slow)
    step_s = rates.decode_step_s(context_tokens=256 * 100, batch=256)
    assert step_s == rates.decode_compute_s(context_tokens=256 * 100, batch=256)
    assert step_s > rates.decode_step_s(context_tokens=256 * 100)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_what_is_no_count_or_share_is_refused_by_name(bad: float) -> None:
    line = Roofline.of(QWEN3_8B, H200)
    with pytest.raises(ValueError, match="new_tokens"):
        line.prefill_s(new_tokens=bad, cached_tokens=0)
    with pytest.raises(ValueError, match="cached_tokens"):
        line.prefill_s(new_tokens=1, cached_tokens=bad)
    with pytest.raises(ValueError, match="contexts"):
        line.decode_step_s([10.0, bad])
    with pytest.raises(ValueError, match="batch"):
        line.rates.decode_step_s(context_tokens=1, batch=bad)
    with pytest.raises(ValueError, match="untouched"):
        line.rates.decode_step_s(context_tokens=1, untouched=bad)
    with pytest.raises(ValueError, match="contexts"):
        line.decode_step_s([])
