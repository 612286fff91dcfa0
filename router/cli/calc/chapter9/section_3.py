"""Section 9.3 and the worked solution: experts on CPU or GPU, attention and feed-forward apart."""

from __future__ import annotations

from estimators.planning.attention_ffn import critical_start_s, layer_crossings
from estimators.planning.expert_placement import (
    Device,
    PathTime,
    Placement,
    expert_of,
    one_after_another,
    resident_bytes,
)
from estimators.planning.known import PLANNED_CARDS, QWEN3_235B
from estimators.planning.pipelines import pipelined_s, serial_s
from estimators.shape_parts import active_experts
from estimators.shapes import QWEN3_8B
from router.cli.calc.chapter9.rows import GIB, KIB, MIB, OUTPUT_TOKENS, PREFIX_TOKENS, Rows
from router.cli.calc.chapter9.section_2 import GQA, LINK, MLA

# Example 9.3: one Xeon 8452Y with the kernels KTransformers measured, an A100 40GB behind PCIe 4.0 x16.
AVX512, AMX = 1.8e12, 21.3e12  # FLOP/s
SAME_SOCKET, OTHER_SOCKET = 220e9, 125e9  # bytes/s
GPU = PLANNED_CARDS["A100-40GB"]
START_S = 5e-6
EXPERT = expert_of(QWEN3_235B)
HOT = 8  # experts one after another

# Section 9.3.3: 64 tokens choose 8 of 128 experts.
TOKENS, CHOSEN, EXPERTS = 64, 8, 128

STEP = layer_crossings(QWEN3_8B)
STAGES_MS, MICRO_BATCHES = (2.0, 3.0), 4


def placement(flops_per_s: float) -> Placement:
    return Placement(
        cpu=Device(flops_per_s=flops_per_s, bytes_per_s=SAME_SOCKET),
        gpu=Device(flops_per_s=GPU.flops_per_s, bytes_per_s=GPU.bytes_per_s),
        link_bytes_per_s=LINK,
        start_s=START_S,
    )


def all_hot_ms(time: PathTime) -> float:
    return one_after_another([time] * HOT) * 1e3


def crossover(flops_per_s: float) -> float:
    rows = placement(flops_per_s).gpu_wins_from(EXPERT)
    return float("inf") if rows is None else float(rows)


def bound_rows(flops_per_s: float, bytes_per_s: float) -> float:
    return Device(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s).compute_bound_rows(EXPERT)


def layer_bytes(experts: float) -> float:
    return experts * EXPERT.weight_bytes


def step_s() -> float:
    return STEP.serial_s(bytes_per_s=LINK, start_s=START_S)


def critical_us(state_bytes: float, bytes_per_s: float) -> float:
    return critical_start_s(state_bytes=state_bytes, layers=STEP, bytes_per_s=bytes_per_s) * 1e6


def active() -> float:
    return active_experts(count=EXPERTS, chosen=CHOSEN, tokens=TOKENS)


ROWS: Rows = {
    "expert_bytes": lambda: (EXPERT.weight_bytes / MIB, "MiB"),
    "cpu_1row": lambda: (all_hot_ms(placement(AVX512).on_cpu(EXPERT, 1)), "ms"),
    "gpu_1row": lambda: (all_hot_ms(placement(AVX512).on_gpu(EXPERT, 1)), "ms"),
    "cpu_128_avx": lambda: (all_hot_ms(placement(AVX512).on_cpu(EXPERT, 128)), "ms"),
    "cpu_128_amx": lambda: (all_hot_ms(placement(AMX).on_cpu(EXPERT, 128)), "ms"),
    "cross_avx": lambda: (crossover(AVX512), "rows"),
    "cross_amx": lambda: (crossover(AMX), "rows"),
    "cpu_bound_avx": lambda: (bound_rows(AVX512, SAME_SOCKET), "rows"),
    "cpu_bound_amx": lambda: (bound_rows(AMX, SAME_SOCKET), "rows"),
    "cpu_bound_avx_x": lambda: (bound_rows(AVX512, OTHER_SOCKET), "rows"),
    "cpu_bound_amx_x": lambda: (bound_rows(AMX, OTHER_SOCKET), "rows"),
    "experts_layer": lambda: (layer_bytes(EXPERTS) / GIB, "GiB"),
    "experts_32_94": lambda: (resident_bytes(QWEN3_235B, per_layer=32) / GIB, "GiB"),
    "experts_16_94": lambda: (resident_bytes(QWEN3_235B, per_layer=16) / GIB, "GiB"),
    "active_experts": lambda: (active(), "experts"),
    "active_bytes": lambda: (layer_bytes(active()) / GIB, "GiB"),
    "read_uniform": lambda: (layer_bytes(EXPERTS) / SAME_SOCKET * 1e3, "ms"),
    "read_hot": lambda: (layer_bytes(HOT) / SAME_SOCKET * 1e3, "ms"),
    "dispatch_flops": lambda: (TOKENS * CHOSEN * EXPERT.row_flops / 1e9, "GFLOP"),
    "pipe_serial": lambda: (serial_s(STAGES_MS, batches=MICRO_BATCHES), "ms"),
    "pipe_two_stage": lambda: (pipelined_s(STAGES_MS, batches=MICRO_BATCHES), "ms"),
    "af_payload": lambda: (STEP.payload_bytes / KIB, "KiB"),
    "af_step": lambda: (step_s() * 1e3, "ms"),
    "af_1024": lambda: ((OUTPUT_TOKENS - 1) * step_s() * 1e3, "ms"),
    "alpha_gqa25": lambda: (critical_us(GQA.kv_bytes(PREFIX_TOKENS), LINK), "us"),
    "alpha_gqa50": lambda: (critical_us(GQA.kv_bytes(PREFIX_TOKENS), 2 * LINK), "us"),
    "alpha_mla25": lambda: (critical_us(MLA.kv_bytes(PREFIX_TOKENS), LINK), "us"),
    "alpha_mla50": lambda: (critical_us(MLA.kv_bytes(PREFIX_TOKENS), 2 * LINK), "us"),
    "af_prefill": lambda: (layer_crossings(QWEN3_8B, tokens=PREFIX_TOKENS).payload_bytes / GIB, "GiB"),
}
