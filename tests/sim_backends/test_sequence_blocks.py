from __future__ import annotations

from sim_backends.alarms import Alarms
from sim_backends.block_hash import BlockHasher
from sim_backends.cache_events import Removed, Stored
from sim_backends.disciplines import DISCIPLINES
from sim_backends.fetching import Fetcher
from sim_backends.intake import Intake
from sim_backends.requests import Counters, EngineSettings, LiveRequest
from sim_backends.sequence_blocks import SequenceBlocks
from sim_backends.store import SharedStore
from tests.sim_backends.builders import a_block_request

SETTINGS = EngineSettings(name="e", vocab=1000, kv_blocks=8)


def some_blocks(*, store: SharedStore | None = None) -> SequenceBlocks:
    discipline = DISCIPLINES["overlapped"]
    fetcher = Fetcher(discipline, Alarms(), block_tokens=16, bytes_per_token=1, layers=1, store=store)
    return SequenceBlocks(SETTINGS, Counters(), fetcher=fetcher, record_events=True)


def a_live(ids: list[int], tokens: int) -> LiveRequest:
    intake = Intake(SETTINGS, BlockHasher(block_tokens=16, vocab=1000))
    return intake.accept(a_block_request(ids, tokens), 0.0)


def computed(blocks: SequenceBlocks, live: LiveRequest) -> LiveRequest:
    """The whole prompt, held and findable."""
    assert blocks.reserve(live, blocks.match(live))
    live.computed = live.known
    blocks.register(live, 1.0)
    return live


def test_the_last_token_of_a_prompt_is_never_reused() -> None:
    blocks = some_blocks()
    computed(blocks, a_live([1, 2, 3], 48))
    assert blocks.match(a_live([1, 2, 3], 48)) == 2
    assert blocks.match(a_live([1, 2, 3], 49)) == 3


def test_without_room_nothing_is_held() -> None:
    blocks = some_blocks()
    computed(blocks, a_live([1, 2, 3, 4, 5], 80))
    late = a_live([7, 8, 9, 10], 64)
    assert not blocks.reserve(late, 0)
    assert (late.blocks, blocks.cache.free_blocks) == ([], 3)


def test_what_is_registered_is_announced_and_written_through() -> None:
    store = SharedStore(capacity_blocks=10)
    blocks = some_blocks(store=store)
    live = computed(blocks, a_live([1, 2], 40))
    assert blocks.has_news
    blocks.end_batch(1.5)
    (batch,) = blocks.take_batches()
    assert (batch.at_s, batch.events) == (1.5, [Stored(live.digests, None, [1, 2], None)])
    assert all(digest in store for digest in live.digests)
    assert not blocks.has_news
    assert blocks.take_batches() == []


def test_evictions_are_announced_with_the_step_that_needed_the_room() -> None:
    blocks = some_blocks()
    old = computed(blocks, a_live([1, 2], 32))
    blocks.end_batch(1.0)
    blocks.let_go(old)
    assert blocks.reserve(a_live([3, 4, 5, 6, 7, 8, 9], 112), 0)
    blocks.end_batch(2.0)
    assert blocks.take_batches()[1].events == [Removed(old.digests[1])]
