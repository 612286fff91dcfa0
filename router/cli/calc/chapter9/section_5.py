"""Section 9.5: storage tiers, pages, and where to send a request."""

from __future__ import annotations

from math import inf

from estimators.first_token import Discipline
from estimators.planning.affinity import HitOrMiss, chain_s, first_token_s, tie_bytes_per_s
from estimators.planning.known import PLANNED_CARDS
from estimators.planning.preload import buffer_bytes, layers_over
from estimators.planning.recovery import PageUse, page_use
from estimators.planning.storage import (
    Endurance,
    StorageTier,
    hold_s,
    kv_bytes_per_s,
    needed_bytes,
    read_ahead,
    saving_over,
)
from estimators.roofline import Roofline
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from router.cli.calc.chapter9.rows import GIB, MIB, PREFIX_TOKENS, Rows
from router.cli.calc.chapter9.section_2 import prefill_flops
from router.cli.calc.preload import Case

GB = 1e9
A100 = Roofline.of(QWEN3_8B, PLANNED_CARDS["A100"])
STATE = costs_of(QWEN3_8B).kv_bytes(float(PREFIX_TOKENS))
LAYER = STATE / QWEN3_8B.layers
PCIE = NIC = 25e9  # bytes/s
NEW_TOKENS = 256

# One card's part of a DGX A100, section 9.5.2
HBM = StorageTier("HBM", 80e9 - 16.4e9)
HOST = StorageTier("host memory", 256 * GIB, (PCIE,))
DISK = StorageTier("disk", 3.84e12, (7.1e9,))
REMOTE = StorageTier("remote pool", inf, (NIC, PCIE))
DISK_LIFE = Endurance(DISK.capacity_bytes, writes_per_day=1.0, years=5.0)

RATE = kv_bytes_per_s(A100, prompt_tokens=PREFIX_TOKENS)
ALL_S = A100.prefill_s(new_tokens=PREFIX_TOKENS, cached_tokens=0)
HIT_S = A100.prefill_s(new_tokens=NEW_TOKENS, cached_tokens=PREFIX_TOKENS)
MISS_S = A100.prefill_s(new_tokens=PREFIX_TOKENS + NEW_TOKENS, cached_tokens=0)
BY_LAYER = Case(QWEN3_8B.layers, LAYER, read_layer_s=LAYER / PCIE, compute_layer_s=HIT_S / QWEN3_8B.layers)
BUFFER = buffer_bytes(bytes_per_s=PCIE, read_s=HOST.read_s(STATE), compute_s=HIT_S)
SAVE = saving_over(size_bytes=STATE, link_bytes_per_s=NIC, compute_s=ALL_S)

# Example 9.7: A has the prefix and queues 250 ms, B queues 20 ms; a look-up takes 10 ms
QUEUE_A_S, QUEUE_B_S, LOOK_UP_S = 0.250, 0.020, 0.010
AFTER_NETWORK_S = chain_s(size_bytes=STATE, bytes_per_s=(PCIE,), start_s=LOOK_UP_S)


def held(tier: StorageTier) -> tuple[float, str]:
    return hold_s(capacity_bytes=tier.capacity_bytes, kv_bytes_per_s=RATE), "s"


def pages() -> PageUse:
    """The restarted request: 1024 tokens stored, of which its own last token keeps one page from being used."""
    return page_use(
        prompt_tokens=1024, stored_tokens=1024, page_tokens=16, token_bytes=costs_of(QWEN3_8B).kv_bytes(1.0)
    )


def alone_s(*, queue_s: float, work_s: float) -> float:
    return first_token_s(Discipline.OVERLAPPED, queue_s=queue_s, fetch_s=0.0, work_s=work_s)


def fetched_s(network: float) -> float:
    fetch_s = AFTER_NETWORK_S + STATE / network
    return first_token_s(Discipline.OVERLAPPED, queue_s=QUEUE_B_S, fetch_s=fetch_s, work_s=HIT_S)


def tie(other_s: float) -> float:
    return tie_bytes_per_s(size_bytes=STATE, other_s=other_s, work_s=HIT_S, rest_of_fetch_s=AFTER_NETWORK_S)


def copy_of_a() -> HitOrMiss:
    """A queues 80 ms, and its copy may have gone."""
    return HitOrMiss(alone_s(queue_s=0.080, work_s=HIT_S), alone_s(queue_s=0.080, work_s=MISS_S))


def computed_s() -> float:
    """B computes everything."""
    return alone_s(queue_s=QUEUE_B_S, work_s=MISS_S)


def of_three(discipline: Discipline) -> float:
    """Queue 80 ms, fetch 60 ms, 10 ms left."""
    return first_token_s(discipline, queue_s=0.080, fetch_s=0.060, work_s=0.010)


TIERS: Rows = {
    "tier_host": lambda: (HOST.read_s(STATE) * 1e3, "ms"),
    "tier_ssd": lambda: (DISK.read_s(STATE) * 1e3, "ms"),
    "tier_remote": lambda: (REMOTE.read_s(STATE) * 1e3, "ms"),
    "kv_rate": lambda: (RATE / GB, "GB/s"),
    "hold_hbm": lambda: held(HBM),
    "hold_host": lambda: held(HOST),
    "hold_ssd": lambda: held(DISK),
    "need_10s": lambda: (needed_bytes(reuse_after_s=10.0, kv_bytes_per_s=RATE) / GB, "GB"),
    "need_10min": lambda: (needed_bytes(reuse_after_s=600.0, kv_bytes_per_s=RATE) / GB, "GB"),
    "mooncake_50k": lambda: (costs_of(QWEN3_8B).kv_bytes(50_000 * 512.0) / 1e12, "TB"),
    "remote_each_step": lambda: (100 * SAVE.read_s, "s"),
    "save_once": lambda: ((SAVE.write_s + SAVE.read_s) * 1e3, "ms"),
    "c_256": lambda: (HIT_S * 1e3, "ms"),
    "whole_then_compute": lambda: (BY_LAYER.whole_s * 1e3, "ms"),
    "layer_read": lambda: (BY_LAYER.read_layer_s * 1e3, "ms"),
    "layer_compute": lambda: (BY_LAYER.compute_layer_s * 1e3, "ms"),
    "layerwise": lambda: (BY_LAYER.times(0).total_s * 1e3, "ms"),
    "buffer_bytes": lambda: (BUFFER / 1e6, "MB"),
    "buffer_layers": lambda: (layers_over(BUFFER, layer_bytes=LAYER), "layers"),
    "ssd_layer": lambda: (DISK.read_s(LAYER) * 1e3, "ms"),
    "host_sessions": lambda: (
        read_ahead(host_bytes=HOST.capacity_bytes, state_bytes=STATE, read_s=DISK.read_s(STATE), queue_s=0.0).depth,
        "prefixes",
    ),
    "ssd_budget": lambda: (DISK_LIFE.bytes_per_s / 1e6, "MB/s"),
    "ssd_over": lambda: (RATE / DISK_LIFE.bytes_per_s, "x"),
    "ssd_share": lambda: (100 * DISK_LIFE.admitted_share(RATE), "%"),
}

PAGES: Rows = {
    "page_bytes": lambda: (pages().page_bytes / MIB, "MiB"),
    "pages_read": lambda: (pages().read_bytes / MIB, "MiB"),
    "pages_used": lambda: (pages().used_bytes / MIB, "MiB"),
}

ROUTES: Rows = {
    "c_8448_flops": lambda: (prefill_flops(PREFIX_TOKENS + NEW_TOKENS) / 1e12, "TFLOP"),
    "c_8448": lambda: (MISS_S * 1e3, "ms"),
    "overlap": lambda: (of_three(Discipline.OVERLAPPED) * 1e3, "ms"),
    "serial": lambda: (of_three(Discipline.SERIAL) * 1e3, "ms"),
    "route_a_local": lambda: (alone_s(queue_s=QUEUE_A_S, work_s=HIT_S) * 1e3, "ms"),
    "route_b_recompute": lambda: (computed_s() * 1e3, "ms"),
    "route_b_50g": lambda: (fetched_s(6.25e9) * 1e3, "ms"),
    "route_b_200g": lambda: (fetched_s(25e9) * 1e3, "ms"),
    "breakeven_local": lambda: (tie(alone_s(queue_s=QUEUE_A_S, work_s=HIT_S)) / GB, "GB/s"),
    "breakeven_recompute": lambda: (tie(computed_s()) / GB, "GB/s"),
    "hit_time": lambda: (copy_of_a().hit_s * 1e3, "ms"),
    "miss_time": lambda: (copy_of_a().miss_s * 1e3, "ms"),
    "p_mean": lambda: (100 * copy_of_a().probability_to_beat(computed_s()), "%"),
    "mean_p90": lambda: (copy_of_a().mean_s(0.9) * 1e3, "ms"),
    "p99_p90": lambda: (copy_of_a().quantile_s(0.9, 0.99) * 1e3, "ms"),
    "p99_p99": lambda: (copy_of_a().quantile_s(0.99, 0.99) * 1e3, "ms"),
    # An idle replica brings 4.666 ms of global state and rebuilds for 8 ms; a queue as long as that ties with it
    "swa_threshold": lambda: (
        first_token_s(Discipline.SERIAL, queue_s=0.0, fetch_s=4.666e-3, work_s=8e-3) * 1e3,
        "ms",
    ),
}

ROWS: Rows = {**TIERS, **PAGES, **ROUTES}
