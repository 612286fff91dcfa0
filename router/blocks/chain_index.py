"""Holders of every block, by tier, as bits; and how far each holder has a chain without a gap.

Model     one entry per block: for each tier a bit mask of holders, 64 holders to a column, and the engine hash
          under which it was announced last. A block nobody holds has no entry
Valid     any order of adds and discards in which a discard follows its add
Blind to  the order of blocks: all blocks of a chain are looked at, so gaps are seen wherever they are. Those announced
          together lie side by side and are compared as one stretch of memory; others are looked up many at once
Errors    none beyond those of 64-bit hashes
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

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
_RUN = 128  # blocks side by side from which finding the next such run is cheaper than looking up each of its blocks
_LONE = 4  # blocks side by side up to which most are taken to be alone
_AHEAD = 512  # blocks looked up at once after a shorter run, and twice as many each time


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
        # Further engine hashes of one holder for a block it already holds, by position; its bit stays until the last
        # goes.
        self._again: dict[tuple[Tier, int, int], int] = {}
        self.blocks: dict[Tier, int] = dict.fromkeys(Tier, 0)  # blocks with a holder, by tier

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._table.nbytes + 200 * len(self._again)

    # One block

    def add(self, tier: Tier, holder: int, block: int, key: int) -> int:
        """`holder` announced `block` under the engine hash `key`. Returns the block's position."""
        column = self._column(tier, holder)
        position = self._table.insert(block)
        views = self._table.views
        if position < 0:
            position = ~position
        mask = views[column][position]
        bit = 1 << holder % _BITS
        views[0][position] = key
        if mask & bit:
            self._once_more(tier, holder, position)
            return position
        views[column][position] = mask | bit
        if not mask and not self._elsewhere(tier, column, position):
            self.blocks[tier] += 1
        return position

    def discard(self, tier: Tier, holder: int, position: int) -> None:
        """One of the engine hashes behind `holder`'s bit at this position is gone."""
        if self._again and self._once_less(tier, holder, position):
            return
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

    def block_at(self, position: int) -> int:
        """The block at a position, which somebody holds."""
        return self._table.key_at(position)

    def blocks_at(self, positions: npt.NDArray[np.integer[Any]]) -> UInt64s:
        """As `block_at`, of each position; of no meaning where nobody holds a block."""
        return self._table.keys_at(positions)

    def blocks_held(self) -> list[int]:
        """All blocks with a holder in any tier, in no order."""
        held: list[int] = self._table.keys().tolist()
        return held

    # Many blocks

    def add_many(self, tier: Tier, holders: UInt32s, blocks: UInt64s, keys: UInt64s) -> Positions:
        """As `add`, each holder its block."""
        first = _firsts(blocks)
        if first is None:
            return self._add_distinct(tier, holders, blocks, keys)
        later = np.ones(len(blocks), dtype=bool)  # the same block from several publishers: later ones alone
        later[first] = False
        again = list(zip(*(column[later].tolist() for column in (holders, blocks, keys)), strict=True))
        positions = np.empty(len(blocks), dtype=np.int64)
        positions[first] = self._add_distinct(tier, holders[first], blocks[first], keys[first])
        positions[later] = [self.add(tier, holder, block, key) for holder, block, key in again]
        return positions

    def discard_many(self, tier: Tier, holders: UInt32s, positions: Positions) -> None:
        """As `discard`, each holder at its position."""
        first = _firsts(positions)
        if first is None and not self._again:
            self._discard_distinct(tier, holders, positions)
            return
        if first is not None and not self._again:
            later = np.ones(len(positions), dtype=bool)
            later[first] = False
            self._discard_distinct(tier, holders[first], positions[first])
            holders, positions = holders[later], positions[later]
        for holder, position in zip(holders.tolist(), positions.tolist(), strict=True):
            self.discard(tier, holder, position)

    def positions(self, hashes: Sequence[int] | UInt64s) -> Positions:
        """Where the leading blocks of a chain are, up to the first that nobody holds. Good until the next change."""
        if not len(hashes) or self._table.find(int(hashes[0])) < 0:
            return _NOWHERE
        keys, parts, at, ahead = as_hashes(hashes), [], 0, _AHEAD
        while at < len(keys):
            found = self._table.find_run(keys[at:])
            if not len(found):
                break
            parts.append(found)
            at += len(found)
            if len(found) < _RUN and at < len(keys):
                seek = self._table.find_many if len(found) < _LONE else self._table.find_runs
                found = _up_to_absent(seek(keys[at : at + ahead]))
                parts.append(found)
                at += len(found)
                ahead *= 2
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

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

    def _add_distinct(self, tier: Tier, holders: UInt32s, blocks: UInt64s, keys: UInt64s) -> Positions:
        positions = self._table.find_many(blocks)
        absent = positions < 0
        if absent.any():
            positions[absent] = self._table.insert_many(blocks[absent])
        self._table.columns[0][positions] = keys
        bits = _ONE << (holders % _BITS).astype(np.uint64)
        for word, here in _by_word(holders):
            column, at = self._column(tier, word * _BITS), positions[here]
            before = self._table.columns[column][at]
            self.blocks[tier] += len(at) - self._count_held(tier, at, column, before)
            for number in np.flatnonzero(before & bits[here]).tolist():
                self._once_more(tier, int(holders[here][number]), int(at[number]))
            self._table.columns[column][at] = before | bits[here]
        return positions

    def _discard_distinct(self, tier: Tier, holders: UInt32s, positions: Positions) -> None:
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

    def _once_more(self, tier: Tier, holder: int, position: int) -> None:
        again = (tier, holder, position)
        self._again[again] = self._again.get(again, 0) + 1

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

    def _once_less(self, tier: Tier, holder: int, position: int) -> bool:
        again = (tier, holder, position)
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


def _firsts(numbers: UInt64s | Positions) -> Positions | None:
    """Where each number comes first; None when none comes twice."""
    in_order = np.sort(numbers)
    if not (in_order[1:] == in_order[:-1]).any():
        return None
    return np.unique(numbers, return_index=True)[1]


def _up_to_absent(found: Positions) -> Positions:
    first = int(found.argmin())  # absent is -1 and the least
    return found[:first] if found[first] < 0 else found


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
