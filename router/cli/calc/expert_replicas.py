"""`tfirst calc expert-replicas`: copies of hot experts, when they pay, and what padded rows cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estimators.planning.expert_placement import Device
from estimators.planning.expert_replicas import Padding, Replication, Tile, padding, replica_bytes, replicate
from estimators.shapes import ModelShape
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import NamedCard, card, count, counts, model, number, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB, GIB = 2.0**20, 2.0**30

INPUTS = (
    model("qwen3-235b"),
    counts("hot-rows", "128,128,128,128,128,128,128,128", "rows", "of each expert on the hot card"),
    count("copies", 7, "experts", "copied, each to an idle card of its own"),
    numbers("links-gb-s", "450,50", "GB/s", "over which copies leave, several cases", above=True),
    number("start-us", 5, "us", "start of one copy"),
    card("gpu", "H100", "card"),
    number("gpu-share", 0.5, "", "share of both its peaks that is reached", high=1, above=True),
    count("tile-rows", 64, "rows", "of the output one tile of the kernel covers", low=1),
    count("tile-columns", 128, "columns", "of the output one tile covers", low=1),
    counts("batches", "16,64", "batches", "the hot spot lasts, several cases"),
    number("room-mib", 64, "MiB", "free on each receiving card"),
)


def answer(
    *,
    model: ModelShape,
    hot_rows: tuple[int, ...],
    copies: int,
    links_gb_s: tuple[float, ...],
    start_us: float,
    gpu: NamedCard,
    gpu_share: float,
    tile_rows: int,
    tile_columns: int,
    batches: tuple[int, ...],
    room_mib: float,
) -> Answer:
    values, lines = [], []
    for link_gb_s in links_gb_s:
        one = _replication(model, hot_rows, copies, link_gb_s, start_us, gpu, gpu_share, Tile(tile_rows, tile_columns))
        pays = one.pays_after
        suffix = f"{link_gb_s:g}_gb_s"
        values += [
            Value(f"copy_ms_{suffix}", one.copy_s * 1e3, "ms"),
            Value(f"pays_after_{suffix}", "never" if pays is None else pays, "batches"),
        ]
        gains = [one.gain_s(each) * 1e3 for each in batches]
        lines.append((link_gb_s, one.copy_s * 1e3, "never" if pays is None else pays, *gains))
    each_mib = replica_bytes(model, layers=1) / MIB
    values = [
        Value("before_ms", one.before_s * 1e3, "ms a batch"),
        Value("after_ms", one.after_s * 1e3, "ms a batch"),
        Value("saved_ms", one.saved_s * 1e3, "ms a batch"),
        Value("copy_mib", each_mib, "MiB on each receiving card"),
        Value("one_more_in_every_layer_gib", replica_bytes(model) / GIB, "GiB a card"),
        *values,
    ]
    columns = ("link, GB/s", "copying, ms", "pays after, batches", *(f"gain of {each}, ms" for each in batches))
    notes = []
    if copies and each_mib > room_mib:
        notes.append(
            f"A copy of {each_mib:g} MiB does not fit the {room_mib:g} MiB a card has left: no copy pays,"
            " however long the hot spot lasts."
        )
    return Answer(values, [Table(f"{copies} copies", columns, lines)], notes)


def _replication(
    model: ModelShape,
    hot_rows: tuple[int, ...],
    copies: int,
    link_gb_s: float,
    start_us: float,
    gpu: NamedCard,
    gpu_share: float,
    tile: Tile,
) -> Replication:
    reached = gpu.reaching(compute_share=gpu_share, memory_share=gpu_share)
    return replicate(
        model,
        hot_rows,
        copies=copies,
        device=Device(flops_per_s=reached.flops_per_s, bytes_per_s=reached.bytes_per_s),
        tile=tile,
        link_bytes_per_s=link_gb_s * 1e9,
        start_s=start_us * 1e-6,
    )


def draw(
    figure: Figure,
    *,
    model: ModelShape,
    hot_rows: tuple[int, ...],
    copies: int,
    links_gb_s: tuple[float, ...],
    start_us: float,
    gpu: NamedCard,
    gpu_share: float,
    tile_rows: int,
    tile_columns: int,
    batches: tuple[int, ...],
    **_: object,
) -> None:
    """Saved less spent time against the batches a hot spot lasts."""
    axes = new_axes(figure, title="What copying has gained", xlabel="batches the hot spot lasts", ylabel="ms")[0]
    lasts = np.linspace(0, max(*batches, 1), 100)
    for link_gb_s in links_gb_s:
        one = _replication(model, hot_rows, copies, link_gb_s, start_us, gpu, gpu_share, Tile(tile_rows, tile_columns))
        label = f"{link_gb_s:g} GB/s, " + ("never pays" if one.pays_after is None else f"pays after {one.pays_after}")
        axes.plot(lasts, [one.gain_s(float(each)) * 1e3 for each in lasts], label=label)
    axes.axhline(0.0, color="gray", linestyle=":")
    axes.legend()


EXPERT_REPLICAS = Calculator(
    "expert-replicas",
    "copies of hot experts: what a batch saves and after how many batches they pay",
    INPUTS,
    answer,
    (Plot("9-24", "gain against the batches a hot spot lasts", draw),),
)


def padding_answer(*, rows: tuple[int, ...], tile_rows: int) -> Answer:
    made: Padding = padding(rows, tile_rows=tile_rows)
    if not made.useful:
        raise ValueError("--rows are all 0: there is nothing to pad")
    return Answer(
        [
            Value("useful_rows", made.useful, "rows"),
            Value("tiled_rows", made.tiles, "rows, each non-empty matrix in whole tiles"),
            Value("equal_rows", made.equal, "rows, every matrix as long as the longest"),
            Value("tiled_over_useful", made.tiles / made.useful, "times"),
            Value("equal_over_useful", made.equal / made.useful, "times"),
        ]
    )


PADDING = Calculator(
    "padding",
    "rows that a grouped matrix product works through beyond the useful ones",
    (
        counts("rows", "32,16,8,4,2,1,1,0", "rows", "of each expert"),
        count("tile-rows", 32, "rows", "of one tile", low=1),
    ),
    padding_answer,
)
