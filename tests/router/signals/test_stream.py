from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.directory import Directory
from router.signals.sequence import State, Verdict
from router.signals.stream import Stream
from router.signals.wire import Batch
from tests.router.signals.events import (
    BLOCK,
    CLEAR,
    MODEL,
    UNREADABLE_REMOVALS,
    P,
    Q,
    batch,
    chain_of,
    payload,
    stored,
    stored_map,
    vector,
)


class Kept:
    """A stream whose effect is the list of batch times since it was last cleared."""

    def __init__(self, first_seq: int = 0) -> None:
        self.held: list[float] = []
        self.now_s = 0.0
        self.stream = Stream("a", self.apply, self.held.clear, first_seq=first_seq, clock=lambda: self.now_s)

    def apply(self, batch: Batch) -> None:
        if batch.ts_s == 13.0:
            raise RuntimeError("poison")
        self.held.append(batch.ts_s)

    def hears(self, seq: int, ts_s: float | None = None, *, clears: bool = False) -> Verdict:
        events = [CLEAR] if clears else [stored(P[:16], 1)]
        return self.stream.heard(seq, Batch(ts_s=float(seq) if ts_s is None else ts_s, events=list(events)))


def test_batches_in_order_take_effect_and_date_the_source() -> None:
    kept = Kept()
    kept.now_s = 5.0
    assert [kept.hears(seq) for seq in range(3)] == [Verdict.APPLY] * 3
    assert (kept.held, kept.stream.sequence.last_event_s, kept.stream.counts.batches) == ([0.0, 1.0, 2.0], 5.0, 3)


def test_a_gap_that_nothing_fills_drops_the_view_until_the_source_clears_itself() -> None:
    kept = Kept()
    for seq in (0, 1, 5, 6):
        kept.hears(seq)
    assert (kept.held, kept.stream.sequence.state) == ([5.0, 6.0], State.DEGRADED)
    assert (kept.stream.sequence.gap_batches, kept.stream.counts.unreplayable) == (3, 1)
    kept.hears(7, clears=True)
    assert kept.stream.sequence.state is State.LIVE


def test_numbers_that_start_again_are_a_new_process() -> None:
    kept = Kept()
    for seq in range(4):
        kept.hears(seq)
    kept.hears(0, 10.0)
    assert (kept.held, kept.stream.sequence.restarts, kept.stream.sequence.state) == ([10.0], 1, State.LIVE)


def test_a_new_process_heard_late_is_degraded() -> None:
    kept = Kept()
    for seq in range(4):
        kept.hears(seq)
    kept.hears(2, 10.0)
    assert (kept.held, kept.stream.sequence.state) == ([10.0], State.DEGRADED)


def test_a_batch_that_cannot_be_read_or_applied_drops_the_view_and_the_next_ones_count() -> None:
    kept = Kept()
    kept.hears(0)
    assert kept.stream.decoded(b"\xc1") is None
    kept.stream.heard(1, None)
    assert (kept.held, kept.stream.sequence.state) == ([], State.DEGRADED)
    kept.hears(2)
    kept.hears(3, 13.0)
    assert (kept.held, kept.stream.counts.errors) == ([], 1)
    kept.hears(4, 14.0)
    assert (kept.held, kept.stream.sequence.last) == ([14.0], 4)


def test_what_the_decoder_passes_over_is_counted() -> None:
    kept = Kept()
    strange = stored_map(P[:16], 1, medium="TAPE"), ["BlockRemoved", 5], ["AllBlocksCleared", "new"]
    kept.stream.decoded(payload(*strange))
    counts = kept.stream.counts
    assert (counts.unknown_events, counts.bad_events, counts.extra_fields) == (1, 1, 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40))
def test_whatever_the_numbers_the_view_is_never_more_than_one_process_said_without_a_gap(
    heard: list[tuple[int, bool]],
) -> None:
    """What is held after any sequence of numbers is a run of batches that followed one another."""
    kept = Kept()
    numbers: list[int] = []
    for at, (seq, clears) in enumerate(heard):
        numbers.append(seq)
        kept.hears(seq, 100.0 + at, clears=clears)
    held = [numbers[int(ts_s - 100.0)] for ts_s in kept.held]
    assert held == [held[0] + place for place in range(len(held))]
    if kept.stream.sequence.state is State.LIVE:
        cleared = any(heard[int(ts_s - 100.0)][1] for ts_s in kept.held)
        assert held[0] == 0 or cleared, "a whole view starts at the first batch, or at a clear"


def test_a_source_that_was_never_heard_is_not_cleared_for_nothing() -> None:
    cleared: list[int] = []
    stream = Stream("a", lambda batch: None, lambda: cleared.append(1), first_seq=0, clock=lambda: 0.0)
    stream.heard(900, batch(stored(P[:16], 1)))
    assert (cleared, stream.sequence.state) == ([], State.DEGRADED)


class Believing:
    """A stream in front of a directory of one row."""

    def __init__(self) -> None:
        self.directory = Directory(BLOCK, 1)
        self.directory.add_source(0, MODEL)
        clear = partial(self.directory.clear, 0)
        self.stream = Stream("a", partial(self.directory.put, 0, now_s=1.0), clear, first_seq=0, clock=lambda: 1.0)
        self._next = 0

    def hears(self, *events: object) -> None:
        self.stream.heard(self._next, self.stream.decoded(payload(*events, ts_s=float(self._next + 1))))
        self._next += 1

    def credit(self, tokens: list[int]) -> int:
        return int(self.directory.match(chain_of(tokens)).hbm_blocks[0])

    @property
    def state(self) -> State:
        return self.stream.sequence.state


@pytest.mark.parametrize("event", UNREADABLE_REMOVALS, ids=str)
def test_after_a_removal_that_cannot_be_read_nothing_from_before_it_is_believed(event: object) -> None:
    kept = Believing()
    kept.hears(stored_map(P, 1))
    kept.hears(stored_map(Q[:32], 9001), event, stored_map(Q[32:64], 9101))
    assert (kept.credit(P), kept.credit(Q[:32]), kept.credit(Q[32:64]), kept.state) == (0, 0, 2, State.DEGRADED)
    assert kept.stream.counts.unread_removals == 1
    kept.hears({"type": "AllBlocksCleared"}, stored_map(P, 1))
    assert (kept.credit(P), kept.state) == (256, State.LIVE)


def test_a_clear_before_an_unreadable_removal_does_not_make_the_view_whole() -> None:
    kept = Believing()
    kept.hears(["AllBlocksCleared"], stored_map(P, 1), ["BlockRemoved", ["?"], "GPU"])
    assert (kept.credit(P), kept.state) == (0, State.DEGRADED)


@pytest.mark.parametrize("medium", ["CXL", "tape", "x" * 65])
def test_a_removal_from_a_medium_nobody_knows_costs_nothing(medium: str) -> None:
    kept = Believing()
    kept.hears(stored_map(P, 1))
    kept.hears(["BlockRemoved", [1], medium], {"type": "BlockRemoved", "block_hashes": [2], "medium": medium})
    kept.hears({"type": "BlockRemoved", "block_hashes": [3], "medium": medium, "group_idx": 0})
    counts = kept.stream.counts
    assert (kept.credit(P), kept.state, counts.unread_removals, counts.unknown_events) == (256, State.LIVE, 0, 3)
    kept.hears(["BlockRemoved", [1], "GPU"])
    assert kept.credit(P) == 0


def test_token_pairs_are_counted_where_an_operator_sees_them() -> None:
    kept = Believing()
    assert kept.stream.decoded(vector("kv_events_sglang_0.5.23_map_bigram")) is not None
    assert kept.stream.counts.pair_events == 1
