"""A dispatcher and the directory it asks: requests in flight, contradicted copies, replicas without events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.first_token import Discipline
from router.actions import Cause, Ended, Send
from router.holdings import DirectoryHoldings
from router.other_tiers import OtherTiers
from router.signals.written_store import WrittenStore
from tests.router.dispatch_bench import booking_of, only_send
from tests.router.holdings_bench import CHAIN, MODEL, DirectoryBench, batch, chosen_of, named

# Conversations


def test_a_turn_that_comes_while_the_one_before_waits_is_booked_with_what_that_one_will_leave() -> None:
    bench = DirectoryBench("A100")
    ahead = bench.send_blocks(0.0, 200, chain=[])  # something else is in service
    before, after = bench.send_blocks(0.1, 200), bench.send_blocks(0.2, 240)
    assert (chosen_of(before).local_tokens, chosen_of(after).local_tokens) == (0, 3200)
    assert (chosen_of(before).path, chosen_of(after).path) == ("recompute", "local")
    assert booking_of(after).new_tokens == 40 * 16 + 1
    assert chosen_of(after).queue_s > chosen_of(before).queue_s
    for sent in (ahead, before, after):
        bench.answer(sent, None, at_s=5.0)


def test_turns_of_one_conversation_follow_each_other_before_any_event_came() -> None:
    bench = DirectoryBench("A100", "A100", "A100")
    rows = {bench.send_blocks(0.1 * turn, 100 + 10 * turn).row for turn in range(6)}
    assert len(rows) == 1


def test_a_request_in_flight_is_of_no_use_to_another_replica() -> None:
    bench = DirectoryBench("A100", "A100")
    first = bench.send_blocks(0.0, 200)
    bench.dispatcher.replica_down(first.row)
    other = bench.send_blocks(0.1, 240)
    assert other.row != first.row
    assert chosen_of(other).local_tokens == 0


def test_a_retry_expects_its_blocks_where_it_went_and_no_more_where_it_was() -> None:
    bench = DirectoryBench("A100", "A100")
    first = bench.send_blocks(0.0, 200)
    again = only_send(bench.dispatcher.failed(first, Cause.CONNECT, 0.1))
    expected = bench.directory.match(CHAIN).expected_blocks.tolist()
    assert (expected[again.row], expected[first.row]) == (200, 0)


@pytest.mark.parametrize("silent", ["not generated", "no chain"])
def test_a_request_that_leaves_nothing_is_not_expected_to(silent: str) -> None:
    bench = DirectoryBench("A100")
    if silent == "no chain":
        bench.send_blocks(0.0, 200, chain=[])
    else:
        bench.send_blocks(0.0, 200, generates=False)
    assert bench.expected == 0


# What an answer shows


def test_a_replica_that_reused_less_than_it_announced_loses_that_credit_for_a_while() -> None:
    bench = DirectoryBench("A100")
    bench.announce(0, 200, 0.0)
    sent = bench.send_blocks(10.0, 240)
    bench.answer(sent, 50, at_s=11.0)
    assert bench.hbm(12.0) == [50]
    assert bench.hbm(60.0) == [200]


@pytest.mark.parametrize("cached_blocks", [200, 240, None])
def test_as_much_reuse_as_was_believed_or_no_word_of_it_contradicts_nothing(cached_blocks: int | None) -> None:
    bench = DirectoryBench("A100")
    bench.announce(0, 200, 0.0)
    bench.answer(bench.send_blocks(10.0, 241), cached_blocks, at_s=11.0)
    assert bench.hbm() == [200]
    assert bench.directory.stats().doubted == 0


def test_what_was_only_expected_and_did_not_come_is_no_contradiction() -> None:
    """Two prompts that an engine took into one step share nothing, and then it has the blocks."""
    bench = DirectoryBench("A100")
    first, second = bench.send_blocks(0.0, 200), bench.send_blocks(0.1, 200)
    bench.announce(0, 200, 1.0)
    for sent in (first, second):
        bench.answer(sent, 0, at_s=1.0)
    assert bench.hbm() == [200]


def test_one_that_could_not_share_yet_does_not_end_what_is_expected_of_the_other() -> None:
    bench = DirectoryBench("A100")
    bench.send_blocks(0.0, 200)
    bench.answer(bench.send_blocks(0.1, 200), 0, at_s=1.0)
    assert bench.directory.match(CHAIN).expected_blocks.tolist() == [200]


def test_what_was_reused_is_young_again() -> None:
    bench = DirectoryBench("A100")
    bench.announce(0, 200, 0.0)
    bench.answer(bench.send_blocks(100.0, 200), 200, at_s=101.0, ended_at_s=110.0)
    assert bench.directory.match(CHAIN, 115.0).hbm_age_s.tolist() == [5.0]


def with_store(**changes: Any) -> DirectoryBench:
    """One replica that has 50 blocks, and a store that has 200."""
    bench = DirectoryBench("A100", network_bytes_per_s=25e9, **changes)
    bench.announce(0, 200, 0.0)
    bench.directory.apply_store(batch(named(list(range(1, 201)))), 1.0)
    bench.directory.clear(0)
    bench.announce(0, 50, 2.0)
    return bench


def test_a_fetch_that_brought_less_costs_the_store_its_credit_from_there_on() -> None:
    bench = with_store()
    sent = bench.send_blocks(10.0, 200)
    assert sent.path.value == "remote"
    bench.answer(sent, 80, at_s=10.2)
    match = bench.directory.match(CHAIN, 12.0)
    assert (match.store_blocks, match.hbm_blocks.tolist()) == (80, [50])


@pytest.mark.parametrize("discipline", [Discipline.BEST_EFFORT, Discipline.TIME_LIMITED])
def test_an_engine_that_starts_with_what_has_come_says_nothing_of_the_rest(discipline: Discipline) -> None:
    bench = with_store(discipline=discipline)
    bench.answer(bench.send_blocks(10.0, 200), 80, at_s=10.2)
    assert bench.directory.match(CHAIN, 12.0).store_blocks == 200


def test_a_prefix_that_broke_in_hbm_says_nothing_of_the_store() -> None:
    bench = with_store()
    bench.answer(bench.send_blocks(10.0, 200), 30, at_s=10.2)
    match = bench.directory.match(CHAIN, 12.0)
    assert (match.store_blocks, match.hbm_blocks.tolist()) == (200, [30])


def test_a_fetch_that_came_makes_the_stores_copies_young() -> None:
    bench = with_store()
    bench.answer(bench.send_blocks(10.0, 200), 200, at_s=10.1, ended_at_s=20.0)
    assert bench.directory.match(CHAIN, 26.0).store_age_s == 6.0


@pytest.mark.parametrize(("first_token_s", "left"), [(0.2, 200), (30.0, 50)])
def test_a_fetch_that_overran_costs_the_store_its_credit(first_token_s: float, left: int) -> None:
    bench = with_store()
    bench.answer(bench.send_blocks(10.0, 200), 200, at_s=10.0 + first_token_s)
    assert bench.directory.match(CHAIN, 41.0).store_blocks == left


def test_a_first_token_that_the_queue_made_late_is_no_overrun() -> None:
    bench = with_store()
    ahead = bench.send_blocks(10.0, 200, chain=[])
    late = bench.send_blocks(10.0, 200)
    assert late.path.value == "remote"
    bench.answer(ahead, None, at_s=40.0)
    bench.answer(late, 200, at_s=40.5)
    assert bench.directory.match(CHAIN, 42.0).store_blocks == 200


# Replicas without events


def test_a_replica_without_events_is_believed_to_have_what_was_computed_there_and_receipts_say_it_is_a_guess() -> None:
    bench = DirectoryBench("A100", publishes=[])
    bench.directory.add_routed(0, MODEL, 1000)
    first = bench.send_blocks(0.0, 200)
    assert bench.hbm() == [0]
    bench.dispatcher.first_token(first, 1.0)
    assert bench.hbm() == [200]
    bench.finish(first, 2.0)
    second = bench.send_blocks(10.0, 220)
    bench.answer(second, None, at_s=11.0)
    choices = [receipt.choice for receipt in bench.receipts]
    assert [(choice.local_tokens, choice.approximate) for choice in choices if choice] == [(0, False), (3200, True)]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_what_was_never_computed_is_not_believed(end: str) -> None:
    bench = DirectoryBench("A100", publishes=[])
    bench.directory.add_routed(0, MODEL, 1000)
    sent = bench.send_blocks(0.0, 200)
    if end == "cancelled":
        bench.dispatcher.cancelled(sent, 0.5)
    else:
        bench.dispatcher.failed(sent, Cause.CONNECT, 0.5)
    assert bench.hbm() == [0]


def test_blocks_of_text_are_remembered_where_they_were_sent_and_nothing_contradicts_them() -> None:
    bench = DirectoryBench("A100", publishes=[])
    bench.directory.add_routed(0, MODEL, 1000)
    for start_s in (0.0, 10.0):
        bench.answer(bench.send_blocks(start_s, 200, chain_of_text=True), 3, at_s=start_s + 1.0)
    assert bench.hbm() == [200]
    assert bench.directory.stats().doubted == 0


def test_a_store_without_events_is_believed_to_have_what_was_computed_and_receipts_say_it_is_a_guess() -> None:
    bench = DirectoryBench("A100", "A100", network_bytes_per_s=25e9)
    written = WrittenStore(capacity_blocks=1000, keep_s=600.0)
    bench.dispatcher._placer._holdings = OtherTiers(DirectoryHoldings(bench.directory), written=written)
    first = bench.send_blocks(0.0, 200)
    bench.answer(first, None, at_s=1.0)
    bench.dispatcher.replica_down(first.row)
    second = bench.send_blocks(10.0, 200)
    chosen = chosen_of(second)
    assert (chosen.path, chosen.fetched_tokens, chosen.approximate) == ("remote", 3200, True)
    bench.answer(second, 40, at_s=10.1)
    assert written.held(CHAIN, 11.0).blocks == 40


# Laws

REQUESTS = ["send", "send", "first", "finish", "finish", "cancel", "connect", "broken", "overloaded"]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*REQUESTS, "announce", "clear"]),
        st.integers(0, 7),
        st.integers(1, 60),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.booleans())
def test_no_history_leaves_an_expectation_behind(events: list[tuple[str, int, int]], routed: bool) -> None:
    """Whatever happens to requests: once all have ended, nothing is expected of any of them."""
    bench = DirectoryBench("A100", "A100", publishes=[0])
    if routed:
        bench.directory.add_routed(1, MODEL, 100)
    sent: list[Send] = []
    now_s = 0.0
    for what, which, blocks in events:
        now_s += 0.25
        if what == "send":
            sent.append(bench.send_blocks(now_s, blocks, request_id=f"r-{now_s}", streams=which % 2 == 0))
        elif what == "announce":
            bench.announce(0, blocks, now_s)
        elif what == "clear":
            bench.directory.clear(which % 2)
        elif sent:
            happens(bench, sent, which % len(sent), what, blocks, now_s)
    assert bench.expected <= len(sent)
    for left in sent:
        bench.dispatcher.cancelled(left, now_s + 1.0)
    assert bench.expected == 0
    assert bench.directory.match(CHAIN).expected_blocks.tolist() == bench.hbm()
    assert bench.dispatcher.in_flight == 0


def happens(bench: DirectoryBench, sent: list[Send], which: int, what: str, blocks: int, now_s: float) -> None:
    """One thing that can happen to a request in flight."""
    if what == "first":
        bench.dispatcher.first_token(sent[which], now_s)
        return
    one = sent.pop(which)
    if what == "finish":
        bench.dispatcher.finished(one, Ended(200, output_tokens=3, cached_tokens=16 * blocks), now_s)
    elif what == "cancel":
        bench.dispatcher.cancelled(one, now_s)
    else:
        cause = {"connect": Cause.CONNECT, "broken": Cause.BROKEN, "overloaded": Cause.OVERLOADED}[what]
        actions = bench.dispatcher.failed(one, cause, now_s)
        sent += [action for action in actions if isinstance(action, Send)]
        if not actions and cause is Cause.OVERLOADED:  # its own answer is relayed
            bench.dispatcher.finished(one, Ended(503), now_s)
