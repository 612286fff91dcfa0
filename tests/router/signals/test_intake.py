from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.directory import Directory
from router.signals import intake as module
from router.signals.intake import (
    FIRST_SEQ,
    MAX_BATCHES,
    MOST_WAITING,
    SLICE_BLOCKS,
    SLICE_BYTES,
    BadPush,
    Intake,
    PushResult,
    TooManyPosts,
    parse_push,
    push_in,
    read_push,
)
from router.signals.sequence import State
from router.signals.stream import Stream
from router.signals.wire import Removed, Stored
from tests.router.signals.events import BLOCK, MODEL, P, Q, chain_of, stored_map


def body(*batches: dict[str, Any], source: str = "r1", incarnation: int = 1) -> bytes:
    return json.dumps({"source": source, "incarnation": incarnation, "batches": list(batches)}).encode()


def stores(seq: int, tokens: list[int], first_hash: int, parent: int | None = None) -> dict[str, Any]:
    return {"seq": seq, "ts": 1.0, "events": [stored_map(tokens, first_hash, parent)]}


CLEARS = {"events": [{"type": "AllBlocksCleared"}]}


class Receiver:
    """An intake of one publisher `r1` behind a directory of one row."""

    def __init__(self) -> None:
        self.directory = Directory(BLOCK, 1)
        self.directory.add_source(0, MODEL, one_copy=True)
        self.applied: list[float] = []
        self.intake = Intake(self.stream_of)

    def stream_of(self, name: str) -> Stream | None:
        if name != "r1":
            return None
        return Stream(
            name,
            lambda batch: self.directory.apply(0, batch, 1.0),
            lambda: self.directory.clear(0),
            first_seq=FIRST_SEQ,
            clock=lambda: 1.0,
        )

    def posts(self, *batches: dict[str, Any], incarnation: int = 1) -> PushResult:
        """Take in one post that nothing else overlaps."""
        result = asyncio.run(
            self.intake.accept(parse_push(body(*batches, incarnation=incarnation), "application/json"))
        )
        assert result is not None
        return result

    async def takes(self, posted: bytes) -> PushResult:
        """Take in a post among others."""
        async with self.intake.turn():
            result = await self.intake.accept(await read_push(posted, "application/json"))
        assert result is not None
        return result

    def credit(self, tokens: list[int]) -> int:
        return int(self.directory.match(chain_of(tokens)).hbm_blocks[0])


def test_a_push_takes_effect_and_the_same_push_again_does_not() -> None:
    receiver = Receiver()
    batches = stores(1, P[:512], 1), stores(2, P[512:1024], 33, 32)
    first = receiver.posts(*batches)
    assert (first.applied, first.duplicates, first.state, receiver.credit(P)) == (2, 0, State.LIVE, 64)
    again = receiver.posts(*batches, {"seq": 3, "events": [["BlockRemoved", [1], "GPU"]]})
    assert (again.applied, again.duplicates, again.gaps, receiver.credit(P)) == (1, 2, 0, 0)


def test_a_jump_in_the_numbers_drops_the_view_and_says_so_until_a_clear() -> None:
    receiver = Receiver()
    receiver.posts(stores(1, P[:512], 1))
    result = receiver.posts(stores(5, Q[:512], 9001))
    assert (result.gaps, result.state, receiver.credit(P), receiver.credit(Q)) == (1, State.DEGRADED, 0, 32)
    assert receiver.posts({"seq": 6, **CLEARS}).state is State.LIVE


def test_a_publisher_that_starts_anew_is_emptied_and_its_earlier_life_is_stale() -> None:
    receiver = Receiver()
    receiver.posts(stores(1, P[:512], 1), stores(2, P[512:1024], 33, 32))
    assert receiver.posts(stores(1, Q[:512], 9001), incarnation=2).applied == 1
    assert (receiver.credit(P), receiver.credit(Q)) == (0, 32)
    late = receiver.posts(stores(3, P[:512], 1), incarnation=1)
    assert (late.applied, late.stale, receiver.credit(P)) == (0, 1, 0)


def test_an_unknown_source_is_refused_and_kept_nowhere() -> None:
    receiver = Receiver()
    assert asyncio.run(receiver.intake.accept(parse_push(body(source="who"), "application/json"))) is None
    assert receiver.intake.streams == {}


def test_hashes_are_integers_of_either_sign_or_hexadecimal_text() -> None:
    event = stored_map(P[:32], 1, block_hashes=[-1, "0x" + "ab" * 24 + "00" * 7 + "05"], parent_block_hash="07")
    ((_, batch),) = parse_push(
        body({"seq": 1, "events": [event, ["BlockRemoved", ["ff"], "cpu"]]}), "application/json"
    ).batches
    first, second = batch.events
    assert isinstance(first, Stored)
    assert isinstance(second, Removed)
    assert (first.hashes, first.parent, second.hashes, second.tier.value) == ([2**64 - 1, 5], 7, [255], "host")


def test_msgpack_says_the_same_as_json() -> None:
    plain = {"source": "r1", "incarnation": 1, "batches": [stores(1, P[:512], 1)]}
    packed = parse_push(msgspec.msgpack.encode(plain), "application/msgpack")
    assert packed == parse_push(json.dumps(plain).encode(), "application/json")


def test_one_bad_event_never_costs_its_push() -> None:
    events = [stored_map(P[:16], 1), {"type": "BlockRemoved", "block_hashes": ["zz"]}, 7, ["BlockRemoved", [9], "GPU"]]
    ((_, batch),) = parse_push(body({"seq": 1, "events": events}), "application/json").batches
    assert (batch.read, batch.bad) == (2, 2)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not a push"),
        (b"[]", "not a push"),
        (b"\xff\xfe", "not a push"),
        (b"[" * 100_000, "not a push"),
        (b'{"source":"r1","batches":[]}', "incarnation"),
        (body({"seq": 0, "events": []}), "numbered from 1"),
        (body({"seq": -1, "events": []}), "not a push"),
        (body({"seq": 1}), "events"),
        (body(*[{"seq": 1, "events": []}] * (MAX_BATCHES + 1)), "at most"),
    ],
)
def test_a_body_that_is_no_push_is_refused_whole(raw: bytes, reason: str) -> None:
    with pytest.raises(BadPush, match=reason):
        parse_push(raw, "application/json")


@given(st.lists(st.lists(st.integers(1, 8), max_size=6), max_size=6))
def test_any_order_of_posts_leaves_what_the_rising_numbers_alone_would(posts: list[list[int]]) -> None:
    """Repeats and late batches change nothing: only each number above all before it counts."""
    every, rising = Receiver(), Receiver()
    highest = 0
    for numbers in posts:
        every.posts(*(stores(number, P[:512], 1) if number % 2 else {"seq": number, **CLEARS} for number in numbers))
        for number in numbers:
            if number > highest:
                highest = number
                rising.posts(stores(number, P[:512], 1) if number % 2 else {"seq": number, **CLEARS})
    assert every.credit(P) == rising.credit(P)
    assert every.intake.streams.keys() >= rising.intake.streams.keys()


# Long posts, and several at once


def a_history(events: int) -> list[dict[str, Any]]:
    """Batches of one event each that store and remove blocks in turn, and end with 32 blocks of `P` stored."""
    turns = [stored_map(P[:512], 1) if turn % 2 == 0 else ["BlockRemoved", [32], "GPU"] for turn in range(events)]
    return [{"seq": at + 1, "events": [event]} for at, event in enumerate(turns)]


async def test_others_get_the_loop_while_a_long_post_is_read_and_between_its_batches() -> None:
    receiver, posted = Receiver(), body(*a_history(301))
    slices = sum(1 for _ in push_in(posted, "application/json"))
    assert slices >= len(posted) // SLICE_BYTES
    task = asyncio.ensure_future(receiver.takes(posted))
    seen = set()
    while not task.done():
        seen.add(receiver.credit(P))
        await asyncio.sleep(0)
    assert seen == {0, 31, 32}, "both kinds of batch were seen as the last one applied"
    assert (task.result().applied, receiver.credit(P)) == (301, 32)


async def test_one_long_batch_is_read_and_takes_effect_in_slices_too() -> None:
    events = [event for batch in a_history(301) for event in batch["events"]]
    receiver, posted = Receiver(), body({"seq": 1, "events": events})
    assert sum(1 for _ in push_in(posted, "application/json")) >= len(posted) // (2 * SLICE_BYTES)
    task = asyncio.ensure_future(receiver.takes(posted))
    turns_with_some = 0
    while not task.done():
        turns_with_some += receiver.credit(P) > 0
        await asyncio.sleep(0)
    assert turns_with_some >= 301 * 32 // 2 // SLICE_BLOCKS
    assert (task.result().applied, receiver.credit(P)) == (1, 32)
    assert receiver.intake.streams["r1"].stream.counts.batches == 1


async def test_what_is_lost_in_the_middle_of_a_long_batch_stays_lost() -> None:
    """The first batch of a process makes a history whole as it begins, not as it ends."""
    events: list[Any] = [event for batch in a_history(101) for event in batch["events"]]
    events[50] = {"type": "BlockRemoved", "block_hashes": ["zz"], "medium": "GPU"}
    receiver = Receiver()
    assert (await receiver.takes(body({"seq": 1, "events": events}))).state is State.DEGRADED
    receiver = Receiver()
    task = asyncio.ensure_future(receiver.takes(body({"seq": 1, "events": events[:50]})))
    while not receiver.credit(P):  # noqa: ASYNC110
        await asyncio.sleep(0)
    receiver.intake.streams["r1"].stream.lose_history()  # somebody noticed that the process started anew
    assert (await task).state is State.DEGRADED


async def test_a_post_given_up_in_the_middle_of_a_batch_can_be_sent_again() -> None:
    events = [event for batch in a_history(101) for event in batch["events"]]
    receiver, posted = Receiver(), body({"seq": 1, "events": events})
    task = asyncio.ensure_future(receiver.takes(posted))
    while not receiver.credit(P):  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await receiver.takes(posted)
    assert (again.applied, again.duplicates, again.state, receiver.credit(P)) == (1, 0, State.LIVE, 32)


@given(st.lists(st.integers(0, 6), max_size=30))
def test_a_batch_read_in_slices_says_what_it_says_in_one_piece(kinds: list[int]) -> None:
    forms: list[Any] = [
        stored_map(P[:512], 1),
        stored_map(P[512:1024], 33, 32),
        ["BlockRemoved", [5, 6], "GPU"],
        {"type": "AllBlocksCleared"},
        {"type": "BlockRemoved", "block_hashes": ["zz"], "medium": "GPU"},
        {"type": "Unheard"},
        stored_map(P[:16], 1, medium="TAPE"),
    ]
    posted = body({"seq": 1, "events": [forms[kind] for kind in kinds]})
    whole, sliced = Receiver(), Receiver()
    one = parse_push(posted, "application/json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_BYTES", 1)
        patch.setattr(module, "SLICE_BLOCKS", 1)
        other = parse_push(posted, "application/json")
        told = asyncio.run(sliced.intake.accept(other))
    ((_, batch),), ((_, pieces),) = one.batches, other.batches
    for count in ("read", "bad", "unknown", "pairs", "extra_fields", "rank", "ts_s"):
        assert getattr(pieces, count) == getattr(batch, count)
    assert asyncio.run(whole.intake.accept(one)) == told
    assert (whole.credit(P), whole.credit(P[:512])) == (sliced.credit(P), sliced.credit(P[:512]))


@pytest.mark.parametrize("long_ones", [1, 3])
async def test_overlapping_posts_of_one_source_take_effect_in_the_order_they_came(long_ones: int) -> None:
    """A short post that comes while a long one is read would else be taken for a jump in the numbers."""
    receiver, history = Receiver(), a_history(401)
    cuts = [at * 400 // long_ones for at in range(long_ones + 1)]
    posts = [body(*history[start:end]) for start, end in pairwise(cuts)] + [body(history[400])]
    results = await asyncio.gather(*(receiver.takes(posted) for posted in posts))
    assert [result.gaps for result in results] == [0] * len(posts)
    assert sum(result.applied for result in results) == 401
    assert (results[-1].state, receiver.credit(P)) == (State.LIVE, 32)


async def test_the_same_post_sent_again_before_it_was_answered_is_applied_once() -> None:
    receiver, posted = Receiver(), body(*a_history(51))
    first, again = await asyncio.gather(receiver.takes(posted), receiver.takes(posted))
    assert (first.applied, again.applied, again.duplicates, receiver.credit(P)) == (51, 0, 51, 32)


async def test_a_post_given_up_half_way_can_be_sent_again_and_nothing_is_missing() -> None:
    receiver, posted = Receiver(), body(*a_history(51))
    task = asyncio.ensure_future(receiver.takes(posted))
    while not receiver.credit(P):  # noqa: ASYNC110  half-way is no event
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await receiver.takes(posted)
    assert again.duplicates > 0
    assert (again.applied + again.duplicates, again.gaps, receiver.credit(P)) == (51, 0, 32)


async def test_a_post_that_cannot_be_read_holds_up_nobody_behind_it() -> None:
    receiver = Receiver()
    bad, good = await asyncio.gather(
        receiver.takes(b'{"source":"r1","incarnation":1,"batches":[{"seq":1,"events":[\xff]}]}'),
        receiver.takes(body(stores(1, P[:512], 1))),
        return_exceptions=True,
    )
    assert isinstance(bad, BadPush)
    assert isinstance(good, PushResult)
    assert (good.applied, receiver.credit(P)) == (1, 32)


async def test_more_posts_than_may_wait_are_turned_away_unread() -> None:
    receiver = Receiver()
    results = await asyncio.gather(
        *(receiver.takes(body(stores(at + 1, P[:512], 1))) for at in range(MOST_WAITING + 1)), return_exceptions=True
    )
    assert [type(result) for result in results] == [PushResult] * MOST_WAITING + [TooManyPosts]
    assert (await receiver.takes(body(stores(MOST_WAITING + 1, P[:512], 1)))).applied == 1
