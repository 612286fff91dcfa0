"""What transfers on one link do to each other.

Model     first come: one after the other, in the order they begin. Fair: all that have begun and are not over get the
          same share of the rate at every moment
Valid     rate > 0; calls in order of time
Blind to  a transfer whose bytes come in more slowly than its share lets them out (an earlier, slower link)
Source    egalitarian processor sharing: Harchol-Balter 2013, ch. 30
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.float64]

APART = 2.0**46  # bytes between the keys of two rows: more than a link ever has, so that one table serves all rows
NOTHING_BYTES = 1e-3  # what rounding leaves of a transfer that is over


@dataclass(slots=True, eq=False)
class Transfer:
    """One promise on one link. left_bytes : as of the last change on that link; begins_s : absolute."""

    row: int
    left_bytes: float
    begins_s: float


def fair_points(row: int, lefts: Iterable[float]) -> Bytes:
    """Two functions of one fair link, for `np.interp`: shape (4, points). Keys are the row times APART plus bytes.

    The level is what each transfer there from the start has had; done is what all had by then, sum_i min(b_i, level).
    First and second line: levels as keys, what is done; third and fourth: what is done as keys, levels. The functions
    are flat from their last step on and zero at the end of the row's keys, so that points of several rows can follow
    one another, and rows without points between them read zero.

    lefts : bytes left of each transfer, at least one, all > 0
    """
    ordered = sorted(lefts)
    levels, done = [0.0], [0.0]
    for index, left in enumerate(ordered):
        step = left - levels[-1]
        if step > 0.0:
            levels.append(left)
            done.append(done[-1] + step * (len(ordered) - index))
    base = row * APART
    ends = [base + 0.75 * APART, base + 0.875 * APART]
    return np.array(
        [
            [base + level for level in levels] + ends,
            [*done, done[-1], 0.0],
            [base + bytes_done for bytes_done in done] + ends,
            [*levels, levels[-1], 0.0],
        ]
    )


def level_at(lefts: Sequence[float], done: float) -> float:
    """What each of a fair link's transfers has had when all together have had `done` bytes; `lefts` ascending."""
    level = 0.0
    for index, left in enumerate(lefts):
        step = (left - level) * (len(lefts) - index)
        if step >= done:
            return level + done / (len(lefts) - index)
        done -= step
        level = left
    return level


def by_begin(transfer: Transfer) -> float:
    return transfer.begins_s


def pass_first_come(transfers: Sequence[Transfer], rate: float, from_s: float, to_s: float) -> None:
    at_s = from_s
    for transfer in transfers:
        at_s = max(at_s, transfer.begins_s)
        if at_s >= to_s:
            return
        crossed = min(transfer.left_bytes, (to_s - at_s) * rate)
        transfer.left_bytes -= crossed
        at_s += crossed / rate


def pass_fairly(transfers: Sequence[Transfer], rate: float, from_s: float, to_s: float) -> None:
    """From one begin or end to the next, all that have begun and are not over get the same."""
    at_s = from_s
    while at_s < to_s:
        active = [t for t in transfers if t.begins_s <= at_s and t.left_bytes > NOTHING_BYTES]
        until_s = min((t.begins_s for t in transfers if t.begins_s > at_s), default=to_s)
        until_s = min(until_s, to_s)
        if active:
            least = min(t.left_bytes for t in active)
            each = min(least, (until_s - at_s) * rate / len(active))
            for transfer in active:
                transfer.left_bytes -= each
            if each == least:
                until_s = min(until_s, at_s + least * len(active) / rate)
        at_s = max(at_s, until_s)
