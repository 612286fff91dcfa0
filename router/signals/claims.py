"""What publishers claim to hold: the shared index, and the books of one publisher behind it.

Model     index[tier][block] -> bit mask of holders; per publisher engine hash -> block, and copies per tier,
          since engines announce one removal for each copy. A bit is set while any copy behind it lives.
Blind to  copies announced without a removal ever: `trim` bounds them, oldest first
Source    duplicate blocks in vLLM's pool: one store and one removal per physical copy
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from estimators.tiers import Tier


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
    evicted: int = 0  # blocks dropped because the publisher reached its limit
    unknown: int = 0  # as counted by the decoder
    bad: int = 0  # as counted by the decoder

    def add(self, other: Applied) -> None:
        for name in _APPLIED_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_APPLIED_FIELDS = tuple(f.name for f in fields(Applied))


class Index:
    """Holders of every block, by tier. Absent means nobody: no entry outlives its last holder."""

    def __init__(self) -> None:
        self.masks: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        # Further engine hashes of one holder for a block it already holds; its bit stays until the last goes.
        self._again: dict[tuple[Tier, int, int], int] = {}

    def add(self, tier: Tier, bit: int, block: int) -> None:
        masks = self.masks[tier]
        mask = masks.get(block)
        if mask is None:
            masks[block] = bit
        elif mask & bit:
            again = (tier, bit, block)
            self._again[again] = self._again.get(again, 0) + 1
        else:
            masks[block] = mask | bit

    def discard(self, tier: Tier, bit: int, block: int) -> None:
        again = (tier, bit, block)
        if self._again and again in self._again:
            self._again[again] -= 1
            if not self._again[again]:
                del self._again[again]
            return
        masks = self.masks[tier]
        left = masks[block] & ~bit
        if left:
            masks[block] = left
        else:
            del masks[block]


class Claims:
    """Books of one publisher. Keys are engine hashes (`meaning.engine_keys`).

    bit : the publisher's bit in the index
    model : name its blocks are rooted in
    one_copy : repeated stores are one copy (SGLang, stores); else each needs its own removal (vLLM)
    """

    def __init__(self, index: Index, bit: int, model: str, *, one_copy: bool) -> None:
        self.bit = bit
        self.model = model
        self.one_copy = one_copy
        self.local_of: dict[int, int] = {}
        self.kept_groups: dict[int, bool] = {}
        self.last_event_s: float | None = None
        self._index = index
        self._copies: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}

    def hold(self, tier: Tier, keys: list[int], blocks: Iterable[int], done: Applied) -> None:
        """One more copy of each block."""
        local_of, copies, add, bit = self.local_of, self._copies[tier], self._index.add, self.bit
        for key, block in zip(keys, blocks, strict=True):
            if local_of.setdefault(key, block) != block:
                self._forget(key)
                local_of[key] = block
                done.conflicts += 1
            count = copies.get(key)
            if count is None:
                copies[key] = 1
                add(tier, bit, block)
            elif not self.one_copy:
                copies[key] = count + 1
        done.stored += len(keys)

    def hold_known(self, tier: Tier, keys: list[int], done: Applied) -> None:
        """One more copy of those blocks whose engine hash has been explained before."""
        known = [key for key in keys if key in self.local_of]
        if known:
            self.hold(tier, known, [self.local_of[key] for key in known], done)
        else:
            done.ignored += 1

    def release(self, tier: Tier, key: int, done: Applied) -> int | None:
        """One copy less. Returns the block when this was the last copy in any tier."""
        copies = self._copies[tier]
        count = copies.get(key)
        if count is None:
            done.unheld += 1
            return None
        done.removed += 1
        if count > 1:
            copies[key] = count - 1
            return None
        del copies[key]
        self._index.discard(tier, self.bit, self.local_of[key])
        for held in self._copies.values():
            if key in held:
                return None
        return self.local_of.pop(key)

    def clear(self) -> None:
        for tier, copies in self._copies.items():
            for key in copies:
                self._index.discard(tier, self.bit, self.local_of[key])
            copies.clear()
        self.local_of.clear()

    def trim(self, limit: int, done: Applied) -> None:
        """Some publishers announce stores and never removals; the oldest claims then go, in one sweep."""
        for key in oldest(self.local_of, limit):
            self._forget(key)
            done.evicted += 1

    def _forget(self, key: int) -> None:
        """Drop every claim of one engine hash, whatever its copies."""
        block = self.local_of.pop(key)
        for tier, copies in self._copies.items():
            if copies.pop(key, None) is not None:
                self._index.discard(tier, self.bit, block)


def oldest(entries: dict[int, Any], limit: int) -> list[int]:
    """Keys beyond `limit` and a sixty-fourth more, so that sweeps are rare and cheap for each entry; or none."""
    excess = len(entries) - limit
    return list(islice(entries, excess + limit // 64)) if excess > 0 else []
