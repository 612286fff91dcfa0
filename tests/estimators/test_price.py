"""The price of work against what really happens to the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.price import backlog_s, joining_rate_rps, joining_s, levelling_s, queue_behind_s, running_decodes_s


def behind(queue_s: float, work_s: float, arrival_rps: float = 0.5, utilisation: float = 0.5) -> float:
    return float(
        queue_behind_s(
            arrival_rps=arrival_rps,
            utilisation=utilisation,
            queue_s=np.array([queue_s]),
            work_s=np.array([work_s]),
        )[0]
    )


def test_queue_price_is_the_difference_of_the_mg1_value_function() -> None:
    def value(backlog_s: float) -> float:
        return 0.5 / (2 * (1 - 0.5)) * backlog_s**2

    assert behind(queue_s=2.0, work_s=3.0) == pytest.approx(value(5.0) - value(2.0))


def test_queue_price_equals_the_area_of_delay_until_the_queue_is_gone() -> None:
    """Independent route at small load: arrivals of rate lambda during the drain each wait for what is left."""
    lam, queue_s, work_s, step = 1e-4, 1.5, 0.8, 1e-4
    left = np.arange(0, queue_s + work_s, step)
    with_s = lam * left.sum() * step
    without_s = lam * np.arange(0, queue_s, step).sum() * step
    assert behind(queue_s, work_s, lam, 0.0) == pytest.approx(with_s - without_s, rel=1e-3)


def test_the_same_work_is_dearer_behind_a_longer_queue_and_under_more_load() -> None:
    assert behind(4.0, 1.0) > behind(1.0, 1.0) > behind(0.0, 1.0)
    assert behind(1.0, 1.0, utilisation=0.9) > behind(1.0, 1.0, utilisation=0.3)


def test_an_overloaded_fleet_has_a_high_but_finite_price() -> None:
    assert behind(1.0, 1.0, utilisation=3.0) == behind(1.0, 1.0, utilisation=0.95) < np.inf
    assert behind(1.0, 1.0, utilisation=3.0) == pytest.approx(20 * behind(1.0, 1.0, utilisation=0.0))


@pytest.mark.parametrize(("queue_s", "work_s"), [(0.0, 2.0), (3.0, 1.0), (0.5, 7.0)])
def test_joining_costs_what_a_queue_adds_to_the_price_where_delays_delay_nobody_in_turn(
    queue_s: float, work_s: float
) -> None:
    joined_s = joining_s(joining_rps=0.3, queue_s=np.array([queue_s]), work_s=np.array([work_s]))
    added_s = behind(queue_s, work_s, 0.3, 0.0) - behind(0.0, work_s, 0.3, 0.0)
    assert joined_s == pytest.approx([added_s])


def test_each_who_comes_while_the_queue_lasts_waits_longer_by_all_of_the_work_that_joined_it() -> None:
    """Independent route: arrivals drawn, and each one's wait with and without that work."""
    rng = np.random.default_rng(5)
    queue_s, work_s, arrival_rps, runs = 4.0, 0.5, 0.7, 20_000
    delays_s = np.zeros(runs)
    for run in range(runs):
        came_s = np.cumsum(rng.exponential(1 / arrival_rps, 30))
        came_s = came_s[came_s < queue_s]
        delays_s[run] = ((queue_s + work_s - came_s) - (queue_s - came_s)).sum()
    joined_s = joining_s(joining_rps=arrival_rps, queue_s=np.array([queue_s]), work_s=np.array([work_s]))
    assert joined_s == pytest.approx([delays_s.mean()], abs=4 * delays_s.std() / np.sqrt(runs))


def test_a_burst_does_not_join_one_queue_faster_than_that_is_served() -> None:
    assert joining_rate_rps(arrival_rps=0.2, mean_work_s=2.0) == 0.2
    assert (
        joining_rate_rps(arrival_rps=9.0, mean_work_s=2.0) == joining_rate_rps(arrival_rps=0.5, mean_work_s=2.0) == 0.5
    )


def test_joining_costs_nothing_while_nobody_knows_what_a_request_takes() -> None:
    assert joining_rate_rps(arrival_rps=9.0, mean_work_s=0.0) == 0.0


def levelled(queue_s: list[float], work_s: list[float], among: list[bool] | None = None) -> list[float]:
    usable = np.ones(len(queue_s), dtype=np.bool_) if among is None else np.array(among)
    levelling = levelling_s(queue_s=np.array(queue_s), work_s=np.array(work_s), among=usable)
    return [float(delay_s) for delay_s in levelling]


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.0, 50.0), st.booleans()), min_size=1, max_size=12).filter(
        lambda rows: any(usable for _, _, usable in rows)
    )
)
def test_work_levels_a_queue_with_those_that_are_longer_and_usable(rows: list[tuple[float, float, bool]]) -> None:
    """Independent route: one replica after the other."""
    queue_s, work_s, usable = (list(column) for column in zip(*rows, strict=True))
    others_s = [other_s for other_s, is_usable in zip(queue_s, usable, strict=True) if is_usable]
    expected_s = [
        sum(min(more_s, max(0.0, other_s - own_s)) for other_s in others_s) / len(others_s)
        for own_s, more_s in zip(queue_s, work_s, strict=True)
    ]
    assert levelled(queue_s, work_s, usable) == pytest.approx(expected_s, abs=1e-9)


def test_work_behind_the_longest_queue_levels_nothing_and_behind_the_shortest_most() -> None:
    assert levelled([1.0, 2.0, 4.0], [2.0] * 3) == pytest.approx([(1.0 + 2.0) / 3, 2.0 / 3, 0.0])
    assert levelled([3.0, 3.0], [5.0, 5.0]) == [0.0, 0.0]


def test_paths_of_one_replica_level_by_what_each_computes() -> None:
    both_s = levelling_s(
        queue_s=np.array([0.0, 9.0]), work_s=np.array([[1.0, 1.0], [4.0, 4.0]]), among=np.ones(2, bool)
    )
    assert both_s.tolist() == [[0.5, 0.0], [2.0, 0.0]]


def test_backlog_is_the_price_of_a_queue_of_mean_length_without_the_wait_for_itself() -> None:
    queues_s, usable = np.array([1.0, 3.0, 50.0]), np.array([True, True, False])
    backlog = backlog_s(
        arrival_rps=0.8, utilisation=0.5, queue_s=queues_s, work_s=np.array([[0.1, 0.1, 0.1]]), among=usable
    )
    whole_s = queue_behind_s(arrival_rps=0.8, utilisation=0.5, queue_s=np.array([2.0]), work_s=np.array([0.1]))
    own_s = queue_behind_s(arrival_rps=0.8, utilisation=0.5, queue_s=np.array([0.0]), work_s=np.array([0.1]))
    assert backlog == pytest.approx(np.full((1, 3), whole_s - own_s))


@given(st.lists(st.floats(0.0, 100.0), min_size=2, max_size=6), st.floats(0.0, 10.0))
def test_backlog_is_the_same_wherever_a_request_waits(queues_s: list[float], work_s: float) -> None:
    queue_s = np.array(queues_s)
    backlog = backlog_s(
        arrival_rps=1.0,
        utilisation=0.9,
        queue_s=queue_s,
        work_s=np.full(queue_s.shape, work_s),
        among=np.ones(queue_s.shape, dtype=bool),
    )
    assert (backlog == backlog[0]).all()


def test_nobody_arriving_means_nobody_to_pay_for() -> None:
    assert behind(5.0, 5.0, arrival_rps=0.0) == 0.0


def test_running_decodes_stand_still_and_later_step_over_more_context() -> None:
    price_s = running_decodes_s(
        decode_batch=np.array([8.0]),
        work_s=np.array([0.5]),
        step_growth_s=np.array([1e-3]),
        remaining_tokens=np.array([800.0]),
    )
    assert price_s == pytest.approx([8 * 0.5 + 0.8])


Works = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]


def constant(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    return np.ones(count)


def exponential(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    return rng.exponential(1.0, count)


def mostly_short(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Mean 1, squared variation 4: nine in ten bring 0.367 s of work, the others 6.7 s."""
    return np.where(rng.random(count) < 0.9, 1 - 2 / 3 * 0.95, 1 + 6 * 0.95)


def delay_of_others_s(
    works: Works, *, arrival_rps: float, queue_s: float, work_s: float, runs: int, seed: int
) -> tuple[float, float]:
    """Extra wait of all later arrivals at a first-come server, with and without `work_s`; mean and standard error.

    Lindley's recursion on the same arrivals and works for both, until the two queues have become one.
    """
    rng = np.random.default_rng(seed)
    plain_s, more_s, total_s = np.full(runs, queue_s), np.full(runs, queue_s + work_s), np.zeros(runs)
    while np.any(more_s > plain_s):
        gap_s = rng.exponential(1 / arrival_rps, runs)
        plain_s, more_s = np.maximum(plain_s - gap_s, 0.0), np.maximum(more_s - gap_s, 0.0)
        total_s += more_s - plain_s
        brought_s = works(rng, runs)
        plain_s, more_s = plain_s + brought_s, more_s + brought_s
        merged = more_s - plain_s < 1e-9
        more_s[merged] = plain_s[merged]
    return float(total_s.mean()), float(total_s.std() / np.sqrt(runs))


@pytest.mark.parametrize("works", [constant, exponential, mostly_short])
@pytest.mark.parametrize(("utilisation", "queue_s", "work_s"), [(0.3, 0.0, 2.0), (0.6, 3.0, 1.0), (0.8, 1.0, 4.0)])
def test_the_queue_price_is_the_delay_later_arrivals_really_have(
    works: Works, utilisation: float, queue_s: float, work_s: float
) -> None:
    """However much the works vary. The request's own wait and service are in neither number."""
    mean_s, error_s = delay_of_others_s(
        works, arrival_rps=utilisation, queue_s=queue_s, work_s=work_s, runs=60_000, seed=17
    )
    assert behind(queue_s, work_s, utilisation, utilisation) == pytest.approx(mean_s, abs=4 * error_s)
    assert 4 * error_s < 0.04 * mean_s


def test_the_price_of_two_requests_is_the_same_in_one_piece() -> None:
    """A value function's differences add up: w1 behind Q, then w2 behind Q + w1."""
    assert behind(1.0, 2.0) + behind(3.0, 0.5) == pytest.approx(behind(1.0, 2.5))


def test_what_is_not_known_of_a_replica_stays_unknown_in_its_price_alone() -> None:
    price_s = queue_behind_s(
        arrival_rps=1.0, utilisation=0.5, queue_s=np.array([1.0, np.nan]), work_s=np.array([1.0, 1.0])
    )
    assert np.isnan(price_s).tolist() == [False, True]


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_a_rate_or_a_utilisation_that_cannot_be_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="arrival_rps"):
        behind(1.0, 1.0, arrival_rps=bad)
    with pytest.raises(ValueError, match="utilisation"):
        behind(1.0, 1.0, utilisation=bad)


def test_decodes_standing_still_and_longer_steps_are_the_delay_of_a_batch_played_step_by_step() -> None:
    """Independent route: every running decode steps on, once beside the new request and once without it."""
    rest, step_s, growth_s, work_s = [3, 10, 40, 7], 0.02, 0.001, 0.5
    alone_s = sum(step_s * tokens for tokens in rest)
    beside_s = 0.0
    for tokens in rest:
        clock_s = work_s
        for _ in range(tokens):
            clock_s += step_s + growth_s
        beside_s += clock_s
    price_s = running_decodes_s(
        decode_batch=np.array([float(len(rest))]),
        work_s=np.array([work_s]),
        step_growth_s=np.array([growth_s]),
        remaining_tokens=np.array([float(sum(rest))]),
    )
    assert price_s == pytest.approx([beside_s - alone_s])
