"""Reading a cached prefix layer by layer beside the computation that uses it.

Model     layers are read one after another and computed one after another; layer i is computed once layer i is there
          and layer i - 1 is done. The first `preloaded` layers were read before the turn
          what has to be there before: B (T_read - T_new) bytes, the part of the read that computing does not cover
Valid     all layers alike; the link is this request's alone
Blind to  a GPU slowed by the copies; room that the preloaded layers take from other requests
Source    AI Infra textbook, section 9.5.2; CachedAttention (USENIX ATC 2024), section 3.2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One prefill, from its turn, seconds; each shape (layers,).

    read_starts_s, read_ends_s : NaN for layers that were there before
    """

    read_starts_s: Times
    read_ends_s: Times
    compute_starts_s: Times
    compute_ends_s: Times

    @property
    def total_s(self) -> float:
        return float(self.compute_ends_s[-1])

    @property
    def waited_s(self) -> float:
        """Time the GPU stood still for layers."""
        return max(0.0, self.total_s - float(np.sum(self.compute_ends_s - self.compute_starts_s)))  # no -1e-17


def layer_times(*, layers: int, read_layer_s: float, compute_layer_s: float, preloaded: int = 0) -> LayerTimes:
    """When each layer is read and computed.

    layers >= 1; read_layer_s, compute_layer_s >= 0; preloaded : 0..layers, read before the turn
    """
    require(layers >= 1, "layers", layers)
    require(0 <= read_layer_s < inf, "read_layer_s", read_layer_s)
    require(0 <= compute_layer_s < inf, "compute_layer_s", compute_layer_s)
    require(0 <= preloaded <= layers, "preloaded", preloaded)
    read_ends_s = np.full(layers, np.nan)
    read_ends_s[preloaded:] = read_layer_s * np.arange(1, layers - preloaded + 1)
    ends_s, free_s = np.empty(layers), 0.0
    for layer, there_s in enumerate(np.nan_to_num(read_ends_s, nan=0.0)):
        free_s = max(free_s, float(there_s)) + compute_layer_s
        ends_s[layer] = free_s
    return LayerTimes(read_ends_s - read_layer_s, read_ends_s, ends_s - compute_layer_s, ends_s)


def whole_then_compute_s(*, layers: int, read_layer_s: float, compute_layer_s: float) -> float:
    """The same without overlap: all is read, then all is computed."""
    return layers * (read_layer_s + compute_layer_s)


def buffer_bytes(*, bytes_per_s: float, read_s: float, compute_s: float) -> float:
    """B (T_read - T_new), what computing does not cover of the read, bytes; 0 where it covers all.

    bytes_per_s > 0 of the link; read_s, compute_s >= 0 of all layers
    """
    require(0 < bytes_per_s < inf, "bytes_per_s", bytes_per_s)
    require(0 <= read_s < inf, "read_s", read_s)
    require(0 <= compute_s < inf, "compute_s", compute_s)
    return bytes_per_s * max(0.0, read_s - compute_s)


def layers_over(size_bytes: float, *, layer_bytes: float) -> int:
    """Whole layers that hold `size_bytes` (>= 0); layer_bytes > 0."""
    require(0 <= size_bytes < inf, "size_bytes", size_bytes)
    require(0 < layer_bytes < inf, "layer_bytes", layer_bytes)
    return ceil(size_bytes / layer_bytes)


def layers_to_preload(*, layers: int, read_layer_s: float, compute_layer_s: float) -> int:
    """Fewest preloaded layers with which the GPU never waits.

    The last layer must be there when its turn comes, (L - p) read <= (L - 1) compute: up to a layer more than the
    bytes of `buffer_bytes`, since what computing the last layer covers comes too late.
    """
    for preloaded in range(layers + 1):
        times = layer_times(
            layers=layers, read_layer_s=read_layer_s, compute_layer_s=compute_layer_s, preloaded=preloaded
        )
        if times.waited_s <= 1e-9 * times.total_s:
            return preloaded
    raise AssertionError("with all layers there the GPU cannot wait")


def tokens_that_hide(read_s: float, compute_s: Callable[[int], float], *, most: int = 1 << 20) -> int:
    """Fewest new tokens whose computation takes at least as long as the read.

    compute_s : seconds of so many new tokens, not falling; most : nothing longer is looked at

    Raises
    ------
    ValueError : not even `most` tokens take so long.
    """
    require(0 <= read_s < inf, "read_s", read_s)
    require(compute_s(most) >= read_s, "read_s", read_s, f"longer than computing {most} tokens")
    low, high = 0, most  # computing `high` is long enough, computing `low` is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_s(middle) >= read_s else (middle, high)
    return high
