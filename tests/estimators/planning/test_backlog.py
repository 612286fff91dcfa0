from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.backlog import (
    StartUp,
    Stretch,
    backlog_over,
    capacity_for_peaks,
    service_to_drain_rps,
    start_to_drain_s,
    steps_to_repay,
)

RPS = st.floats(0.1, 100.0)
READY_S = st.floats(0.1, 100.0)
STRETCHES = st.lists(
    st.builds(Stretch, st.floats(0.1, 60.0), st.floats(0.0, 20.0), st.floats(0.0, 20.0)), min_size=1, max_size=6
)


@given(arrival=RPS, spare=st.floats(0.05, 50.0), ready_s=READY_S)
def test_a_start_is_drained_when_served_and_come_are_equal(arrival: float, spare: float, ready_s: float) -> None:
    """All that came until then has been served since it was ready: lambda t = mu (t - T_s)."""
    start = StartUp(arrival, arrival + spare, ready_s)
    at_s = start.drained_at_s
    assert arrival * at_s == pytest.approx(start.service_rps * (at_s - ready_s))
    assert start.backlog(at_s * 1.01) == 0.0


@given(arrival=RPS, service=RPS, ready_s=READY_S, share=st.floats(0.0, 3.0))
def test_the_fluid_queue_over_two_stretches_is_the_same(
    arrival: float, service: float, ready_s: float, share: float
) -> None:
    corners = backlog_over([Stretch(ready_s, arrival, 0.0), Stretch(3 * ready_s, arrival, service)])
    at_s = share * ready_s
    start = StartUp(arrival, service, ready_s)
    assert np.interp(at_s, *corners) == pytest.approx(start.backlog(at_s), abs=1e-6 * arrival * ready_s)


def test_a_service_that_cannot_keep_up_never_drains() -> None:
    start = StartUp(3.5, 3.0, 10.0)
    assert start.drain_s == inf
    assert start.backlog(60.0) == pytest.approx(35 + 25)
    assert StartUp(3.5, 3.5, 0.0).drain_s == 0.0


@given(arrival=RPS, ready_s=READY_S, rest_s=READY_S)
def test_at_the_rate_to_drain_the_backlog_ends_at_that_moment(arrival: float, ready_s: float, rest_s: float) -> None:
    by_s = ready_s + rest_s
    service = service_to_drain_rps(arrival_rps=arrival, ready_s=ready_s, by_s=by_s)
    assert StartUp(arrival, service, ready_s).drained_at_s == pytest.approx(by_s)
    assert start_to_drain_s(arrival_rps=arrival, service_rps=service, by_s=by_s) == pytest.approx(ready_s)


def test_no_rate_drains_before_the_service_is_ready() -> None:
    with pytest.raises(ValueError, match="not below"):
        service_to_drain_rps(arrival_rps=1.0, ready_s=10.0, by_s=10.0)


@given(extra_s=st.floats(1e-3, 1000.0), saved_s=st.floats(1e-6, 1.0))
def test_the_steps_to_repay_have_saved_what_the_start_took(extra_s: float, saved_s: float) -> None:
    steps = steps_to_repay(extra_s=extra_s, saved_per_step_s=saved_s)
    assert steps * saved_s >= extra_s * (1 - 1e-8)
    assert (steps - 1) * saved_s < extra_s * (1 + 1e-8) or steps == 0


@given(stretches=STRETCHES, start=st.floats(0.0, 50.0))
def test_a_backlog_is_never_negative_and_at_least_all_flows_in_sum(stretches: list[Stretch], start: float) -> None:
    at_s, left = backlog_over(stretches, start=start)
    assert min(left) >= 0.0
    net = start + sum(one.duration_s * (one.inflow - one.capacity) for one in stretches)
    assert left[-1] >= net - 1e-6
    assert at_s[-1] == pytest.approx(sum(one.duration_s for one in stretches))
    assert at_s == sorted(at_s)


@given(stretches=STRETCHES, start=st.floats(0.0, 50.0))
def test_the_corners_agree_with_small_steps_through_time(stretches: list[Stretch], start: float) -> None:
    """The second route: a thousand steps in each stretch, each of them cut off at zero."""
    left = start
    for one in stretches:
        for _ in range(1000):
            left = max(0.0, left + (one.inflow - one.capacity) * one.duration_s / 1000)
    assert backlog_over(stretches, start=start)[1][-1] == pytest.approx(left, abs=0.06 * 20)


@given(stretches=STRETCHES, most=st.floats(0.0, 100.0))
def test_at_the_capacity_for_peaks_a_repeated_cycle_stays_within_bounds(stretches: list[Stretch], most: float) -> None:
    capacity = capacity_for_peaks(stretches, most=most)
    cycle = [Stretch(one.duration_s, one.inflow, capacity) for one in stretches]
    assert max(backlog_over(cycle * 4)[1]) <= most + 1e-6
    mean = sum(one.inflow * one.duration_s for one in stretches) / sum(one.duration_s for one in stretches)
    assert capacity >= mean
    if capacity > mean * 1.001:  # a peak decides: with less of it, that peak alone leaves more than is allowed
        less = [Stretch(one.duration_s, one.inflow, 0.98 * capacity) for one in stretches]
        assert max(backlog_over(less * 2)[1]) > most


def test_even_arrivals_need_their_mean_and_no_more() -> None:
    assert capacity_for_peaks([Stretch(10.0, 3.0, 0.0), Stretch(50.0, 3.0, 0.0)], most=0.0) == pytest.approx(3.0)
