from __future__ import annotations

from math import factorial, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.waits import NONE, Wait, one_after_another, wait


def erlang_wait_s(servers: int, rho: float, service_s: float) -> float:
    """Mean wait of M/M/c, exactly: Erlang's C formula."""
    offered = servers * rho
    full = offered**servers / factorial(servers) / (1 - rho)
    waits = full / (sum(offered**n / factorial(n) for n in range(servers)) + full)
    return waits * service_s / (servers * (1 - rho))


@given(rho=st.floats(0.01, 0.99), cv2=st.floats(0.0, 4.0))
def test_one_server_gives_the_formula_of_pollaczek_and_khinchine(rho: float, cv2: float) -> None:
    assert wait(servers=1, utilisation=rho, service_s=2.0, cv2=cv2).mean_s == pytest.approx(
        rho * 2.0 * (1 + cv2) / (2 * (1 - rho))
    )
    assert wait(servers=1, utilisation=rho, service_s=2.0).probability == pytest.approx(rho)


@pytest.mark.parametrize("servers", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rho", [0.1, 0.5, 0.8, 0.95])
def test_several_servers_give_erlangs_formula_with_factorials(servers: int, rho: float) -> None:
    found = wait(servers=servers, utilisation=rho, service_s=1.0, cv2=1.0).mean_s
    assert found == pytest.approx(erlang_wait_s(servers, rho, 1.0), rel=1e-9)


@given(servers=st.integers(1, 200), rho=st.floats(0.0, 0.99), more=st.floats(0.0, 0.009))
def test_more_load_waits_longer_and_more_servers_wait_less(servers: int, rho: float, more: float) -> None:
    here = wait(servers=servers, utilisation=rho, service_s=1.0).mean_s
    assert wait(servers=servers, utilisation=rho + more, service_s=1.0).mean_s >= here * (1 - 1e-9)
    assert wait(servers=servers + 1, utilisation=rho, service_s=1.0).mean_s <= here


def test_without_load_or_work_nobody_waits_and_at_full_load_for_ever() -> None:
    assert wait(servers=3, utilisation=0.0, service_s=1.0) == NONE
    assert wait(servers=3, utilisation=0.9, service_s=0.0) == NONE
    assert wait(servers=3, utilisation=1.0, service_s=1.0).mean_s == inf
    assert wait(servers=3, utilisation=1.2, service_s=1.0).longer_than(1e9) == 1.0


@given(mean=st.floats(0.01, 10.0), p=st.floats(0.01, 1.0))
def test_the_tail_has_the_mean_it_was_made_from(mean: float, p: float) -> None:
    queue = Wait(mean, p)
    limits_s = np.linspace(0.0, 30 * mean / p, 20_001)
    tail = np.array([queue.longer_than(float(limit)) for limit in limits_s])
    assert np.trapezoid(tail, limits_s) == pytest.approx(mean, rel=1e-3)
    assert queue.longer_than(0.0) == pytest.approx(p)
    assert queue.longer_than(-1.0) == 1.0


def test_millions_of_servers_are_answered_at_once_and_wait_next_to_nothing() -> None:
    assert wait(servers=10**9, utilisation=0.9, service_s=1.0).mean_s < 1e-6


def test_two_queues_add_up_and_are_both_free_only_together() -> None:
    both = one_after_another(Wait(1.0, 0.5), Wait(2.0, 0.5))
    assert (both.mean_s, both.probability) == (3.0, 0.75)
    assert one_after_another(NONE, Wait(2.0, 0.5)) == Wait(2.0, 0.5)


def test_a_busy_queue_of_draws_agrees() -> None:
    """The second route: ten thousand requests through four servers, first come first served."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / 3.4, 40_000))
    free = np.zeros(4)
    waited = []
    for at_s in arrivals:
        server = int(np.argmin(free))
        starts_s = max(at_s, free[server])
        waited.append(starts_s - at_s)
        free[server] = starts_s + 1.0
    expected = wait(servers=4, utilisation=0.85, service_s=1.0).mean_s
    assert float(np.mean(waited[2000:])) == pytest.approx(expected, rel=0.15)
