from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimates
from estimators.hit_probability import HitProbability
from estimators.likely import PACE_SCALE, in_time, on_pace, quantile_s
from estimators.paths import COLUMN, Path
from estimators.spread import ResidualSpread
from tests.builders import a_fleet, estimate, held

LOCAL, RECOMPUTE = COLUMN[Path.LOCAL], COLUMN[Path.RECOMPUTE]


def learned(conformal: Conformal | None = None, hit: float = 0.93, scale: float = 0.2) -> Estimates:
    """A copy on the first replica that is there in `hit` of all cases, nothing on the second."""
    estimates = estimate(a_fleet(), held([512, 0]))
    probability = estimates.hit_probability.copy()
    probability[LOCAL, 0] = hit
    names = ("a", "b")
    doubt = Doubt(HitProbability(names), ResidualSpread(names), conformal or Conformal(LEVELS))
    return estimates.changed(hit_probability=probability, doubt=doubt, scale=np.full(2, scale), shift=np.full(2, 0.1))


def late_by_half() -> Conformal:
    """What has learned that first tokens come half as late again as their p90 and p99 said."""
    conformal = Conformal(LEVELS)
    for _ in range(200):
        issued = conformal.corrected_one(8448, [1.0, 1.2])
        conformal.observe(8448, observed_s=1.5, predicted_s=[1.0, 1.2], issued_s=issued)
    return conformal


@pytest.mark.parametrize("conformal", [None, late_by_half()])
def test_at_the_levels_of_receipts_quantiles_are_those_of_receipts(conformal: Conformal | None) -> None:
    estimates = learned(conformal)
    for number, level in enumerate(LEVELS):
        assert quantile_s(estimates, level) == pytest.approx(estimates.quantile_grid_s[number], rel=1e-4)


@pytest.mark.parametrize("conformal", [None, late_by_half()])
@given(level=st.floats(0.05, 0.995), deadline_s=st.floats(0.05, 3.0))
def test_in_time_with_a_probability_means_that_quantile_is_in_time(
    conformal: Conformal | None, level: float, deadline_s: float
) -> None:
    estimates = learned(conformal)
    at_level, chance = quantile_s(estimates, level), in_time(estimates, deadline_s, level=level)
    for at in zip(*estimates.possible.nonzero(), strict=True):
        if at_level[at] < 0.999 * deadline_s:
            assert chance[at] >= level
        elif at_level[at] > 1.001 * deadline_s:
            assert chance[at] < level


def test_a_quantile_is_where_that_share_of_drawn_first_tokens_has_come() -> None:
    estimates, chance = learned(hit=0.6), np.random.default_rng(5)
    hit_s, miss_s = estimates.first_token_s[LOCAL, 0], estimates.first_token_s[RECOMPUTE, 0]
    times_s = np.where(chance.random(200_000) < 0.6, hit_s, miss_s) * np.exp(0.1 + 0.2 * chance.logistic(size=200_000))
    for q in (0.3, 0.5, 0.8, 0.95):
        assert quantile_s(estimates, q)[LOCAL, 0] == pytest.approx(np.quantile(times_s, q), rel=0.02)
    late = estimates.changed(doubt=None)
    assert in_time(late, 0.5, level=0.9)[LOCAL, 0] == pytest.approx((times_s <= 0.5).mean(), abs=0.005)


def test_without_spread_a_first_token_is_in_time_or_not() -> None:
    estimates = replace(learned(hit=0.6), scale=0.0, shift=0.0)
    hit_s, miss_s = estimates.first_token_s[LOCAL, 0], estimates.first_token_s[RECOMPUTE, 0]
    chances = [in_time(estimates, s, level=0.9)[LOCAL, 0] for s in (hit_s * 0.99, hit_s, miss_s * 0.99, miss_s)]
    assert chances == pytest.approx([0.0, 0.6, 0.6, 1.0])


def test_what_is_impossible_is_never_in_time() -> None:
    estimates = learned()
    assert in_time(estimates, 1e6, level=0.9)[~estimates.possible].max() == 0.0
    assert np.isinf(quantile_s(estimates, 0.5)[~estimates.possible]).all()


def test_nine_in_ten_paces_are_within_a_quarter_of_their_estimate() -> None:
    estimates = learned()
    on = on_pace(estimates, float(estimates.pace_s[0]) * 9**PACE_SCALE)
    assert on[0] == pytest.approx(0.9)
    assert on_pace(estimates, float(estimates.pace_s[0]))[0] == pytest.approx(0.5)
    assert on_pace(estimates, 1e9)[0] == 1.0


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_deadline_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        in_time(learned(), bad, level=0.9)
    with pytest.raises(ValueError, match="deadline_s"):
        on_pace(learned(), bad)
