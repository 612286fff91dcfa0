from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.links import LinkTable, Sharing
from sim_backends.links import FairLink
from tests.builders import GIB

BOTH = pytest.mark.parametrize("sharing", list(Sharing))


def a_table(*gb_s: float, sharing: Sharing = Sharing.FAIR, look_up_s: float = 0.0, start_s: float = 0.0) -> LinkTable:
    """Links of these rates; only the first has a look-up."""
    look_ups = [look_up_s] + [0.0] * (len(gb_s) - 1)
    return LinkTable(bytes_per_s=[rate * 1e9 for rate in gb_s], look_up_s=look_ups, start_s=start_s, sharing=sharing)


def one_s(
    table: LinkTable, stages: list[int], size_bytes: float, at_s: float = 0.0, chunk: float | None = None
) -> float:
    return table.fetch_one(stages, size_bytes, at_s, chunk_bytes=chunk)[0]


def played_ends_s(rate: float, look_up_s: float, begun: list[tuple[float, float]]) -> list[float]:
    """Independent route: the simulator's link, event by event.

    begun : (moment, bytes) of each transfer, by moment; its end, in the same order.
    """
    link = FairLink(rate_bytes_per_s=rate, start_s=look_up_s)
    ends_s = [math.inf] * len(begun)
    for index, (at_s, size) in enumerate(begun):
        while link.due_s <= at_s:
            link.run_due()
        link.start(size, at_s, partial(ends_s.__setitem__, index))
    while link.due_s < math.inf:
        link.run_due()
    return ends_s


# One fetch alone.


def test_example_9_7_takes_the_look_up_and_both_links_in_turn() -> None:
    """AI Infra textbook, section 9.5.4: 10 ms, then 1.125 GiB at 50 Gbit/s, then over PCIe: 251.6 ms."""
    table = a_table(6.25, 25, look_up_s=0.010)
    assert one_s(table, [0, 1], 1.125 * GIB) == pytest.approx(0.2516, abs=5e-5)


def test_one_and_an_eighth_gib_cross_200_gbe_in_48_3_ms() -> None:
    assert one_s(a_table(25), [0], 1.125 * GIB) * 1000 == pytest.approx(48.31838208, rel=1e-9)


@BOTH
def test_nothing_to_fetch_takes_no_time_not_even_a_look_up(sharing: Sharing) -> None:
    table = a_table(25, 25, look_up_s=0.010, sharing=sharing)
    table.promise([0, 1], 1e9, now_s=0.0)
    assert one_s(table, [0, 1], 0.0) == 0.0
    assert table.fetch_s(np.array([[0, 1]]), np.zeros(1), 0.0) == 0.0


def test_a_look_up_is_paid_once_and_a_start_with_every_chunk() -> None:
    table = LinkTable(bytes_per_s=[1e9], look_up_s=[0.5], start_s=[0.01])
    assert one_s(table, [0], 1e9) == pytest.approx(0.5 + 0.01 + 1.0)
    assert one_s(table, [0], 1e9, chunk=0.25e9) == pytest.approx(0.5 + 4 * 0.01 + 1.0)


def piped_s(rates: list[float], chunks: list[float], look_up_s: float) -> float:
    """Independent route: walk every chunk over every link; a chunk waits for the one before it on that link."""
    free_s = [look_up_s] * len(rates)
    at_s = 0.0
    for chunk in chunks:
        at_s = 0.0
        for stage, rate in enumerate(rates):
            at_s = free_s[stage] = max(at_s, free_s[stage]) + chunk / rate
    return at_s


@pytest.mark.parametrize("rates", [[1e9, 25e9], [25e9, 1e9], [3e9, 3e9], [5e9, 2e9, 9e9]])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_chunks_take_the_slowest_link_and_one_chunk_on_the_others(rates: list[float], count: int) -> None:
    table = LinkTable(bytes_per_s=rates, look_up_s=[0.01] + [0.0] * (len(rates) - 1))
    got_s = one_s(table, list(range(len(rates))), 1e9, chunk=1e9 / count)
    assert got_s == pytest.approx(piped_s(rates, [1e9 / count] * count, 0.01), rel=1e-9)


def test_one_chunk_is_the_whole_and_smaller_chunks_are_never_later() -> None:
    table = a_table(5, 2, 9, look_up_s=0.01)
    times_s = [one_s(table, [0, 1, 2], 1e9, chunk=chunk) for chunk in (1e12, 1e9, 0.5e9, 0.1e9, 0.01e9)]
    assert times_s[0] == times_s[1] == pytest.approx(one_s(table, [0, 1, 2], 1e9))
    assert all(later <= earlier for earlier, later in pairwise(times_s))
    assert times_s[-1] > 0.01 + 1e9 / 2e9


def test_what_comes_before_the_first_byte_is_the_look_up_and_in_chunks_the_first_chunk() -> None:
    table = a_table(1, 25, look_up_s=0.01)
    assert table.fetch_one([0, 1], 1e9, 0.0)[1] == pytest.approx(0.01)
    chunked_s, first_s = table.fetch_one([0, 1], 1e9, 0.0, chunk_bytes=0.1e9)
    assert first_s == pytest.approx(0.01 + 0.1 + 0.1 / 25)
    assert chunked_s - first_s == pytest.approx(0.9)


# Beside others.


def test_first_come_lets_sixteen_fetches_wait_for_each_other() -> None:
    table = a_table(25, sharing=Sharing.FIRST_COME)
    ends_s = [table.promise([0], 1.125 * GIB, now_s=0.0).ends_at_s for _ in range(16)]
    alone_s = 1.125 * GIB / 25e9
    assert ends_s == pytest.approx([alone_s * (i + 1) for i in range(16)])


def test_a_fair_link_takes_the_new_bytes_and_of_each_other_as_much_at_most() -> None:
    """(s + sum_i min(b_i, s)) / rate, with 1, 3 and 8 GB left."""
    table = a_table(1)
    for size in (1e9, 3e9, 8e9):
        table.promise([0], size, now_s=0.0)
    assert one_s(table, [0], 4e9) == pytest.approx(4 + 1 + 3 + 4)
    assert one_s(table, [0], 0.5e9) == pytest.approx(4 * 0.5)


sizes = st.floats(0.05, 5.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), sizes), min_size=1, max_size=8))
def test_the_last_to_come_over_a_fair_link_ends_when_the_simulated_link_says(drawn: list[tuple[float, float]]) -> None:
    """It has all others before it, so nothing comes later and the estimate is exact."""
    begun = sorted((at_s, size * 1e9) for at_s, size in drawn)
    table = a_table(1)
    ends_s = [table.promise([0], size, now_s=at_s).ends_at_s for at_s, size in begun]
    assert ends_s[-1] == pytest.approx(played_ends_s(1e9, 0.0, begun)[-1], rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), sizes), min_size=1, max_size=8))
def test_look_ups_make_the_estimate_wrong_by_one_of_them_at_most(drawn: list[tuple[float, float]]) -> None:
    """What others let cross while this one looks up is drained at the link's rate, whoever has begun by then."""
    begun = sorted((at_s, size * 1e9) for at_s, size in drawn)
    table = a_table(1, look_up_s=0.25)
    ends_s = [table.promise([0], size, now_s=at_s).ends_at_s for at_s, size in begun]
    assert ends_s[-1] == pytest.approx(played_ends_s(1e9, 0.25, begun)[-1], abs=0.25)


def test_a_fetch_that_starts_later_finds_a_fair_link_as_it_is_then() -> None:
    """2 and 6 GB at 1 GB/s: after 5 s the first is over and the second has 3 GB left."""
    table = a_table(1)
    table.promise([0], 2e9, now_s=0.0)
    table.promise([0], 6e9, now_s=0.0)
    assert one_s(table, [0], 1e9, at_s=5.0) == pytest.approx(2.0)
    assert one_s(table, [0], 9e9, at_s=5.0) == pytest.approx(12.0)
    assert one_s(table, [0], 1e9, at_s=8.0) == pytest.approx(1.0)


@BOTH
def test_a_burst_waits_in_its_look_ups_side_by_side(sharing: Sharing) -> None:
    """The second of two that came together ends after both, and not a look-up later or earlier."""
    table = a_table(1, look_up_s=0.2, sharing=sharing)
    table.promise([0], 1e9, now_s=0.0)
    assert one_s(table, [0], 1e9) == pytest.approx(0.2 + 2.0)


@BOTH
def test_a_link_of_its_own_is_not_slowed_by_the_fetches_of_others(sharing: Sharing) -> None:
    table = a_table(25, 1, 1, sharing=sharing)
    table.promise([1], 5e9, now_s=0.0)
    assert one_s(table, [2], 1e9) == pytest.approx(1.0)


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(sizes, st.floats(0.0, 0.5), st.integers(0, 2)), max_size=8),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 4.0), st.integers(-1, 3), st.integers(-1, 3)), min_size=1),
    st.sampled_from([None, 0.07e9, 1e9]),
)
def test_arrays_and_the_scalar_route_give_the_same_answers(
    sharing: Sharing,
    promised: list[tuple[float, float, int]],
    asked: list[tuple[float, float, int, int]],
    chunk: float | None,
) -> None:
    table = a_table(2, 10, 25, 7, sharing=sharing, look_up_s=0.03, start_s=0.001)
    now_s = 0.0
    for size, gap_s, second in promised:
        now_s += gap_s
        table.promise([0, second + 1], size * 1e9, now_s=now_s)
    sizes_bytes = np.array([size * 1e9 for size, *_ in asked])
    starts_s = np.array([now_s + later_s for _, later_s, *_ in asked])
    stages = np.array([[first, second] for _, _, first, second in asked])
    fetches = table.fetch(stages, sizes_bytes, starts_s, chunk_bytes=chunk)
    for index, (size, start_s, route) in enumerate(zip(sizes_bytes, starts_s, stages.tolist(), strict=True)):
        alone = table.fetch_one(route, float(size), float(start_s), chunk_bytes=chunk)
        both = (fetches.duration_s[index], fetches.first_byte_s[index])
        assert both == pytest.approx(alone, rel=1e-7, abs=1e-7)


@BOTH
def test_estimates_of_a_whole_fleet_see_one_shared_link(sharing: Sharing) -> None:
    """Two paths, three replicas: the store over row 0 and a link of their own, and that link alone."""
    table = a_table(5, 25, 25, 25, sharing=sharing)
    table.promise([0, 1], 5e9, now_s=0.0)
    own = np.arange(1, 4)
    stages = np.stack([np.stack([np.zeros(3, dtype=int), own], axis=-1), np.stack([own, np.full(3, -1)], axis=-1)])
    got_s = table.fetch_s(stages, np.full((2, 3), 1e9), np.zeros((2, 3)))
    assert got_s.shape == (2, 3)
    assert np.all(got_s[0] > 1 / 5 + 1 / 25 + 0.15)
    assert got_s[1, 1:] == pytest.approx(1 / 25)


@BOTH
def test_more_promised_or_more_to_fetch_is_never_sooner(sharing: Sharing) -> None:
    table = a_table(3, 25, sharing=sharing)
    before = -1.0
    for _ in range(5):
        times_s = [one_s(table, [0, 1], size * 1e9) for size in (0.1, 0.5, 1.0, 4.0)]
        assert all(small < large for small, large in pairwise(times_s))
        assert times_s[2] > before
        before = times_s[2]
        table.promise([0, 1], 0.7e9, now_s=0.0)


# Promises and what becomes of them.


@BOTH
def test_promised_bytes_drain_at_the_rate_while_time_passes(sharing: Sharing) -> None:
    table = a_table(1, 1, sharing=sharing)
    table.promise([0], 2e9, now_s=10.0)
    table.promise([0], 1e9, now_s=10.5)
    assert table.outstanding_bytes(11.5) == pytest.approx([1.5e9, 0.0])
    assert table.outstanding_bytes(99.0) == pytest.approx([0.0, 0.0])


@BOTH
def test_a_promise_taken_back_at_once_leaves_the_links_as_they_were(sharing: Sharing) -> None:
    table = a_table(1, 4, sharing=sharing, look_up_s=0.1)
    table.promise([0, 1], 1e9, now_s=0.0)
    before = [one_s(table, [0, 1], size, at_s=0.2) for size in (1e8, 1e9, 9e9)]
    promise = table.promise([0, 1], 3e9, now_s=0.2)
    assert one_s(table, [0, 1], 1e9, at_s=0.2) > before[1]
    table.take_back(promise, 0.2)
    assert [one_s(table, [0, 1], size, at_s=0.2) for size in (1e8, 1e9, 9e9)] == pytest.approx(before)


@BOTH
def test_taking_back_leaves_what_has_crossed_behind_and_the_others_their_own(sharing: Sharing) -> None:
    """After 2 s of 1 GB/s: first come 2 GB of the first have crossed, fairly 1 GB of each."""
    table = a_table(1, sharing=sharing)
    first = table.promise([0], 4e9, now_s=0.0)
    table.promise([0], 4e9, now_s=0.0)
    table.take_back(first, 2.0)
    left = 4e9 if sharing is Sharing.FIRST_COME else 3e9
    assert table.outstanding_bytes(2.0) == pytest.approx([left])


@BOTH
def test_ending_a_promise_twice_or_after_it_has_crossed_changes_nothing(sharing: Sharing) -> None:
    table = a_table(1, sharing=sharing)
    over = table.promise([0], 1e9, now_s=0.0)
    table.promise([0], 1e9, now_s=5.0)
    for end in (table.take_back, table.arrived):
        end(over, 5.0)
        end(over, 5.0)
    assert table.outstanding_bytes(5.0) == pytest.approx([1e9])


def test_what_arrived_early_makes_room_and_first_come_so_does_all_before_it() -> None:
    for sharing, left in ((Sharing.FIRST_COME, 1e9), (Sharing.FAIR, 3e9 - 2e9 / 3)):
        table = a_table(1, sharing=sharing)
        _, second, _ = (table.promise([0], size, now_s=0.0) for size in (2e9, 1e9, 1e9))
        table.arrived(second, 1.0)
        # First come: 1 GB is left of the third. Fair: a third of a gigabyte of each has crossed.
        assert table.outstanding_bytes(1.0) == pytest.approx([left])


@BOTH
def test_a_fetch_promised_for_its_turn_begins_then(sharing: Sharing) -> None:
    table = a_table(1, sharing=sharing)
    promise = table.promise([0], 1e9, now_s=0.0, starts_s=5.0)
    assert promise.ends_at_s == pytest.approx(6.0)
    assert table.outstanding_bytes(5.5) == pytest.approx([0.5e9])


@BOTH
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 1.0), sizes, st.booleans()), max_size=12))
def test_no_byte_is_left_or_lost_however_promises_come_and_go(
    sharing: Sharing, told: list[tuple[float, float, bool]]
) -> None:
    table = a_table(2, 9, sharing=sharing, look_up_s=0.02)
    now_s, kept = 0.0, 0.0
    for gap_s, size, stays in told:
        now_s += gap_s
        promise = table.promise([0, 1], size * 1e9, now_s=now_s)
        if stays:
            kept += size * 1e9
        else:
            table.take_back(promise, now_s)
        assert np.all(table.outstanding_bytes(now_s) <= kept + 1.0)
    assert np.all(table.outstanding_bytes(now_s + kept / 2e9 + kept / 9e9 + 1.0) <= 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_row_without_a_usable_rate_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s"):
        LinkTable(bytes_per_s=[25e9, bad])


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_time_or_size_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="look_up_s"):
        LinkTable(bytes_per_s=[25e9], look_up_s=[bad])
    with pytest.raises(ValueError, match="size_bytes"):
        a_table(25).promise([0], bad, now_s=0.0)
    with pytest.raises(ValueError, match="chunk_bytes"):
        a_table(25).fetch_s(np.array([[0]]), np.array([1e9]), 0.0, chunk_bytes=bad)


# Stages that are asked for again and again.


@BOTH
def test_ways_made_once_give_what_their_stages_give_and_also_after_they_were_turned(sharing: Sharing) -> None:
    table = a_table(3, 10, 25, 7, sharing=sharing, look_up_s=0.02, start_s=0.001)
    stages = np.array([[[0, 1], [0, 2]], [[1, -1], [2, -1]]])
    ways = table.ways(stages)
    size, starts_s = np.array([[1e9, 2e9], [0.0, 3e9]]), 0.3
    for promised in ([], [0, 1], [2]):
        table.promise(promised, 1e9, now_s=0.0)
        assert np.array_equal(table.fetch_s(ways, size, starts_s), table.fetch_s(stages, size, starts_s))
    turned = np.array([[[0, 1], [0, 2]], [[2, -1], [1, -1]]])
    ways.turn(1, np.array([2, 1]))
    fetch, wanted = table.fetch(ways, size, starts_s), table.fetch(turned, size, starts_s)
    assert np.array_equal(fetch.duration_s, wanted.duration_s)
    assert np.array_equal(fetch.first_byte_s, wanted.first_byte_s)


def test_a_table_is_idle_until_something_is_promised_and_again_when_it_has_come() -> None:
    table = a_table(1)
    assert table.idle
    promise = table.promise([0], 1e9, now_s=0.0)
    assert not table.idle
    table.arrived(promise, 0.5)
    assert table.idle
