"""Arrival rate and output length: learned from what was seen."""

from __future__ import annotations

import numpy as np
import pytest

from estimators.arrivals import ArrivalRate
from estimators.output_length import PRIOR_TOKENS, OutputLength


def test_the_rate_of_poisson_arrivals_is_found() -> None:
    rng = np.random.default_rng(8)
    rate = ArrivalRate(memory=400)
    for at_s in np.cumsum(rng.exponential(1 / 7.0, 4000)):
        rate.arrived(float(at_s))
    assert rate.rate_rps == pytest.approx(7.0, rel=0.15)


def test_one_arrival_is_no_rate() -> None:
    rate = ArrivalRate()
    rate.arrived(3.0)
    assert rate.rate_rps == 0.0


def test_mean_work_is_the_mean_of_what_was_placed() -> None:
    rate = ArrivalRate(memory=1000)
    for work_s in (1.0, 2.0, 6.0):
        rate.placed(work_s)
    assert rate.mean_work_s == pytest.approx(3.0)


def test_output_length_starts_at_its_prior_and_goes_to_what_is_seen() -> None:
    output = OutputLength()
    assert output.expected(None) == PRIOR_TOKENS
    for _ in range(500):
        output.observe(40)
    assert output.expected(None) == pytest.approx(40, rel=0.05)


def test_a_client_limit_caps_the_expectation() -> None:
    assert OutputLength().expected(10) == 10
