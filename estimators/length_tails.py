"""A distribution of lengths kept as tail sums at fixed edges, from which what is left of an answer is read directly.

Model     at every edge e: S(e) = P(L > e), the share of lengths above it, and A(e) = E[(L - e)+], what they exceed it
          by. Both are means over answers, so learning and mixing are plain averages, and
              E[L] = A(0)     E[min(L, m)] = A(0) - A(m)     E[min(L, m) - k | L > k] = (A(k) - A(m)) / S(k)
          Between two edges the mass lies evenly and as widely as fits around its own mean, which both edges give
          exactly; above the last edge it falls exponentially.
Valid     whole tokens; exact at edges, hence for every length up to 16
Blind to  where inside one bin (an eighth of an octave, 9 %) several different lengths lie
Source    A is the integrated survival function; its ratio to S is the mean residual life (Kotz and Shanbhag 1980)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from math import exp, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

Table = npt.NDArray[np.float64]  # (edges, 2): columns S and A

WHOLE = 16  # every length up to this has an edge
PER_OCTAVE = 8
LARGEST = 2**17  # longer answers count with their true length, but no edge tells them apart

_OCTAVES = (LARGEST // WHOLE).bit_length() - 1
EDGES: tuple[int, ...] = (
    *range(WHOLE),
    *(round(WHOLE * 2 ** (step / PER_OCTAVE)) for step in range(PER_OCTAVE * _OCTAVES + 1)),
)
_LAST = len(EDGES) - 1
_EDGES = np.array(EDGES, dtype=np.float64)
_NEXT = np.diff(_EDGES)
# Weights of the trapezoid rule over the edges.
_TRAPEZOID = 0.5 * (np.append(_NEXT, 0.0) + np.append(0.0, _NEXT))
FORGOTTEN = 1e-9  # a share this small is dropped, long before it becomes slow denormal numbers


class Tail(NamedTuple):
    """P(L > x) and E[(L - x)+] at one x."""

    share: float
    excess_tokens: float


def of_one(tokens: float) -> Table:
    """Tails of an answer of exactly `tokens` (>= 0)."""
    table = np.zeros((len(EDGES), 2))
    below = bisect_left(EDGES, tokens)  # edges it exceeds, all of them at the start
    table[:below, 0] = 1.0
    np.subtract(tokens, _EDGES[:below], out=table[:below, 1])
    return table


def of_memoryless(mean_tokens: float) -> Table:
    """Tails of the geometric distribution with this mean (> 1): what is left never depends on what was produced."""
    require(1 < mean_tokens < float("inf"), "mean_tokens", mean_tokens)
    share = (1.0 - 1.0 / mean_tokens) ** _EDGES
    return np.stack([share, mean_tokens * share], axis=1)


def of_longer(table: Table, tokens: float) -> Table:
    """Tails of an answer known to be longer than `tokens` (>= 0): `table` above that, cut off and scaled up to one."""
    share, excess = tail_at(tokens, [(1.0, table.reshape(-1))])
    if share <= 0.0:  # longer than anything believed possible: then just that long
        return of_one(tokens)
    return np.where(
        (tokens > _EDGES)[:, None],
        np.stack([np.ones(len(EDGES)), tokens - _EDGES + excess / share], axis=1),
        table / share,
    )


def drop_forgotten(table: Table) -> None:
    """Set tails that have all but faded to zero, in place."""
    table[table[:, 0] < FORGOTTEN] = 0.0


def tail_at(tokens: float, parts: Iterable[tuple[float, Table]]) -> Tail:
    """Tail above `tokens` (>= 0) of a mixture.

    parts : (weight, table) of each; tables flattened by `reshape(-1)`, which makes reading them three times faster
    """
    index = bisect_right(EDGES, tokens) - 1
    if index == _LAST:
        share, excess, _, _ = _mixed(parts, _LAST - 1, upper=True)
        return _above_all(tokens, share, excess)
    share, excess, next_share, next_excess = _mixed(parts, index)
    start = EDGES[index]
    at = tokens - start
    if at == 0.0:
        return Tail(share, excess)
    width = EDGES[index + 1] - start
    mass = share - next_share
    low, high = _spread(width, mass, excess - next_excess - width * next_share)
    if at <= low:
        return Tail(share, excess - at * share)
    above = next_excess + (width - at) * next_share
    if at >= high:
        return Tail(next_share, above)
    inside = mass * (high - at) / (high - low)
    return Tail(next_share + inside, above + 0.5 * inside * (high - at))


def smallest_at(target: float, table: Table) -> float:
    """Smallest length x with P(L > x) <= `target` (0 < target <= 1), tokens; tolerant to rounding."""
    require(0 < target <= 1, "target", target)
    target *= 1.0 + 1e-9
    index = int(np.searchsorted(-table[:, 0], -target))
    if index == 0:
        return 0.0
    if index > _LAST:
        share, excess = table[_LAST].tolist()
        return float(LARGEST + excess / share * log(share / target))
    (share, excess), (next_share, next_excess) = table[index - 1 : index + 1].tolist()
    start = EDGES[index - 1]
    width = EDGES[index] - start
    mass = share - next_share
    low, high = _spread(width, mass, excess - next_excess - width * next_share)
    return float(start + high - (target - next_share) / mass * (high - low))


def mean_left_at_random(table: Table) -> float:
    """Expected rest of an answer met at a random moment of its life, tokens: E[L^2] / (2 E[L]).

    Long answers are met more often than they are asked for, and half-way on average.
    """
    flat = table.reshape(-1)
    return mean_left_of_parts([(1.0, flat, area(flat))])


def mean_left_of_parts(parts: Iterable[tuple[float, Table, float]]) -> float:
    """The same of a mixture: (weight, flat table, its `area`) of each part, weights summing to one."""
    within = mean = share = excess = 0.0
    for weight, flat, part_area in parts:
        within += weight * part_area
        mean += weight * flat.item(1)
        share += weight * flat.item(-2)
        excess += weight * flat.item(-1)
    beyond = excess * excess / share if share > 0 else 0.0
    return (within + beyond) / mean


def area(flat: Table) -> float:
    """The integral of what lengths exceed each x by, up to the last edge; `flat` as for `tail_at`."""
    return float(flat[1::2] @ _TRAPEZOID)


def mixture(parts: Iterable[tuple[float, Table]]) -> Table:
    """The whole table of a mixture; parts as for `tail_at`."""
    total = np.zeros(2 * len(EDGES))
    for weight, flat in parts:
        total += weight * flat
    return total.reshape(-1, 2)


def _mixed(parts: Iterable[tuple[float, Table]], index: int, *, upper: bool = False) -> tuple[float, ...]:
    """S and A at edge `index` and at the next, weighted; `upper`: those at the next edge first."""
    share = excess = next_share = next_excess = 0.0
    start = 2 * index
    for weight, flat in parts:
        a, b, c, d = flat[start : start + 4].tolist()
        share += weight * a
        excess += weight * b
        next_share += weight * c
        next_excess += weight * d
    return (next_share, next_excess, share, excess) if upper else (share, excess, next_share, next_excess)


def _spread(width: float, mass: float, moment: float) -> tuple[float, float]:
    """Where a bin's mass lies, from its start: the widest interval inside the bin around moment / mass."""
    if mass <= 0.0:
        return width, width
    mean = min(max(moment / mass, 0.0), width)
    half = min(mean, width - mean)
    return mean - half, mean + half


def _above_all(tokens: float, share: float, excess: float) -> Tail:
    if share <= 0.0:
        return Tail(0.0, 0.0)
    mean = excess / share
    left = share * exp((LARGEST - tokens) / mean)
    return Tail(left, left * mean)
