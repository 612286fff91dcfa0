"""Copies that turned out not to be there, or not to come: their credit is withheld for a while.

Model     a contradiction names the first block that was not reused. Withholding that one block at its depth ends the
          prefix there, since a prefix has no gaps
Valid     until the penalty time is over, or the publisher announces the block again
Errors    a copy that is there after all is not credited for the penalty time
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier

Int32s = npt.NDArray[np.int32]
UInt64s = npt.NDArray[np.uint64]


class Doubts:
    """Withheld credit, by holder, tier and block.

    Parameters
    ----------
    penalty_s : seconds credit is withheld, > 0
    most : doubts kept; beyond it the oldest is forgotten
    """

    def __init__(self, *, penalty_s: float, most: int) -> None:
        self._penalty_s = penalty_s
        self._most = most
        self._doubts: dict[tuple[int, Tier, int], tuple[int, float]] = {}  # -> depth, until when; oldest first

    def __len__(self) -> int:
        return len(self._doubts)

    def add(self, holder: int, tier: Tier, hashes: Sequence[int] | UInt64s, depth: int, now_s: float) -> None:
        """`holder` did not have, or did not deliver, the block at `depth` of this chain from `tier`."""
        self.expire(now_s)
        doubt = (holder, tier, int(hashes[depth]))
        self._doubts.pop(doubt, None)
        if len(self._doubts) >= self._most:
            del self._doubts[next(iter(self._doubts))]
        self._doubts[doubt] = (depth, now_s + self._penalty_s)

    def lift(self, holder: int, tier: Tier, blocks: Collection[int]) -> None:
        """`holder` announced these blocks in `tier`."""
        for doubt in [doubt for doubt in self._doubts if doubt[:2] == (holder, tier) and doubt[2] in blocks]:
            del self._doubts[doubt]

    def expire(self, now_s: float) -> None:
        """Forget doubts whose time is over."""
        while self._doubts:
            doubt, (_depth, until_s) = next(iter(self._doubts.items()))
            if until_s > now_s:
                return
            del self._doubts[doubt]

    def withhold(self, tier: Tier, hashes: Sequence[int] | UInt64s, counts: Int32s, now_s: float) -> None:
        """End each holder's prefix in `counts`, by holder, where its first doubtful block is."""
        for (holder, of_tier, block), (depth, until_s) in self._doubts.items():
            if of_tier is tier and until_s > now_s and holder < len(counts) and depth < counts[holder]:
                counts[holder] = depth if hashes[depth] == block else counts[holder]

    def withheld(self, tier: Tier, holder: int, hashes: Sequence[int] | UInt64s, count: int, now_s: float) -> int:
        """As `withhold`, for one holder: what is left of its `count`."""
        counts = np.zeros(holder + 1, dtype=np.int32)
        counts[holder] = count
        self.withhold(tier, hashes, counts, now_s)
        return int(counts[holder])
