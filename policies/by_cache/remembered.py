"""Blocks each replica was sent, as a rule remembers them that is told of no cache events.

Model     a set of blocks for each replica with how often each was used; when it is full the least recently used go.
          All of a chain counts as used at once, its first block last, so what is left of a chain is a prefix of it
Valid     chains are hashes over all before, so one block names its whole prefix
Blind to  what replicas really evict
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from estimators.ranges import require


class Remembered:
    """Of one replica. most_blocks : kept from the next `add` on, >= 1"""

    def __init__(self, most_blocks: float) -> None:
        require(most_blocks >= 1, "most_blocks", most_blocks)
        self.most_blocks = most_blocks
        self._uses: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self.total_uses = 0

    def __len__(self) -> int:
        return len(self._uses)

    def matched(self, chain: Sequence[int]) -> int:
        """Leading blocks of `chain` that are remembered."""
        return leading(self._uses, chain)

    def add(self, chain: Sequence[int]) -> None:
        """`chain` was sent there."""
        uses = self._uses
        for block in reversed(chain):
            uses[block] = uses.pop(block, 0) + 1
        self.total_uses += len(chain)
        while len(uses) > self.most_blocks:
            self.total_uses -= uses.popitem(last=False)[1]

    def forget_use(self, chain: Sequence[int]) -> None:
        """One `add` of `chain` counts no more; its blocks stay."""
        uses = self._uses
        for block in chain:
            count = uses.get(block, 0)
            if count > 0:
                uses[block] = count - 1
                self.total_uses -= 1

    def uses_of_oldest(self, blocks: int) -> int:
        """Uses of so many least recently used blocks."""
        return sum(islice(self._uses.values(), blocks))


def leading(known: dict[int, int] | OrderedDict[int, int], chain: Sequence[int]) -> int:
    """Leading blocks of `chain` in `known`, of which none is without those before it."""
    return bisect_left(chain, True, key=lambda block: block not in known)
