"""How such directories fail in the field: caches that vanished, gaps, ranks, block sizes, adapters, growth."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from estimators.tiers import Tier
from router.blocks import ledger
from router.directory import Directory
from router.signals.sequence import State
from router.signals.stream import Stream
from router.signals.wire import Batch, Removed, Stored, decode
from tests.router.signals.events import (
    BLOCK,
    CLEAR,
    MODEL,
    P,
    Q,
    batch,
    chain_of,
    named,
    payload,
    removed,
    stored,
    stored_map,
)

MARKER = 1  # a replica that holds the first 64 blocks of P, so that it gets what nobody else is believed to have


def with_marker(rows: int = 2) -> Directory:
    directory = Directory(BLOCK, rows)
    for row in range(rows):
        directory.add_source(row, MODEL)
    directory.apply(MARKER, batch(stored(P[:1024], 50001)), 1.0)
    return directory


def credit(directory: Directory, tokens: list[int], row: int = 0) -> int:
    """Tokens of the prompt the row is believed to hold, wherever."""
    match = directory.match(chain_of(tokens))
    return BLOCK * max(int(match.hbm_blocks[row]), int(match.host_blocks[row]), int(match.expected_blocks[row]))


# A cache that vanished


@pytest.mark.parametrize("end", ["clear event", "restart, sleep or a new process", "other model", "gone and back"])
def test_a_cache_that_vanished_leaves_no_credit_of_any_kind(end: str) -> None:
    directory = with_marker()
    for seq in range(10):
        part = P[seq * 400 : seq * 400 + 400]
        event = stored(part, 10001 + seq * 25, parent=10000 + seq * 25 if seq else None)
        directory.put(0, batch(event), 1.0)
    directory.apply(0, batch(named(list(range(10001, 10101)), tier=Tier.HOST)), 1.5)
    request = directory.expect(0, chain_of(P), 1.5)
    assert credit(directory, P) == 4096
    if end == "clear event":
        directory.apply(0, batch(CLEAR), 2.0)
        assert credit(directory, P) == 4096  # the cache is empty, but the request still runs and will leave its blocks
        directory.cancel(request)
    elif end == "restart, sleep or a new process":
        directory.clear(0)
    elif end == "other model":
        directory.add_source(0, "m2")
        directory.add_source(0, MODEL)
    else:
        directory.drop_source(0)
        directory.add_source(0, MODEL)
    assert (credit(directory, P), credit(directory, P, MARKER)) == (0, 1024)
    late = batch(stored(P[2000:2400], 10126, parent=10125))  # sent before, heard after
    assert directory.apply(0, late, 3.0).orphans == 1
    assert credit(directory, P) == 0
    directory.apply(0, batch(stored(Q[:16], 1)), 4.0)
    assert credit(directory, Q) == 16


# Gaps


def a_stream(directory: Directory, row: int) -> Stream:
    return Stream(
        "a", lambda news: directory.put(row, news, 1.0), partial(directory.clear, row), first_seq=0, clock=lambda: 1.0
    )


BATCHES = [
    batch(stored(Q[:16], 1)),
    batch(stored(P[:1024], 10001)),
    batch(stored(P[1024:2048], 10065, parent=10064)),
    batch(stored(P[2048:], 10129, parent=10128)),
    batch(removed(1)),
    batch(stored(Q[:32], 5001)),
    batch(removed(5002)),
    batch(stored(Q[16:32], 5002, parent=5001)),
]


def test_a_gap_filled_by_a_replay_is_applied_in_the_publishers_order() -> None:
    directory = with_marker()
    stream = a_stream(directory, 0)
    for seq in (0, 1, 2):
        stream.heard(seq, BATCHES[seq])
    for seq in (3, 4, 5):  # the replay of what was missed, and what was waiting for it
        stream.take(seq, BATCHES[seq])
    assert (credit(directory, P), credit(directory, Q)) == (4096, 32)
    for seq in (6, 7):
        stream.heard(seq, BATCHES[seq])
    assert (credit(directory, Q), stream.sequence.state) == (32, State.LIVE)


@pytest.mark.parametrize("first", [5, 900], ids=["a gap", "a stream joined late"])
def test_a_gap_nobody_can_fill_leaves_only_what_was_heard_since(first: int) -> None:
    directory = with_marker()
    stream = a_stream(directory, 0)
    for seq in (0, 1, 2) if first == 5 else ():
        stream.heard(seq, BATCHES[seq])
    for seq, news in enumerate(BATCHES[5:], first):
        stream.heard(seq, news)
    assert stream.sequence.state is State.DEGRADED
    assert (credit(directory, P), credit(directory, Q), credit(directory, P, MARKER)) == (0, 32, 1024)


# Ranks


def test_ranks_that_number_and_hash_alike_stay_apart_through_clears_and_restarts() -> None:
    directory = Directory(BLOCK, 3)
    streams = []
    for row in (0, 1):
        directory.add_source(row, MODEL)
        streams.append(a_stream(directory, row))
    for seq, first in enumerate(range(0, 256, 32)):
        for row, tokens in ((0, P), (1, Q)):
            part = stored(tokens[first * BLOCK : (first + 32) * BLOCK], 1 + first, parent=first or None)
            streams[row].heard(seq, batch(part))
    assert [stream.sequence.gaps + stream.sequence.restarts for stream in streams] == [0, 0]
    assert [(credit(directory, P, row), credit(directory, Q, row)) for row in (0, 1)] == [(4096, 0), (0, 4096)]
    streams[1].heard(8, batch(CLEAR))
    assert [(credit(directory, P, row), credit(directory, Q, row)) for row in (0, 1)] == [(4096, 0), (0, 0)]
    streams[0].heard(0, batch(stored(Q[:16], 7)))
    assert [(credit(directory, P, row), credit(directory, Q, row)) for row in (0, 1)] == [(0, 16), (0, 0)]


# Block sizes


def blocks_of_size(tokens: list[int], size: int, together: int, first_hash: int = 1) -> list[Stored]:
    """The whole of `tokens` in blocks of `size`, so many of them in an event."""
    step = size * together
    events = []
    for start in range(0, len(tokens) - size + 1, step):
        part = tokens[start : start + step]
        number = first_hash + start // size
        events.append(
            Stored(
                hashes=list(range(number, number + len(part) // size)),
                parent=number - 1 if start else None,
                tokens=array("I", part),
                block_tokens=size,
                tier=Tier.HBM,
            )
        )
    return events


def sized(sizes: list[int], together: int) -> Directory:
    directory = Directory(BLOCK, len(sizes))
    for row, size in enumerate(sizes):
        directory.add_source(row, MODEL, one_copy=size < BLOCK)
        directory.apply(row, batch(*blocks_of_size(P, size, together)), 1.0)
    return directory


@pytest.mark.parametrize("together", [1, 3, 8, 64])
def test_every_block_size_that_fits_is_credited_in_whole_blocks_of_the_engine_and_of_the_router(together: int) -> None:
    sizes = [64, 16, 1, 4, 32, 256]
    directory = sized(sizes, together)
    for held in (48, 64, 100, 1000, 4088, 4096):
        prompt = [*P[:held], *Q[:1000]]
        for row, size in enumerate(sizes):
            unit = max(size, BLOCK)
            assert credit(directory, prompt, row) == held // unit * unit, (held, size)
    assert not any(directory.unmatchable(row) for row in range(len(sizes)))


@pytest.mark.parametrize("size", [1, 4, 8, 16, 64])
def test_blocks_of_any_size_go_as_the_engine_takes_them(size: int) -> None:
    """The last block first, as prefix caches evict."""
    directory = sized([size], 8)
    unit, count = max(size, BLOCK), len(P) // size
    for left in (count - 1, count - 2, count // 2, 1, 0):
        directory.apply(0, batch(removed(*range(count, left, -1))), 2.0)
        directory.apply(0, batch(removed(*range(count, count + 9))), 2.0)  # not held: changes nothing
        assert credit(directory, P) == left * size // unit * unit
    assert directory.stats().engine_hashes == 0
    directory.apply(0, batch(*blocks_of_size(P, size, 8)), 3.0)
    assert credit(directory, P) == 4096


def test_small_blocks_branch_anywhere() -> None:
    directory = sized([1], 8)
    keys = list(range(9001, 9091))
    turn = Stored(hashes=keys, parent=1000, tokens=array("I", Q[:90]), block_tokens=1, tier=Tier.HBM)
    directory.apply(0, batch(turn), 2.0)
    assert credit(directory, [*P[:1000], *Q[:90]]) == 1088  # 68 whole blocks of 1090 tokens
    assert credit(directory, P) == 4096
    orphan = Stored(hashes=[1], parent=77_777, tokens=array("I", [5]), block_tokens=1, tier=Tier.HBM)
    assert directory.apply(0, batch(orphan), 3.0).orphans == 1


def test_an_engine_that_restarts_with_another_block_size_is_credited_by_the_new_one() -> None:
    directory = sized([64, 16], 8)
    directory.clear(0)
    directory.apply(0, batch(*blocks_of_size(P, 32, 8)), 2.0)
    assert [credit(directory, [*P[:held], *Q], 0) for held in (48, 64, 100, 4088)] == [32, 64, 96, 4064]


@pytest.mark.parametrize("news", [blocks_of_size(P, 24, 8), [Stored([1], None, array("I"), 16, Tier.HBM, bigram=True)]])
def test_events_that_apply_and_can_never_match_are_said_to_be_so(news: list[Stored]) -> None:
    directory = Directory(BLOCK, 1)
    directory.add_source(0, MODEL)
    assert not directory.unmatchable(0)
    directory.put(0, batch(*news), 1.0)
    assert directory.unmatchable(0)


# Adapters


def test_base_and_every_adapter_are_worlds_of_their_own() -> None:
    directory = Directory(BLOCK, 3)
    for row in range(3):
        directory.add_source(row, MODEL)
    by_name = stored_map(P, 10001, lora_id=7, lora_name="ad-1", extra_keys=[["ad-1"]] * 256)
    directory.apply(0, decode(payload(by_name)), 1.0)
    directory.apply(1, decode(payload(stored_map(P, 10001))), 1.0)
    directory.apply(2, decode(payload(stored_map(P, 10001, lora_id=9))), 1.0)
    held = {
        adapter: directory.match(chain_of(P, adapter=adapter)).hbm_blocks.tolist() for adapter in ("ad-1", "", "ad-2")
    }
    assert held == {"ad-1": [256, 0, 0], "": [0, 256, 0], "ad-2": [0, 0, 0]}


def test_an_adapter_loaded_anew_loses_its_credit_and_nothing_else_does() -> None:
    directory = Directory(BLOCK, 2)
    for row in (0, 1):
        directory.add_source(row, MODEL)
        directory.put(row, batch(stored(P, 1), stored(P, 1001, adapter="ad-1"), stored(P, 2001, adapter="ad-2")), 1.0)
        directory.put(row, batch(named([1001, 1002], tier=Tier.HOST)), 1.0)
    directory.drop_adapter(0, "ad-1")
    directory.drop_adapter(0, "never seen")
    held = {
        adapter: directory.match(chain_of(P, adapter=adapter)).hbm_blocks.tolist() for adapter in ("ad-1", "ad-2", "")
    }
    assert held == {"ad-1": [0, 256], "ad-2": [256, 256], "": [256, 256]}
    assert directory.match(chain_of(P, adapter="ad-1")).host_blocks.tolist() == [0, 2]
    directory.apply(0, batch(stored(P, 3001, adapter="ad-1")), 2.0)
    assert directory.match(chain_of(P, adapter="ad-1")).hbm_blocks.tolist() == [256, 256]


@pytest.mark.parametrize("few", [0, 1 << 16], ids=["tables", "dictionaries"])
@pytest.mark.parametrize("repeated", [False, True])
def test_a_host_copy_told_by_hash_after_hbm_dropped_the_block_goes_with_its_adapter(
    few: int, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_FEW", few)
    directory = Directory(BLOCK, 1)
    directory.add_source(0, MODEL)
    chains = {adapter: chain_of(P[:64], adapter=adapter) for adapter in ("", "ad-1", "ad-2")}
    for first, adapter in ((1, ""), (101, "ad-1"), (201, "ad-2")):
        for _ in range(1 + repeated):
            directory.put(0, batch(stored(P[:64], first, adapter=adapter or None)), 1.0)
    keys = [key for first in (1, 101, 201) for key in range(first, first + 4)]
    directory.put(0, batch(removed(*keys * (1 + repeated)), named(keys, tier=Tier.HOST)), 2.0)
    assert [directory.match(chain).hbm_blocks.tolist() for chain in chains.values()] == [[0], [0], [0]]
    assert [directory.match(chain).host_blocks.tolist() for chain in chains.values()] == [[4], [4], [4]]
    directory.drop_adapter(0, "ad-1")
    assert [directory.match(chain).host_blocks.tolist() for chain in chains.values()] == [[4], [0], [4]]


def test_a_host_copy_with_tokens_that_names_no_adapter_goes_with_that_of_its_parent() -> None:
    directory = Directory(BLOCK, 1)
    directory.add_source(0, MODEL)
    tail = stored(P[48:64], 4, parent=3, tier=Tier.HOST)
    directory.put(0, batch(stored(P[:48], 1, adapter="ad-1"), removed(1, 2, 3)), 1.0)
    directory.put(0, batch(named([1, 2, 3], tier=Tier.HOST), tail), 2.0)
    chain = chain_of(P[:64], adapter="ad-1")
    assert directory.match(chain).host_blocks.tolist() == [4]
    directory.drop_adapter(0, "ad-1")
    assert [directory.holders(block) for block in chain] == [{}] * 4


def test_pages_of_an_adapter_that_is_gone_make_up_no_block_and_those_of_others_do() -> None:
    directory = Directory(BLOCK, 1)
    directory.add_source(0, MODEL)

    def pages(first: int, last: int, adapter: str | None, *, salt: int) -> Stored:
        hashes = [salt + page for page in range(first, last)]
        tokens = array("I", P[8 * (first - 1) : 8 * (last - 1)])
        parent = salt + first - 1 if first > 1 else None
        return Stored(hashes, parent, tokens, BLOCK // 2, Tier.HBM, adapter=adapter)

    for adapter, salt in (("ad-1", 100), (None, 200)):
        directory.put(0, batch(pages(1, 8, adapter, salt=salt)), 1.0)  # three blocks and a half
    directory.drop_adapter(0, "ad-1")
    for adapter, salt in (("ad-1", 100), (None, 200)):
        directory.put(0, batch(pages(8, 9, adapter, salt=salt)), 2.0)
    assert [directory.holders(block) for block in chain_of(P[:64], adapter="ad-1")] == [{}] * 4
    assert directory.match(chain_of(P[:64])).hbm_blocks.tolist() == [4]
    directory.put(0, batch(removed(204)), 3.0)
    assert directory.match(chain_of(P[:64])).hbm_blocks.tolist() == [1]


def test_names_of_adapters_without_end_are_still_dropped_by_name_or_together() -> None:
    directory = Directory(BLOCK, 1)
    directory.add_source(0, MODEL)
    for number in range(400):
        directory.put(0, batch(stored(P[:16], 1 + number, adapter=f"ad-{number}")), 1.0)
    directory.drop_adapter(0, "ad-3")
    directory.drop_adapter(0, "ad-399")
    left = {n for n in range(400) if directory.match(chain_of(P[:16], adapter=f"ad-{n}")).hbm_blocks[0]}
    assert left.isdisjoint({3, 399})
    assert set(range(250)) - {3} <= left


# Growth

CHAIN_BLOCKS = 128


def as_is(chains: deque[list[int]], chance: random.Random) -> list[int]:
    del chance
    return chains.popleft()


def children_first(chains: deque[list[int]], chance: random.Random) -> list[int]:
    del chance
    return chains.popleft()[::-1]


def shuffled(chains: deque[list[int]], chance: random.Random) -> list[int]:
    gone = chains.popleft()
    chance.shuffle(gone)
    return gone


def some_never(chains: deque[list[int]], chance: random.Random) -> list[int]:
    return [key for key in chains.popleft() if chance.random() >= 0.01]


def some_unknown(chains: deque[list[int]], chance: random.Random) -> list[int]:
    return [chance.getrandbits(63) if chance.random() < 0.01 else key for key in chains.popleft()]


@pytest.mark.parametrize("few", [0, 1 << 16], ids=["tables", "dictionaries"])
@pytest.mark.parametrize("order", [as_is, children_first, shuffled, some_never, some_unknown])
def test_memory_follows_the_blocks_that_live(
    order: Callable[[deque[list[int]], random.Random], list[int]], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_FEW", few)
    directory, chance, ids = Directory(BLOCK, 2, memory_limit=64), random.Random(3), np.random.default_rng(3)
    directory.add_source(0, MODEL)
    chains: deque[list[int]] = deque()
    left, sizes = 0, []
    for number in range(150):
        keys = ids.integers(1, 2**63, CHAIN_BLOCKS, dtype=np.uint64).tolist()
        tokens = array("I", ids.integers(0, 2**17, CHAIN_BLOCKS * BLOCK, dtype=np.uint32).tobytes())
        directory.put(0, Batch(events=[Stored(keys, None, tokens, BLOCK, Tier.HBM)]), float(number))
        chains.append(keys)
        if len(chains) > 24:
            gone = order(chains, chance)
            left += CHAIN_BLOCKS - (len(gone) if order is not some_unknown else CHAIN_BLOCKS)
            directory.put(0, Batch(events=[Removed(gone, Tier.HBM)]), float(number))
            sizes.append(directory.stats().index_bytes)
    stats = directory.stats()
    if order is some_unknown:
        left = stats.totals.unheld  # for each removal of an unknown hash, one known was never removed
    assert left > 0 or order in (as_is, children_first, shuffled)
    assert stats.engine_hashes == stats.blocks[Tier.HBM] == 24 * CHAIN_BLOCKS + left
    assert sizes[-1] < 1.2 * sizes[0] + 300 * left
    directory.drop_source(0)
    stats = directory.stats()
    assert (stats.engine_hashes, stats.blocks[Tier.HBM], stats.remembered) == (0, 0, 0)


def test_replicas_that_come_and_go_leave_nothing() -> None:
    directory = Directory(BLOCK, 8)
    sizes = []
    for cycle in range(200):
        row = cycle % 8
        directory.add_source(row, f"model-{cycle % 5}")
        directory.put(row, batch(stored(P[:640], 1), named([1], tier=Tier.HOST), removed(2)), 1.0)
        directory.expect(row, chain_of(P[:640]), 1.0)
        directory.reused(row, chain_of(P[:640]), 2, 1.0)
        directory.drop_source(row)
        stats = directory.stats()
        assert (stats.engine_hashes, sum(stats.blocks.values()), stats.remembered, stats.expected) == (0, 0, 0, 0)
        sizes.append(stats.index_bytes)
    assert sizes[-1] == sizes[8]
