"""Plain events must say what the router's decoder reads from the bytes of the same events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.tiers import Tier
from loadtest.replay.block_events import plain_batch, plain_store_batch, wire_batch, wire_store_batches
from router.directory import Directory
from router.signals import wire
from sim_backends.cache_events import Cleared, EventBatch, OffDevice, Removed, Said, Stored
from sim_backends.event_wire import MasterEncoder
from sim_backends.store import StoreChange

MODEL = "m"


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


EVENTS: list[Said] = [
    Stored([digest(1), digest(2)], None, [70, 71]),
    Stored([digest(3)], digest(2), [72]),
    Removed(digest(3)),
    Removed(digest(2)),
    Stored([digest(2)], digest(1), [71]),
]


def a_batch(events: Sequence[Said]) -> EventBatch:
    return EventBatch(1.0, list(events))


CHANGES = [
    StoreChange(1.0, digest(1), stored=True),
    StoreChange(1.0, digest(2), stored=True),
    StoreChange(1.0, digest(1), stored=False),
    StoreChange(1.0, digest(3), stored=True),
]


def what_it_holds(batches: list[wire.Batch], store: list[wire.Batch]) -> list[dict[Tier, tuple[int, ...]]]:
    """Holders of every block of a three block prompt once the batches are applied."""
    directory = Directory(1, 1)
    directory.add_source(0, MODEL)
    for batch in batches:
        directory.apply(0, batch, 1.0)
    for batch in store:
        directory.apply_store(batch, 1.0)
    return [directory.holders(block) for block in sorted(directory.blocks())]


def test_a_stored_event_is_the_same_either_way() -> None:
    plain, decoded = plain_batch([a_batch(EVENTS[:1])]).events[0], wire_batch(a_batch(EVENTS[:1]), 1).events[0]
    assert isinstance(plain, wire.Stored)
    assert isinstance(decoded, wire.Stored)
    assert msgspec.structs.replace(decoded, kind=None, extras=None) == plain


def test_removals_that_follow_one_another_are_one_event_in_their_place() -> None:
    events = plain_batch([a_batch(EVENTS)]).events
    assert [type(event).__name__ for event in events] == ["Stored", "Removed", "Stored"]
    removed = events[1]
    assert isinstance(removed, wire.Removed)
    assert removed.hashes == [3, 2]


def test_a_store_that_goes_on_where_the_last_one_ended_is_one_with_it_whatever_step_it_is_of() -> None:
    steps = [a_batch([event]) for event in EVENTS[:2]]
    assert plain_batch(steps) == plain_batch([a_batch(EVENTS[:2])])
    (stored,) = plain_batch(steps).events
    assert isinstance(stored, wire.Stored)
    assert (stored.hashes, stored.parent, stored.tokens.tolist()) == ([1, 2, 3], None, [70, 71, 72])
    again = [
        *EVENTS[:1],
        Removed(digest(2)),
        Stored([digest(2)], digest(1), [71]),
        Stored([digest(9)], digest(1), [79]),
    ]
    assert [type(event).__name__ for event in plain_batch([a_batch(again)]).events] == [
        "Stored",
        "Removed",
        "Stored",
        "Stored",
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=20), st.integers(1, 20))
def test_steps_told_together_leave_what_the_bytes_of_each_would(moves: list[tuple[int, int, bool]], split: int) -> None:
    """Sequences that share no block; stores go on from what is held, removals take what is held last."""
    held: dict[int, int] = dict.fromkeys(range(4), 0)
    steps: list[EventBatch] = []
    for sequence, count, stores in moves:
        first = 100 * sequence + held[sequence]
        if stores:
            numbers = range(first, first + count)
            parent = digest(first - 1) if held[sequence] else None
            steps.append(a_batch([Stored([digest(n) for n in numbers], parent, list(numbers))]))
            held[sequence] += count
        elif held[sequence]:
            steps.append(a_batch([Removed(digest(first - 1))]))
            held[sequence] -= 1
    together = [plain_batch(part) for part in (steps[:split], steps[split:]) if part]
    assert what_it_holds(together, []) == what_it_holds([wire_batch(step, 1) for step in steps], [])


def test_what_came_to_the_store_and_what_left_it_are_told_together_unless_a_block_did_both() -> None:
    calm = [CHANGES[0], StoreChange(1.0, digest(8), stored=False), CHANGES[1]]
    came, left = plain_store_batch(calm, MODEL).events
    assert isinstance(came, wire.Stored)
    assert isinstance(left, wire.Removed)
    assert (came.hashes, left.hashes) == ([1, 2], [8])


def test_a_cleared_cache_is_told_after_what_came_before() -> None:
    events = plain_batch([a_batch([*EVENTS[:3], Cleared()])]).events
    assert isinstance(events[-1], wire.Cleared)
    assert what_it_holds([plain_batch([a_batch([*EVENTS, Cleared()])])], []) == []


def test_store_changes_keep_their_order() -> None:
    events = plain_store_batch(CHANGES, MODEL).events
    assert [(type(event).__name__, event.hashes) for event in events if not isinstance(event, wire.Cleared)] == [
        ("Stored", [1, 2]),
        ("Removed", [1]),
        ("Stored", [3]),
    ]


def test_the_directory_believes_the_same_either_way() -> None:
    encoder = MasterEncoder(model=MODEL, block_tokens=1, backend_id="store")
    plain = what_it_holds([plain_batch([a_batch(EVENTS)])], [plain_store_batch(CHANGES, MODEL)])
    encoded = what_it_holds([wire_batch(a_batch(EVENTS), 1)], wire_store_batches(CHANGES, encoder))
    assert plain == encoded
    assert sorted(map(len, plain)) == [1, 1, 2]  # one block in memory, one in the store, one in both


def either_way(batch: EventBatch) -> list[wire.Batch]:
    return [plain_batch([batch]), wire_batch(batch, 1)]


def off(number: int, tier: Literal["host", "disk"], *, stored: bool = True) -> OffDevice:
    return OffDevice(digest(number), tier, stored)


def singly(batch: wire.Batch) -> list[tuple[str, int, Tier]]:
    """What happened to which block where, a block at a time."""
    return [
        (type(event).__name__, key, event.tier)
        for event in batch.events
        if not isinstance(event, wire.Cleared)
        for key in event.hashes
        if isinstance(key, int)
    ]


@pytest.mark.parametrize("way", [0, 1], ids=["plain", "wire"])
def test_a_block_that_moves_down_is_believed_where_it_is_all_the_time(way: int) -> None:
    """From memory to the host and on to the disk, each new copy told before the old one is gone."""
    moves: list[list[Said]] = [EVENTS[:1], [off(1, "host"), Removed(digest(1))]]
    moves.append([off(1, "disk"), off(1, "host", stored=False)])
    directory = Directory(1, 1)
    directory.add_source(0, MODEL)
    seen = []
    for events in moves:
        directory.apply(0, either_way(a_batch(events))[way], 1.0)
        chain = sorted(directory.blocks())
        seen.append(sorted(tier.value for block in chain for tier in directory.holders(block)))
    hbm, host, disk = Tier.HBM.value, Tier.HOST.value, Tier.DISK.value
    assert seen == [[hbm, hbm], sorted([hbm, host]), sorted([hbm, disk])]


def test_copies_off_the_device_are_told_as_the_wire_tells_them() -> None:
    changes: list[Said] = [*EVENTS, off(1, "host"), Removed(digest(1)), off(2, "disk"), off(1, "host", stored=False)]
    changes += [off(2, "disk", stored=False), Removed(digest(2))]
    plain, decoded = map(singly, either_way(a_batch(changes)))
    assert plain == decoded
    assert ("Stored", 2, Tier.DISK) in plain
    assert ("Removed", 1, Tier.HOST) in plain
    assert ("Removed", 2, Tier.DISK) not in plain, "disks say no removals"
