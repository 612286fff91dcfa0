"""Arrival rate, mean work and utilisation: learned from what was seen."""

from __future__ import annotations

import numpy as np
import pytest

from estimators.arrivals import Traffic


def poisson(rate_rps: float, arrivals: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    times: list[float] = np.cumsum(rng.exponential(1 / rate_rps, arrivals)).tolist()
    return times


def test_the_rate_of_poisson_arrivals_is_found() -> None:
    traffic = Traffic(memory_s=100.0)
    times = poisson(7.0, 4000, seed=8)
    for at_s in times:
        traffic.arrived(at_s)
    assert traffic.rate_rps(times[-1]) == pytest.approx(7.0, rel=0.12)


@pytest.mark.parametrize("rate_rps", [0.02, 0.2, 2.0])
@pytest.mark.parametrize("asks_on_arrival", [True, False])
def test_the_rate_is_not_biased_however_low_it_is(rate_rps: float, asks_on_arrival: bool) -> None:
    """Asked by the arrival itself or at any other time, the mean over a long run is the rate; 4 % is its noise."""
    traffic, said = Traffic(memory_s=30.0), []
    for at_s in poisson(rate_rps, 6000, seed=4):
        if not asks_on_arrival:
            said.append(traffic.rate_rps(at_s))  # Poisson arrivals see time averages
        traffic.arrived(at_s)
        if asks_on_arrival:
            said.append(traffic.rate_rps(at_s))
    assert np.mean(said[200:]) == pytest.approx(rate_rps, rel=0.04)


def test_the_rate_is_right_soon_after_the_start() -> None:
    traffic = Traffic(memory_s=30.0)
    for index in range(21):
        traffic.arrived(index * 0.1)
    assert traffic.rate_rps(2.0) == pytest.approx(10.0, rel=0.1)


def test_a_quiet_hour_is_forgotten_as_fast_as_it_came() -> None:
    traffic = Traffic(memory_s=30.0)
    for index in range(1000):
        traffic.arrived(index * 0.1)
    quiet_until_s = 3700.0
    assert traffic.rate_rps(quiet_until_s) < 0.01
    for index in range(600):
        traffic.arrived(quiet_until_s + index * 0.1)
    assert traffic.rate_rps(quiet_until_s + 60.0) == pytest.approx(10.0, rel=0.2)


def test_one_arrival_is_no_rate_and_reading_changes_nothing() -> None:
    traffic = Traffic()
    traffic.arrived(3.0)
    assert traffic.rate_rps(3.0) == 0.0
    assert traffic.rate_rps(9.0) == traffic.rate_rps(9.0) == 0.0


def test_nothing_seen_is_no_traffic_and_no_utilisation() -> None:
    traffic = Traffic()
    assert traffic.rate_rps(5.0) == traffic.utilisation(5.0, replicas=3) == 0.0


def test_means_are_those_of_what_was_answered() -> None:
    traffic = Traffic()
    for compute_s, context in ((1.0, 100), (2.0, 200), (6.0, 600)):
        traffic.answered(compute_s, context)
    assert traffic.mean_compute_s == pytest.approx(3.0)
    assert traffic.mean_context_tokens == pytest.approx(300)


def test_utilisation_is_the_share_of_time_a_spread_fleet_would_compute() -> None:
    """Independent route: work that arrived in a window, over the window and the replicas."""
    rng = np.random.default_rng(6)
    traffic = Traffic(memory_s=200.0)
    times, works = poisson(4.0, 8000, seed=5), rng.exponential(0.8, 8000)
    for at_s, compute_s in zip(times, works.tolist(), strict=True):
        traffic.arrived(at_s)
        traffic.answered(compute_s, 1000)
    share = works.sum() / times[-1] / 5
    assert traffic.utilisation(times[-1], replicas=5) == pytest.approx(share, rel=0.25)
    assert traffic.utilisation(times[-1], replicas=1) == pytest.approx(5 * traffic.utilisation(times[-1], replicas=5))


def test_an_overloaded_fleet_has_a_utilisation_above_one() -> None:
    traffic = Traffic()
    for index in range(1000):
        traffic.arrived(index * 0.1)
        traffic.answered(1.0, 1000)
    assert traffic.utilisation(100.0, replicas=4) == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_work_and_context_that_cannot_be_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="compute_s"):
        Traffic().answered(bad, 10)
    with pytest.raises(ValueError, match="context_tokens"):
        Traffic().answered(1.0, bad)


def test_a_memory_and_a_fleet_must_be_there() -> None:
    with pytest.raises(ValueError, match="memory_s"):
        Traffic(memory_s=0.0)
    with pytest.raises(ValueError, match="replicas"):
        Traffic().utilisation(1.0, replicas=0)
