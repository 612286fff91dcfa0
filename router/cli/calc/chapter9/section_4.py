"""Section 9.4: uneven expert-parallel groups, copies of hot experts, padding, overlapped stages."""

from __future__ import annotations

from math import inf

import numpy as np

from estimators.planning.expert_parallel import (
    Fabric,
    LayerBound,
    card_rows,
    compute_s,
    layer_bound,
    one_hot_expert,
)
from estimators.planning.expert_placement import Device
from estimators.planning.expert_replicas import Replication, Tile, padding, replica_bytes, replicate
from estimators.planning.known import PLANNED_CARDS, QWEN3_235B
from estimators.planning.pipelines import pipelined_s
from router.cli.calc.chapter9.rows import GIB, Rows
from router.cli.calc.chapter9.section_3 import EXPERT, START_S

H100 = PLANNED_CARDS["H100"]
ADAPTER, NVLINK = 50e9, 450e9  # bytes/s each way
BF16_ROW, FP8_ROW = EXPERT.row_bytes, EXPERT.row_bytes / 2
SOURCES = 4  # cards of server A, each sending 2048 rows
EVEN, HOT = (2048, 2048, 2048, 2048), (5120, 1024, 1024, 1024)  # rows of the expert groups, example 9.5
SERVERS = Fabric(card_bytes_per_s=ADAPTER, cut_bytes_per_s=SOURCES * ADAPTER)
ONE_LINK = Fabric(card_bytes_per_s=ADAPTER, cut_bytes_per_s=ADAPTER)
ONE_SERVER = Fabric(card_bytes_per_s=NVLINK)

# Example 9.6: 128 tokens choose the eight experts of card 0, seven of which are copied. The tile is the one with which
# the text's 921 MB of memory traffic a batch come out to the byte.
HOT_CARD_ROWS, COPIES, TILE = (128,) * 8, 7, Tile(rows=64, columns=128)


def hottest_rows(cards: int) -> float:
    rows = one_hot_expert(tokens=1024, chosen=8, experts=256, hot_rows=128)
    return float(card_rows(rows, cards).max())


def dispatches_us(rows: float) -> float:
    return compute_s(rows, row_flops=EXPERT.row_flops, flops_per_s=H100.flops_per_s) * 1e6


def bound(rows: tuple[int, ...], fabric: Fabric = SERVERS, dispatch_bytes: float = BF16_ROW) -> LayerBound:
    return layer_bound(
        np.tile(np.asarray(rows) / SOURCES, (SOURCES, 1)),
        dispatch_bytes=dispatch_bytes,
        combine_bytes=BF16_ROW,
        fabric=fabric,
        row_flops=EXPERT.row_flops,
        flops_per_s=H100.flops_per_s,
    )


def copies(link_bytes_per_s: float) -> Replication:
    return replicate(
        QWEN3_235B,
        HOT_CARD_ROWS,
        copies=COPIES,
        device=Device(flops_per_s=H100.flops_per_s, bytes_per_s=H100.bytes_per_s),
        tile=TILE,
        link_bytes_per_s=link_bytes_per_s,
        start_s=START_S,
    )


def pays_after(link_bytes_per_s: float) -> float:
    batches = copies(link_bytes_per_s).pays_after
    return inf if batches is None else float(batches)


def halves_overlapped_s() -> float:
    return pipelined_s([time_s / 2 for time_s in bound(EVEN).stages_s], batches=2)


ROWS: Rows = {
    "hot_rows_ep8": lambda: (hottest_rows(8), "rows"),
    "hot_rows_ep32": lambda: (hottest_rows(32), "rows"),
    "hot_rows_ep256": lambda: (hottest_rows(256), "rows"),
    "ep8_balanced": lambda: (dispatches_us(512 / 8), "us"),
    "ep8_hot": lambda: (dispatches_us(512), "us"),
    "skew_balanced": lambda: (bound(EVEN).total_s * 1e3, "ms"),
    "skew_hot": lambda: (bound(HOT).total_s * 1e3, "ms"),
    "skew_one_link": lambda: (bound(EVEN, ONE_LINK).total_s * 1e3, "ms"),
    "skew_fp8_dispatch": lambda: (bound(HOT, dispatch_bytes=FP8_ROW).total_s * 1e3, "ms"),
    "skew_nvlink": lambda: (bound(HOT, ONE_SERVER).total_s * 1e3, "ms"),
    "copy_nvlink": lambda: (copies(NVLINK).copy_s * 1e3, "ms"),
    "copy_cx7": lambda: (copies(ADAPTER).copy_s * 1e3, "ms"),
    "payback_nvlink": lambda: (pays_after(NVLINK), "batches"),
    "payback_cx7": lambda: (pays_after(ADAPTER), "batches"),
    "replica_94": lambda: (replica_bytes(QWEN3_235B) / GIB, "GiB"),
    "pad_nonempty": lambda: (float(padding([32, 16, 8, 4, 2, 1, 1, 0], tile_rows=32).tiles), "rows"),
    "pipe3": lambda: (halves_overlapped_s() * 1e3, "ms"),
}
