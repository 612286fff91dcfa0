"""A shared store that says nothing: it is believed to hold what was written through it, as long as that may last.

Model     engines that write through put each block they compute into the store. Blocks are kept in the order in which
          they were last written or read, the oldest go first beyond the store's capacity or `keep_s`. Of one prompt the
          last block goes first, so whoever holds a block holds all before it, and a prefix is found by halving
Valid     stores filled by the routed engines alone, evicting what was used longest ago
Blind to  writes that failed or are still under way, writes by others, another rule of eviction, a restart of the store
Errors    both ways; what is found here is approximate and must be shown as such. `missed` corrects it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from estimators.ranges import require

_MOST_MISSED = 1 << 16


@dataclass(frozen=True, slots=True)
class Written:
    """Leading blocks of one chain. age_s : since the last of them was written or read; NaN when there are none."""

    blocks: int
    age_s: float
    approximate: bool = True


class WrittenStore:
    """Belief about one store. Plain calls, no clock; times must not go back.

    Parameters
    ----------
    capacity_blocks : blocks the store has room for, >= 1; take less than the truth if others write too
    keep_s : how long a block is believed after it was last used, > 0
    """

    def __init__(self, *, capacity_blocks: int, keep_s: float) -> None:
        require(capacity_blocks >= 1, "capacity_blocks", capacity_blocks)
        require(keep_s > 0, "keep_s", keep_s)
        self.evicted = 0  # to make room
        self.misses = 0
        self._capacity = self._room = capacity_blocks
        self._keep_s = keep_s
        self._used_s: dict[int, float] = {}  # block -> last use, in the order of that
        self._missed: dict[int, None] = {}  # blocks the store turned out not to have, until they are written again

    def __len__(self) -> int:
        """Blocks kept, those that are too old by now included."""
        return len(self._used_s)

    def written(self, chain: Sequence[int], now_s: float, *, each: int = 1) -> None:
        """An engine has computed all blocks of this chain and written them through; call it when that is over.

        each : blocks of the store that one of these stands for, >= 1; all are taken to be as large as the largest seen
        """
        self._room = min(self._room, max(1, self._capacity // each))
        if self._missed:
            for block in chain:
                self._missed.pop(block, None)
        self._use(chain[: self._room], now_s)

    def read(self, chain: Sequence[int], blocks: int, now_s: float) -> None:
        """An engine has fetched the first `blocks` of this chain: they are there, and were just used."""
        self.written(chain[: max(0, blocks)], now_s)

    def missed(self, chain: Sequence[int], blocks: int) -> None:
        """A fetch of this chain found only its first `blocks`: nobody's prompt has the next one any more."""
        beyond = chain[max(0, blocks) :]
        if not beyond:
            return
        self.misses += 1
        self._missed[beyond[0]] = None
        for block in beyond:
            if self._used_s.pop(block, None) is not None:
                self._missed[block] = None  # other prompts that go on from here must end here too
        if len(self._missed) > _MOST_MISSED:
            self.clear()  # a store that lacks so much is another one than we believe

    def clear(self) -> None:
        """Believe nothing any more: the store was restarted, or emptied."""
        self._used_s.clear()
        self._missed.clear()

    def held(self, chain: Sequence[int], now_s: float) -> Written:
        """How much of this chain the store should have."""
        since_s = now_s - self._keep_s
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if self._used_s.get(chain[middle - 1], float("-inf")) >= since_s:
                low = middle
            else:
                high = middle - 1
        if self._missed and not self._missed.keys().isdisjoint(chain[:low]):
            low = next(place for place, block in enumerate(chain) if block in self._missed)
        age_s = now_s - self._used_s[chain[low - 1]] if low else float("nan")
        return Written(low, age_s)

    def _use(self, chain: Sequence[int], now_s: float) -> None:
        used_s = self._used_s
        for block in reversed(chain):
            used_s.pop(block, None)
            used_s[block] = now_s
        excess = len(used_s) - self._room
        if excess > 0:
            self.evicted += excess
            oldest = iter(used_s)
            for block in [next(oldest) for _ in range(excess)]:
                del used_s[block]
