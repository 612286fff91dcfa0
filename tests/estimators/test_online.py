"""Arrival rate and output length: learned from what was seen."""

from __future__ import annotations

import numpy as np
import pytest

from estimators.arrivals import Traffic
from estimators.output_length import PRIOR_TOKENS, OutputLength


def test_the_rate_of_poisson_arrivals_is_found() -> None:
    rng = np.random.default_rng(8)
    traffic = Traffic(memory_s=100.0)
    times = np.cumsum(rng.exponential(1 / 7.0, 4000))
    for at_s in times:
        traffic.arrived(float(at_s))
    assert traffic.rate_rps(float(times[-1])) == pytest.approx(7.0, rel=0.12)


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


def test_means_are_those_of_what_was_answered() -> None:
    traffic = Traffic()
    for compute_s, context in ((1.0, 100), (2.0, 200), (6.0, 600)):
        traffic.answered(compute_s, context)
    assert traffic.mean_compute_s == pytest.approx(3.0)
    assert traffic.mean_context_tokens == pytest.approx(300)


def test_output_length_starts_at_its_prior_and_goes_to_what_is_seen() -> None:
    output = OutputLength()
    assert output.expected(None) == PRIOR_TOKENS
    for _ in range(500):
        output.observe(40)
    assert output.expected(None) == pytest.approx(40, rel=0.05)


def test_a_client_limit_caps_the_expectation() -> None:
    assert OutputLength().expected(10) == 10
