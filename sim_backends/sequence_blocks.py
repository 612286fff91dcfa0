"""The blocks of an engine's requests: held, grown, made findable, announced, written through, let go.

Model     a request holds whole blocks; a full computed block is findable in the cache, announced, and in the store
Valid     calls in order of time
Source    vLLM, vllm/v1/core/kv_cache_manager.py
"""

from __future__ import annotations

from sim_backends.block_cache import BlockCache
from sim_backends.cache_events import EventBatch, Said, Stored
from sim_backends.fetching import Fetcher
from sim_backends.requests import Counters, EngineSettings, LiveRequest


class SequenceBlocks:
    """Owns the cache and the events; the counters are the engine's. `fetcher` None: nothing is beyond HBM."""

    def __init__(
        self, settings: EngineSettings, counters: Counters, *, fetcher: Fetcher | None, record_events: bool
    ) -> None:
        self._events: list[Said] | None = [] if record_events else None
        self._batches: list[EventBatch] = []
        evicted = None
        if fetcher is not None and fetcher.tiers.tiers:
            evicted = fetcher.tiers.write_back
            fetcher.tiers.events = self._events  # one list, so that what replaces what is told in order
        self.cache = BlockCache(settings.kv_blocks, events=self._events, evicted=evicted)
        self.size = settings.block_tokens
        self._counters = counters
        self._fetcher = fetcher
        self.let_gos = 0  # how often blocks were let go: what did not fit may fit once this has moved

    @property
    def has_news(self) -> bool:
        """Whether the step under way will have events to announce."""
        return bool(self._events)

    def findable(self, live: LiveRequest) -> int:
        """Blocks that may be reused: at least one token is always computed."""
        return (live.known - 1) // self.size

    def match(self, live: LiveRequest) -> int:
        """Leading blocks that are here and may be reused."""
        return self.cache.match(live.digests, self.findable(live))

    def reserve(self, live: LiveRequest, hits: int) -> bool:
        """Hold the blocks of all known tokens, the first `hits` from the cache; False, and nothing held, if no room."""
        size = self.size
        total = -(-live.known // size)
        blocks = self.cache.reserve(live.digests[:hits], total)
        if blocks is None:
            return False
        live.blocks = blocks
        live.registered = hits
        live.computed = max(hits * size, live.given_tokens)
        if live.cached_tokens < 0:
            live.cached_tokens = live.computed
            self._counters.prefix_queries += live.prompt_tokens
            self._counters.prefix_hits += live.computed
            if self._fetcher is not None:
                self._counters.external_queries += live.prompt_tokens - live.computed
        return True

    def grow(self, live: LiveRequest) -> None:
        """One more block; there is a free one."""
        live.blocks.extend(self.cache.take(1))

    def let_go(self, live: LiveRequest) -> None:
        self.release(live.blocks)
        live.blocks = []

    def release(self, blocks: list[int]) -> None:
        """Let go of blocks that no request has any more."""
        self.cache.release(blocks)
        self.let_gos += 1

    def register(self, live: LiveRequest, now_s: float) -> None:
        """Make all full computed blocks findable, announce them and write them through to the store."""
        first, last = live.registered, live.computed // self.size
        digests = live.digests
        if len(digests) < last:
            live.content.fill(last)
        fresh = digests[first:last]
        for block, digest in zip(live.blocks[first:last], fresh, strict=True):
            self.cache.register(block, digest)
        live.registered = last
        if self._events is not None:
            parent = digests[first - 1] if first else None
            salt = live.salt if first == 0 else None
            self._events.append(Stored(fresh, parent, live.content.told(first, last), salt))
        if self._fetcher is not None:
            self._fetcher.computed(fresh, now_s)

    def lose(self) -> None:
        """Forget all content with the process that had it: nobody holds a block, and nothing is announced."""
        cleared = self.cache.clear()
        assert cleared, "all blocks were let go before"
        if self._events is not None:
            self._events.clear()

    def end_batch(self, now_s: float) -> None:
        """Close the batch of a step's events."""
        if self._events:
            self._batches.append(EventBatch(now_s, list(self._events)))
            self._events.clear()  # cache and tiers append to the same list

    def take_batches(self) -> list[EventBatch]:
        """Batches since the last call, oldest first."""
        batches, self._batches = self._batches, []
        return batches
