"""What an engine or the store says about its blocks, before any wire form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    A copy that takes over from another one is told before the removal of that, so that a listener who knows a block
    by its copies never loses it in between.
    """

    digest: bytes
    tier: Literal["host", "disk"]
    stored: bool


Said = CacheEvent | OffDevice


@dataclass(frozen=True, slots=True)
class EventBatch:
    """All events of one engine step in the order they happened, at the virtual time the step ended."""

    at_s: float
    events: list[Said]
