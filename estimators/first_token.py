"""When the first token comes back, by what the engine does about a fetch.

Model     Q  moment the GPU can start the request      R  moment its KV state is ready
          C  work left once both are there             F(t)  duration of the fetch if it starts at t
          overlapped   max(Q, R) + C                    R = F(0): the fetch runs while the request queues
          serial       Q + F(Q) + C                     the fetch starts when the request's turn comes
          layerwise    max(Q + C, R1 + C, R + C / L)    R1 first layer there, R last, L layers of equal work
Valid     all times >= 0, in seconds from the request's arrival
Blind to  the other disciplines (best effort, time-limited, blocking): each needs its own form
Source    AI Infra textbook, section 9.5.4; CachedAttention (USENIX ATC 2024) for the layer-wise form
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

Times = npt.NDArray[np.float64]  # a scalar in gives a 0-d array out


class Discipline(Enum):
    """What a replica does between a request's arrival and its turn. Configured per fleet."""

    OVERLAPPED = "overlapped"
    SERIAL = "serial"
    LAYERWISE = "layerwise"


def overlapped_s(queue_s: npt.ArrayLike, ready_s: npt.ArrayLike, compute_s: npt.ArrayLike) -> Times:
    """max(Q, R) + C. Scalars or arrays that broadcast."""
    return np.asarray(np.maximum(queue_s, ready_s) + compute_s)


def serial_s(queue_s: npt.ArrayLike, fetch_s: npt.ArrayLike, compute_s: npt.ArrayLike) -> Times:
    """Q + F + C, with F the fetch's duration when it starts at Q. Scalars or arrays that broadcast."""
    return np.asarray(np.add(queue_s, fetch_s) + compute_s)


def layerwise_s(
    queue_s: npt.ArrayLike,
    first_layer_s: npt.ArrayLike,
    ready_s: npt.ArrayLike,
    compute_s: npt.ArrayLike,
    *,
    layers: int,
) -> Times:
    """max(Q + C, R1 + C, R + C / L); `first_layer_s` (R1) and `ready_s` (R) count from arrival, layers >= 1.

    A fetch that starts only at Q has Q in both R1 and R already.
    """
    require(layers >= 1, "layers", layers)
    start_s = np.maximum(queue_s, first_layer_s)
    return np.asarray(np.maximum(start_s + compute_s, ready_s + np.divide(compute_s, layers)))


def first_layer_s(fetch_s: Times, fetch_start_s: float, layers: int) -> Times:
    """R1: when the first of `layers` (>= 1) layers is there, of a fetch that moves its bytes evenly after its start."""
    return np.asarray(np.minimum(fetch_s, fetch_start_s + (fetch_s - fetch_start_s) / layers))


def first_token_s(
    discipline: Discipline,
    *,
    queue_s: Times,
    fetch_s: Times,
    fetch_start_s: float,
    compute_s: Times,
    layers: int,
) -> Times:
    """T_first of a fetch that takes `fetch_s` from its start, under `discipline`.

    fetch_s : F, zero where nothing is fetched; fetch_start_s : its part before the first byte, >= 0.
    Where F is zero all three forms are Q + C.
    """
    if discipline is Discipline.SERIAL:
        return serial_s(queue_s, fetch_s, compute_s)
    if discipline is Discipline.LAYERWISE:
        first_s = first_layer_s(fetch_s, fetch_start_s, layers)
        return layerwise_s(queue_s, first_s, fetch_s, compute_s, layers=layers)
    return overlapped_s(queue_s, fetch_s, compute_s)
