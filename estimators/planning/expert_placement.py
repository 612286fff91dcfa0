"""Should routed experts run on the host's processor, where their weights are, or on the GPU, where they must be moved?

Model     an expert with m rows. CPU: two starts, rows there and back over the link, and the longer of arithmetic and
          one read of the weights. GPU: one start, the weights over the link, and the longer of the two there. Experts
          one after another
Valid     weights and rows already in the format the kernel wants; one link; sustained rates, not peaks
Blind to  conversion, overlap of transfer and computation, caches, several sockets working on one expert
Source    textbook section 9.3; KTransformers, SOSP 2025
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from estimators.planning.attention_ffn import Crossing
from estimators.ranges import require
from estimators.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One routed expert. weights : values; weight_bytes : all of them; row_bytes : one row in, as much comes out"""

    weights: int
    weight_bytes: float
    row_bytes: float

    def __post_init__(self) -> None:
        require(self.weights >= 1, "weights", self.weights)
        require(0 < self.weight_bytes < inf, "weight_bytes", self.weight_bytes)
        require(0 < self.row_bytes < inf, "row_bytes", self.row_bytes)

    @property
    def row_flops(self) -> int:
        return 2 * self.weights


def expert_of(shape: ModelShape, *, weight_bytes_per_value: float | None = None) -> Expert:
    """An expert of `shape`, in its own format or in one of so many bytes a value (> 0).

    Raises
    ------
    ValueError : the model has no experts, or the format is out of range.
    """
    require(shape.experts is not None, "experts", shape.name, "a model without routed experts")
    each = shape.expert_format.bytes_per_value if weight_bytes_per_value is None else weight_bytes_per_value
    return Expert(
        weights=shape.expert_weights,
        weight_bytes=shape.expert_weights * each,
        row_bytes=float(shape.hidden * shape.value_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What computes an expert: arithmetic and memory at the rates it sustains, both > 0."""

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        require(0 < self.flops_per_s < inf, "flops_per_s", self.flops_per_s)
        require(0 < self.bytes_per_s < inf, "bytes_per_s", self.bytes_per_s)

    def compute_bound_rows(self, expert: Expert) -> float:
        """Rows from which arithmetic takes longer than reading the weights once."""
        return self.flops_per_s * expert.weight_bytes / (self.bytes_per_s * expert.row_flops)


@dataclass(frozen=True, slots=True)
class PathTime:
    """One expert on one path, seconds. The longer of compute_s and read_s counts."""

    transfer_s: float
    compute_s: float
    read_s: float

    @property
    def total_s(self) -> float:
        return self.transfer_s + max(self.compute_s, self.read_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The two places an expert can run, and the link between them. start_s : of one transfer, >= 0"""

    cpu: Device
    gpu: Device
    link_bytes_per_s: float
    start_s: float

    def __post_init__(self) -> None:
        require(0 < self.link_bytes_per_s < inf, "link_bytes_per_s", self.link_bytes_per_s)
        require(0 <= self.start_s < inf, "start_s", self.start_s)

    def on_cpu(self, expert: Expert, rows: float) -> PathTime:
        """Rows (> 0) go to the processor, results come back."""
        moved = Crossing(2 * rows * expert.row_bytes, starts=2)
        return self._time(self.cpu, expert, rows, moved)

    def on_gpu(self, expert: Expert, rows: float) -> PathTime:
        """The weights go to the GPU, where the rows (> 0) are."""
        return self._time(self.gpu, expert, rows, Crossing(expert.weight_bytes, starts=1))

    def gpu_wins_from(self, expert: Expert) -> int | None:
        """The fewest rows of an expert with which the GPU path is faster; None: never.

        Both times are lines with one bend, so their difference is a line between bends.
        """
        bends = sorted(device.compute_bound_rows(expert) for device in (self.cpu, self.gpu))
        for low, high in zip([0.0, *bends], [*bends, inf], strict=True):
            found = self._first_win(expert, max(1, ceil(low)), high)
            if found is not None:
                return found
        return None

    def _first_win(self, expert: Expert, first: int, high: float) -> int | None:
        """The same among row counts from `first` to `high`, between which the lead is a line."""
        if first > high:
            return None
        lead_s = self._lead_s(expert, first)
        if lead_s > 0:
            return first
        end = first + 1 if high == inf else high
        slope = (self._lead_s(expert, end) - lead_s) / (end - first) if end > first else 0.0
        if slope <= 0:
            return None
        found = first + floor(-lead_s / slope) + 1
        return found if found <= high else None

    def _lead_s(self, expert: Expert, rows: float) -> float:
        """How much faster the GPU path is, seconds."""
        return self.on_cpu(expert, rows).total_s - self.on_gpu(expert, rows).total_s

    def _time(self, device: Device, expert: Expert, rows: float, moved: Crossing) -> PathTime:
        require(0 < rows < inf, "rows", rows)
        return PathTime(
            transfer_s=moved.serial_s(bytes_per_s=self.link_bytes_per_s, start_s=self.start_s),
            compute_s=rows * expert.row_flops / device.flops_per_s,
            read_s=expert.weight_bytes / device.bytes_per_s,
        )


def one_after_another(times: Sequence[PathTime]) -> float:
    """Experts that do not overlap, seconds."""
    return sum(one.total_s for one in times)


def resident_bytes(shape: ModelShape, *, per_layer: int) -> float:
    """Memory of `per_layer` routed experts kept in every layer that has them.

    Raises
    ------
    ValueError : the model has no experts, or not so many.
    """
    require(shape.experts is not None, "experts", shape.name, "a model without routed experts")
    assert shape.experts is not None
    require(0 <= per_layer <= shape.experts.count, "per_layer", per_layer, f"outside 0 to {shape.experts.count}")
    return shape.routed_bytes * per_layer / shape.experts.count


def residents_that_fit(shape: ModelShape, *, room_bytes: float) -> int:
    """The most routed experts of every layer that fit `room_bytes` (>= 0) together."""
    require(0 <= room_bytes < inf, "room_bytes", room_bytes)
    one = resident_bytes(shape, per_layer=1)
    assert shape.experts is not None
    return min(floor(room_bytes / one), shape.experts.count)
