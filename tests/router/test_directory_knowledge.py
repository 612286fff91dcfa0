"""What the router itself knows beside events: requests in flight, contradictions, ages, guesses; and host copies."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.tiers import Tier
from router.blocks.expected import Expected
from router.directory import Directory
from router.signals.wire import Stored
from tests.router.signals.events import BLOCK, CLEAR, MODEL, P, Q, batch, chain_of, named, removed, stored

CHAIN = chain_of(P)


def a_directory(rows: int = 2, **limits: float) -> Directory:
    directory = Directory(BLOCK, rows, **limits)  # type: ignore[arg-type]  # counts and seconds
    for row in range(rows):
        directory.add_source(row, MODEL)
    return directory


# Requests in flight


def test_a_request_in_flight_is_expected_to_leave_its_blocks_and_not_believed_to_have_left_them() -> None:
    directory = a_directory()
    directory.expect(1, CHAIN, 1.0)
    match = directory.match(CHAIN)
    assert (match.expected_blocks.tolist(), match.hbm_blocks.tolist()) == ([0, 256], [0, 0])
    longer = chain_of([*P, *Q])
    assert directory.match(longer).expected_blocks.tolist() == [0, 256]
    assert directory.match(chain_of(Q)).expected_blocks.tolist() == [0, 0]


def test_what_is_held_counts_as_expected() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P[:1024], 1)), 1.0)
    directory.expect(0, CHAIN[:16], 1.0)
    assert directory.match(CHAIN).expected_blocks.tolist() == [64, 0]


def test_an_expected_request_is_confirmed_by_the_event_of_its_last_block() -> None:
    directory = a_directory()
    directory.expect(0, CHAIN[:64], 1.0)
    directory.apply(0, batch(stored(P[:512], 1)), 2.0)
    assert directory.stats().expected == 1
    directory.apply(0, batch(stored(P[512:1040], 33, parent=32)), 3.0)
    assert directory.stats().expected == 0
    assert directory.match(CHAIN).hbm_blocks.tolist() == [65, 0]


@pytest.mark.parametrize("end", ["cancelled", "contradicted", "cleared", "dropped", "lapsed"])
def test_an_expected_request_ends(end: str) -> None:
    directory = a_directory(expected_s=60.0)
    number = directory.expect(0, CHAIN, 1.0)
    directory.expect(1, CHAIN[:64], 50.0)
    if end == "cancelled":
        directory.cancel(number)
        directory.cancel(number)
    elif end == "contradicted":
        directory.reused(0, CHAIN, 3, 2.0)
    elif end == "cleared":
        directory.clear(0)
    elif end == "dropped":
        directory.drop_source(0)
    assert directory.match(CHAIN, 61.0 if end == "lapsed" else 50.0).expected_blocks.tolist() == [0, 64]
    assert directory.stats().expected == 1


def test_a_reuse_that_is_not_shorter_than_what_was_expected_contradicts_nothing() -> None:
    directory = a_directory()
    directory.expect(0, CHAIN[:64], 1.0)
    directory.reused(0, CHAIN[:64], 64, 2.0)
    directory.reused(0, chain_of([*P[:1024], *Q]), 64, 2.0)  # another prompt, which turned off after the 64
    assert directory.stats().expected == 1


def test_what_is_expected_of_an_engine_with_larger_blocks_is_whole_blocks_of_it_too() -> None:
    directory = a_directory()
    directory.apply(0, batch(Stored([1], None, array("I", P[:64]), 64, Tier.HBM)), 1.0)
    for row in range(2):
        directory.expect(row, CHAIN[:7], 1.0)
    assert directory.match(CHAIN).expected_blocks.tolist() == [4, 7]


def test_requests_in_flight_are_bounded_in_blocks() -> None:
    directory = a_directory(expected_limit=100)
    for start in range(40):
        directory.expect(0, chain_of(P[start * 16 : start * 16 + 480]), 1.0)
    assert directory.stats().expected == 3
    assert directory.match(chain_of(P[39 * 16 : 39 * 16 + 480])).expected_blocks.tolist() == [30, 0]
    directory.expect(0, CHAIN, 1.0)  # more than the limit by itself: never expected
    assert directory.match(CHAIN).expected_blocks.tolist() == [0, 0]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)  # two kinds of blocks: prefixes are often shared


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), PROMPTS), max_size=8), st.lists(st.integers(0, 7), max_size=8), PROMPTS)
def test_expected_blocks_are_the_longest_common_prefix_less_seven_at_most(
    requests: list[tuple[int, list[int]]], cancelled: list[int], prompt: list[int]
) -> None:
    def chain(kinds: list[int]) -> list[int]:
        return [hash(tuple(kinds[: n + 1])) & 0xFFFFFFFFFFFFFFFF for n in range(len(kinds))]

    expected = Expected(most=10**6, lapse_s=60.0)
    numbers = [expected.place(row, chain(kinds), 1.0) for row, kinds in requests]
    for which in cancelled:
        if which < len(numbers):
            expected.cancel(numbers[which])
    left = [request for number, request in enumerate(requests) if number not in cancelled]
    counts = expected.leading(chain(prompt), 3)
    for row in range(3):
        common = [
            next(
                (n for n, (a, b) in enumerate(zip(kinds, prompt, strict=False)) if a != b), min(len(kinds), len(prompt))
            )
            for of, kinds in left
            if of == row
        ]
        longest = max(common, default=0)
        assert longest - 7 <= counts[row] <= longest
        if any(of == row and kinds == prompt for of, kinds in left):
            assert counts[row] == len(prompt)
    for number in numbers:
        expected.cancel(number)
    assert (len(expected), expected.blocks, not expected.leading(chain(prompt), 3).any()) == (0, 0, True)


# Contradictions


def test_a_contradicted_block_has_no_credit_until_the_penalty_is_over() -> None:
    directory = a_directory(penalty_s=10.0)
    directory.apply(0, batch(stored(P, 1), stored(P[:320], 1, tier=Tier.HOST)), 1.0)
    directory.reused(0, CHAIN, 100, 2.0)
    for now_s, blocks in ((2.0, 100), (11.9, 100), (12.0, 256)):
        match = directory.match(CHAIN, now_s)
        assert (match.hbm_blocks.tolist(), match.host_blocks.tolist()) == ([blocks, 0], [20, 0])
    directory.reused(0, CHAIN, 3, 20.0)
    match = directory.match(CHAIN, 20.0)
    assert (match.hbm_blocks.tolist(), match.host_blocks.tolist()) == ([3, 0], [3, 0])


def test_a_contradiction_costs_only_the_prompts_that_pass_through_that_block_of_that_replica() -> None:
    directory = a_directory()
    other = [*P[:1600], *Q[:160]]
    for row in (0, 1):
        directory.apply(row, batch(stored(P, 1), stored(Q[:160], 1001, parent=100)), 1.0)
    directory.reused(0, CHAIN, 100, 2.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [100, 256]
    assert directory.match(chain_of(other)).hbm_blocks.tolist() == [110, 110]
    assert directory.match(CHAIN[:100]).hbm_blocks.tolist() == [100, 100]


def test_a_block_announced_again_is_believed_again() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P, 1)), 1.0)
    directory.reused(0, CHAIN, 100, 2.0)
    directory.apply(0, batch(stored(P[1600:1616], 101, parent=100)), 3.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [256, 0]
    assert directory.stats().doubted == 2  # nothing was heard of the host and the disk


def test_a_fetch_that_failed_costs_the_store_its_credit_from_there_on() -> None:
    directory = a_directory(penalty_s=5.0)
    directory.apply(0, batch(stored(P, 1)), 1.0)
    directory.apply_store(batch(named(list(range(1, 257)))), 1.0)
    directory.fetch_failed(directory.rows, Tier.REMOTE, CHAIN, 40, 2.0)
    match = directory.match(CHAIN, 6.9)
    assert (match.store_blocks, match.hbm_blocks.tolist()) == (40, [256, 0])
    assert directory.match(CHAIN, 7.0).store_blocks == 256
    directory.fetch_failed(0, Tier.HBM, CHAIN, 256, 8.0)  # all of it came
    assert directory.match(CHAIN, 8.0).hbm_blocks.tolist() == [256, 0]


def test_doubts_are_bounded() -> None:
    directory = a_directory()
    for token in range(6000):
        directory.fetch_failed(0, Tier.HBM, [token + 1], 0, 1.0)
    assert directory.stats().doubted <= 4096


@pytest.mark.parametrize("reused", [-1, 257])
def test_a_reuse_beyond_the_chain_is_refused(reused: int) -> None:
    with pytest.raises(ValueError, match="reused_blocks"):
        a_directory().reused(0, CHAIN, reused, 1.0)


def test_a_block_that_was_announced_or_used_since_it_was_believed_is_not_doubted() -> None:
    """An answer comes long after its choice; what happened meanwhile says more than its reuse back then."""
    for news in ("announced", "used"):
        directory = a_directory()
        directory.apply(0, batch(stored(P, 1)), 1.0)
        directory.apply(0, batch(removed(*range(1, 257)), stored(P, 1)) if news == "announced" else batch(), 20.0)
        if news == "used":
            directory.reused(0, CHAIN, 256, 20.0)
        directory.reused(0, CHAIN, 100, 30.0, since_s=10.0)
        assert directory.match(CHAIN).hbm_blocks.tolist() == [256, 0]
        directory.reused(0, CHAIN, 100, 40.0, since_s=25.0)
        assert directory.match(CHAIN).hbm_blocks.tolist() == [100, 0]


# Tiers together


def test_a_host_that_has_the_tail_of_what_hbm_has_the_head_of_reaches_to_its_end() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P, 1), named(list(range(61, 201)), tier=Tier.HOST)), 1.0)
    directory.apply(0, batch(removed(*range(101, 257))), 2.0)
    match = directory.match(CHAIN)
    assert (match.hbm_blocks.tolist(), match.host_blocks.tolist()) == ([100, 0], [0, 0])
    assert (match.host_reach.tolist(), match.disk_reach.tolist()) == ([200, 0], [200, 0])
    directory.apply(0, batch(named([201, 202], tier=Tier.DISK), named([204], tier=Tier.DISK)), 3.0)
    match = directory.match(CHAIN)
    assert (match.host_reach.tolist(), match.disk_reach.tolist()) == ([200, 0], [202, 0])


def test_without_other_tiers_their_reach_is_that_of_hbm() -> None:
    directory = a_directory()
    directory.apply(1, batch(stored(P[:160], 1)), 1.0)
    match = directory.match(CHAIN)
    assert match.host_reach.tolist() == match.disk_reach.tolist() == match.hbm_blocks.tolist() == [0, 10]
    assert match.host_blocks.tolist() == [0, 0]


def test_a_doubt_about_one_tier_ends_the_reach_only_where_no_other_tier_has_the_block() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P, 1), named(list(range(1, 257)), tier=Tier.HOST)), 1.0)
    directory.apply(0, batch(removed(*range(151, 257))), 1.5)
    directory.fetch_failed(0, Tier.HOST, CHAIN, 50, 2.0)  # HBM has it too
    match = directory.match(CHAIN)
    assert (match.host_blocks.tolist(), match.host_reach.tolist()) == ([50, 0], [256, 0])
    directory.fetch_failed(0, Tier.HOST, CHAIN, 170, 2.0)  # only the host has it
    match = directory.match(CHAIN)
    assert (match.hbm_blocks.tolist(), match.host_reach.tolist()) == ([150, 0], [170, 0])
    directory.reused(0, CHAIN, 20, 3.0)  # no tier had it
    assert directory.match(CHAIN).host_reach.tolist() == [20, 0]


# Ages


def test_the_age_of_what_the_store_has_counts_from_its_last_write_or_read() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P, 1)), 1.0)
    directory.apply_store(batch(named(list(range(1, 101)))), 10.0)
    assert directory.match(CHAIN, 50.0).store_age_s == 40.0
    directory.fetched(CHAIN[:60], 30.0)
    assert directory.match(CHAIN, 50.0).store_age_s == 40.0
    assert directory.match(CHAIN[:60], 50.0).store_age_s == 20.0
    assert np.isnan(directory.match(chain_of(Q), 50.0).store_age_s)


def test_the_age_is_that_of_the_last_block_of_each_rows_prefix() -> None:
    directory = a_directory(3)
    directory.apply(0, batch(stored(P[:1024], 1)), 10.0)
    directory.apply(0, batch(stored(P[1024:], 65, parent=64)), 70.0)
    directory.apply(1, batch(stored(P[:1024], 1)), 30.0)
    match = directory.match(CHAIN, 100.0)
    assert match.hbm_age_s.tolist()[:2] == [30.0, 70.0]
    assert np.isnan(match.hbm_age_s[2])
    assert np.isnan(match.host_age_s).all()
    assert directory.match(CHAIN[:64], 100.0).hbm_age_s.tolist()[:2] == [90.0, 70.0]


def test_what_the_engine_reused_is_young_again() -> None:
    directory = a_directory(1)
    directory.apply(0, batch(stored(P, 1)), 10.0)
    directory.reused(0, CHAIN[:64], 64, 90.0)
    assert directory.match(CHAIN[:64], 100.0).hbm_age_s.tolist() == [10.0]
    assert directory.match(CHAIN, 100.0).hbm_age_s.tolist() == [90.0]


def test_an_age_is_unknown_where_another_publisher_used_another_hash_for_the_block() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P, 1)), 10.0)
    directory.apply(1, batch(stored(P, 5001)), 20.0)
    ages = directory.match(CHAIN, 30.0).hbm_age_s
    assert np.isnan(ages[0])
    assert ages[1] == 10.0


# Replicas without events


def test_a_replica_without_events_is_guessed_from_what_was_sent_there_and_marked() -> None:
    directory = Directory(BLOCK, 2)
    directory.add_source(0, MODEL)
    directory.add_routed(1, MODEL, 1000)
    directory.sent(0, CHAIN, 1.0)  # its events will say
    directory.sent(1, CHAIN, 2.0)
    match = directory.match(CHAIN, 5.0)
    assert (match.hbm_blocks.tolist(), match.approximate.tolist()) == ([0, 256], [False, True])
    assert match.hbm_age_s.tolist()[1] == 3.0


def test_a_guess_keeps_as_many_blocks_as_the_engine_has_and_forgets_tails_first() -> None:
    directory = Directory(BLOCK, 1)
    directory.add_routed(0, MODEL, 300)
    directory.sent(0, CHAIN, 1.0)
    directory.sent(0, chain_of(Q), 2.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [44]
    assert directory.match(chain_of(Q)).hbm_blocks.tolist() == [256]
    directory.sent(0, CHAIN[:44], 3.0)  # used again, so the other one's tail goes next
    directory.add_routed(0, MODEL, 100)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [44]
    assert directory.match(chain_of(Q)).hbm_blocks.tolist() == [56]
    assert directory.stats().engine_hashes == 100


def test_a_prompt_longer_than_the_replica_leaves_its_head() -> None:
    directory = Directory(BLOCK, 1)
    directory.add_routed(0, MODEL, 10)
    directory.sent(0, CHAIN, 1.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [10]


def test_blocks_that_stand_for_several_take_as_much_room() -> None:
    directory = Directory(BLOCK, 1)
    directory.add_routed(0, MODEL, 300)
    directory.sent(0, CHAIN, 1.0, each=4)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [75]
    directory.sent(0, chain_of(Q)[:100], 2.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [50]
    assert directory.match(chain_of(Q)).hbm_blocks.tolist() == [100]
    directory.sent(0, [*CHAIN[:50], *chain_of(Q)[200:206]], 3.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [50]
    assert directory.match(chain_of(Q)).hbm_blocks.tolist() == [94]


def test_what_the_directory_had_to_drop_of_a_guess_comes_back_with_its_prompt() -> None:
    directory = Directory(BLOCK, 2, cap=30)
    for row in range(2):
        directory.add_routed(row, MODEL, 20)
    for now_s, row, chain in ((1.0, 0, CHAIN), (2.0, 1, chain_of(Q)), (3.0, 0, CHAIN), (4.0, 0, CHAIN)):
        directory.sent(row, chain[:20], now_s)
        assert directory.match(chain, 5.0).hbm_blocks.tolist()[row] == 20
        assert directory.match(chain, 5.0).hbm_age_s.tolist()[row] == 5.0 - now_s
        assert directory.stats().engine_hashes <= 30


def test_an_adapter_that_is_gone_takes_what_was_guessed_and_expected_with_it() -> None:
    directory = Directory(BLOCK, 2)
    for row in range(2):
        directory.add_routed(row, MODEL, 1000)
        directory.sent(row, CHAIN[:64], 1.0)
        directory.expect(row, CHAIN[:128], 1.0)
    directory.drop_adapter(0, "ad-1")
    match = directory.match(CHAIN)
    assert (match.hbm_blocks.tolist(), match.expected_blocks.tolist()) == ([0, 64], [0, 128])
    directory.sent(0, CHAIN[:32], 2.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [32, 64]


def test_a_row_that_turns_over_leaf_after_leaf_keeps_to_its_last() -> None:
    directory = Directory(BLOCK, 2, at_once=10)
    for row in range(2):
        directory.add_source(row, MODEL)
        directory.apply(row, batch(stored(P, 1)), 1.0)
    for round_ in range(12):  # more than can leave before one is swept
        directory.clear(0)
        assert directory.match(CHAIN).hbm_blocks.tolist() == [0, 256]
        directory.apply(0, batch(stored(P[: 64 * BLOCK], 1)), 2.0 + round_)
        assert directory.match(CHAIN, 20.0).hbm_blocks.tolist() == [64, 256]
        assert directory.match(CHAIN, 20.0).hbm_age_s.tolist() == [18.0 - round_, 19.0]
    directory.drop_source(1)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [64, 0]
    assert directory.holders(CHAIN[0]) == {Tier.HBM: (0,)}
    while directory.sweep():
        assert directory.match(CHAIN).hbm_blocks.tolist() == [64, 0]
    assert directory.stats().engine_hashes == 64
    directory.add_source(1, MODEL)
    directory.apply(1, batch(stored(P, 1)), 30.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [64, 256]


def test_events_end_the_guess_and_a_clear_empties_it() -> None:
    directory = Directory(BLOCK, 2)
    for row in (0, 1):
        directory.add_routed(row, MODEL, 1000)
        directory.sent(row, CHAIN, 1.0)
    directory.add_source(0, MODEL)
    directory.clear(1)
    match = directory.match(CHAIN)
    assert (match.hbm_blocks.tolist(), match.approximate.tolist()) == ([0, 0], [False, True])
    assert directory.stats().engine_hashes == 0
    with pytest.raises(ValueError, match="capacity"):
        directory.add_routed(1, MODEL, 0)


# Other tiers, late news


def test_a_host_copy_announced_after_the_device_dropped_the_block_is_believed() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P[:64], 1), removed(1, 2, 3, 4)), 1.0)
    done = directory.apply(0, batch(named([1, 2, 3], tier=Tier.HOST), named([9], tier=Tier.HOST)), 2.0)
    match = directory.match(CHAIN)
    assert (match.hbm_blocks.tolist(), match.host_blocks.tolist()) == ([0, 0], [3, 0])
    assert done.ignored == 1
    directory.apply(0, batch(removed(2, tier=Tier.HOST)), 3.0)
    assert directory.match(CHAIN).host_blocks.tolist() == [1, 0]


def test_a_host_copy_with_tokens_after_the_device_dropped_its_parent_is_believed() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P[:64], 1, salt="s"), removed(1, 2, 3, 4)), 1.0)
    tail = Stored(hashes=[4], parent=3, tokens=array("I", P[48:64]), block_tokens=BLOCK, tier=Tier.HOST)
    directory.apply(0, batch(named([1, 2, 3], tier=Tier.HOST), tail), 2.0)
    assert directory.match(chain_of(P, salt="s")).host_blocks.tolist() == [4, 0]


def test_what_one_replica_dropped_explains_nothing_of_another() -> None:
    directory = a_directory()
    directory.apply(0, batch(stored(P[:64], 1), removed(1, 2, 3, 4)), 1.0)
    assert directory.apply(1, batch(named([1, 2], tier=Tier.HOST)), 2.0).ignored == 1


def test_batches_put_off_count_with_the_next_question() -> None:
    directory = a_directory()
    for first in range(0, 256, 8):
        directory.put(0, batch(stored(P[first * 16 : first * 16 + 128], first + 1, parent=first or None)), 1.0)
    directory.put(0, batch(removed(250)), 1.0)
    directory.put(1, batch(stored(Q, 1)), 1.0)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [249, 0]
    directory.put(1, batch(CLEAR), 1.0)
    directory.put(0, batch(stored(P[249 * 16 : 250 * 16], 250, parent=249)), 1.0)
    totals = directory.stats().totals
    assert (totals.stored, totals.removed, totals.cleared) == (513, 1, 1)
    assert directory.match(CHAIN).hbm_blocks.tolist() == [256, 0]
    assert directory.match(chain_of(Q)).hbm_blocks.tolist() == [0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=25),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_a_guess_is_the_least_recently_used_of_an_engine_whatever_is_sent(
    sends: list[tuple[int, int]], capacity: int, later: int
) -> None:
    """Against a list of what was used, last first, cut to the capacity after every prompt."""
    chains = [[100 * family + block for block in range(1, 13)] for family in (1, 2)]
    chains += [
        chains[0][:5] + [501 + block for block in range(7)],
        chains[1][:2] + [601 + block for block in range(10)],
    ]
    directory = Directory(BLOCK, 1)
    directory.add_routed(0, MODEL, capacity)
    used: list[tuple[int, int]] = []  # block and its size, most recent first
    for number, (which, length) in enumerate(sends):
        if number == len(sends) // 2:
            capacity = later
            directory.add_routed(0, MODEL, capacity)
            used = _cut(used, capacity)
        each = 1 + which % 2  # of one chain always the same
        chain = chains[which][:length] if which < 2 else [block + 10_000 for block in chains[which][:length]]
        directory.sent(0, chain, float(number), each=each)
        kept = chain[: capacity // each]
        used = _cut([(block, each) for block in kept] + [one for one in used if one[0] not in kept], capacity)
        assert sorted(directory.blocks()) == sorted(block for block, _ in used)


def _cut(used: list[tuple[int, int]], capacity: int) -> list[tuple[int, int]]:
    while sum(each for _, each in used) > capacity:
        used = used[:-1]
    return used
