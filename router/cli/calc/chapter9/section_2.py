"""Section 9.2: state sizes, handoffs, stage times, pools."""

from __future__ import annotations

import msgspec

from estimators.planning.known import DEEPSEEK_V3, PLANNED_CARDS
from estimators.planning.pools import (
    Group,
    Split,
    StageTimes,
    Work,
    all_splits,
    colocated_per_s,
    handoffs_per_s,
    stage_times,
)
from estimators.roofline import Roofline
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B, ModelShape
from router.cli.calc.chapter9.rows import GIB, KIB, MIB, OUTPUT_TOKENS, PREFIX_TOKENS, Rows

GQA, MLA = costs_of(QWEN3_8B), costs_of(DEEPSEEK_V3)
LINK = 25e9  # bytes/s of one 200 Gbit/s adapter, section 9.2.2
REQUEST = Work(new_tokens=PREFIX_TOKENS, output_tokens=OUTPUT_TOKENS)
HIT = Work(new_tokens=2048, cached_tokens=6144, output_tokens=OUTPUT_TOKENS)
SHORT = Work(new_tokens=PREFIX_TOKENS, output_tokens=129)


def expanded(shape: ModelShape) -> ModelShape:
    """The same model keeping K and V of every head."""
    assert shape.latent is not None, f"{shape.name} has no latent attention"
    return msgspec.structs.replace(shape, latent=msgspec.structs.replace(shape.latent, expanded=True))


def times(card: str, work: Work = REQUEST) -> StageTimes:
    return stage_times(QWEN3_8B, PLANNED_CARDS[card], work)


def groups(work: Work = REQUEST, **cards: int) -> list[Group]:
    return [Group(count, times(card, work)) for card, count in cards.items()]


def split(work: Work = REQUEST, prefill: tuple[int, ...] | None = None, **cards: int) -> Split:
    """Over one 25 GB/s link; the best one unless `prefill` says how many cards of each kind prefill."""
    link_per_s = handoffs_per_s(link_bytes_per_s=LINK, state_bytes=GQA.kv_bytes(float(PREFIX_TOKENS)))
    every = all_splits(groups(work, **cards), link_per_s=link_per_s)
    return every.at(every.best if prefill is None else prefill)


def prefill_flops(new_tokens: int = PREFIX_TOKENS) -> float:
    """What the roofline's prefill time stands for on a card of 1 FLOP/s, so that it is counted in one place."""
    slow = msgspec.structs.replace(PLANNED_CARDS["A100"], peak_tflops=1e-12, compute_share=1.0)
    return Roofline.of(QWEN3_8B, slow).prefill_s(new_tokens=new_tokens, cached_tokens=0)


ROWS: Rows = {
    "kv_gqa_token": lambda: (GQA.kv_bytes(1.0) / KIB, "KiB"),
    "kv_gqa_8k": lambda: (GQA.kv_bytes(PREFIX_TOKENS) / GIB, "GiB"),
    "handoff_25": lambda: (GQA.kv_bytes(PREFIX_TOKENS) / LINK * 1e3, "ms"),
    "handoff_25_launch": lambda: ((GQA.kv_bytes(PREFIX_TOKENS) / LINK + 5e-6) * 1e3, "ms"),
    "kv_mla_token": lambda: (MLA.kv_bytes(1.0), "B"),
    "kv_mla_8k": lambda: (MLA.kv_bytes(PREFIX_TOKENS) / MIB, "MiB"),
    "mla_25": lambda: (MLA.kv_bytes(PREFIX_TOKENS) / LINK * 1e3, "ms"),
    "mla_50": lambda: (MLA.kv_bytes(PREFIX_TOKENS) / (2 * LINK) * 1e3, "ms"),
    "mla_expanded": lambda: (costs_of(expanded(DEEPSEEK_V3)).kv_bytes(1.0) / MIB, "MiB"),
    "handoff_rate_8": lambda: (8 * GQA.kv_bytes(PREFIX_TOKENS) / 1e9, "GB/s"),
    "handoff_rate_16": lambda: (16 * GQA.kv_bytes(PREFIX_TOKENS) / 1e9, "GB/s"),
    "handoff_backlog": lambda: ((16 * GQA.kv_bytes(PREFIX_TOKENS) - 12.5e9) / 1e9, "GB/s"),
    "prefill_flops_8k": lambda: (prefill_flops() / 1e12, "TFLOP"),
    "a100_prefill": lambda: (times("A100").prefill_s, "s"),
    "h20_prefill": lambda: (times("H20").prefill_s, "s"),
    "decode_kv_bytes": lambda: (REQUEST.batch * GQA.kv_bytes(REQUEST.mean_context) / 1e9, "GB"),
    "decode_weight_bytes": lambda: (QWEN3_8B.step_weights_bytes / 1e9, "GB"),
    "a100_step": lambda: (times("A100").step_s * 1e3, "ms"),
    "h20_step": lambda: (times("H20").step_s * 1e3, "ms"),
    "a100_rd": lambda: (REQUEST.batch / times("A100").step_s, "1/s"),
    "h20_rd": lambda: (REQUEST.batch / times("H20").step_s, "1/s"),
    "a100_dd": lambda: (times("A100").decode_s, "GPU s"),
    "h20_dd": lambda: (times("H20").decode_s, "GPU s"),
    "coloc_8a100": lambda: (colocated_per_s(groups(A100=8)), "req/s"),
    "pd_8a100": lambda: (split(A100=8).per_s, "req/s"),
    "piggyback_a100": lambda: (times("A100").idle_tokens, "tokens"),
    "coloc_mixed": lambda: (colocated_per_s(groups(A100=4, H20=4)), "req/s"),
    "pd_mixed": lambda: (split(A100=4, H20=4).per_s, "req/s"),
    "pd_link_gqa": lambda: (LINK / GQA.kv_bytes(PREFIX_TOKENS), "req/s"),
    "pd_link_mla": lambda: (LINK / MLA.kv_bytes(PREFIX_TOKENS), "req/s"),
    "pd_link_mla50": lambda: (2 * LINK / MLA.kv_bytes(PREFIX_TOKENS), "req/s"),
    "pd_swapped": lambda: (split(A100=4, H20=4, prefill=(0, 4)).per_s, "req/s"),
    "hit_prefill": lambda: (times("A100", HIT).prefill_s, "s"),
    "pd_hit": lambda: (split(HIT, A100=4, H20=4).per_s, "req/s"),
    "d129_h20": lambda: (1 / times("H20", SHORT).decode_s, "req/s"),
    "pd_129": lambda: (split(SHORT, A100=4, H20=4).per_s, "req/s"),
    "coloc_129": lambda: (colocated_per_s(groups(SHORT, A100=4, H20=4)), "req/s"),
}
