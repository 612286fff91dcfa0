"""What an engine or the store says about its blocks, before any wire form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one sequence are now in GPU memory.

    digests : full 32-byte hashes in prefix order
    parent : digest of the block before the first one; None at the start of a sequence
    tokens : the tokens of these blocks
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
class EventBatch:
    """All events of one engine step, at the virtual time the step ended."""

    at_s: float
    events: list[CacheEvent]
