from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.fading_fit import Drift, Fit, Vector, is_positive_definite

CENTRE = np.array([1.0, 1.0, 0.0])
OWN = (0.3, 0.4, 1.0)
SPREAD = 0.5


def a_fit(forgetting: float = 1.0) -> Fit:
    return Fit(CENTRE, own_spread=OWN, spread=SPREAD, forgetting=forgetting)


def samples(count: int, seed: int = 1) -> list[tuple[Vector, float, float]]:
    """(x, y, weight) of theta = (1.5, 0.7, 0.4) with noise."""
    rng = np.random.default_rng(seed)
    xs, weights = rng.random((count, 3)), rng.random(count) * 100
    ys = xs @ np.array([1.5, 0.7, 0.4]) + 0.1 * rng.standard_normal(count)
    return list(zip(xs, ys.tolist(), weights.tolist(), strict=True))


def ridge(data: list[tuple[Vector, float, float]], forgetting: float) -> Vector:
    """The same minimum from one stacked problem: rows of the prior, then the samples with their faded weights."""
    covariance = np.diag(np.array(OWN) ** 2) + SPREAD**2 * np.outer(CENTRE, CENTRE)
    root = np.linalg.cholesky(np.linalg.inv(covariance)).T
    rows, values = [root], [root @ CENTRE]
    for age, (x, y, weight) in enumerate(reversed(data)):
        scale = np.sqrt(weight * forgetting**age)
        rows.append(scale * x[None, :])
        values.append(np.array([scale * y]))
    return np.asarray(np.linalg.lstsq(np.vstack(rows), np.concatenate(values), rcond=None)[0])


@pytest.mark.parametrize("forgetting", [1.0, 0.95])
def test_it_is_the_regularised_least_squares_of_all_samples_with_faded_weights(forgetting: float) -> None:
    fit, data = a_fit(forgetting), samples(60)
    for x, y, weight in data:
        fit.add(x, y, weight)
    assert fit.solution() == pytest.approx(ridge(data, forgetting), rel=1e-6)


def test_without_samples_the_answer_is_the_centre_however_often_nothing_is_added() -> None:
    fit = a_fit(0.9)
    for _ in range(1000):
        fit.add(np.ones(3), 5.0, 0.0)
    assert fit.solution() == pytest.approx(CENTRE, abs=1e-9)


def test_a_direction_without_news_returns_to_the_prior_and_does_not_drift() -> None:
    fit = a_fit(0.95)
    for x, y, weight in samples(50):
        fit.add(x, y, weight)
    for _ in range(500):
        fit.add(np.array([1.0, 0.0, 0.0]), 1.0, 1e4)
    assert fit.solution() == pytest.approx(CENTRE, abs=0.02)


def test_scaling_multiplies_the_answer_before_and_after_further_samples() -> None:
    fit = a_fit(0.95)
    for x, y, weight in samples(30):
        fit.add(x, y, weight)
    before = fit.solution()
    fit.scale(2.5)
    assert fit.solution() == pytest.approx(2.5 * before)
    fit.add(np.zeros(3), 0.0, 0.0)
    assert fit.solution() == pytest.approx(2.5 * before, rel=0.05)


def test_widening_to_nothing_leaves_the_prior() -> None:
    fit = a_fit()
    for x, y, weight in samples(30):
        fit.add(x, y, weight)
    fit.widen(0.0)
    assert fit.solution() == pytest.approx(CENTRE, abs=1e-9)


@given(seed=st.integers(0, 10_000))
def test_no_coefficient_is_negative_and_none_could_do_better(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker on a random problem, many of which have a negative free minimum."""
    rng = np.random.default_rng(seed)
    fit = a_fit()
    for _ in range(12):
        fit.add(rng.standard_normal(3), float(3 * rng.standard_normal()), 50.0)
    theta = fit.solution()
    gradient = fit.information @ theta - fit.vector
    assert (theta >= 0).all()
    rounding = 1e-6 * float(np.abs(fit.vector).max())
    assert np.abs(gradient[theta > 0]).max(initial=0.0) < rounding
    assert (gradient[theta == 0] > -rounding).all()


def test_a_lasting_shift_is_an_alarm_and_chance_is_none() -> None:
    rng = np.random.default_rng(5)
    drift = Drift()
    assert not any(drift.saw(float(np.clip(rng.standard_normal(), -3, 3))) for _ in range(5000))
    alarms = [drift.saw(2.0 + float(np.clip(rng.standard_normal(), -3, 3))) for _ in range(20)]
    assert any(alarms)
    assert drift.pile >= 4


def test_two_outliers_in_a_row_are_no_alarm() -> None:
    drift = Drift()
    assert not any(drift.saw(3.0) for _ in range(2))


def test_a_matrix_with_a_negative_or_crooked_side_is_refused() -> None:
    assert is_positive_definite(np.eye(3))
    assert not is_positive_definite(-np.eye(3))
    assert not is_positive_definite(np.array([[1.0, 0.5], [0.0, 1.0]]))
