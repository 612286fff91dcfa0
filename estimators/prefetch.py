"""Room for fetches under way, one row per replica.

Model     a fetch holds all its bytes from its promise to its end. One that does not fit is not made: the replica
          computes instead
Valid     every `hold` is ended by one `give_back`
Blind to  fetches that others caused there
Source    SGLang HiCache, `prefetch_capacity_limit` (a share of the host pool), by its documentation
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from estimators.ranges import require


@dataclass(slots=True, eq=False)
class Hold:
    """One fetch's room. until_s : when it should end, absolute."""

    row: int
    size_bytes: float
    until_s: float
    over: bool = False


class PrefetchSpace:
    """capacity_bytes : of each replica, >= 0; inf where there is no limit.

    outstanding_bytes : held now, shape (rows,)
    """

    def __init__(self, capacity_bytes: npt.ArrayLike) -> None:
        self.capacity_bytes = np.atleast_1d(np.asarray(capacity_bytes, dtype=np.float64))
        require(bool(np.all(self.capacity_bytes >= 0)), "capacity_bytes", capacity_bytes)
        self.outstanding_bytes = np.zeros_like(self.capacity_bytes)
        self._holds: list[list[Hold]] = [[] for _ in self.capacity_bytes]

    def fits(self, size_bytes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether a fetch of `size_bytes`, shape (..., rows), would be made now; one of nothing always."""
        size = np.asarray(size_bytes)
        return np.asarray((self.outstanding_bytes + size <= self.capacity_bytes) | (size == 0))

    def wait_s(self, row: int, size_bytes: float, now_s: float) -> float:
        """How long until a fetch of `size_bytes` would fit, if those under way end as expected; inf: never."""
        room = float(self.capacity_bytes[row] - self.outstanding_bytes[row])
        if size_bytes <= room or size_bytes == 0:
            return 0.0
        for hold in sorted(self._holds[row], key=_until_s):
            room += hold.size_bytes
            if size_bytes <= room:
                return max(0.0, hold.until_s - now_s)
        return inf

    def hold(self, row: int, size_bytes: float, *, until_s: float) -> Hold:
        """Room for a fetch that was sent, whether or not it was thought to fit; size_bytes >= 0."""
        require(0 <= size_bytes < inf, "size_bytes", size_bytes)
        hold = Hold(row, size_bytes, until_s)
        self._holds[row].append(hold)
        self._sum_up(row)
        return hold

    def give_back(self, hold: Hold) -> None:
        """The fetch is over. Idempotent."""
        if not hold.over:
            hold.over = True
            self._holds[hold.row].remove(hold)
            self._sum_up(hold.row)

    def _sum_up(self, row: int) -> None:
        """Summed anew, so that an empty row is exactly empty."""
        self.outstanding_bytes[row] = sum(hold.size_bytes for hold in self._holds[row])


def _until_s(hold: Hold) -> float:
    return hold.until_s
