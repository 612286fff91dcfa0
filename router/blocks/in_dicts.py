"""Claims and index in dictionaries: quickest for one key after another, at 250 bytes a key.

Model     for each publisher: engine hash -> block, copies per tier, coarse time, adapter. For each tier: block -> bit
          mask of holders
Valid     some ten thousand keys, as small fleets and replays have; beyond it see `in_tables.py`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier
from router.blocks.chain_index import Int32s, bits_of
from router.blocks.table import UInt64s
from router.signals.claims import TICKS_PER_S, Applied, Claims, Contents, Copies, Told, ticks_of

_FEW_ROWS = 8  # up to here a loop over set bits beats unpacking the whole mask


class DictIndex:
    """Holders of every block, by tier. Absent means nobody: no entry outlives its last holder.

    Parameters
    ----------
    holders : holders there can be, >= 1
    """

    def __init__(self, holders: int) -> None:
        self._count = holders
        self._masks: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self._keys: dict[int, int] = {}  # engine hash of the last store
        # Further engine hashes of one holder for a block it already holds; its bit stays until the last goes.
        self._again: dict[tuple[Tier, int, int], int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def blocks(self) -> dict[Tier, int]:
        """Distinct blocks, by tier."""
        return {tier: len(masks) for tier, masks in self._masks.items()}

    def add(self, tier: Tier, bit: int, blocks: Mapping[int, int]) -> None:
        """The holder of `bit` announced these blocks, by engine hash."""
        masks, keys = self._masks[tier], self._keys
        its = blocks.values()
        if masks.keys().isdisjoint(its) and len(fresh := dict.fromkeys(its, bit)) == len(blocks):  # new to all
            masks.update(fresh)
            keys.update(zip(its, blocks, strict=True))
            return
        for key, block in blocks.items():
            mask = masks.get(block)
            keys[block] = key
            if mask is None:
                masks[block] = bit
            elif mask & bit:
                again = (tier, bit, block)
                self._again[again] = self._again.get(again, 0) + 1
            else:
                masks[block] = mask | bit

    def discard(self, tier: Tier, bit: int, blocks: Sequence[int]) -> None:
        """Of each block, one of the engine hashes behind `bit` is gone."""
        masks = self._masks[tier]
        elsewhere = [others for others in self._masks.values() if others and others is not masks]
        if not self._again and list(map(masks.get, blocks)).count(bit) == len(blocks):  # nobody else has one
            deque(map(masks.__delitem__, blocks), maxlen=0)
            for others in elsewhere:
                blocks = [block for block in blocks if block not in others]
            deque(map(self._keys.__delitem__, blocks), maxlen=0)
            return
        for block in blocks:
            if self._again and self._once_less((tier, bit, block)):
                continue
            left = masks[block] & ~bit
            if left:
                masks[block] = left
                continue
            del masks[block]
            for others in elsewhere:
                if block in others:
                    break
            else:
                del self._keys[block]

    def _once_less(self, again: tuple[Tier, int, int]) -> bool:
        count = self._again.pop(again, 0)
        if count > 1:
            self._again[again] = count - 1
        return count > 0

    def positions(self, hashes: Sequence[int] | UInt64s) -> list[int]:
        """The chain itself."""
        if isinstance(hashes, list):
            return hashes
        return hashes.tolist() if isinstance(hashes, np.ndarray) else list(hashes)

    def leading(self, tier: Tier, positions: list[int]) -> Int32s:
        """For each holder, how many leading blocks it has in `tier`."""
        masks = self._masks[tier]
        if not positions or positions[0] not in masks:
            return np.zeros(self._count, dtype=np.int32)
        return self._walk(map(masks.get, positions), len(positions))

    def leading_together(self, tiers: Sequence[Tier], positions: list[int]) -> Int32s:
        """For each holder, how many leading blocks it has in any of `tiers`, one block here and the next there."""
        first, *others = (self._masks[tier] for tier in tiers)
        masks = [first.get(block, 0) for block in positions]
        for other in others:
            masks = [mask | other.get(block, 0) for mask, block in zip(masks, positions, strict=True)]
        return self._walk(masks, len(positions))

    def has_any(self, tier: Tier) -> bool:
        """Whether anybody has a block in `tier`."""
        return bool(self._masks[tier])

    def _walk(self, masks: Iterable[int | None], length: int) -> Int32s:
        """Where each holder's bit goes out for the first time. Most blocks have the holders of the one before."""
        counts = np.zeros(self._count, dtype=np.int32)
        alive = last = -1
        for depth, mask in enumerate(masks):
            if mask == last:
                continue
            last = mask or 0
            left = alive & last
            if left != alive:
                if depth:
                    _write(counts, alive ^ left, depth)
                alive = left
                if not alive:
                    return counts
        if alive > 0:
            _write(counts, alive, length)
        return counts

    def leading_any(self, tier: Tier, positions: list[int]) -> int:
        """How many leading blocks have a holder in `tier`, whoever it is."""
        masks = self._masks[tier]
        if masks:
            for depth, block in enumerate(positions):
                if block not in masks:
                    return depth
            return len(positions)
        return 0

    def holders(self, block: int) -> dict[Tier, list[int]]:
        """Who holds one block, by tier."""
        return {tier: bits_of(masks[block]) for tier, masks in self._masks.items() if block in masks}

    def engine_hash(self, block: int) -> int | None:
        """Engine hash under which the block was announced last; None when nobody holds it."""
        return self._keys.get(block)

    def engine_hashes(self, blocks: Iterable[int]) -> list[int | None]:
        """As `engine_hash`, of each block."""
        return list(map(self._keys.get, blocks))

    def blocks_held(self) -> list[int]:
        """All blocks with a holder in any tier."""
        return list(self._keys)


class _Book:
    """One publisher."""

    __slots__ = ("adapters", "bit", "blocks", "copies", "ticks")

    def __init__(self, holder: int) -> None:
        self.bit = 1 << holder
        self.blocks: dict[int, int] = {}
        self.copies: Copies = {tier: {} for tier in Tier}
        self.ticks: dict[int, int] = {}
        self.adapters: dict[int, int] = {}  # where not 0


class InDicts:
    """Books of all publishers (`claims.Books`).

    Parameters
    ----------
    holders : holders there can be in the index, >= 1
    """

    def __init__(self, holders: int) -> None:
        self.index = DictIndex(holders)
        self._books: dict[Claims, _Book] = {}
        self._held = 0

    def __len__(self) -> int:
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes in use, roughly."""
        return 160 * self._held + 90 * len(self.index)

    def contents(self) -> Contents:
        """All of it, lent."""
        return {claims: (book.blocks, book.copies, book.ticks, book.adapters) for claims, book in self._books.items()}

    def opened(self, claims: Claims) -> None:
        """A publisher that holds nothing yet."""
        self._books[claims] = _Book(claims.holder)

    def closed(self, claims: Claims) -> None:
        """A publisher that holds nothing any more."""
        del self._books[claims]

    def block_of(self, claims: Claims, key: int) -> int | None:
        """The block behind an engine hash; None when it is not known."""
        return self._books[claims].blocks.get(key)

    def blocks_of(self, claims: Claims, keys: Sequence[int]) -> dict[int, int]:
        """The blocks behind those keys that are known."""
        blocks = self._books[claims].blocks
        return {key: blocks[key] for key in keys if key in blocks}

    def adapters_of(self, claims: Claims, keys: Iterable[int]) -> dict[int, int]:
        """Adapter numbers of those keys that are held under one."""
        adapters = self._books[claims].adapters
        return {key: adapters[key] for key in keys if key in adapters}

    def age_s(self, claims: Claims, key: int, block: int, now_s: float) -> float:
        """Seconds since the block was stored or used, >= 0; NaN when the key does not stand for this block."""
        book = self._books[claims]
        if book.blocks.get(key) != block:
            return float("nan")
        return max(0.0, now_s - book.ticks[key] / TICKS_PER_S)

    def used(self, claims: Claims, hashes: Sequence[int], now_s: float) -> None:
        """These leading blocks of a chain were used at `now_s`."""
        book, known = self._books[claims], self._books[claims].blocks
        keys = zip(self.index.engine_hashes(hashes), hashes, strict=True)
        its = [key for key, block in keys if key is not None and known.get(key) == block]
        book.ticks.update(dict.fromkeys(its, ticks_of(now_s)))

    def touch(self, claims: Claims, keys: Sequence[int]) -> None:
        """These keys, all of them known, were stored again at the time of the last batch."""
        self._books[claims].ticks.update(dict.fromkeys(keys, ticks_of(claims.last_event_s)))

    def hold(self, tier: Tier, told: Sequence[Told], done: Applied) -> None:
        """One more copy of each block, for each publisher, at the time of its last batch."""
        for claims, blocks, adapter in told:
            book = self._books[claims]
            known, copies = book.blocks, book.copies[tier]
            new: Mapping[int, int] = blocks
            if known.keys().isdisjoint(blocks):  # the rule, and a third of the cost
                known.update(blocks)
                copies.update(dict.fromkeys(blocks, 1))
            else:
                new = self._hold_again(tier, claims, blocks, done)
            self.index.add(tier, book.bit, new)
            book.ticks.update(dict.fromkeys(blocks, ticks_of(claims.last_event_s)))
            if adapter:
                book.adapters.update(dict.fromkeys(blocks, adapter))
            self._held += len(known) - claims.held
            claims.held = len(known)

    def _hold_again(self, tier: Tier, claims: Claims, blocks: Mapping[int, int], done: Applied) -> dict[int, int]:
        """Keys of which some are known. Returns those that this publisher did not have in `tier`."""
        book, one_copy = self._books[claims], claims.one_copy
        known, copies, new = book.blocks, book.copies[tier], {}
        for key, block in blocks.items():
            if known.setdefault(key, block) != block:
                self._forget(book, key)
                known[key] = block
                done.conflicts += 1
            count = copies.get(key)
            if count is None:
                copies[key] = 1
                new[key] = block
            elif not one_copy:
                copies[key] = count + 1
        return new

    def release(self, tier: Tier, told: Sequence[tuple[Claims, list[int]]], done: Applied) -> list[dict[int, int]]:
        """One copy less of each key. Returns for each publisher the keys whose last copy went, with their blocks."""
        gone = []
        for claims, keys in told:
            book = self._books[claims]
            blocks, copies = book.blocks, book.copies[tier]
            counts = list(map(copies.get, keys))
            elsewhere = any(others for others in book.copies.values() if others is not copies)
            if not elsewhere and counts.count(1) == len(keys):  # one copy each, the rule for most engines
                done.removed += len(keys)
                here = list(map(blocks.pop, keys))
                for gone_from in (copies, book.ticks):
                    deque(map(gone_from.__delitem__, keys), maxlen=0)
                if book.adapters:
                    for key in keys:
                        book.adapters.pop(key, None)
                everywhere = dict(zip(keys, here, strict=True))
            else:
                here, everywhere = self._release_some(book, tier, keys, done)
            self.index.discard(tier, book.bit, here)
            self._held -= len(everywhere)
            claims.held = len(blocks)
            gone.append(everywhere)
        return gone

    def _release_some(
        self, book: _Book, tier: Tier, keys: list[int], done: Applied
    ) -> tuple[list[int], dict[int, int]]:
        """Blocks that left `tier`, and keys with their blocks that left the publisher."""
        blocks, copies = book.blocks, book.copies[tier]
        elsewhere = [others for others in book.copies.values() if others and others is not copies]
        here, everywhere = [], {}
        for key in keys:
            count = copies.get(key)
            if count is None:
                done.unheld += 1
                continue
            done.removed += 1
            if count > 1:
                copies[key] = count - 1
                continue
            del copies[key]
            here.append(blocks[key])
            for others in elsewhere:
                if key in others:
                    break
            else:
                everywhere[key] = self._close(book, key)
        return here, everywhere

    def drop(self, claims: Claims, adapter: int | None = None) -> None:
        """Drop all keys of one publisher, or those of one adapter."""
        book = self._books[claims]
        keys = list(book.blocks)
        self._drop_keys(
            claims, keys if adapter is None else [key for key in keys if book.adapters.get(key, 0) == adapter]
        )

    def drop_some(self, claims: Claims, most: int) -> None:
        """Drop `most` keys of one publisher, any of them, or all there are."""
        self._drop_keys(claims, list(islice(self._books[claims].blocks, most)))

    def hand_over(self, claims: Claims, to: Claims) -> None:
        """What `claims` holds is held by `to`, under the same owner and holder."""
        self._books[to] = self._books.pop(claims)
        to.held, claims.held = claims.held, 0

    def evict(self, claims: Claims | None, count: int) -> int:
        """Forget the `count` oldest keys, of one publisher or of all; returns how many that were."""
        those = [claims] if claims is not None else list(self._books)
        by_age = sorted(
            (ticks, number, key) for number, one in enumerate(those) for key, ticks in self._books[one].ticks.items()
        )
        count = min(count, len(by_age))
        for number, one in enumerate(those):
            self._drop_keys(one, [key for _ticks, of, key in islice(by_age, count) if of == number])
        return count

    def _drop_keys(self, claims: Claims, keys: list[int]) -> None:
        book = self._books[claims]
        for key in keys:
            self._forget(book, key)
        self._held -= len(keys)
        claims.held = len(book.blocks)

    def _forget(self, book: _Book, key: int) -> None:
        """Drop every claim of one engine hash, whatever its copies."""
        block = self._close(book, key)
        for tier, copies in book.copies.items():
            if copies.pop(key, None) is not None:
                self.index.discard(tier, book.bit, [block])

    @staticmethod
    def _close(book: _Book, key: int) -> int:
        if book.adapters:
            book.adapters.pop(key, None)
        del book.ticks[key]
        return book.blocks.pop(key)


def _write(counts: npt.NDArray[np.int32], mask: int, value: int) -> None:
    if mask.bit_count() <= _FEW_ROWS:
        for row in bits_of(mask):
            counts[row] = value
        return
    bits = np.frombuffer(mask.to_bytes((len(counts) + 7) // 8, "little"), dtype=np.uint8)
    counts[np.unpackbits(bits, count=len(counts), bitorder="little").view(bool)] = value
