"""The textbook's numbers (chapter 9) that the online estimators give, without the planning functions built on them.

All rows, through the public functions of planning: tests/router/calc/test_chapter9.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from estimators.hardware import CARDS
from estimators.model_config import read_config
from estimators.roofline import Roofline
from estimators.shape_costs import costs_of
from estimators.shape_parts import active_experts
from estimators.shapes import QWEN3_8B, ModelShape

VECTORS = Path(__file__).parents[1] / "vectors"
ROWS: dict[str, dict[str, Any]] = {
    row["id"]: row for row in json.loads((VECTORS / "chapter9_values.json").read_text(encoding="utf-8"))
}


def model(name: str) -> ModelShape:
    return read_config((VECTORS / "hf_configs" / f"{name}.json").read_text(encoding="utf-8"))


KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
PREFIX, LAYERS = 8192, 36

# The chapter takes half of both peaks, and 4096 GB/s for the H20 where the maker's sheet says 4.0 TB/s.
A100 = Roofline.of(QWEN3_8B, msgspec.structs.replace(CARDS["A100"], memory_share=0.5))
H20 = Roofline.of(QWEN3_8B, msgspec.structs.replace(CARDS["H20"], memory_share=0.5, memory_gb_s=4096))

QWEN = costs_of(QWEN3_8B)
DEEPSEEK = model("deepseek_v3")
# The chapter keeps V3's latent in bf16, and so does the file: only its weights are fp8.
MLA = costs_of(DEEPSEEK)
assert DEEPSEEK.latent is not None
EXPANDED = costs_of(msgspec.structs.replace(DEEPSEEK, latent=msgspec.structs.replace(DEEPSEEK.latent, expanded=True)))
QWEN_235B = msgspec.structs.replace(model("qwen3_235b_a22b_fp8"), weights=None)  # the chapter counts it in bf16
EXPERT_BYTES = QWEN_235B.expert_weights * QWEN_235B.expert_format.bytes_per_value
LAYER_EXPERTS_BYTES = QWEN_235B.routed_bytes / QWEN_235B.layers


def flops(*, new: float, cached: float) -> float:
    pairs = QWEN.pairs(new, cached)
    return new * QWEN3_8B.linear_flops_per_token + pairs * QWEN3_8B.attention_flops_per_pair + QWEN3_8B.head_flops


def prefill_s(on: Roofline, *, new: int, cached: int = 0) -> float:
    return on.prefill_s(new_tokens=new, cached_tokens=cached)


def step_s(on: Roofline, *, context: float = 8704, batch: int = 32) -> float:
    return on.decode_step_s([context] * batch)


def calls_per_s(on: Roofline, *, context: float = 8704) -> float:
    return 32 / step_s(on, context=context)


def idle_tokens() -> float:
    """Prefill tokens whose arithmetic fits beside one decode step's reads."""
    busy_s = A100.rates.decode_compute_s(context_tokens=32 * 8704, batch=32)
    return (step_s(A100) - busy_s) * PREFIX / prefill_s(A100, new=PREFIX)


def kv_rate() -> float:
    """Bytes of KV one A100 makes per second of prefill."""
    return QWEN.kv_bytes(PREFIX) / prefill_s(A100, new=PREFIX)


COVERED: dict[str, Callable[[], float]] = {
    # Size of the state
    "kv_gqa_token": lambda: QWEN.kv_bytes(1) / KIB,
    "kv_gqa_8k": lambda: QWEN.kv_bytes(PREFIX) / GIB,
    "kv_mla_token": lambda: MLA.kv_bytes(1),
    "kv_mla_8k": lambda: MLA.kv_bytes(PREFIX) / MIB,
    "mla_expanded": lambda: EXPANDED.kv_bytes(1) / MIB,
    "page_bytes": lambda: QWEN.kv_bytes(16) / MIB,
    "pages_read": lambda: QWEN.kv_bytes(64 * 16) / MIB,
    "pages_used": lambda: QWEN.kv_bytes(63 * 16) / MIB,
    "mooncake_50k": lambda: QWEN.kv_bytes(50_000 * 512) / 1e12,
    "host_sessions": lambda: 256 * GIB // QWEN.kv_bytes(PREFIX),
    "pool_prefixes": lambda: 64 * GIB // QWEN.kv_bytes(PREFIX),
    "pool_prefixes_mla": lambda: 64 * GIB // MLA.kv_bytes(PREFIX),
    # That size over a link
    "handoff_25": lambda: QWEN.kv_bytes_between(0, PREFIX) / 25e9 * 1e3,
    "handoff_25_launch": lambda: QWEN.kv_bytes_between(0, PREFIX) / 25e9 * 1e3 + 5e-3,
    "mla_25": lambda: MLA.kv_bytes_between(0, PREFIX) / 25e9 * 1e3,
    "mla_50": lambda: MLA.kv_bytes_between(0, PREFIX) / 50e9 * 1e3,
    "handoff_rate_8": lambda: 8 * QWEN.kv_bytes(PREFIX) / 1e9,
    "handoff_rate_16": lambda: 16 * QWEN.kv_bytes(PREFIX) / 1e9,
    "handoff_backlog": lambda: 16 * QWEN.kv_bytes(PREFIX) / 1e9 - 12.5,
    "pd_link_gqa": lambda: 25e9 / QWEN.kv_bytes(PREFIX),
    "pd_link_mla": lambda: 25e9 / MLA.kv_bytes(PREFIX),
    "pd_link_mla50": lambda: 50e9 / MLA.kv_bytes(PREFIX),
    "tier_host": lambda: QWEN.kv_bytes(PREFIX) / 25e9 * 1e3,
    "tier_ssd": lambda: QWEN.kv_bytes(PREFIX) / 7.1e9 * 1e3,
    "tier_remote": lambda: 2 * QWEN.kv_bytes(PREFIX) / 25e9 * 1e3,
    "save_once": lambda: 2 * QWEN.kv_bytes(PREFIX) / 25e9 * 1e3,
    "remote_each_step": lambda: 100 * QWEN.kv_bytes(PREFIX) / 25e9,
    "layer_read": lambda: QWEN.kv_bytes(PREFIX) / LAYERS / 25e9 * 1e3,
    "ssd_layer": lambda: QWEN.kv_bytes(PREFIX) / LAYERS / 7.1e9 * 1e3,
    "reuse_bytes": lambda: 3.5 * 3 * QWEN.kv_bytes(PREFIX) / 1e9,
    # Prefill
    "prefill_flops_8k": lambda: flops(new=PREFIX, cached=0) / 1e12,
    "a100_prefill": lambda: prefill_s(A100, new=PREFIX),
    "h20_prefill": lambda: prefill_s(H20, new=PREFIX),
    "hit_prefill": lambda: prefill_s(A100, new=2048, cached=6144),
    "c_256": lambda: prefill_s(A100, new=256, cached=PREFIX) * 1e3,
    "c_8448_flops": lambda: flops(new=8448, cached=0) / 1e12,
    "c_8448": lambda: prefill_s(A100, new=8448) * 1e3,
    "layer_compute": lambda: prefill_s(A100, new=256, cached=PREFIX) / LAYERS * 1e3,
    # What prefill produces, and how long a tier holds it
    "kv_rate": lambda: kv_rate() / 1e9,
    "hold_hbm": lambda: 63.6e9 / kv_rate(),
    "hold_host": lambda: 256 * GIB / kv_rate(),
    "hold_ssd": lambda: 3.84e12 / kv_rate(),
    "need_10s": lambda: 10 * kv_rate() / 1e9,
    "need_10min": lambda: 600 * kv_rate() / 1e9,
    "ssd_over": lambda: kv_rate() / (3.84e12 / 86_400),
    "ssd_share": lambda: 100 * (3.84e12 / 86_400) / kv_rate(),
    # Decode
    "decode_kv_bytes": lambda: 32 * QWEN.kv_bytes(8704) / 1e9,
    "decode_weight_bytes": lambda: QWEN3_8B.step_weights_bytes / 1e9,
    "a100_step": lambda: step_s(A100) * 1e3,
    "h20_step": lambda: step_s(H20) * 1e3,
    "a100_rd": lambda: calls_per_s(A100),
    "h20_rd": lambda: calls_per_s(H20),
    "a100_dd": lambda: 1024 / calls_per_s(A100),
    "h20_dd": lambda: 1024 / calls_per_s(H20),
    "d129_h20": lambda: calls_per_s(H20, context=8256) / 128,
    "piggyback_a100": idle_tokens,
    # Experts
    "expert_bytes": lambda: EXPERT_BYTES / MIB,
    "experts_layer": lambda: LAYER_EXPERTS_BYTES / GIB,
    "experts_32_94": lambda: 32 / 128 * QWEN_235B.routed_bytes / GIB,
    "experts_16_94": lambda: 16 / 128 * QWEN_235B.routed_bytes / GIB,
    "active_experts": lambda: active_experts(count=128, chosen=8, tokens=64),
    "active_bytes": lambda: (1 - costs_of(QWEN_235B).untouched_share(64.0)) * LAYER_EXPERTS_BYTES / GIB,
    "read_uniform": lambda: LAYER_EXPERTS_BYTES / 220e9 * 1e3,
    "read_hot": lambda: 8 * EXPERT_BYTES / 220e9 * 1e3,
    "dispatch_flops": lambda: 512 * 2 * QWEN_235B.expert_weights / 1e9,
    "replica_94": lambda: QWEN_235B.routed_bytes / 128 / GIB,
}


@pytest.mark.parametrize("row", COVERED)
def test_the_estimator_gives_the_textbooks_number(row: str) -> None:
    expected = ROWS[row]
    assert COVERED[row]() == pytest.approx(expected["expected"], rel=0, abs=expected["tolerance"]), expected["quantity"]
