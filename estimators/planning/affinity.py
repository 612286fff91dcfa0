"""Send a request to the busy replica that has its state, or to a free one that must fetch or compute it?

Model     T_first of each way as `estimators.first_token` has it; ways compared by the link rate at which they tie, and
          a copy that is there with probability p only by mean and quantile of the two times
Valid     one request; its own wait and fetch known
Blind to  what the choice costs others; a copy that is lost while a slower one is left, which makes three outcomes
Source    AI Infra textbook, section 9.5.4
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from estimators.first_token import Discipline, Rest, service
from estimators.mixture import mean_s, quantile_s
from estimators.ranges import require


def first_token_s(discipline: Discipline, *, queue_s: float, fetch_s: float, work_s: float) -> float:
    """T_first of one request that waits `queue_s`, fetches for `fetch_s` (0: nothing) and then computes `work_s`.

    All >= 0. Disciplines that use a part of a fetch need to know what the rest costs: see `first_token.service`.
    """
    for name, value in (("queue_s", queue_s), ("fetch_s", fetch_s), ("work_s", work_s)):
        require(0 <= value < inf, name, value)
    served = service(discipline, queue_s=queue_s, fetch_s=fetch_s, first_byte_s=0.0, rest=Rest(work_s), layers=1)
    return float(served.first_token_s)


def chain_s(*, size_bytes: float, bytes_per_s: tuple[float, ...], start_s: float = 0.0) -> float:
    """A fetch over links passed one after another, after a fixed start (>= 0), seconds."""
    require(0 <= size_bytes < inf, "size_bytes", size_bytes)
    require(0 <= start_s < inf, "start_s", start_s)
    require(all(rate > 0 for rate in bytes_per_s), "bytes_per_s", bytes_per_s)
    return start_s + sum(size_bytes / rate for rate in bytes_per_s)


def tie_bytes_per_s(*, size_bytes: float, other_s: float, work_s: float, rest_of_fetch_s: float) -> float:
    """Rate of one link at which fetching ties with another way that answers after `other_s`; inf where it never does.

    size_bytes : over that link, > 0
    work_s : computed after the fetch; rest_of_fetch_s : look-up and other links, >= 0

    The fetching replica must be free before the fetch ends; else the link does not matter.
    """
    require(0 < size_bytes < inf, "size_bytes", size_bytes)
    require(0 <= other_s < inf, "other_s", other_s)
    left_s = other_s - work_s - rest_of_fetch_s
    return size_bytes / left_s if left_s > 0 else inf


@dataclass(frozen=True, slots=True)
class HitOrMiss:
    """A way whose copy may have gone. hit_s, miss_s : T_first in each case, > 0, hit_s <= miss_s"""

    hit_s: float
    miss_s: float

    def __post_init__(self) -> None:
        require(0 < self.hit_s <= self.miss_s < inf, "hit_s", self.hit_s, f"not in (0, miss_s = {self.miss_s}]")

    def mean_s(self, hit_probability: float) -> float:
        """Expected T_first; hit_probability 0..1."""
        return float(mean_s(*self._outcomes(hit_probability)))

    def quantile_s(self, hit_probability: float, q: float) -> float:
        """Smallest time that a share q (0..1, both excluded) of such requests does not exceed."""
        return float(quantile_s(*self._outcomes(hit_probability), q))

    def probability_to_beat(self, other_s: float) -> float:
        """Hit probability at which the mean equals another way's T_first; 0 where it always wins, inf where never."""
        if other_s >= self.miss_s:
            return 0.0
        return (self.miss_s - other_s) / (self.miss_s - self.hit_s) if other_s >= self.hit_s else inf

    def _outcomes(self, hit_probability: float) -> tuple[np.ndarray, np.ndarray]:
        require(0 <= hit_probability <= 1, "hit_probability", hit_probability)
        return np.array([hit_probability, 1.0 - hit_probability]), np.array([self.hit_s, self.miss_s])
