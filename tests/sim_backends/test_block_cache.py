from __future__ import annotations

import random

from sim_backends.block_cache import BlockCache
from sim_backends.cache_events import Cleared, Removed, Said


def digests(name: str, count: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(count)]


def stored(cache: BlockCache, name: str, count: int) -> list[int]:
    """Blocks of a live sequence that computed all its content itself."""
    blocks = cache.take(count)
    for block, digest in zip(blocks, digests(name, count), strict=True):
        cache.register(block, digest)
    return blocks


def test_a_match_ends_at_the_first_missing_block() -> None:
    cache = BlockCache(8)
    cache.release(stored(cache, "a", 3))
    assert cache.match([*digests("a", 2), b"other", *digests("a", 3)[2:]], 9) == 2


def test_a_match_is_no_longer_than_its_limit() -> None:
    cache = BlockCache(8)
    stored(cache, "a", 3)
    assert cache.match(digests("a", 3), 2) == 2


def test_released_blocks_stay_findable_until_they_are_needed() -> None:
    cache = BlockCache(4)
    cache.release(stored(cache, "a", 3))
    assert (cache.free_blocks, cache.match(digests("a", 3), 3)) == (4, 3)


def test_the_tail_of_a_released_sequence_is_taken_before_its_head() -> None:
    events: list[Said] = []
    cache = BlockCache(3, events=events)
    cache.release(stored(cache, "a", 3))
    cache.take(1)
    assert events == [Removed(b"a2")]
    assert cache.match(digests("a", 3), 3) == 2


def test_the_least_recently_released_sequence_is_taken_first() -> None:
    cache = BlockCache(4)
    first, second = stored(cache, "a", 2), stored(cache, "b", 2)
    cache.release(first)
    cache.release(second)
    cache.release(cache.reserve(digests("a", 2), 2) or [])  # used again: now the youngest
    cache.take(2)
    assert (cache.match(digests("a", 2), 2), cache.match(digests("b", 2), 2)) == (2, 0)


def test_held_blocks_are_never_taken() -> None:
    cache = BlockCache(4)
    stored(cache, "a", 2)
    assert cache.reserve([], 3) is None
    assert cache.reserve([], 2) is not None
    assert cache.match(digests("a", 2), 2) == 2


def test_a_reservation_that_does_not_fit_holds_nothing() -> None:
    cache = BlockCache(4)
    cache.release(stored(cache, "a", 2))
    assert cache.reserve(digests("a", 2), 5) is None
    assert cache.free_blocks == 4


def test_idle_hits_are_not_counted_as_room_for_the_rest() -> None:
    """Three free blocks, two of them hits: one more fits, two more do not."""
    cache = BlockCache(4)
    cache.release(stored(cache, "a", 2))
    cache.take(1)
    assert cache.reserve(digests("a", 2), 4) is None
    assert cache.reserve(digests("a", 2), 3) is not None


def test_two_copies_of_a_block_leave_one_by_one() -> None:
    events: list[Said] = []
    cache = BlockCache(2, events=events)
    first, second = stored(cache, "a", 1), stored(cache, "a", 1)
    cache.release(first)
    cache.take(1)
    assert (events, cache.match([b"a0"], 1)) == ([Removed(b"a0")], 1)
    cache.release(second)
    cache.take(1)
    assert (events, cache.match([b"a0"], 1)) == ([Removed(b"a0")] * 2, 0)


def test_clear_is_refused_while_a_block_is_held() -> None:
    events: list[Said] = []
    cache = BlockCache(4, events=events)
    held = stored(cache, "a", 1)
    assert not cache.clear()
    cache.release(held)
    assert cache.clear()
    assert (events, cache.match([b"a0"], 1)) == ([Cleared()], 0)


def test_whatever_happens_blocks_are_held_or_free_and_findable_ones_are_counted_right() -> None:
    """A random walk against a plain model: held blocks and the set of digests announced minus removed."""
    rng = random.Random(5)
    events: list[Said] = []
    cache = BlockCache(40, events=events)
    held: list[list[int]] = []
    copies: dict[bytes, int] = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            cache.release(held.pop(rng.randrange(len(held))))
            continue
        chain = digests(f"p{rng.randrange(12)}-", rng.randrange(1, 8))
        hits = cache.match(chain, len(chain))
        blocks = cache.reserve(chain[:hits], len(chain))
        if blocks is None:
            continue
        for block, digest in zip(blocks[hits:], chain[hits:], strict=True):
            cache.register(block, digest)
            copies[digest] = copies.get(digest, 0) + 1
        for event in events:
            assert isinstance(event, Removed)
            copies[event.digest] -= 1
        events.clear()
        held.append(blocks)
        assert cache.size - cache.free_blocks == len({block for blocks in held for block in blocks})
        assert all((cache.match([digest], 1) == 1) == (number > 0) for digest, number in copies.items())
