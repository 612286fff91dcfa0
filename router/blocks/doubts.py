"""Copies that turned out not to be there, or not to come: their credit is withheld for a while.

Model     a contradiction names the first block that was not reused. Withholding that one block at its depth ends the
          prefix there, since a prefix has no gaps
Valid     until the penalty time is over, or the publisher announces the block again
Errors    a copy that is there after all is not credited for the penalty time
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier

UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Doubt:
    """A block of a chain whose copy in one tier of one holder gets no credit. depth : its place in the chain"""

    depth: int
    holder: int
    tier: Tier


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
        self._at: dict[int, list[tuple[int, Tier]]] = {}  # by block: a question meets few of them

    def __len__(self) -> int:
        return len(self._doubts)

    def add(self, holder: int, tier: Tier, hashes: Sequence[int] | UInt64s, depth: int, now_s: float) -> None:
        """`holder` did not have, or did not deliver, the block at `depth` of this chain from `tier`."""
        self.expire(now_s)
        block = int(hashes[depth])
        self._drop((holder, tier, block))
        if len(self._doubts) >= self._most:
            self._drop(next(iter(self._doubts)))
        self._doubts[holder, tier, block] = (depth, now_s + self._penalty_s)
        self._at.setdefault(block, []).append((holder, tier))

    def lift(self, holder: int, tier: Tier, blocks: Collection[int]) -> None:
        """`holder` announced these blocks in `tier`."""
        for block in self._at.keys() & blocks:
            self._drop((holder, tier, block))

    def forget(self, holder: int) -> None:
        """`holder` is somebody else from now on."""
        for doubt in [doubt for doubt in self._doubts if doubt[0] == holder]:
            self._drop(doubt)

    def expire(self, now_s: float) -> None:
        """Forget doubts whose time is over."""
        while self._doubts:
            doubt, (_depth, until_s) = next(iter(self._doubts.items()))
            if until_s > now_s:
                return
            self._drop(doubt)

    def among(self, hashes: Sequence[int] | UInt64s, now_s: float) -> list[Doubt]:
        """Those that this chain meets now."""
        chain = hashes.tolist() if isinstance(hashes, np.ndarray) else hashes
        met, at = list[Doubt](), self._at
        if at.keys().isdisjoint(chain):  # the rule
            return met
        for block in [block for block in chain if block in at]:
            for holder, tier in at[block]:
                depth, until_s = self._doubts[holder, tier, block]
                if until_s > now_s and depth < len(chain) and chain[depth] == block:
                    met.append(Doubt(depth, holder, tier))
        return met

    def _drop(self, doubt: tuple[int, Tier, int]) -> None:
        if self._doubts.pop(doubt, None) is None:
            return
        holder, tier, block = doubt
        here = self._at[block]
        here.remove((holder, tier))
        if not here:
            del self._at[block]
