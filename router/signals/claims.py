"""What publishers claim to hold: their own engine hashes, and the blocks behind them.

Model     (publisher, engine hash) -> block, copies per tier and a coarse time, since engines announce one removal for
          each copy. All publishers share one table; a publisher's bit in the index is set while any copy behind it
          lives
Valid     engine hashes of 64 well mixed bits; each publisher's are told apart by a constant of its own
Blind to  copies announced without a removal ever: limits bound them, oldest first
Errors    the time is that of the last store or use, whatever the tier, to a sixteenth of a second
Source    duplicate blocks in vLLM's pool: one store and one removal per physical copy
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier
from router.blocks_table import BlockTable, Positions, UInt64s
from router.chain_index import ChainIndex, as_hashes

_TICKS_PER_S = 16
_MANY = 24  # keys from which arrays beat one after another
_MORE = 3
_SHIFT = {tier: 2 * number for number, tier in enumerate(Tier)}  # two bits a tier: 0, 1, 2 or "see Ledger.more" copies
_ONCE = {tier: 1 << shift for tier, shift in _SHIFT.items()}
_SALT = 0x9E6C63D0876A9A35  # times the owner: what tells publishers apart
_MASK_64 = (1 << 64) - 1
_MAX_OWNERS = 1 << 16
_BLOCK, _COPIES, _OWNER, _TICKS, _ADAPTER = range(5)  # columns


@dataclass(slots=True)
class Applied:
    """What applying a batch did, in blocks where it says so and else in events."""

    stored: int = 0  # blocks
    removed: int = 0  # blocks
    cleared: int = 0
    unheld: int = 0  # blocks removed that we did not hold: normal after a gap or an ignored store
    orphans: int = 0  # stores whose parent is not known
    mismatched: int = 0  # stores with another block size
    ignored: int = 0  # groups, pairs, unnamed adapters, hashes nobody can explain, malformed shapes
    conflicts: int = 0  # blocks whose engine hash was known for other tokens; the old claim is dropped
    evicted: int = 0  # blocks dropped because the publisher or the directory reached its limit
    unknown: int = 0  # as counted by the decoder
    bad: int = 0  # as counted by the decoder

    def add(self, other: Applied) -> None:
        self.stored += other.stored  # one by one: a loop over the names costs more than applying a small batch
        self.removed += other.removed
        self.cleared += other.cleared
        self.unheld += other.unheld
        self.orphans += other.orphans
        self.mismatched += other.mismatched
        self.ignored += other.ignored
        self.conflicts += other.conflicts
        self.evicted += other.evicted
        self.unknown += other.unknown
        self.bad += other.bad


class Claims:
    """One publisher's part of the ledger. Made by `Ledger.open`; keys are engine hashes.

    owner : its number in the ledger, >= 1
    holder : its number in the index
    model : name its blocks are rooted in
    one_copy : repeated stores are one copy (SGLang, stores); else each needs its own removal (vLLM)
    held : keys it has now
    last_event_s : router's clock when it last sent a batch; None when it never has
    """

    __slots__ = ("_ledger", "held", "holder", "last_event_s", "limit", "model", "one_copy", "owner", "salt")

    def __init__(self, ledger: Ledger, *, owner: int, holder: int, model: str, one_copy: bool, limit: int) -> None:
        self.owner = owner
        self.holder = holder
        self.salt = owner * _SALT & _MASK_64
        self.model = model
        self.one_copy = one_copy
        self.limit = limit
        self.held = 0
        self.last_event_s: float | None = None
        self._ledger = ledger

    def block_of(self, key: int) -> int | None:
        """The block behind an engine hash; None when it is not known."""
        table = self._ledger.table
        position = table.find(key ^ self.salt)
        return None if position < 0 else table.views[_BLOCK][position]

    def blocks_of(self, keys: Sequence[int]) -> dict[int, int]:
        """The blocks behind those keys that are known."""
        if len(keys) < _MANY:
            return {key: block for key in keys if (block := self.block_of(key)) is not None}
        table = self._ledger.table
        positions = table.find_many(as_hashes(keys) ^ np.uint64(self.salt))
        blocks = table.columns[_BLOCK][positions].tolist()
        return {key: blocks[number] for number, key in enumerate(keys) if positions[number] >= 0}

    def age_s(self, key: int, block: int, now_s: float) -> float:
        """Seconds since the block was stored or used, >= 0; NaN when the hash does not stand for this block."""
        table = self._ledger.table
        position = table.find(key ^ self.salt)
        if position < 0 or table.views[_BLOCK][position] != block:
            return float("nan")
        return max(0.0, now_s - table.views[_TICKS][position] / _TICKS_PER_S)

    def used(self, keys: UInt64s, blocks: UInt64s, now_s: float) -> None:
        """These blocks, announced under these engine hashes, were used at `now_s`."""
        table = self._ledger.table
        positions = table.find_many(keys ^ np.uint64(self.salt))
        positions = positions[(positions >= 0) & (table.columns[_BLOCK][positions] == blocks)]
        table.columns[_TICKS][positions] = _ticks(now_s)

    def clear(self) -> None:
        """Drop everything this publisher held."""
        if self.held:
            self._ledger.drop(self)

    def drop_adapter(self, adapter: int) -> None:
        """Drop the keys held under this adapter number."""
        self._ledger.drop(self, adapter)

    def close(self) -> None:
        """Drop everything and give the number back; the object is of no use afterwards."""
        self._ledger.close(self)


Told = tuple[Claims, Mapping[int, int], int]  # a publisher; its keys and their blocks; their adapter, by number


class Ledger:
    """Claims of all publishers, and the index kept in step with them.

    Parameters
    ----------
    cap : keys kept over all publishers, >= 1; the oldest go first
    """

    def __init__(self, index: ChainIndex, *, cap: int) -> None:
        self.table = BlockTable(np.uint64, np.uint8, np.uint16, np.uint32, np.uint8, most=cap)
        self._index = index
        self._cap = cap
        self._claims: dict[int, Claims] = {}  # by owner
        self._more: dict[tuple[Tier, int], int] = {}  # copies beyond two

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self.table.nbytes + 150 * len(self._more)

    def open(self, holder: int, model: str, *, one_copy: bool, limit: int) -> Claims:
        """A new publisher, which holds nothing.

        limit : keys it may have; room for new ones is made first, so its newest always stay
        """
        owner = next(number for number in range(1, _MAX_OWNERS) if number not in self._claims)
        claims = Claims(self, owner=owner, holder=holder, model=model, one_copy=one_copy, limit=min(limit, self._cap))
        self._claims[owner] = claims
        return claims

    def close(self, claims: Claims) -> None:
        """Forget a publisher and all it held."""
        claims.clear()
        del self._claims[claims.owner]

    def hold(self, tier: Tier, told: Sequence[Told], done: Applied) -> None:
        """One more copy of each block, for each publisher, at the time of its last batch."""
        told = [self._make_room(one, done) for one in told]
        count = sum(len(blocks) for _claims, blocks, _adapter in told)
        if len(self.table) + count > self._cap:
            if len(told) > 1:
                for one in told:
                    self.hold(tier, [one], done)
                return
            self._evict(self.table.positions(), len(self.table) + count - self._cap + self._cap // 64, done)
        done.stored += count
        if count >= _MANY:
            self._hold_many(tier, told, done)
            return
        for claims, blocks, adapter in told:
            ticks = _ticks(claims.last_event_s)
            for key, block in blocks.items():
                self._hold_one(tier, claims, key, block, (ticks, adapter), done)

    def release(self, tier: Tier, told: Sequence[tuple[Claims, list[int]]], done: Applied) -> list[dict[int, int]]:
        """One copy less of each key; keys of a publisher are distinct.

        Returns for each publisher the keys that had their last copy in any tier, with their blocks.
        """
        if sum(len(keys) for _claims, keys in told) >= _MANY:
            return self._release_many(tier, told, done)
        gone: list[dict[int, int]] = []
        for claims, keys in told:
            of_one = {}
            for key in keys:
                block = self._release_one(tier, claims, key, done)
                if block is not None:
                    of_one[key] = block
            gone.append(of_one)
        return gone

    def drop(self, claims: Claims, adapter: int | None = None) -> None:
        """Drop all keys of one publisher, or those of one adapter."""
        positions = self.table.where(_OWNER, claims.owner)
        if adapter is not None:
            positions = positions[self.table.columns[_ADAPTER][positions] == adapter]
        self._forget(positions)

    # One key

    def _hold_one(
        self, tier: Tier, claims: Claims, key: int, block: int, told_at: tuple[int, int], done: Applied
    ) -> None:
        """told_at : ticks and adapter"""
        salted = key ^ claims.salt
        position = self.table.insert(salted)
        blocks, copies, owners, times, adapters = self.table.views
        if position < 0:
            position = ~position
            blocks[position] = block
            owners[position] = claims.owner
            adapters[position] = told_at[1]
            claims.held += 1
        elif blocks[position] != block:
            self._forget(np.array([position]))
            done.conflicts += 1
            self._hold_one(tier, claims, key, block, told_at, done)
            return
        times[position] = told_at[0]
        if not copies[position] >> _SHIFT[tier] & _MORE:
            copies[position] |= _ONCE[tier]
            self._index.add(tier, claims.holder, block, key)
        elif not claims.one_copy:
            self._count(tier, salted, position, 1)

    def _count(self, tier: Tier, salted: int, position: int, change: int) -> int:
        """Copies of a key after `change` (1 or -1) to what it has, which is at least one."""
        copies = self.table.views[_COPIES][position]
        count = copies >> _SHIFT[tier] & _MORE
        if count == _MORE:
            count = self._more[tier, salted]
        count += change
        if count >= _MORE:
            self._more[tier, salted] = count
        elif self._more:
            self._more.pop((tier, salted), None)
        self.table.views[_COPIES][position] = copies & ~(_MORE << _SHIFT[tier]) | min(count, _MORE) << _SHIFT[tier]
        return count

    def _release_one(self, tier: Tier, claims: Claims, key: int, done: Applied) -> int | None:
        salted = key ^ claims.salt
        position = self.table.find(salted)
        if position < 0 or not self.table.views[_COPIES][position] >> _SHIFT[tier] & _MORE:
            done.unheld += 1
            return None
        done.removed += 1
        if self._count(tier, salted, position, -1):
            return None
        block: int = self.table.views[_BLOCK][position]
        last = not self.table.views[_COPIES][position]
        if last:
            self.table.remove(position)
            claims.held -= 1
        self._index.discard(tier, claims.holder, block)
        return block if last else None

    # Many keys

    def _hold_many(self, tier: Tier, told: Sequence[Told], done: Applied) -> None:
        keys, salted, numbers = _joined(told)
        blocks = as_hashes(list(chain.from_iterable(its.values() for _claims, its, _adapter in told)))
        positions = self.table.find_many(salted)
        absent = positions < 0
        if not absent.all():
            self._hold_known(tier, told, positions, blocks, done)
            keys, salted, numbers, blocks = keys[absent], salted[absent], numbers[absent], blocks[absent]
            if not len(keys):
                return
        positions = self.table.insert_many(salted)
        columns = self.table.columns
        columns[_BLOCK][positions] = blocks
        columns[_COPIES][positions] = _ONCE[tier]
        columns[_OWNER][positions] = numbers[:, 0]
        columns[_TICKS][positions] = numbers[:, 2]
        columns[_ADAPTER][positions] = numbers[:, 3]
        at = 0
        for claims, its, _adapter in told:
            claims.held += int(np.count_nonzero(absent[at : at + len(its)]))
            at += len(its)
        self._index.add_many(tier, numbers[:, 1], blocks, keys)

    def _hold_known(
        self, tier: Tier, told: Sequence[Told], positions: Positions, blocks: UInt64s, done: Applied
    ) -> None:
        """The keys with a position: said again (one copy, the same block) or with something to count or put right."""
        again = (positions >= 0) & (self.table.columns[_BLOCK][positions] == blocks)
        again &= self.table.columns[_COPIES][positions] >> np.uint8(_SHIFT[tier]) & np.uint8(_MORE) != 0
        todo, at = [], 0
        for claims, its, adapter in told:
            ticks, here = _ticks(claims.last_event_s), slice(at, at + len(its))
            one_by_one = positions[here] >= 0
            if claims.one_copy:
                self.table.columns[_TICKS][positions[here][again[here]]] = ticks
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
        positions = self.table.find_many(salted)
        plain = self.table.columns[_COPIES][positions] == _ONCE[tier]
        plain &= positions >= 0
        at, gone = 0, []
        blocks = self.table.columns[_BLOCK][positions].tolist()
        others: list[tuple[int, int]] = []
        for number, (claims, its_keys) in enumerate(told):
            its_plain = plain[at : at + len(its_keys)]
            its_blocks = zip(its_keys, blocks[at : at + len(its_keys)], strict=True)
            if its_plain.all():
                gone.append(dict(its_blocks))
            else:
                gone.append({key: block for (key, block), one in zip(its_blocks, its_plain, strict=True) if one})
                others += [(number, its_keys[index]) for index in np.flatnonzero(~its_plain).tolist()]
            claims.held -= len(gone[-1])
            at += len(its_keys)
        done.removed += int(np.count_nonzero(plain))
        positions = positions[plain]
        released = self.table.columns[_BLOCK][positions]
        self.table.remove_many(positions)
        self._index.discard_many(tier, numbers[plain, 1], released)
        for number, key in others:
            block = self._release_one(tier, told[number][0], key, done)
            if block is not None:
                gone[number][key] = block
        return gone

    # Limits

    def _make_room(self, told: Told, done: Applied) -> Told:
        """Some publishers announce stores and never removals; the oldest claims then go, many in one sweep."""
        claims, blocks, adapter = told
        if len(blocks) > claims.limit:
            done.evicted += len(blocks) - claims.limit
            blocks = dict(islice(blocks.items(), claims.limit))
        excess = claims.held + len(blocks) - claims.limit
        if excess > 0:
            self._evict(self.table.where(_OWNER, claims.owner), excess + claims.limit // 64, done)
        return claims, blocks, adapter

    def _evict(self, positions: Positions, count: int, done: Applied) -> None:
        """Forget the `count` oldest of these."""
        count = min(len(positions), count)
        done.evicted += count
        ticks = self.table.columns[_TICKS][positions]
        self._forget(positions[np.argpartition(ticks, count - 1)[:count]])

    def _forget(self, positions: Positions) -> None:
        """Drop every claim of these keys, whatever their copies."""
        blocks, copies, owners = (self.table.columns[number][positions] for number in (_BLOCK, _COPIES, _OWNER))
        if self._more:
            for key in self.table.keys_at(positions).tolist():
                for tier in Tier:
                    self._more.pop((tier, key), None)
        self.table.remove_many(positions)
        holders = np.zeros(len(positions), dtype=np.uint32)
        for owner in set(owners.tolist()):
            claims, its = self._claims[owner], owners == owner
            claims.held -= int(np.count_nonzero(its))
            holders[its] = claims.holder
        for tier, shift in _SHIFT.items():
            held = copies >> np.uint8(shift) & np.uint8(_MORE) != 0
            if held.any():
                self._index.discard_many(tier, holders[held], blocks[held])


def _ticks(now_s: float | None) -> int:
    return max(0, int((now_s or 0.0) * _TICKS_PER_S)) & 0xFFFFFFFF


def _joined(
    told: Sequence[tuple[Claims, Collection[int], int]],
) -> tuple[UInt64s, UInt64s, npt.NDArray[np.uint32]]:
    """Keys of all, as they are and salted, and for each its owner, holder, ticks of the last batch and adapter."""
    keys = as_hashes(list(chain.from_iterable(its for _claims, its, _adapter in told)))
    lengths = [len(its) for _claims, its, _adapter in told]
    salts = np.array([claims.salt for claims, _its, _adapter in told], dtype=np.uint64)
    numbers = [(claims.owner, claims.holder, _ticks(claims.last_event_s), adapter) for claims, _its, adapter in told]
    return (
        keys,
        keys ^ np.repeat(salts, lengths),
        np.repeat(np.array(numbers, dtype=np.uint32), lengths, axis=0),
    )
