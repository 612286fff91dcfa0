from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from estimators.mixture import fallbacks, mean_s, quantile_s, spread_quantile_s, spread_quantiles_of_one_s

Array = npt.NDArray[np.float64]

HIT_S, RECOMPUTE_S = 0.1109, 0.9672  # one request, by how its cache lookup turns out


def two(p: float) -> Array:
    return np.array([p, 1.0 - p])


def two_times() -> Array:
    return np.array([HIT_S, RECOMPUTE_S])


def by_counting(probability: list[float], time_s: list[float], q: float) -> float:
    """Walk the points in order until enough probability is passed."""
    passed = 0.0
    for t, p in sorted(zip(time_s, probability, strict=True)):
        passed += p
        if passed >= q - 1e-9:
            return t
    raise AssertionError("probabilities do not reach q")


def by_bisection(probability: Array, time_s: Array, q: float, scale: float) -> float:
    """Independent route to the spread quantile: halve an interval of log time until F meets q."""
    low, high = math.log(time_s.min()) - 60.0 * scale, math.log(time_s.max()) + 60.0 * scale
    for _ in range(200):
        middle = (low + high) / 2.0
        z = (middle - np.log(time_s)) / scale
        reached = float(np.sum(probability * (0.5 + 0.5 * np.tanh(z / 2.0))))
        low, high = (middle, high) if reached < q else (low, middle)
    return math.exp((low + high) / 2.0)


def a_mixture(draw: st.DrawFn, most: int = 5) -> tuple[Array, Array]:
    count = draw(st.integers(1, most))
    parts = np.array(draw(st.lists(st.floats(0.001, 1.0), min_size=count, max_size=count)))
    times = draw(st.lists(st.floats(1e-3, 1e2), min_size=count, max_size=count))
    return parts / parts.sum(), np.array(times)


mixtures = st.composite(a_mixture)


def test_the_mean_of_an_uncertain_hit_is_that_of_the_textbook() -> None:
    assert float(mean_s(two(0.9), two_times())) == pytest.approx(0.1965, abs=6e-5)


def test_an_uncertain_hit_beats_a_sure_recompute_of_907_ms_from_seven_percent_on() -> None:
    assert float(mean_s(two(0.0705), two_times())) < 0.907 < float(mean_s(two(0.0695), two_times()))


@pytest.mark.parametrize(("p", "expected_s"), [(0.5, RECOMPUTE_S), (0.9, RECOMPUTE_S), (0.99, HIT_S)])
def test_p99_is_the_slow_point_until_the_fast_one_holds_99_percent(p: float, expected_s: float) -> None:
    assert float(quantile_s(two(p), two_times(), 0.99)) == expected_s


def test_a_tie_reached_by_adding_floats_is_still_a_tie() -> None:
    tenths = np.full(10, 0.1)
    assert np.cumsum(tenths)[8] != 0.9  # the sum is a hair off
    assert float(quantile_s(tenths, np.arange(1.0, 11.0), 0.9)) == 9.0
    assert float(quantile_s(tenths, np.arange(1.0, 11.0), 0.3)) == 3.0  # this one a hair above


@given(mixtures(), st.floats(0.01, 0.999))
def test_point_quantiles_agree_with_counting(mixture: tuple[Array, Array], q: float) -> None:
    probability, time_s = mixture
    expected_s = by_counting(probability.tolist(), time_s.tolist(), q)
    assert float(quantile_s(probability, time_s, q)) == expected_s


def test_an_impossible_outcome_changes_no_quantile() -> None:
    probability = np.array([0.0, 0.4, 0.0, 0.6, 0.0])
    time_s = np.array([0.1, 1.0, 1.5, 2.0, 9.0])
    assert [float(quantile_s(probability, time_s, q)) for q in (0.01, 0.4, 0.5, 0.999)] == [1.0, 1.0, 2.0, 2.0]
    with_spread = spread_quantile_s(probability, time_s, 0.9, scale=0.2)
    assert float(with_spread) == pytest.approx(by_bisection(probability, time_s, 0.9, 0.2), rel=1e-5)


def test_an_unknown_time_counts_as_later_than_all_others() -> None:
    time_s = np.array([1.0, np.nan])
    assert float(quantile_s(two(0.9), time_s, 0.9)) == 1.0
    assert float(quantile_s(two(0.9), time_s, 0.99)) == np.inf
    assert np.isnan(mean_s(two(0.9), time_s))
    assert np.isnan(spread_quantile_s(two(0.9), time_s, 0.9, scale=0.1))


@given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=1, max_size=4))
def test_outcomes_are_all_there_is(survival: list[list[float]]) -> None:
    outcomes = fallbacks(np.array(survival))
    assert outcomes.shape == (len(survival) + 1, 3)
    assert np.all(outcomes >= 0.0)
    assert outcomes.sum(axis=0) == pytest.approx(np.ones(3))
    assert outcomes[-1] == pytest.approx(np.prod(1.0 - np.array(survival), axis=0))
    assert outcomes[0].tolist() == survival[0]


def test_a_host_copy_stands_in_for_a_lost_one() -> None:
    assert fallbacks(np.array([0.9, 0.5])) == pytest.approx([0.9, 0.05, 0.05])
    assert fallbacks(np.array([0.9])) == pytest.approx([0.9, 0.1])


@given(mixtures(), st.floats(0.02, 0.995), st.floats(0.005, 1.5))
@example((np.full(4, 0.25), np.array([1.0, 1.0, 3.0, 3.0])), 0.5, 0.0625)  # F is flat just below q
@example((np.array([0.49975012, 0.49975012, 0.00049976]), np.array([1.0, 46.0, 1.0])), 0.5, 0.25)
def test_spread_quantiles_agree_with_bisection(mixture: tuple[Array, Array], q: float, scale: float) -> None:
    """However many outcomes, by closed form or by Newton. The tolerance is that promised, 1e-5 of the scale."""
    probability, time_s = mixture
    expected_s = by_bisection(probability, time_s, q, scale)
    found_s = float(spread_quantile_s(probability, time_s, q, scale=scale))
    near = abs(math.log(found_s / expected_s)) < 1e-5 * max(1.0, scale)
    # Between two outcomes F can be flat at q: then any time there is as good.
    assert near or reached(probability, time_s.tolist(), found_s, scale, 0.0) == pytest.approx(q, abs=1e-7)


def test_spread_quantiles_agree_with_drawn_first_tokens() -> None:
    rng = np.random.default_rng(5)
    probability, time_s, scale = np.array([0.7, 0.2, 0.1]), np.array([0.1, 0.3, 0.9]), 0.15
    drawn = rng.choice(time_s, p=probability, size=400_000) * np.exp(rng.logistic(0.05, scale, 400_000))
    for q in (0.5, 0.9, 0.99):
        found_s = float(spread_quantile_s(probability, time_s, q, scale=scale, shift=0.05))
        assert found_s == pytest.approx(np.quantile(drawn, q), rel=0.02)  # its own standard error is under 0.5 %


@pytest.mark.parametrize("outcomes", [1, 2, 3, 5])
def test_without_spread_the_points_remain(outcomes: int) -> None:
    rng = np.random.default_rng(outcomes)
    probability = rng.dirichlet(np.ones(outcomes), 200).T
    time_s = rng.uniform(0.05, 5.0, (outcomes, 200))
    for q in (0.5, 0.9, 0.99):
        points_s = quantile_s(probability, time_s, q)
        for scale in (0.0, 1e-7):
            assert spread_quantile_s(probability, time_s, q, scale=scale) == pytest.approx(points_s, rel=1e-4)


def test_at_a_tie_spread_leaves_the_quantile_between_the_two_times() -> None:
    found_s = float(spread_quantile_s(two(0.99), two_times(), 0.99, scale=0.05))
    assert HIT_S < found_s < RECOMPUTE_S


def test_one_outcome_is_stretched_by_the_quantile_of_its_residual() -> None:
    one = np.ones(1)
    assert float(spread_quantile_s(one, one, 0.5, scale=0.3)) == pytest.approx(1.0)
    assert float(spread_quantile_s(one, one, 0.9, scale=0.3)) == pytest.approx(9.0**0.3)
    assert float(spread_quantile_s(one, one, 0.9, scale=0.3, shift=math.log(2.0))) == pytest.approx(2.0 * 9.0**0.3)


@pytest.mark.parametrize("outcomes", [2, 3])
def test_an_outcome_told_in_two_parts_is_the_same_outcome(outcomes: int) -> None:
    """Closed form against Newton: two outcomes, one of them split, must not change."""
    time_s = np.array([0.1, 0.7, 2.0])[:outcomes]
    probability = np.array([0.85, 0.1, 0.05])[:outcomes]
    probability = probability / probability.sum()
    split_s = np.append(time_s, time_s[0])
    split = np.append(probability, probability[0] / 3.0)
    split[0] -= split[-1]
    for q in (0.5, 0.9, 0.95, 0.99):
        whole = spread_quantile_s(probability, time_s, q, scale=0.1)
        assert float(spread_quantile_s(split, split_s, q, scale=0.1)) == pytest.approx(float(whole), rel=1e-6)


@given(mixtures(), st.floats(0.01, 1.0), st.floats(0.1, 10.0))
def test_quantiles_rise_with_the_level_and_scale_with_the_unit(
    mixture: tuple[Array, Array], scale: float, unit: float
) -> None:
    probability, time_s = mixture
    answers = [float(spread_quantile_s(probability, time_s, q, scale=scale)) for q in (0.1, 0.5, 0.9, 0.99)]
    assert answers == sorted(answers)
    for q, answer in zip((0.1, 0.5, 0.9, 0.99), answers, strict=True):
        other = spread_quantile_s(probability, unit * time_s, q, scale=scale)
        assert float(other) == pytest.approx(unit * answer, rel=1e-4)


def test_a_likelier_hit_never_raises_a_quantile() -> None:
    hits = np.linspace(0.01, 0.9999, 300)
    probability = np.stack([hits, 1.0 - hits])
    time_s = np.broadcast_to(two_times()[:, None], probability.shape)
    for answer in (quantile_s(probability, time_s, 0.99), spread_quantile_s(probability, time_s, 0.99, scale=0.1)):
        assert np.all(np.diff(answer) <= 1e-12)


def test_every_replica_and_path_is_answered_as_if_alone() -> None:
    rng = np.random.default_rng(8)
    for outcomes in (1, 2, 4):
        probability = np.moveaxis(rng.dirichlet(np.ones(outcomes), (6, 3)), -1, 0)
        time_s = rng.uniform(0.05, 4.0, (outcomes, 6, 3))
        scale = rng.uniform(0.01, 0.5, (6, 1))
        together = spread_quantile_s(probability, time_s, 0.9, scale=scale, shift=scale / 10.0)
        for row, path in np.ndindex(6, 3):
            alone = spread_quantile_s(
                probability[:, row, path], time_s[:, row, path], 0.9, scale=scale[row, 0], shift=scale[row, 0] / 10.0
            )
            assert float(together[row, path]) == pytest.approx(float(alone), rel=1e-6)
            point = quantile_s(probability[:, row, path], time_s[:, row, path], 0.9)
            assert float(quantile_s(probability, time_s, 0.9)[row, path]) == float(point)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, 1.1, float("nan")])
def test_a_level_outside_zero_to_one_is_refused(q: float) -> None:
    for answer in (quantile_s, lambda p, t, q: spread_quantile_s(p, t, q, scale=0.1)):
        with pytest.raises(ValueError, match="q ="):
            answer(two(0.9), two_times(), q)


@given(
    times=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
    scale=st.floats(0.005, 1.0),
    shift=st.floats(-0.5, 0.5),
)
def test_one_candidate_without_arrays_has_the_quantiles_of_the_arrays(
    times: list[float], weights: list[float], scale: float, shift: float
) -> None:
    shares = np.array(weights[: len(times)]) + 1e-3
    shares /= shares.sum()
    levels = (0.5, 0.9, 0.99)
    alone = spread_quantiles_of_one_s(list(zip(shares.tolist(), times, strict=True)), levels, scale=scale, shift=shift)
    for quantile_at_s, q in zip(alone, levels, strict=True):
        together_s = float(spread_quantile_s(shares, np.array(times), q, scale=scale, shift=shift))
        # Between two outcomes F can be flat: there the times may differ, and what they reach may not.
        assert reached(shares, times, quantile_at_s, scale, shift) == pytest.approx(q, abs=1e-3)
        assert reached(shares, times, together_s, scale, shift) == pytest.approx(q, abs=1e-3)


def reached(shares: Array, times: list[float], at_s: float, scale: float, shift: float) -> float:
    """F of the mixture at `at_s`, outcome by outcome."""
    z = [(math.log(at_s) - shift - math.log(time_s)) / scale for time_s in times]
    return sum(p / (1.0 + math.exp(-x)) if x > -700 else 0.0 for p, x in zip(shares.tolist(), z, strict=True))


def test_one_candidate_at_a_tie_takes_the_fast_outcome_and_beyond_it_the_slow_one() -> None:
    fast, slow = spread_quantiles_of_one_s([(0.9, 0.1), (0.1, 10.0)], (0.85, 0.95), scale=0.0, shift=0.0)
    assert (fast, slow) == pytest.approx((0.1, 10.0), rel=1e-4)
