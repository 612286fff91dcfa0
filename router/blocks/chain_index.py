"""Holders of every block, by tier, as bits; and how far each holder has a chain without a gap.

Model     one entry per block: for each tier a bit mask of holders, 64 holders to a column, and the engine hash
          under which it was announced last. A block nobody holds has no entry
Valid     any order of adds and discards in which a discard follows its add
Blind to  the order of blocks: a prefix is found by looking up all blocks of a chain at once, so gaps in the
          middle are seen wherever they are
Errors    none beyond those of 64-bit hashes
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier
from router.blocks.table import BlockTable, Positions, UInt64s

Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]

_BITS = 64  # holders in a column
_FEW = 16  # up to here one by one beats arrays
_ONE = np.uint64(1)
_NOWHERE: Positions = np.empty(0, dtype=np.int64)
_SHORT = 512  # chains up to here are looked up whole; of longer ones the end is sought first


def as_hashes(hashes: Sequence[int] | UInt64s) -> UInt64s:
    """The hashes as an array, without a copy where they are one."""
    if isinstance(hashes, np.ndarray):
        return hashes
    return np.fromiter(hashes, dtype=np.uint64, count=len(hashes))


class ChainIndex:
    """The shared index. A holder is a number from 0; the caller knows who stands behind it.

    Parameters
    ----------
    holders : holders there can be, >= 1
    most : blocks there will hardly ever be more of, >= 1
    """

    def __init__(self, holders: int, *, most: int) -> None:
        self._holders = holders
        self._table = BlockTable(np.uint64, most=most)  # column 0: engine hash of the last store
        self._columns: dict[Tier, list[int]] = {}  # a tier's columns, made when it is first used
        # Further engine hashes of one holder for a block it already holds; its bit stays until the last goes.
        self._again: dict[tuple[Tier, int, int], int] = {}
        self.blocks: dict[Tier, int] = dict.fromkeys(Tier, 0)  # blocks with a holder, by tier

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._table.nbytes + 200 * len(self._again)

    # One block

    def add(self, tier: Tier, holder: int, block: int, key: int) -> None:
        """`holder` announced `block` under the engine hash `key`."""
        column = self._column(tier, holder)
        position = self._table.insert(block)
        views = self._table.views
        if position < 0:
            position = ~position
        mask = views[column][position]
        bit = 1 << holder % _BITS
        views[0][position] = key
        if mask & bit:
            self._once_more(tier, holder, block)
            return
        views[column][position] = mask | bit
        if not mask and not self._elsewhere(tier, column, position):
            self.blocks[tier] += 1

    def discard(self, tier: Tier, holder: int, block: int) -> None:
        """One of the engine hashes behind `holder`'s bit is gone."""
        if self._again and self._once_less(tier, holder, block):
            return
        position = self._table.find(block)
        column, views = self._column(tier, holder), self._table.views
        left = views[column][position] & ~(1 << holder % _BITS)
        views[column][position] = left
        if left or self._elsewhere(tier, column, position):
            return
        self.blocks[tier] -= 1
        for view in views[1:]:
            if view[position]:
                return
        self._table.remove(position)

    def holders(self, block: int) -> dict[Tier, list[int]]:
        """Who holds one block, by tier."""
        position = self._table.find(block)
        found = {} if position < 0 else {tier: self._holders_at(tier, position) for tier in self._columns}
        return {tier: who for tier, who in found.items() if who}

    def engine_hash(self, block: int) -> int | None:
        """Engine hash under which the block was announced last; None when nobody holds it."""
        position = self._table.find(block)
        return None if position < 0 else self._table.views[0][position]

    def engine_hashes(self, positions: Positions) -> UInt64s:
        """As `engine_hash`, of the blocks at these positions."""
        keys: UInt64s = self._table.columns[0][positions]
        return keys

    def blocks_held(self) -> list[int]:
        """All blocks with a holder in any tier, in no order."""
        held: list[int] = self._table.keys().tolist()
        return held

    # Many blocks

    def add_many(self, tier: Tier, holders: UInt32s, blocks: UInt64s, keys: UInt64s) -> None:
        """As `add`, each holder its block."""
        first = _firsts(blocks)
        if first is not None:  # the same block from several publishers: later ones alone
            later = np.ones(len(blocks), dtype=bool)
            later[first] = False
            again = list(zip(*(column[later].tolist() for column in (holders, blocks, keys)), strict=True))
            self._add_distinct(tier, holders[first], blocks[first], keys[first])
            for holder, block, key in again:
                self.add(tier, holder, block, key)
        else:
            self._add_distinct(tier, holders, blocks, keys)

    def discard_many(self, tier: Tier, holders: UInt32s, blocks: UInt64s) -> None:
        """As `discard`, each holder its block."""
        first = _firsts(blocks)
        if first is None and not self._again:
            self._discard_distinct(tier, holders, blocks)
            return
        if first is not None and not self._again:
            later = np.ones(len(blocks), dtype=bool)
            later[first] = False
            self._discard_distinct(tier, holders[first], blocks[first])
            holders, blocks = holders[later], blocks[later]
        for holder, block in zip(holders.tolist(), blocks.tolist(), strict=True):
            self.discard(tier, holder, block)

    def positions(self, hashes: Sequence[int] | UInt64s) -> Positions:
        """Where the leading blocks of a chain are, up to the first that nobody holds. Good until the next change."""
        end = self._end(hashes)
        if not end:
            return _NOWHERE
        found = self._table.find_many(as_hashes(hashes if end == len(hashes) else hashes[:end]))
        first = int(found.argmin())  # absent is -1 and the least
        return found[:first] if found[first] < 0 else found

    def leading(self, tier: Tier, positions: Positions) -> Int32s:
        """For each holder, how many leading blocks it has in `tier`."""
        counts = np.zeros(self._holders, dtype=np.int32)
        for word, column in enumerate(self._columns.get(tier, ())):
            masks = self._table.columns[column].take(positions)
            _write_leading(counts[word * _BITS :], np.bitwise_and.accumulate(masks))
        return counts

    def leading_together(self, tiers: Sequence[Tier], positions: Positions) -> Int32s:
        """For each holder, how many leading blocks it has in any of `tiers`, one block here and the next there."""
        counts = np.zeros(self._holders, dtype=np.int32)
        for word, columns in enumerate(zip_longest(*(self._columns.get(tier, ()) for tier in tiers))):
            first, *others = (self._table.columns[column] for column in columns if column is not None)
            masks = first.take(positions)
            for other in others:
                masks |= other.take(positions)
            _write_leading(counts[word * _BITS :], np.bitwise_and.accumulate(masks))
        return counts

    def has_any(self, tier: Tier) -> bool:
        """Whether anybody has a block in `tier`."""
        return self.blocks[tier] > 0

    def leading_any(self, tier: Tier, positions: Positions) -> int:
        """How many leading blocks have a holder in `tier`, whoever it is."""
        columns = self._columns.get(tier)
        if not columns or not len(positions):
            return 0
        held = np.any([self._table.columns[column].take(positions) for column in columns], axis=0)
        first = int(held.argmin())
        return len(held) if held[first] else first

    # Inside

    def _add_distinct(self, tier: Tier, holders: UInt32s, blocks: UInt64s, keys: UInt64s) -> None:
        positions = self._table.find_many(blocks)
        absent = positions < 0
        if absent.any():
            layout = self._table.layout
            positions[absent] = self._table.insert_many(blocks[absent])
            if self._table.layout != layout:
                positions = self._table.find_many(blocks)
        self._table.columns[0][positions] = keys
        bits = _ONE << (holders % _BITS).astype(np.uint64)
        for word, here in _by_word(holders):
            column, at = self._column(tier, word * _BITS), positions[here]
            before = self._table.columns[column][at]
            self.blocks[tier] += len(at) - self._count_held(tier, at, column, before)
            for number in np.flatnonzero(before & bits[here]).tolist():
                self._once_more(tier, int(holders[here][number]), int(blocks[here][number]))
            self._table.columns[column][at] = before | bits[here]

    def _discard_distinct(self, tier: Tier, holders: UInt32s, blocks: UInt64s) -> None:
        positions = self._table.find_many(blocks)
        bits = _ONE << (holders % _BITS).astype(np.uint64)
        for word, here in _by_word(holders):
            column, at = self._column(tier, word * _BITS), positions[here]
            left = self._table.columns[column][at] & ~bits[here]
            self._table.columns[column][at] = left
            self.blocks[tier] -= len(at) - self._count_held(tier, at, column, left)
        rest = np.zeros(len(positions), dtype=np.uint64)
        for masks in self._table.columns[1:]:
            rest |= masks[positions]
        self._table.remove_many(positions[rest == 0])

    def _once_more(self, tier: Tier, holder: int, block: int) -> None:
        again = (tier, holder, block)
        self._again[again] = self._again.get(again, 0) + 1

    def _end(self, hashes: Sequence[int] | UInt64s) -> int:
        """A number of leading blocks that nobody's prefix exceeds: none goes past a block that has no entry."""
        if not len(hashes) or not self._table or self._table.find(int(hashes[0])) < 0:
            return 0
        end = len(hashes)
        while end > _SHORT and self._table.find(int(hashes[end // 2])) < 0:
            end //= 2
        return end

    def _column(self, tier: Tier, holder: int) -> int:
        columns = self._columns.get(tier)
        if columns is None:
            columns = self._columns[tier] = []
        while len(columns) <= holder // _BITS:
            columns.append(self._table.add_column(np.uint64))
        return columns[holder // _BITS]

    def _elsewhere(self, tier: Tier, column: int, position: int) -> bool:
        """Whether a holder in `tier` has its bit in another column."""
        columns = self._columns[tier]
        if len(columns) == 1:
            return False
        return any(self._table.views[number][position] for number in columns if number != column)

    def _count_held(self, tier: Tier, positions: Positions, column: int, masks: UInt64s) -> int:
        """How many of these blocks have a holder in `tier`, if its `column` there is `masks`."""
        others = [number for number in self._columns[tier] if number != column]
        if others:
            masks = masks.copy()
            for number in others:
                masks |= self._table.columns[number][positions]
        return int(np.count_nonzero(masks))

    def _once_less(self, tier: Tier, holder: int, block: int) -> bool:
        again = (tier, holder, block)
        count = self._again.get(again)
        if count is None:
            return False
        if count == 1:
            del self._again[again]
        else:
            self._again[again] = count - 1
        return True

    def _holders_at(self, tier: Tier, position: int) -> list[int]:
        views = self._table.views
        return [
            word * _BITS + bit
            for word, column in enumerate(self._columns[tier])
            for bit in bits_of(views[column][position])
        ]


def _by_word(holders: UInt32s) -> list[tuple[int, slice | npt.NDArray[np.bool_]]]:
    """Which of the holders have their bit in which column of 64."""
    words = holders // _BITS
    different = set(words.tolist()) if len(words) and (words != words[0]).any() else set()
    if different:
        return [(word, words == word) for word in different]
    return [(int(words[0]), slice(None))] if len(words) else []


def _firsts(blocks: UInt64s) -> Positions | None:
    """Where each block comes first; None when none comes twice."""
    in_order = np.sort(blocks)
    if not (in_order[1:] == in_order[:-1]).any():
        return None
    return np.unique(blocks, return_index=True)[1]


def bits_of(mask: int) -> list[int]:
    """Numbers of the set bits, ascending."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits


def _write_leading(counts: Int32s, alive: UInt64s) -> None:
    """`alive` holds, at each depth, the holders of everything up to it; bits only ever go out."""
    if not len(alive) or not alive[0]:
        return
    last = int(alive[-1])
    _write(counts, last, len(alive))
    if last == int(alive[0]):
        return
    for depth in np.flatnonzero(alive[1:] != alive[:-1]).tolist():
        _write(counts, int(alive[depth]) ^ int(alive[depth + 1]), depth + 1)


def _write(counts: Int32s, mask: int, value: int) -> None:
    if mask.bit_count() <= _FEW:
        for bit in bits_of(mask):
            counts[bit] = value
        return
    bits = np.frombuffer(mask.to_bytes(_BITS // 8, "little"), dtype=np.uint8)
    width = min(_BITS, len(counts))
    counts[:width][np.unpackbits(bits, count=width, bitorder="little").view(bool)] = value
