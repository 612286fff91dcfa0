"""Cache events as SGLang sends them: its own page hashes, one logical copy of a page, neighbours merged.

Model     d[i] = SHA-256(d[i-1] + tokens as little-endian u32); on the wire the first 8 bytes of d[i], signed. From
          0.5.18 a salted sequence starts from SHA-256("sglang-cache-salt-v1\\0" + salt), and pages that follow one
          another in one step go into one event; before it is one event a page
Blind to  the radix tree: pages are announced as they fill, SGLang announces generated ones when a request ends;
          adapters, sessions and token pairs; its storage tier below the host, of which it says nothing itself
Source    released SGLang 0.5.6 to 0.5.23, event structs and page hashes; recorded payloads
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from sim_backends.cache_events import OffDevice, Removed, Said, Stored
from sim_backends.event_wire import Version, batch_bytes

_FIRST_MEDIUM: Version = (0, 5, 9)
_FIRST_HOST: Version = (0, 5, 11)
_FIRST_SALT_AND_MERGING: Version = (0, 5, 18)
_FIRST_MAP: Version = (0, 5, 20)
_MEDIUMS = {"hbm": "GPU", "host": "CPU_PINNED"}


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of one page after `parent`, which is empty (or a salt's root) at the start of a sequence.

    tokens : ids in 0..2**32-1
    """
    return sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def salt_root(salt: str) -> bytes:
    return sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()


def page_hash(digest: bytes) -> int:
    """What events carry: the first 64 bits, signed."""
    return int.from_bytes(digest[:8], "big", signed=True)


@dataclass(slots=True)
class _Page:
    """A page this replica holds; `copies` by tier, of which SGLang's tree would have one each.

    parent : wire hash of the page before; None at the start of a sequence
    """

    digest: bytes
    parent: int | None
    tokens: list[int]
    salt: str | None
    copies: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Pending:
    """An event that neighbours may still join. `tokens` is None for a removal."""

    medium: str
    hashes: list[int]
    parent: int | None = None
    tokens: list[int] | None = None
    salt: str | None = None

    def joined(self, other: _Pending) -> bool:
        """Take `other` in if it goes on where this ends."""
        if (self.medium, self.salt) != (other.medium, other.salt):
            return False
        if self.tokens is None or other.tokens is None:
            if self.tokens is not other.tokens:
                return False
        elif other.parent != self.hashes[-1]:
            return False
        else:
            self.tokens += other.tokens
        self.hashes += other.hashes
        return True


class SglangEncoder:
    """Events as SGLang `version` sends them. Remembers the pages it has announced, by the engine's digests."""

    def __init__(self, version: Version, *, block_tokens: int, rank: int = 0) -> None:
        self._version = version
        self._block_tokens = block_tokens
        self._rank = rank
        self._pages: dict[bytes, _Page] = {}
        self._left: list[bytes] = []  # pages that lost their copy in some tier during this batch

    def encode(self, events: Sequence[Said], *, unix_s: float) -> bytes | None:
        merging = self._version >= _FIRST_SALT_AND_MERGING
        said: list[_Pending | None] = []  # None is "all cleared"
        for event in events:
            for page in self._pages_of(event):
                last = said[-1] if said else None
                if not (merging and page is not None and last is not None and last.joined(page)):
                    said.append(page)
        for digest in self._left:  # at the end, so that another tier could take over meanwhile
            if digest in self._pages and not self._pages[digest].copies:
                del self._pages[digest]
        self._left.clear()
        return batch_bytes(map(self._shaped, said), unix_s=unix_s, rank=self._rank)

    def _pages_of(self, said: Said) -> Iterator[_Pending | None]:
        """One pending event for each page that this changes in its tier."""
        if isinstance(said, Stored):
            yield from self._stored(said)
        elif isinstance(said, Removed):
            yield from self._dropped(said.digest, "hbm")
        elif isinstance(said, OffDevice):
            yield from self._off_device(said)
        else:
            self._pages.clear()
            yield None

    def _off_device(self, said: OffDevice) -> Iterator[_Pending]:
        """Nothing of a page that this process has never told: it was below the device before the start."""
        page = self._pages.get(said.digest)
        if said.tier != "host" or self._version < _FIRST_HOST or page is None:
            return
        if said.stored:
            yield from self._added(said.digest, said.tier)
        elif said.tier in page.copies:
            yield from self._dropped(said.digest, said.tier)

    def _stored(self, event: Stored) -> Iterator[_Pending]:
        size = self._block_tokens
        before = None if event.parent is None else self._pages[event.parent]
        for index, digest in enumerate(event.digests):
            page = self._pages.get(digest)
            if page is None:
                tokens = list(event.tokens[index * size : (index + 1) * size])
                page = self._pages[digest] = self._new_page(before, tokens, event.salt)
            yield from self._added(digest, "hbm")
            before = page

    def _new_page(self, before: _Page | None, tokens: list[int], salt: str | None) -> _Page:
        if before is not None:
            return _Page(page_digest(before.digest, tokens), page_hash(before.digest), tokens, before.salt)
        if salt is None or self._version < _FIRST_SALT_AND_MERGING:
            return _Page(page_digest(b"", tokens), None, tokens, None)
        return _Page(page_digest(salt_root(salt), tokens), None, tokens, salt)

    def _added(self, digest: bytes, tier: str) -> Iterator[_Pending]:
        """One more copy; only the first of a tier is told."""
        page = self._pages[digest]
        page.copies[tier] = copies = page.copies.get(tier, 0) + 1
        if copies == 1:
            yield _Pending(_MEDIUMS[tier], [page_hash(page.digest)], page.parent, list(page.tokens), page.salt)

    def _dropped(self, digest: bytes, tier: str) -> Iterator[_Pending]:
        """One copy less; only the last of a tier is told."""
        page = self._pages[digest]
        page.copies[tier] -= 1
        if page.copies[tier] == 0:
            del page.copies[tier]
            self._left.append(digest)
            yield _Pending(_MEDIUMS[tier], [page_hash(page.digest)])

    def _shaped(self, said: _Pending | None) -> Any:
        if self._version >= _FIRST_MAP:
            return self._map(said)
        if said is None:
            return ["AllBlocksCleared"]
        medium = [said.medium] if self._version >= _FIRST_MEDIUM else []
        if said.tokens is None:
            return ["BlockRemoved", said.hashes, *medium]
        salt = [] if said.salt is None else [{"cache_salt": said.salt}]
        return ["BlockStored", said.hashes, said.parent, said.tokens, self._block_tokens, None, *medium, *salt]

    def _map(self, said: _Pending | None) -> dict[str, Any]:
        if said is None:
            return {"type": "AllBlocksCleared"}
        if said.tokens is None:
            return {"type": "BlockRemoved", "block_hashes": said.hashes, "medium": said.medium}
        return {
            "type": "BlockStored",
            "block_hashes": said.hashes,
            "parent_block_hash": said.parent,
            "token_ids": said.tokens,
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": said.medium,
            **({} if said.salt is None else {"cache_salt": said.salt}),
        }
