"""Host memory and disk of one replica: where blocks go that its GPU memory has to give up.

Model     write-back: a block that leaves HBM is written to the host tier, one that leaves the host tier to the
          disk, one that leaves the disk is gone. Each tier forgets its least recently written or read block.
          A read leaves the copy where it is, so a block can be in several tiers at once
Valid     one copy of a block per tier, however many HBM had
Blind to  the bytes of write-backs on the links (PCIe is full duplex; the disk's writes are taken as hidden), blocks
          that are offloaded before HBM needs their room (write-through), file formats
Source    vLLM OffloadingConnector and SGLang HiCache with `write_back`, by their documentation
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from sim_backends.cache_events import OffDevice, Said


class LruTier:
    """Blocks by digest, the least recently used first."""

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` >= 1."""
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._pinned: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def match(self, digests: Sequence[bytes], start: int, limit: int) -> int:
        """How many leading digests are here if the first `start` are taken for granted; at most `limit`."""
        blocks = self._blocks
        end = min(limit, len(digests))
        for index in range(start, end):
            if digests[index] not in blocks:
                return index
        return max(start, end)

    def put(self, digest: bytes) -> bytes | None:
        """Write or refresh one block; returns the block that had to leave for it."""
        self._blocks[digest] = None
        self._blocks.move_to_end(digest)
        if len(self._blocks) <= self.capacity_blocks:
            return None
        leaving = next((block for block in self._blocks if block not in self._pinned), digest)
        del self._blocks[leaving]
        return leaving

    def pin(self, digests: Sequence[bytes]) -> None:
        """Keep those of these blocks that are here, until the tier is cleared: nobody lets them go."""
        self._pinned.update(digest for digest in digests if digest in self._blocks)

    def refresh(self, digests: Sequence[bytes]) -> None:
        """Mark the blocks that are here as just read."""
        for digest in digests:
            if digest in self._blocks:
                self._blocks.move_to_end(digest)

    def clear(self) -> None:
        self._blocks.clear()
        self._pinned.clear()


class TierStack:
    """The tiers below one replica's HBM, fastest first. Either may be absent.

    events : appended to in the order things happen; None, as at first, records nothing
    """

    def __init__(self, *, host_blocks: int = 0, disk_blocks: int = 0) -> None:
        """Capacities in blocks; 0 for a tier the replica does not have."""
        sizes: dict[Literal["host", "disk"], int] = {"host": host_blocks, "disk": disk_blocks}
        self.tiers = {name: LruTier(blocks) for name, blocks in sizes.items() if blocks > 0}
        self.events: list[Said] | None = None
        self._order = list(self.tiers)

    def write_back(self, digest: bytes) -> None:
        """HBM is about to give this block up: into the first tier, and what that displaces into the next."""
        self._put(digest, self._order)

    def _put(self, digest: bytes, below: list[Literal["host", "disk"]]) -> None:
        """Into the first of these tiers; what has to leave for it is in the next one before it is gone here."""
        if not below:
            return
        name, *further = below
        tier = self.tiers[name]
        fresh = digest not in tier
        leaving = tier.put(digest)
        if fresh:
            self._note(name, digest, stored=True)
        if leaving is not None:
            self._put(leaving, further)
            self._note(name, leaving, stored=False)

    def clear(self) -> None:
        """Forget everything, as a process that died does. Nothing is announced."""
        for tier in self.tiers.values():
            tier.clear()

    def _note(self, tier: Literal["host", "disk"], digest: bytes, *, stored: bool) -> None:
        if self.events is not None:
            self.events.append(OffDevice(digest, tier, stored))
