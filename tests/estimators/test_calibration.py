from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from estimators.calibration import PrefillCalibration, ScaleCalibration, prior_coefficients

TRUE = np.array([1.6, 2.2, 0.7, 1.5])


def works(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Prefills of 50 to 30,000 tokens after 0 to 20,000, as roofline seconds of an A100."""
    new, cached = rng.integers(50, 30_000, count), rng.integers(0, 20_000, count)
    weights_s = 9e-3
    return np.stack(
        [new * 9e-5, (new * cached + new**2 / 2) * 3.8e-9, np.ceil(new / 2048) * weights_s, np.full(count, weights_s)],
        axis=1,
    )


def median_error(theta: npt.NDArray[np.float64], features: npt.NDArray[np.float64], truth: float = 1.0) -> float:
    true_s = truth * features @ TRUE
    return float(np.median(np.abs(features @ theta - true_s) / true_s))


def trained(samples: int, *, noise: float = 0.05, start: float = 1.0, outliers: float = 0.0) -> npt.NDArray[np.float64]:
    rng = np.random.default_rng(11)
    theta = prior_coefficients() * start
    calibration = PrefillCalibration(theta, spread=2.0)
    for features in works(rng, samples):
        seen_s = float(features @ TRUE) * float(np.exp(noise * rng.standard_normal()))
        if rng.random() < outliers:
            seen_s *= 100.0
        calibration.observe(features, extra_s=0.0, observed_s=seen_s)
    return theta


@pytest.mark.parametrize("start", [1 / 3, 1.0, 3.0])
def test_wrong_start_values_converge(start: float) -> None:
    assert median_error(trained(300, start=start), works(np.random.default_rng(2), 500)) < 0.05


def test_two_percent_of_absurd_outliers_change_little() -> None:
    assert median_error(trained(500, outliers=0.02), works(np.random.default_rng(2), 500)) < 0.10


def test_a_replica_that_becomes_twice_as_slow_is_followed() -> None:
    rng = np.random.default_rng(3)
    theta = prior_coefficients()
    calibration = PrefillCalibration(theta)
    for factor in (1.0, 2.0):
        for features in works(rng, 200):
            calibration.observe(features, extra_s=0.0, observed_s=factor * float(features @ TRUE))
    assert median_error(theta, works(rng, 200), truth=2.0) < 0.1


def test_time_explained_by_running_decodes_is_not_learned_twice() -> None:
    theta = prior_coefficients()
    calibration = PrefillCalibration(theta)
    for features in works(np.random.default_rng(4), 50):
        calibration.observe(features, extra_s=0.3, observed_s=float(features @ prior_coefficients()) + 0.3)
    assert theta == pytest.approx(prior_coefficients(), abs=1e-9)


def test_coefficients_never_become_negative() -> None:
    theta = prior_coefficients()
    calibration = PrefillCalibration(theta, spread=2.0)
    for features in works(np.random.default_rng(5), 200):
        calibration.observe(features, extra_s=0.0, observed_s=1e-4)
    assert np.all(theta >= 0)


def test_a_long_run_of_equal_work_keeps_the_estimate_finite_and_right() -> None:
    theta = prior_coefficients()
    calibration = PrefillCalibration(theta)
    features = works(np.random.default_rng(6), 1)[0]
    for _ in range(5000):
        calibration.observe(features, extra_s=0.0, observed_s=1.3 * float(features.sum()))
    assert np.isfinite(theta).all()
    assert float(features @ theta) == pytest.approx(1.3 * float(features.sum()), rel=0.01)


def test_a_ratio_is_learned_and_one_absurd_value_moves_it_by_a_bounded_step() -> None:
    scale = ScaleCalibration()
    for _ in range(60):
        learned = scale.observe(1.5)
    assert learned == pytest.approx(1.5, rel=0.02)
    assert scale.observe(1e6) < 1.5 * 1.1
