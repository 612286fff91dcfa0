"""What look-ups answered lately, kept so that an answer serves later prompts with the same beginning.

Model     every `stride`-th block of an answered chain is remembered with who holds everything up to it; the newest
          answer about a block alone counts. A question walks its own chain from the start until nobody is left, so a
          block that is not known, or too old, ends it
Valid     holders whose chunk is a multiple of our block
Blind to  what happened since the answer: the age is given with every reply, and `ttl_s` bounds it
Errors    towards fewer hits by up to one stride; towards more by what was evicted within `ttl_s`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from estimators.ranges import require
from estimators.tiers import Tier
from router.signals.lmcache import Holding

Int32s = npt.NDArray[np.int32]
Slot = tuple[Tier, int]  # a tier of a row; the row of a shared pool is one past the last
_NOBODY: frozenset[Slot] = frozenset()


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Leading blocks of one chain, by answers that are recent enough.

    host_blocks, disk_blocks : of each row
    store_blocks : of the pool all share
    age_s : of the oldest answer used; NaN when there is none
    """

    host_blocks: Int32s
    disk_blocks: Int32s
    store_blocks: int
    age_s: float


class Answers:
    """Bounded memory of answers. Plain calls, no clock.

    Parameters
    ----------
    rows : replicas, >= 1
    rows_of : instance, as the service names it -> row
    block_tokens, chunk_tokens : of the router and of the service; the chunk is a multiple of the block
    ttl_s : how long an answer is believed, > 0
    most : blocks remembered, >= 1; those answered longest ago go first
    """

    def __init__(
        self,
        rows: int,
        rows_of: Mapping[str, int],
        *,
        block_tokens: int,
        chunk_tokens: int,
        ttl_s: float = 10.0,
        most: int = 1 << 16,
    ) -> None:
        require(rows >= 1 and all(0 <= row < rows for row in rows_of.values()), "rows", rows)
        require(block_tokens >= 1, "block_tokens", block_tokens)
        require(chunk_tokens >= block_tokens and chunk_tokens % block_tokens == 0, "chunk_tokens", chunk_tokens)
        require(ttl_s > 0, "ttl_s", ttl_s)
        require(most >= 1, "most", most)
        self.block_tokens = block_tokens
        self.stride = chunk_tokens // block_tokens
        self.strangers = 0  # holdings of instances nobody has named
        self._rows = rows
        self._rows_of = dict(rows_of)
        self._ttl_s = ttl_s
        self._most = most
        self._known: dict[int, tuple[float, frozenset[Slot]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def rows_are(self, rows_of: Mapping[str, int]) -> None:
        """Replicas came or went, so that instances are behind these rows from now on; what is remembered is void."""
        require(all(0 <= row < self._rows for row in rows_of.values()), "rows_of", rows_of)
        if self._rows_of != rows_of:
            self._rows_of = dict(rows_of)
            self._known.clear()

    def answered(self, chain: Sequence[int], holdings: Sequence[Holding], now_s: float) -> None:
        """Take in what a look-up of this chain's tokens said at `now_s`."""
        reach = self._reach(holdings)
        anchors = chain[self.stride - 1 :: self.stride]
        at_depth = {
            depth: frozenset(slot for slot, far in reach.items() if far > depth) for depth in set(reach.values())
        }
        everybody, holders = frozenset(reach), _NOBODY
        fresh: list[tuple[int, frozenset[Slot]]] = []
        for depth, block in enumerate(anchors):
            holders = everybody if depth == 0 else at_depth.get(depth, holders)
            fresh.append((block, holders))
        for block, held_by in reversed(fresh):  # the start of a prompt is worth most, so it goes last
            self._known.pop(block, None)
            if held_by:
                self._known[block] = (now_s, held_by)
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def held(self, chain: Sequence[int], now_s: float) -> LookedUp:
        """How far each holder has this chain, as far as is known."""
        reached: dict[Slot, int] = {}
        alive: frozenset[Slot] = _NOBODY
        strides, oldest_s = 0, float("nan")
        for block in chain[self.stride - 1 :: self.stride]:
            said_s, holders = self._known.get(block, (float("nan"), _NOBODY))
            if not now_s - said_s <= self._ttl_s:
                break
            left = holders if strides == 0 or holders is alive else alive & holders
            if left is not alive:
                reached.update(dict.fromkeys(alive - left, strides))
                alive = left
            if not alive:
                break
            oldest_s = said_s if strides == 0 else min(oldest_s, said_s)
            strides += 1
        reached.update(dict.fromkeys(alive, strides))
        return self._looked_up(reached, now_s - oldest_s)

    def _looked_up(self, reached: Mapping[Slot, int], age_s: float) -> LookedUp:
        blocks = {tier: np.zeros(self._rows + 1, np.int32) for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE)}
        for (tier, row), strides in reached.items():
            blocks[tier][row] = strides * self.stride
        return LookedUp(
            host_blocks=blocks[Tier.HOST][: self._rows],
            disk_blocks=blocks[Tier.DISK][: self._rows],
            store_blocks=int(blocks[Tier.REMOTE][self._rows]),
            age_s=age_s,
        )

    def _reach(self, holdings: Sequence[Holding]) -> dict[Slot, int]:
        """Whole strides each holder has."""
        reach: dict[Slot, int] = {}
        for holding in holdings:
            row = self._rows if holding.instance is None else self._rows_of.get(holding.instance)
            if row is None:
                self.strangers += 1
                continue
            strides = holding.tokens // (self.stride * self.block_tokens)
            if strides:
                slot = (holding.tier, row)
                reach[slot] = max(strides, reach.get(slot, 0))
        return reach
