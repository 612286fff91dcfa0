"""What an engine or the store says about its blocks, before any wire form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one sequence are now in GPU memory.

    digests : full 32-byte hashes in prefix order
    parent : digest of the block before the first one; None at the start of a sequence
    tokens : the tokens of these blocks; of a request made of block ids, one id for each block
    salt : cache salt of the request when the first block is block 0 of a salted request
    """

    digests: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """One physical copy of a block is gone."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """All cached blocks are gone."""


CacheEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class OffDevice:
    """A block's copy came to, or left, the replica's host memory or disk. Told after the block itself was stored.

    A copy that takes over from the device is told before or in the same batch as the device's removal.
    """

    digest: bytes
    tier: Literal["host", "disk"]
    stored: bool


@dataclass(frozen=True, slots=True)
class EventBatch:
    """All events of one engine step, at the virtual time the step ended; those of its tiers come after its memory's."""

    at_s: float
    events: list[CacheEvent]
    off_device: list[OffDevice] = field(default_factory=list)
