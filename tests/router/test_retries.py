"""The budget of second attempts: laws over any sequence of requests and failures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.retries import RetryBudget, RetryConfig

STEPS = st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans()), max_size=120)
CONFIGS = st.builds(RetryConfig, share=st.floats(0, 1), per_s=st.floats(0, 5), burst=st.floats(0, 20))


@given(config=CONFIGS, steps=STEPS)
def test_retries_never_exceed_burst_share_and_rate_in_any_window(
    config: RetryConfig, steps: list[tuple[float, bool]]
) -> None:
    budget, now_s = RetryBudget(config), 0.0
    history: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # time, requests and retries so far
    for gap_s, wants_retry in steps:
        now_s += gap_s
        _, requests, retries = history[-1]
        if wants_retry:
            retries += budget.take(now_s)
        else:
            budget.request(now_s)
            requests += 1
        history.append((now_s, requests, retries))
    for number, (start_s, requests_before, retries_before) in enumerate(history):
        for end_s, requests, retries in history[number:]:
            allowed = (
                config.burst + config.share * (requests - requests_before) + config.per_s * (end_s - start_s) + 1e-6
            )
            assert retries - retries_before <= allowed


def test_a_total_outage_is_multiplied_by_the_share_and_no_more() -> None:
    budget = RetryBudget(RetryConfig(share=0.2, per_s=0.0, burst=10.0))
    retries = 0
    for number in range(10_000):
        budget.request(number / 100)
        retries += budget.take(number / 100)
    assert retries == pytest.approx(0.2 * 10_000 + 10, abs=1)


def test_a_quiet_router_may_retry_again_after_a_while() -> None:
    budget = RetryBudget(RetryConfig(share=0.0, per_s=1.0, burst=2.0))
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert [budget.take(1.0), budget.take(1.0)] == [True, False]
    assert budget.left(100.0) == 2.0


def test_a_clock_that_jumps_back_earns_nothing_twice() -> None:
    budget = RetryBudget(RetryConfig(share=0.0, per_s=1.0, burst=2.0))
    assert [budget.take(10.0), budget.take(10.0)] == [True, True]
    assert not budget.take(5.0)
    assert not budget.take(10.0)


def test_with_everything_at_zero_there_is_no_second_attempt() -> None:
    budget = RetryBudget(RetryConfig(share=0.0, per_s=0.0, burst=0.0))
    budget.request(0.0)
    assert not budget.take(1e9)
