"""What publishers claim to hold: their own engine hashes, and the blocks behind them.

Model     (publisher, engine hash) -> block, copies per tier and a coarse time, since engines announce one removal for
          each copy. A publisher's bit in the index is set while any copy behind it lives. Up to 65,536 keys the books
          are dictionaries, which are quicker for one key; beyond it tables, which are small and quick for many
Blind to  copies announced without a removal ever: limits bound them, oldest first
Errors    the time is that of the last store or use, whatever the tier, to a sixteenth of a second
Source    duplicate blocks in vLLM's pool: one store and one removal per physical copy
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier

TICKS_PER_S = 16
_SALT = 0x9E6C63D0876A9A35  # times the owner: what tells publishers apart in a common table
_MASK_64 = (1 << 64) - 1


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
    """One publisher's part of the books. Made by `Ledger.open`; keys are engine hashes.

    owner : its number in the ledger, >= 1
    holder : its number in the index
    model : name its blocks are rooted in
    one_copy : repeated stores are one copy (SGLang, stores); else each needs its own removal (vLLM)
    limit : keys it may have
    held : keys it has now
    last_event_s : router's clock when it last sent a batch; None when it never has
    """

    __slots__ = ("books", "held", "holder", "last_event_s", "limit", "model", "one_copy", "owner", "salt")

    def __init__(self, books: Books, *, owner: int, holder: int, model: str, one_copy: bool, limit: int) -> None:
        self.books = books
        self.move(owner=owner, holder=holder)
        self.model = model
        self.one_copy = one_copy
        self.limit = limit
        self.held = 0
        self.last_event_s: float | None = None

    def move(self, *, owner: int, holder: int) -> None:
        """Hold what comes under other numbers."""
        self.owner = owner
        self.holder = holder
        self.salt = owner * _SALT & _MASK_64

    def block_of(self, key: int) -> int | None:
        """The block behind an engine hash; None when it is not known."""
        return self.books.block_of(self, key)

    def blocks_of(self, keys: Sequence[int]) -> dict[int, int]:
        """The blocks behind those keys that are known."""
        return self.books.blocks_of(self, keys)

    def adapters_of(self, keys: Iterable[int]) -> dict[int, int]:
        """Adapter numbers of those keys that are held under one."""
        return self.books.adapters_of(self, keys)

    def age_s(self, key: int, block: int, now_s: float) -> float:
        """Seconds since the block was stored or used, >= 0; NaN when the key does not stand for this block."""
        return self.books.age_s(self, key, block, now_s)

    def used(self, hashes: Sequence[int], now_s: float) -> None:
        """These leading blocks of a chain were used at `now_s`."""
        self.books.used(self, hashes, now_s)

    def clear(self) -> None:
        """Drop everything this publisher held."""
        if self.held:
            self.books.drop(self)

    def drop_adapter(self, adapter: int) -> None:
        """Drop the keys held under this adapter number."""
        self.books.drop(self, adapter)


Told = tuple[Claims, Mapping[int, int], int]  # a publisher; its keys and their blocks; their adapter, by number
Copies = dict[Tier, dict[int, int]]
# Of each publisher: block, copies, ticks and adapter by key; the adapter only where it is not 0.
Contents = Mapping[Claims, tuple[dict[int, int], Copies, dict[int, int], dict[int, int]]]


class Index(Protocol):
    """Holders of every block. What `positions` returns is the index's own affair, good until the next change."""

    @property
    def blocks(self) -> Mapping[Tier, int]: ...  # distinct blocks, by tier
    def positions(self, hashes: Sequence[int] | npt.NDArray[np.uint64]) -> Any: ...
    def leading(self, tier: Tier, positions: Any) -> npt.NDArray[np.int32]: ...
    def leading_together(self, tiers: Sequence[Tier], positions: Any) -> npt.NDArray[np.int32]: ...
    def has_any(self, tier: Tier) -> bool: ...
    def leading_any(self, tier: Tier, positions: Any) -> int: ...
    def holders(self, block: int) -> dict[Tier, list[int]]: ...
    def engine_hash(self, block: int) -> int | None: ...
    def blocks_held(self) -> list[int]: ...


class Books(Protocol):
    """Claims of all publishers and the index kept in step with them. Limits are the ledger's affair."""

    @property
    def index(self) -> Index: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def opened(self, claims: Claims) -> None: ...
    def closed(self, claims: Claims) -> None: ...
    def block_of(self, claims: Claims, key: int) -> int | None: ...
    def blocks_of(self, claims: Claims, keys: Sequence[int]) -> dict[int, int]: ...
    def adapters_of(self, claims: Claims, keys: Iterable[int]) -> dict[int, int]: ...
    def age_s(self, claims: Claims, key: int, block: int, now_s: float) -> float: ...
    def used(self, claims: Claims, hashes: Sequence[int], now_s: float) -> None: ...
    def touch(self, claims: Claims, keys: Sequence[int]) -> None: ...
    def hold(self, tier: Tier, told: Sequence[Told], done: Applied) -> None: ...
    def release(self, tier: Tier, told: Sequence[tuple[Claims, list[int]]], done: Applied) -> list[dict[int, int]]: ...
    def drop(self, claims: Claims, adapter: int | None = None) -> None: ...
    def drop_some(self, claims: Claims, most: int) -> None: ...
    def hand_over(self, claims: Claims, to: Claims) -> None: ...
    def evict(self, claims: Claims | None, count: int) -> int: ...


def ticks_of(now_s: float | None) -> int:
    """Coarse time for the books."""
    return max(0, int((now_s or 0.0) * TICKS_PER_S)) & 0xFFFFFFFF
