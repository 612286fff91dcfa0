"""The KV blocks of one replica: who holds them, which can be found again, which goes next.

Model     vLLM V1's block pool: reference counts by live requests; a block nobody holds stays findable until it is
          taken for something else; taken in the order they were let go, tails of sequences before their heads.
          Two requests that compute the same prefix at the same time make two copies of each block
Source    vLLM, vllm/v1/core/block_pool.py and kv_cache_utils.py (FreeKVCacheBlockQueue)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from sim_backends.cache_events import Cleared, Removed, Said


class BlockCache:
    """Blocks 0..size-1. `events` is appended to in the order things happen; None records nothing."""

    def __init__(
        self,
        size: int,
        *,
        events: list[Said] | None = None,
        evicted: Callable[[bytes], None] | None = None,
    ) -> None:
        """`size` >= 1 blocks. `evicted` is told of a digest when its last copy is about to be overwritten."""
        self.size = size
        self._events = events
        self._evicted = evicted
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self._holders = [0] * size
        self._digest_of: list[bytes | None] = [None] * size
        self._block_of: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}  # further blocks with a digest that is in _block_of

    @property
    def free_blocks(self) -> int:
        """Blocks no live request holds, findable ones included."""
        return len(self._free)

    @property
    def used_share(self) -> float:
        """Blocks held by live requests over all blocks, 0..1."""
        return (self.size - len(self._free)) / self.size

    def match(self, digests: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` digests are here without a gap, from the start. Changes nothing."""
        known = self._block_of
        for index in range(min(limit, len(digests))):
            if digests[index] not in known:
                return index
        return min(limit, len(digests))

    def reserve(self, hits: Sequence[bytes], total: int) -> list[int] | None:
        """Hold the blocks of `hits` and new ones up to `total` blocks; None, and nothing held, if they do not fit.

        Every digest in `hits` must be here: it comes from `match`.
        """
        found = [self._block_of[digest] for digest in hits]
        holders = self._holders
        idle_hits = sum(1 for block in found if holders[block] == 0)
        if total - len(found) > len(self._free) - idle_hits:
            return None
        for block in found:
            if holders[block] == 0:
                del self._free[block]
            holders[block] += 1
        found.extend(self.take(total - len(found)))
        return found

    def take(self, count: int) -> list[int]:
        """Hold `count` <= free_blocks blocks of no content, forgetting the least recently used."""
        blocks: list[int] = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            if self._digest_of[block] is not None:
                self._forget(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """Make a held block findable under `digest`."""
        assert self._digest_of[block] is None, "a block is registered once between two takings"
        self._digest_of[block] = digest
        if self._block_of.setdefault(digest, block) != block:
            self._copies.setdefault(digest, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, tail first: the tail is of use to fewer prompts than the head."""
        holders = self._holders
        for block in reversed(blocks):
            holders[block] -= 1
            if holders[block] == 0:
                self._free[block] = None

    def clear(self) -> bool:
        """Forget all content. Refused (False) while a request holds a block, as vLLM does."""
        if len(self._free) != self.size:
            return False
        self._block_of.clear()
        self._copies.clear()
        self._digest_of = [None] * self.size
        if self._events is not None:
            self._events.append(Cleared())
        return True

    def _forget(self, block: int) -> None:
        digest = self._digest_of[block]
        assert digest is not None, "only findable blocks are forgotten"
        self._digest_of[block] = None
        copies = self._copies.get(digest)
        if self._block_of[digest] == block:
            if copies:
                self._block_of[digest] = copies.pop(0)
            else:
                del self._block_of[digest]
                if self._evicted is not None:
                    self._evicted(digest)
        else:
            assert copies is not None, "a second copy is listed"
            copies.remove(block)
        if not copies and copies is not None:
            del self._copies[digest]
        if self._events is not None:
            self._events.append(Removed(digest))
