from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.calibration import DAY_S, PrefillCalibration, ScaleCalibration
from estimators.prefill_features import FEATURES, Beside, prefill_features, prior_coefficients

Vector = npt.NDArray[np.float64]

TRUE = np.array([1.6, 2.2, 0.7, 1.5, 1.2])
WEIGHTS_S = 9e-3
FRESH = np.random.default_rng(2)


def works(rng: np.random.Generator, count: int) -> Vector:
    """Prefills of 50 to 30,000 tokens after 0 to 20,000, as roofline seconds of an A100, shape (count, features)."""
    new = np.exp(rng.uniform(np.log(50), np.log(30_000), count)).round()
    cached = rng.integers(0, 20_000, count)
    features = prefill_features(
        linear_s=new * 9e-5,
        attention_s=(new * cached + new**2 / 2) * 3.8e-9,
        new_tokens=new,
        beside=Beside(0.0, 0.0, 0.0, WEIGHTS_S, WEIGHTS_S),
        step_tokens=2048,
    )
    return np.ascontiguousarray(features.T)


TEST_WORKS = works(FRESH, 500)


def median_error(theta: Vector, truth: Vector = TRUE) -> float:
    true_s = TEST_WORKS @ truth
    return float(np.median(np.abs(TEST_WORKS @ theta - true_s) / true_s))


def no_disturbance(seen_s: float, rng: np.random.Generator) -> float:
    return seen_s


def teach(
    calibration: PrefillCalibration,
    samples: int,
    *,
    seed: int = 11,
    noise: float = 0.05,
    truth: Vector = TRUE,
    disturb: Callable[[float, np.random.Generator], float] = no_disturbance,
) -> None:
    """Samples of a replica whose times are `truth` with log-normal noise; `disturb` has chance of its own."""
    rng, chance = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    for features in works(rng, samples):
        seen_s = float(features @ truth) * float(np.exp(noise * rng.standard_normal()))
        calibration.observe(features, observed_s=disturb(seen_s, chance))


def a_calibration(start: float = 1.0, spread: float = 0.5) -> tuple[PrefillCalibration, Vector]:
    theta = prior_coefficients() * start
    return PrefillCalibration(theta, spread=spread), theta


def two_percent_absurd(seen_s: float, chance: np.random.Generator) -> float:
    return seen_s * 50.0 if chance.random() < 0.02 else seen_s


@pytest.mark.parametrize("start", [1 / 3, 1.0, 3.0])
@pytest.mark.parametrize("noise", [0.05, 0.25])
def test_wrong_start_values_converge(start: float, noise: float) -> None:
    calibration, theta = a_calibration(start * TRUE[0])
    teach(calibration, 300, noise=noise)
    assert median_error(theta) < (0.02 if noise < 0.1 else 0.1)


def test_how_wrong_the_start_was_makes_no_difference_in_the_end() -> None:
    ends = []
    for start in (1 / 3, 1.0, 3.0):
        calibration, theta = a_calibration(start)
        teach(calibration, 200)
        ends.append(theta)
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
    assert ends[2] == pytest.approx(ends[1], rel=1e-6)


def test_a_start_ten_times_off_is_set_right_by_the_first_handful_of_samples() -> None:
    calibration, theta = a_calibration(10.0)
    teach(calibration, 8)
    assert median_error(theta) < 0.15


def test_two_percent_of_outliers_fifty_times_too_long_change_nothing() -> None:
    clean, theta = a_calibration()
    teach(clean, 500)
    disturbed, disturbed_theta = a_calibration()
    teach(disturbed, 500, disturb=two_percent_absurd)
    assert abs(median_error(disturbed_theta) - median_error(theta)) < 0.01
    assert disturbed.changes == clean.changes == 0


def test_one_outlier_among_the_first_samples_changes_little() -> None:
    calibration, theta = a_calibration()
    rng = np.random.default_rng(4)
    for index, features in enumerate(works(rng, 20)):
        calibration.observe(features, observed_s=float(features @ TRUE) * (50.0 if index == 3 else 1.0))
    assert median_error(theta) < 0.05


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("noise", [0.05, 0.25])
def test_a_replica_that_becomes_twice_as_slow_or_fast_is_followed(factor: float, noise: float) -> None:
    calibration, theta = a_calibration()
    teach(calibration, 500, noise=noise)
    teach(calibration, 100, noise=noise, seed=12, truth=factor * TRUE)
    assert median_error(theta, factor * TRUE) < (0.02 if noise < 0.1 else 0.1)
    assert calibration.changes == 1


def test_a_change_is_followed_among_outliers_too() -> None:
    calibration, theta = a_calibration()
    teach(calibration, 300, disturb=two_percent_absurd)
    teach(calibration, 100, seed=12, truth=2.0 * TRUE, disturb=two_percent_absurd)
    assert median_error(theta, 2.0 * TRUE) < 0.05


def test_a_replica_that_slows_down_bit_by_bit_is_followed() -> None:
    calibration, theta = a_calibration()
    for step in range(60):
        teach(calibration, 10, seed=step, truth=TRUE * 1.01**step)
    assert median_error(theta, TRUE * 1.01**59) < 0.1


def test_a_steady_replica_is_not_taken_for_a_changed_one() -> None:
    calibration, _ = a_calibration()
    teach(calibration, 3000, noise=0.2)
    assert calibration.changes <= 1


def test_the_usual_error_is_that_of_the_samples() -> None:
    calibration, _ = a_calibration()
    teach(calibration, 1000, noise=0.2)
    assert calibration.usual_error == pytest.approx(0.2, rel=0.3)


def test_time_explained_by_other_models_is_not_learned_twice() -> None:
    calibration, theta = a_calibration()
    for features in works(np.random.default_rng(4), 50):
        calibration.observe(features, extra_s=0.3, observed_s=float(features @ prior_coefficients()) + 0.3)
    assert theta == pytest.approx(prior_coefficients(), abs=1e-9)


def test_samples_that_are_blurred_teach_less_than_sharp_ones() -> None:
    moved = []
    for blur_s in (0.0, 0.5):
        calibration, theta = a_calibration()
        teach(calibration, 200, noise=0.02, truth=prior_coefficients())
        work = works(np.random.default_rng(1), 1)[0]
        expected_s = float(work @ theta)
        calibration.observe(work, observed_s=1.1 * expected_s, blur_s=blur_s)
        moved.append(float(work @ theta) / expected_s - 1.0)
    assert 0.0 < moved[1] < moved[0]


def test_coefficients_never_become_negative() -> None:
    calibration, theta = a_calibration()
    for features in works(np.random.default_rng(5), 200):
        calibration.observe(features, observed_s=1e-4)
    assert np.all(theta >= 0)


def test_a_long_run_of_equal_work_keeps_the_estimate_right_and_all_others_near() -> None:
    """One kind of work excites one direction; the rest stays with the roofline and must not wander."""
    calibration, theta = a_calibration()
    rng = np.random.default_rng(6)
    features = works(rng, 1)[0]
    for _ in range(5000):
        calibration.observe(
            features, observed_s=1.3 * float(features.sum()) * float(np.exp(0.05 * rng.standard_normal()))
        )
    assert float(features @ theta) == pytest.approx(1.3 * float(features.sum()), rel=0.02)
    assert median_error(theta, 1.3 * prior_coefficients()) < 0.1


@pytest.mark.parametrize(
    "wrong", [{"observed_s": 0.0}, {"observed_s": nan}, {"extra_s": -1.0}, {"blur_s": nan}, {"blur_s": -1.0}]
)
def test_times_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    calibration, _ = a_calibration()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        calibration.observe(np.ones(len(FEATURES)), **{"observed_s": 1.0, **wrong})


# Answers of which only the whole time is known


@given(ratio=st.floats(1e-6, 1e6), weight=st.floats(0, 1))
def test_one_whole_answer_moves_the_prefill_by_at_most_seven_percent(ratio: float, weight: float) -> None:
    calibration, theta = a_calibration()
    calibration.nudge(ratio, weight=weight)
    moved = float(TEST_WORKS[0] @ theta) / float(TEST_WORKS[0] @ prior_coefficients())
    assert 1 / 1.072 < moved < 1.072
    assert (moved - 1.0) * (ratio - 1.0) >= 0.0


@pytest.mark.parametrize("start", [1 / 3, 3.0])
def test_whole_answers_alone_bring_a_wrong_start_to_the_right_total(start: float) -> None:
    calibration, theta = a_calibration(start)
    pace = ScaleCalibration()
    pace.observe(start)
    rng = np.random.default_rng(8)
    for features in works(rng, 500):
        prefill_s, decode_s = float(features @ theta), 2.0 * pace.scale
        ratio = (float(features @ prior_coefficients()) + 2.0) / (prefill_s + decode_s)
        calibration.nudge(ratio, weight=prefill_s / (prefill_s + decode_s))
        pace.nudge(ratio, weight=decode_s / (prefill_s + decode_s))
    totals = (TEST_WORKS @ theta + 2.0 * pace.scale) / (TEST_WORKS @ prior_coefficients() + 2.0)
    assert np.abs(totals - 1.0).max() < 0.2
    assert median_error(theta, prior_coefficients()) < 0.25


def test_beside_first_tokens_whole_answers_teach_little_and_more_again_when_those_stop_coming() -> None:
    calibration, theta = a_calibration()
    teach(calibration, 200)
    moved = []
    for _ in range(300):
        before = theta.copy()
        calibration.nudge(2.0, weight=1.0)
        moved.append(float(theta[0] / before[0]) - 1.0)
    assert moved[0] < 0.01 < moved[-1]


def test_what_whole_answers_moved_stays_when_samples_come_again() -> None:
    calibration, theta = a_calibration()
    for _ in range(20):
        calibration.nudge(2.0, weight=1.0)
    teach(calibration, 200)
    assert median_error(theta) < 0.03


# State that survives a restart


def taught_state(samples: int = 200) -> dict[str, Any]:
    calibration, _ = a_calibration()
    teach(calibration, samples)
    return calibration.state()


def test_a_restored_calibration_goes_on_as_if_nothing_had_happened() -> None:
    calibration, theta = a_calibration()
    teach(calibration, 200)
    successor, restored = a_calibration()
    successor.restore(calibration.state(), age_s=10.0)
    assert restored == pytest.approx(theta)
    for one in (calibration, successor):
        teach(one, 50, seed=3)
    assert restored == pytest.approx(theta, rel=1e-3)
    assert successor.samples == calibration.samples


def test_a_state_older_than_a_day_is_left_sooner_than_a_young_one() -> None:
    """Both meet a replica that is now a tenth slower, which is too little to count as a change."""
    state, moved = taught_state(), []
    for age_s in (0.5 * DAY_S, 10 * DAY_S):
        calibration, theta = a_calibration()
        calibration.restore(state, age_s=age_s)
        assert median_error(theta) < 0.05
        teach(calibration, 5, seed=3, truth=1.1 * TRUE)
        moved.append(float(np.median(TEST_WORKS @ theta / (TEST_WORKS @ TRUE))))
    young, old = moved
    assert young + 0.01 < old < 1.12


def test_a_state_of_a_few_samples_teaches_nothing() -> None:
    calibration, theta = a_calibration()
    calibration.restore(taught_state(3), age_s=0.0)
    assert theta.tolist() == prior_coefficients().tolist()
    assert calibration.samples == 0


GARBAGE: list[dict[str, Any]] = [
    {"coefficients": None},
    {"coefficients": [1.0, 1.0]},
    {"coefficients": ["a", 1, 1, 1, 1]},
    {"coefficients": [-1.0, 1.0, 0.0, 0.0, 1.0]},
    {"coefficients": [nan, 1.0, 0.0, 0.0, 1.0]},
    {"centre": [0.0] * 5},
    {"information": [[1.0] * 5] * 4},
    {"information": (-np.eye(5)).tolist()},
    {"vector": "text"},
    {"usual_error": -1.0},
    {"usual_error": None},
    {"samples": 1.5},
    {"samples": True},
]


@pytest.mark.parametrize("wrong", GARBAGE, ids=lambda wrong: f"{next(iter(wrong))}={next(iter(wrong.values()))}"[:40])
def test_a_state_that_is_garbage_is_refused_by_name_and_changes_nothing(wrong: dict[str, Any]) -> None:
    calibration, theta = a_calibration()
    teach(calibration, 50)
    before = calibration.state()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        calibration.restore({**taught_state(), **wrong}, age_s=0.0)
    assert calibration.state() == before
    assert theta.tolist() == before["coefficients"]


def test_an_age_that_cannot_be_is_refused() -> None:
    calibration, _ = a_calibration()
    with pytest.raises(ValueError, match="age_s"):
        calibration.restore(taught_state(), age_s=-1.0)
    with pytest.raises(ValueError, match="age_s"):
        ScaleCalibration().restore(ScaleCalibration().state(), age_s=nan)


# One ratio


def test_a_ratio_is_learned_and_one_absurd_value_moves_it_by_a_bounded_step() -> None:
    scale = ScaleCalibration()
    for _ in range(60):
        learned = scale.observe(1.5)
    assert learned == scale.scale == pytest.approx(1.5, rel=0.02)
    assert scale.observe(1e6) < 1.5 * 1.1


def test_a_ratio_survives_a_restart_and_an_old_one_is_left_sooner() -> None:
    scale = ScaleCalibration()
    for _ in range(60):
        scale.observe(1.5)
    learned = []
    for age_s in (0.0, 30 * DAY_S):
        successor = ScaleCalibration()
        successor.restore(scale.state(), age_s=age_s)
        assert successor.scale == pytest.approx(scale.scale)
        learned.append(successor.observe(2.0))
    assert learned[0] < learned[1] < 2.0


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": "1"}, {"scale": nan}, {"samples": -1}, {"samples": None}])
def test_a_ratio_that_is_garbage_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    scale = ScaleCalibration()
    scale.observe(1.5)
    before = scale.state()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        scale.restore({"scale": 2.0, "samples": 5, **wrong}, age_s=0.0)
    assert scale.state() == before
