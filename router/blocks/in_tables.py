"""Claims of all publishers in one table, and the index in another: for more blocks than dictionaries should hold.

Model     (publisher, engine hash) -> block, copies per tier, a coarse time and an adapter; blocks by their position in
          the index, which is good as long as the copies are, since the publisher's bit there is. Some 35 bytes, and as
          much for each block in the index. A key among many takes a tenth of the time of a key alone
Valid     engine hashes of 64 well mixed bits; each publisher's are told apart by a constant of its own
Blind to  nothing `in_dicts.py` sees
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier
from router.blocks.chain_index import ChainIndex, as_hashes
from router.blocks.table import BlockTable, Positions, UInt64s
from router.signals.claims import TICKS_PER_S, Applied, Claims, Contents, Told, ticks_of

_MANY = 24  # keys from which arrays beat one after another
_MORE = 3
_SHIFT = {tier: 2 * number for number, tier in enumerate(Tier)}  # two bits a tier: 0, 1, 2 or "see _more" copies
_ONCE = {tier: 1 << shift for tier, shift in _SHIFT.items()}
_BLOCK, _COPIES, _OWNER, _TICKS, _ADAPTER = range(5)  # columns


class InTables:
    """Books of all publishers (`claims.Books`).

    Parameters
    ----------
    holders : holders there can be in the index, >= 1
    most : keys there will hardly ever be more of, >= 1
    """

    def __init__(self, holders: int, *, most: int) -> None:
        self.index = ChainIndex(holders, most=most)
        self._table = BlockTable(np.uint32, np.uint8, np.uint16, np.uint32, np.uint8, most=most)
        self._claims: dict[int, Claims] = {}  # by owner
        self._more: dict[tuple[Tier, int], int] = {}  # copies beyond two
        self._leaving: dict[
            int, Positions
        ] = {}  # by owner: keys still to be dropped, of those that drop some at a time

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes in use, the index included."""
        return self._table.nbytes + 150 * len(self._more) + self.index.nbytes

    def opened(self, claims: Claims) -> None:
        """A publisher that holds nothing yet."""
        self._claims[claims.owner] = claims

    def closed(self, claims: Claims) -> None:
        """A publisher that holds nothing any more."""
        del self._claims[claims.owner]

    def block_of(self, claims: Claims, key: int) -> int | None:
        """The block behind an engine hash; None when it is not known."""
        position = self._table.find(key ^ claims.salt)
        return None if position < 0 else self.index.block_at(self._table.views[_BLOCK][position])

    def blocks_of(self, claims: Claims, keys: Sequence[int]) -> dict[int, int]:
        """The blocks behind those keys that are known."""
        if len(keys) < _MANY:
            return {key: block for key in keys if (block := self.block_of(claims, key)) is not None}
        positions = self._table.find_many(as_hashes(keys) ^ np.uint64(claims.salt))
        blocks = self._blocks_at(positions).tolist()
        return {key: blocks[number] for number, key in enumerate(keys) if positions[number] >= 0}

    def adapters_of(self, claims: Claims, keys: Iterable[int]) -> dict[int, int]:
        """Adapter numbers of those keys that are held under one."""
        adapters = self._table.views[_ADAPTER]
        places = ((key, self._table.find(key ^ claims.salt)) for key in keys)
        return {key: adapters[position] for key, position in places if position >= 0 and adapters[position]}

    def age_s(self, claims: Claims, key: int, block: int, now_s: float) -> float:
        """Seconds since the block was stored or used, >= 0; NaN when the key does not stand for this block."""
        position = self._table.find(key ^ claims.salt)
        if position < 0 or self.index.block_at(self._table.views[_BLOCK][position]) != block:
            return float("nan")
        return max(0.0, now_s - self._table.views[_TICKS][position] / TICKS_PER_S)

    def used(self, claims: Claims, hashes: Sequence[int], now_s: float) -> None:
        """These leading blocks of a chain were used at `now_s`."""
        at = self.index.positions(hashes)
        positions = self._table.find_many(self.index.engine_hashes(at) ^ np.uint64(claims.salt))
        positions = positions[(positions >= 0) & (self._table.columns[_BLOCK][positions] == at)]
        self._table.columns[_TICKS][positions] = ticks_of(now_s)

    def touch(self, claims: Claims, keys: Sequence[int]) -> None:
        """These keys, all of them known, were stored again at the time of the last batch."""
        positions = self._table.find_many(as_hashes(keys) ^ np.uint64(claims.salt))
        self._table.columns[_TICKS][positions] = ticks_of(claims.last_event_s)

    def hold(self, tier: Tier, told: Sequence[Told], done: Applied) -> None:
        """One more copy of each block, for each publisher, at the time of its last batch."""
        if sum(len(blocks) for _claims, blocks, _adapter in told) >= _MANY:
            self._hold_many(tier, told, done)
            return
        for claims, blocks, adapter in told:
            told_at = ticks_of(claims.last_event_s), adapter
            for key, block in blocks.items():
                self._hold_one(tier, claims, key, block, told_at, done)

    def release(self, tier: Tier, told: Sequence[tuple[Claims, list[int]]], done: Applied) -> list[dict[int, int]]:
        """One copy less of each key. Returns for each publisher the keys whose last copy went, with their blocks."""
        if sum(len(keys) for _claims, keys in told) >= _MANY:
            return self._release_many(tier, told, done)
        gone: list[dict[int, int]] = []
        for claims, keys in told:
            released = {key: self._release_one(tier, claims, key, done) for key in keys}
            gone.append({key: block for key, block in released.items() if block is not None})
        return gone

    def drop(self, claims: Claims, adapter: int | None = None) -> None:
        """Drop all keys of one publisher, or those of one adapter."""
        positions = self._table.where(_OWNER, claims.owner)
        if adapter is not None:
            positions = positions[self._table.columns[_ADAPTER][positions] == adapter]
        self._forget(positions)

    def drop_some(self, claims: Claims, most: int) -> None:
        """Drop `most` keys of one publisher that is told nothing new any more, or all there are."""
        left = self._leaving.get(claims.owner)
        if left is None:
            left = self._table.where(_OWNER, claims.owner)
        some, self._leaving[claims.owner] = left[:most], left[most:]
        if len(left) <= most:
            del self._leaving[claims.owner]
        self._forget(some[self._table.columns[_OWNER][some] == claims.owner])  # others were evicted meanwhile

    def hand_over(self, claims: Claims, to: Claims) -> None:
        """What `claims` holds is held by `to`, under the same owner and holder."""
        self._claims[to.owner] = to
        to.held, claims.held = claims.held, 0

    def evict(self, claims: Claims | None, count: int) -> int:
        """Forget the `count` oldest keys, of one publisher or of all; returns how many that were."""
        positions = self._table.positions() if claims is None else self._table.where(_OWNER, claims.owner)
        count = min(len(positions), count)
        if count:
            ticks = self._table.columns[_TICKS][positions]
            self._forget(positions[np.argpartition(ticks, count - 1)[:count]])
        return count

    def take_over(self, contents: Contents) -> None:
        """Begin with what other books held."""
        for claims, (blocks, copies, ticks, adapters) in contents.items():
            self.opened(claims)
            claims.held = len(blocks)
            keys = as_hashes(list(blocks))
            positions = self._table.insert_many(keys ^ np.uint64(claims.salt))
            columns = self._table.columns
            columns[_OWNER][positions] = claims.owner
            columns[_TICKS][positions] = np.fromiter(map(ticks.__getitem__, blocks), np.uint32, len(blocks))
            if adapters:
                columns[_ADAPTER][positions] = [adapters.get(key, 0) for key in blocks]
            at = dict(zip(blocks, positions.tolist(), strict=True))
            for tier, counts in copies.items():
                if counts:
                    here = np.fromiter(map(at.__getitem__, counts), dtype=np.int64, count=len(counts))
                    self._take_over_copies(tier, claims, counts, blocks, here)

    def _take_over_copies(
        self, tier: Tier, claims: Claims, counts: Mapping[int, int], blocks: dict[int, int], at: Positions
    ) -> None:
        """counts : copies by key; at : where those keys are"""
        copies = np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
        self._table.columns[_COPIES][at] |= (np.minimum(copies, _MORE) << _SHIFT[tier]).astype(np.uint8)
        if copies.max() >= _MORE:
            self._more |= {(tier, key ^ claims.salt): count for key, count in counts.items() if count >= _MORE}
        its = as_hashes(list(counts))
        holders = np.full(len(its), claims.holder, dtype=np.uint32)
        self._table.columns[_BLOCK][at] = self.index.add_many(
            tier, holders, as_hashes([blocks[key] for key in counts]), its
        )

    # One key

    def _hold_one(
        self, tier: Tier, claims: Claims, key: int, block: int, told_at: tuple[int, int], done: Applied
    ) -> None:
        """told_at : ticks and adapter"""
        salted = key ^ claims.salt
        position = self._table.insert(salted)
        blocks, copies, owners, times, adapters = self._table.views
        if position < 0:
            position = ~position
            owners[position] = claims.owner
            adapters[position] = told_at[1]
            claims.held += 1
        elif self.index.block_at(blocks[position]) != block:
            self._forget(np.array([position]))
            done.conflicts += 1
            self._hold_one(tier, claims, key, block, told_at, done)
            return
        times[position] = told_at[0]
        if not copies[position] >> _SHIFT[tier] & _MORE:
            copies[position] |= _ONCE[tier]
            blocks[position] = self.index.add(tier, claims.holder, block, key)
        elif not claims.one_copy:
            self._count(tier, salted, position, 1)

    def _count(self, tier: Tier, salted: int, position: int, change: int) -> int:
        """Copies of a key after `change` (1 or -1) to what it has, which is at least one."""
        copies = self._table.views[_COPIES][position]
        count = copies >> _SHIFT[tier] & _MORE
        if count == _MORE:
            count = self._more[tier, salted]
        count += change
        if count >= _MORE:
            self._more[tier, salted] = count
        elif self._more:
            self._more.pop((tier, salted), None)
        self._table.views[_COPIES][position] = copies & ~(_MORE << _SHIFT[tier]) | min(count, _MORE) << _SHIFT[tier]
        return count

    def _release_one(self, tier: Tier, claims: Claims, key: int, done: Applied) -> int | None:
        salted = key ^ claims.salt
        position = self._table.find(salted)
        if position < 0 or not self._table.views[_COPIES][position] >> _SHIFT[tier] & _MORE:
            done.unheld += 1
            return None
        done.removed += 1
        if self._count(tier, salted, position, -1):
            return None
        at: int = self._table.views[_BLOCK][position]
        block = self.index.block_at(at)
        last = not self._table.views[_COPIES][position]
        if last:
            self._table.remove(position)
            claims.held -= 1
        self.index.discard(tier, claims.holder, at)
        return block if last else None

    # Many keys

    def _hold_many(self, tier: Tier, told: Sequence[Told], done: Applied) -> None:
        keys, salted, numbers = _joined(told)
        blocks = as_hashes(list(chain.from_iterable(its.values() for _claims, its, _adapter in told)))
        positions = self._table.find_many(salted)
        absent = positions < 0
        new = [len(its) for _claims, its, _adapter in told]
        if not absent.all():
            self._hold_known(tier, told, positions, blocks, done)
            ends = np.cumsum(new)
            new = np.diff(np.cumsum(absent)[ends - 1], prepend=0).tolist()
            keys, salted, numbers, blocks = keys[absent], salted[absent], numbers[absent], blocks[absent]
            if not len(keys):
                return
        positions = self._table.insert_many(salted)
        columns = self._table.columns
        columns[_BLOCK][positions] = self.index.add_many(tier, numbers[:, 1], blocks, keys)
        columns[_COPIES][positions] = _ONCE[tier]
        columns[_OWNER][positions] = numbers[:, 0]
        columns[_TICKS][positions] = numbers[:, 2]
        columns[_ADAPTER][positions] = numbers[:, 3]
        for (claims, _its, _adapter), count in zip(told, new, strict=True):
            claims.held += count

    def _hold_known(
        self, tier: Tier, told: Sequence[Told], positions: Positions, blocks: UInt64s, done: Applied
    ) -> None:
        """The keys with a position: said again (one copy, the same block) or with something to count or put right."""
        again = (positions >= 0) & (self._blocks_at(positions) == blocks)
        again &= self._table.columns[_COPIES][positions] >> np.uint8(_SHIFT[tier]) & np.uint8(_MORE) != 0
        todo, at = [], 0
        for claims, its, adapter in told:
            ticks, here = ticks_of(claims.last_event_s), slice(at, at + len(its))
            one_by_one = positions[here] >= 0
            if claims.one_copy:
                self._table.columns[_TICKS][positions[here][again[here]]] = ticks
                one_by_one &= ~again[here]
            if one_by_one.any():
                items = zip(its.items(), one_by_one.tolist(), strict=True)
                todo += [(claims, key, block, (ticks, adapter)) for (key, block), one in items if one]
            at += len(its)
        for claims, key, block, told_at in todo:
            self._hold_one(tier, claims, key, block, told_at, done)

    def _release_many(
        self, tier: Tier, told: Sequence[tuple[Claims, list[int]]], done: Applied
    ) -> list[dict[int, int]]:
        _keys, salted, numbers = _joined([(claims, keys, 0) for claims, keys in told])
        positions = self._table.find_many(salted)
        plain = self._table.columns[_COPIES][positions] == _ONCE[tier]
        plain &= positions >= 0
        gone, others = [], list[tuple[int, int]]()
        blocks = iter(self._blocks_at(positions).tolist())
        is_plain = None if plain.all() else iter(plain.tolist())
        for number, (claims, its_keys) in enumerate(told):
            if is_plain is None:
                gone.append(dict(zip(its_keys, islice(blocks, len(its_keys)), strict=True)))
            else:
                of_one = {}
                for key in its_keys:
                    block = next(blocks)
                    if next(is_plain):
                        of_one[key] = block
                    else:
                        others.append((number, key))
                gone.append(of_one)
            claims.held -= len(gone[-1])
        done.removed += int(np.count_nonzero(plain))
        positions = positions[plain]
        released = self._table.columns[_BLOCK][positions].astype(np.int64)
        self._table.remove_many(positions)
        self.index.discard_many(tier, numbers[plain, 1], released)
        for number, key in others:
            last = self._release_one(tier, told[number][0], key, done)
            if last is not None:
                gone[number][key] = last
        return gone

    def _blocks_at(self, positions: Positions) -> UInt64s:
        """Blocks behind these keys; of no meaning where a position is -1."""
        return self.index.blocks_at(self._table.columns[_BLOCK][positions])

    def _forget(self, positions: Positions) -> None:
        """Drop every claim of these keys, whatever their copies."""
        blocks, copies, owners = (self._table.columns[number][positions] for number in (_BLOCK, _COPIES, _OWNER))
        blocks = blocks.astype(np.int64)
        if self._more:
            for key in self._table.keys_at(positions).tolist():
                for tier in Tier:
                    self._more.pop((tier, key), None)
        self._table.remove_many(positions)
        holders = np.zeros(len(positions), dtype=np.uint32)
        for owner in set(owners.tolist()):
            claims, its = self._claims[owner], owners == owner
            claims.held -= int(np.count_nonzero(its))
            holders[its] = claims.holder
        for tier, shift in _SHIFT.items():
            held = copies >> np.uint8(shift) & np.uint8(_MORE) != 0
            if held.any():
                self.index.discard_many(tier, holders[held], blocks[held])


def _joined(
    told: Sequence[tuple[Claims, Collection[int], int]],
) -> tuple[UInt64s, UInt64s, npt.NDArray[np.uint32]]:
    """Keys of all, as they are and salted, and for each its owner, holder, ticks of the last batch and adapter."""
    keys = as_hashes(list(chain.from_iterable(its for _claims, its, _adapter in told)))
    lengths = [len(its) for _claims, its, _adapter in told]
    salts = np.array([claims.salt for claims, _its, _adapter in told], dtype=np.uint64)
    numbers = [(claims.owner, claims.holder, ticks_of(claims.last_event_s), adapter) for claims, _its, adapter in told]
    return (
        keys,
        keys ^ np.repeat(salts, lengths),
        np.repeat(np.array(numbers, dtype=np.uint32), lengths, axis=0),
    )
