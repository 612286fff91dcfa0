"""The shared store.

Model     every full block an engine computes is written through at once; least recently written or read blocks
          leave when the bytes run out. How replicas read it: `fetching`
Blind to  the bytes of writes on the links, replication, segments that go away with their owner
Source    Mooncake Store and vLLM's MooncakeStoreConnector, by their documentation
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One block entered or left the store at virtual time `at_s`."""

    at_s: float
    digest: bytes
    stored: bool


class SharedStore:
    """Blocks by digest, least recently used first. `changes` is None when nobody listens."""

    def __init__(self, *, capacity_blocks: int, record_changes: bool = False) -> None:
        """`capacity_blocks` >= 1."""
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._changes: list[StoreChange] | None = [] if record_changes else None

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def match(self, digests: Sequence[bytes], start: int, limit: int) -> int:
        """How far a prompt can be read if its first `start` blocks are taken for granted; at most `limit`.

        A connector looks a prompt up from its first block, whatever the replica has itself, and what it finds counts
        as just read: otherwise the beginnings that all prompts share would be the first to be evicted.
        """
        blocks = self._blocks
        end = min(limit, len(digests))
        for index in range(end):
            if digests[index] not in blocks:
                return max(start, index)
            blocks.move_to_end(digests[index])
        return max(start, end)

    def put(self, digests: Sequence[bytes], now_s: float) -> None:
        """Write blocks, or refresh those that are here."""
        blocks, changes = self._blocks, self._changes
        for digest in digests:
            if digest in blocks:
                blocks.move_to_end(digest)
                continue
            blocks[digest] = None
            if changes is not None:
                changes.append(StoreChange(now_s, digest, stored=True))
            if len(blocks) > self.capacity_blocks:
                oldest, _none = blocks.popitem(last=False)
                if changes is not None:
                    changes.append(StoreChange(now_s, oldest, stored=False))

    def refresh(self, digests: Sequence[bytes]) -> None:
        """Mark blocks as just read."""
        for digest in digests:
            if digest in self._blocks:
                self._blocks.move_to_end(digest)

    def take_changes(self) -> list[StoreChange]:
        """Changes since the last call, oldest first."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes
