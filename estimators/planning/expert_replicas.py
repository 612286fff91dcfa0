"""When does copying a hot expert to idle cards pay, and what do padded rows cost?

Model     a matrix of rows x K times K x N runs in tiles: weights once for every row tile, inputs once for every column
          tile, outputs once. A card takes the longer of its arithmetic and its memory traffic; the batch waits for the
          slowest card. Copies leave one after another. They pay when saved time first exceeds copying time
Valid     the hot spot stays where it is; copies and rows are shared equally; whole tiles
Blind to  caches that keep a weight tile between row tiles, copying behind other work, gate and up in one kernel
Source    textbook sections 9.4.2 and 9.4.3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from estimators.planning.attention_ffn import Crossing
from estimators.planning.expert_placement import Device
from estimators.ranges import require
from estimators.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the output that one tile covers, each >= 1."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        require(self.rows >= 1, "rows", self.rows)
        require(self.columns >= 1, "columns", self.columns)


def matrix_traffic_bytes(rows: int, *, inner: int, columns: int, tile: Tile, value_bytes: float) -> float:
    """Memory traffic of `rows` (>= 0) x `inner` times `inner` x `columns`, bytes."""
    require(rows >= 0, "rows", rows)
    weights = ceil(rows / tile.rows) * inner * columns
    inputs = ceil(columns / tile.columns) * rows * inner
    return (weights + inputs + rows * columns) * value_bytes


def expert_traffic_bytes(shape: ModelShape, rows: int, tile: Tile) -> float:
    """Memory traffic of one routed expert over `rows` (>= 0): gate, up and down, bytes.

    Raises
    ------
    ValueError : the model has no experts, or rows is negative.
    """
    require(shape.experts is not None, "experts", shape.name, "a model without routed experts")
    assert shape.experts is not None
    hidden, inner = shape.hidden, shape.experts.intermediate
    widen = matrix_traffic_bytes(rows, inner=hidden, columns=inner, tile=tile, value_bytes=shape.value_bytes)
    narrow = matrix_traffic_bytes(rows, inner=inner, columns=hidden, tile=tile, value_bytes=shape.value_bytes)
    return 2 * widen + narrow


def card_s(shape: ModelShape, rows: Sequence[int], *, device: Device, tile: Tile) -> float:
    """One card with experts of so many `rows` each, seconds."""
    traffic = sum(expert_traffic_bytes(shape, each, tile) for each in rows)
    flops = sum(rows) * 2 * shape.expert_weights
    return max(traffic / device.bytes_per_s, flops / device.flops_per_s)


@dataclass(frozen=True, slots=True)
class Replication:
    """Copies of hot experts, each to a card of its own. before_s, after_s : of a batch; copy_s : of all copies"""

    before_s: float
    after_s: float
    copy_s: float

    @property
    def saved_s(self) -> float:
        """In every batch."""
        return self.before_s - self.after_s

    @property
    def pays_after(self) -> int | None:
        """Batches until saved time first exceeds copying time; None: never."""
        return batches_to_repay(cost_s=self.copy_s, saved_s=self.saved_s)

    def gain_s(self, batches: float) -> float:
        """Saved less spent after `batches` (>= 0), seconds; negative while it has not paid."""
        require(0 <= batches < inf, "batches", batches)
        return batches * self.saved_s - self.copy_s


def batches_to_repay(*, cost_s: float, saved_s: float) -> int | None:
    """The fewest batches whose savings exceed `cost_s` (>= 0); None when a batch saves nothing."""
    require(0 <= cost_s < inf, "cost_s", cost_s)
    require(-inf < saved_s < inf, "saved_s", saved_s)
    return floor(cost_s / saved_s) + 1 if saved_s > 0 else None


def replicate(
    shape: ModelShape,
    rows: Sequence[int],
    *,
    copies: int,
    device: Device,
    tile: Tile,
    link_bytes_per_s: float,
    start_s: float,
) -> Replication:
    """Copy `copies` of the hot experts of one card, one to each idle card, and halve their rows with it.

    Parameters
    ----------
    rows : of each expert on the hot card; the fullest are copied
    copies : 0 to len(rows)
    link_bytes_per_s : over which the copies leave, one after another, > 0
    start_s : of each copy, >= 0
    """
    require(len(rows) > 0, "rows", rows, "empty")
    require(0 <= copies <= len(rows), "copies", copies, f"outside 0 to the {len(rows)} experts")
    ordered = sorted(rows, reverse=True)
    stay = [each - each // 2 for each in ordered[:copies]] + ordered[copies:]
    moved = [each // 2 for each in ordered[:copies]]
    busiest_other_s = max((card_s(shape, [each], device=device, tile=tile) for each in moved), default=0.0)
    each = Crossing(shape.expert_weights * shape.expert_format.bytes_per_value, starts=1)
    return Replication(
        before_s=card_s(shape, rows, device=device, tile=tile),
        after_s=max(card_s(shape, stay, device=device, tile=tile), busiest_other_s),
        copy_s=copies * each.serial_s(bytes_per_s=link_bytes_per_s, start_s=start_s),
    )


def replica_bytes(shape: ModelShape, *, layers: int | None = None) -> float:
    """Memory of one more expert in each of `layers` layers (None: all that have experts).

    Raises
    ------
    ValueError : the model has no experts or not so many layers of them.
    """
    require(shape.experts is not None, "experts", shape.name, "a model without routed experts")
    many = shape.expert_layers if layers is None else layers
    require(0 <= many <= shape.expert_layers, "layers", many, f"outside 0 to {shape.expert_layers}")
    return many * shape.expert_weights * shape.expert_format.bytes_per_value


@dataclass(frozen=True, slots=True)
class Padding:
    """Rows a grouped matrix product works through. useful : those of tokens; tiles : each non-empty matrix to whole
    tiles; equal : all matrices to the longest one's tiles, empty ones too"""

    useful: int
    tiles: int
    equal: int


def padding(rows: Sequence[int], *, tile_rows: int) -> Padding:
    """What `rows` (each >= 0) of the experts of one group become in tiles of `tile_rows` (>= 1).

    >>> padding([32, 16, 8, 4, 2, 1, 1, 0], tile_rows=32)
    Padding(useful=64, tiles=224, equal=256)
    """
    require(len(rows) > 0, "rows", rows, "empty")
    require(all(each >= 0 for each in rows), "rows", rows)
    require(tile_rows >= 1, "tile_rows", tile_rows)
    padded = [ceil(each / tile_rows) * tile_rows for each in rows]
    return Padding(useful=sum(rows), tiles=sum(padded), equal=len(rows) * max(padded))
