"""How much of a prompt's stored prefix to fetch, and how much to compute instead.

Model     B blocks can be fetched. F(m), the fetch of m of them, is the part before the first byte plus m/B of the rest;
          F(0) = 0. C(x) as in `first_token.Rest`
          overlapped   the first m are fetched:  max(Q, F(m)) + C(m / B)
          two ends     the last m are fetched while the others are computed from Q:
                       max(Q + cost of the first B - m, F(m)) + C(1)
Valid     C falls in x, which it does for work in tokens and pairs
Blind to  the stairs of the step count; links that get slower or faster during the fetch
Source    both are exact. Overlapped: up to the last m with F(m) <= Q only C counts, which falls; past it the sum of a
          straight line and a concave C is least at one of its ends. Two ends: one side rises in m and the other
          falls, so the best m is beside their crossing. Cake (Jin et al. 2024) for the idea of meeting
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from estimators.first_token import Discipline, Rest, Times, service

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """blocks : to fetch, 0..all; fewest of equals. first_token_s : then, from the request's arrival"""

    blocks: Blocks
    first_token_s: Times


def best_prefix(
    *,
    queue_s: npt.ArrayLike,
    fetch_s: npt.ArrayLike,
    first_byte_s: npt.ArrayLike,
    rest: Rest,
    blocks: npt.ArrayLike,
) -> Split:
    """The best prefix to fetch for an engine that fetches on arrival and starts when it is there.

    Scalars or arrays that broadcast to one shape.

    Parameters
    ----------
    queue_s : Q, >= 0
    fetch_s : F of all blocks, from arrival
    first_byte_s : its part before the first byte, 0..fetch_s
    rest : C(x), with `none_reused_s`
    blocks : how many can be fetched, >= 0
    """
    queue, fetch, first_byte, count = _broadcast(queue_s, fetch_s, first_byte_s, blocks)
    moving = fetch - first_byte
    block_s = moving / np.maximum(count, 1.0)
    in_queue = np.maximum(np.minimum(queue, fetch) - first_byte, 0.0) / np.where(moving > 0, moving, 1.0)
    hidden = np.where(queue >= fetch, count, np.floor(in_queue * count * (1 + 1e-12)))
    candidates = np.stack([np.zeros_like(count), hidden, np.minimum(hidden + 1.0, count), count])

    ready = np.where(candidates > 0, first_byte + candidates * block_s, 0.0)
    return _least(candidates, np.maximum(queue, ready) + rest.at(candidates / np.maximum(count, 1.0)))


def best_two_ends(
    *,
    queue_s: npt.ArrayLike,
    fetch_s: npt.ArrayLike,
    first_byte_s: npt.ArrayLike,
    rest: Rest,
    blocks: npt.ArrayLike,
) -> Split:
    """Where computed head and fetched tail meet, in whole blocks. Arguments as for `best_prefix`."""
    queue, fetch, first_byte, count = _broadcast(queue_s, fetch_s, first_byte_s, blocks)
    in_any_step = Rest(rest.all_reused_s, rest.none_reused_s, rest.bend_s)
    met = service(
        Discipline.TWO_ENDS, queue_s=queue, fetch_s=fetch, first_byte_s=first_byte, rest=in_any_step, layers=1
    ).fetched_share
    below = np.clip(np.floor(met * count), 0.0, count)
    candidates = np.stack([np.zeros_like(count), below, np.minimum(below + 1.0, count)])

    safe = np.maximum(count, 1.0)
    ready = np.where(candidates > 0, first_byte + candidates * ((fetch - first_byte) / safe), 0.0)
    head = np.where(count > 0, 1.0 - candidates / safe, 0.0)
    return _least(candidates, np.maximum(queue + rest.head_s(head), ready) + rest.all_reused_s)


def _broadcast(*values: npt.ArrayLike) -> tuple[Times, ...]:
    return tuple(np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in values)))


def _least(candidates: Times, first_token_s: Times) -> Split:
    """Of candidates along the first axis, in rising order."""
    best = np.argmin(first_token_s, axis=0)[np.newaxis]
    chosen = np.take_along_axis(candidates, best, axis=0)[0]
    return Split(chosen.astype(np.int64), np.take_along_axis(first_token_s, best, axis=0)[0])
