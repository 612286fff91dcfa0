from __future__ import annotations

import pytest

from router.tokenizing.breaker import Breaker


def test_it_opens_after_failures_in_a_row_and_only_then() -> None:
    breaker = Breaker(failures_to_open=3)
    assert [breaker.failed(0.0), breaker.failed(0.0)] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(0.0) for _ in range(4)] == [False, False, True, False]
    assert breaker.open


def test_an_open_one_lets_one_trial_through_after_each_rest() -> None:
    breaker = Breaker(failures_to_open=1, rest_s=5.0)
    assert breaker.lets_through(0.0)
    breaker.failed(10.0)
    assert [at for at in range(10, 30) if breaker.lets_through(float(at))] == [15, 20, 25]


def test_a_success_closes_it_once() -> None:
    breaker = Breaker(failures_to_open=1)
    breaker.failed(0.0)
    assert [breaker.succeeded(), breaker.succeeded()] == [True, False]
    assert all(breaker.lets_through(0.0) for _ in range(5))


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="failures_to_open"):
        Breaker(failures_to_open=0)
    with pytest.raises(ValueError, match="rest_s"):
        Breaker(rest_s=0.0)
