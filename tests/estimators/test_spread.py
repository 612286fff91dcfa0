from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.spread import LARGEST_SCALE, LEAST_SCALE, WIDE_SCALE, ResidualSpread, widened
from estimators.view import FleetView
from tests.builders import a_fleet

NAMES = ("a", "b", "c")


def teach(spread: ResidualSpread, errors: list[float], *, row: int = 0, from_s: float = 0.0) -> float:
    """One first token a second, predicted at 0.5 s; returns the time of the last."""
    for second, error in enumerate(errors):
        spread.observe(row, observed_s=0.5 * math.exp(error), predicted_s=0.5, now_s=from_s + second)
    return from_s + len(errors) - 1


def logistic(seed: int, *, centre: float, scale: float, count: int = 600) -> list[float]:
    return list(map(float, np.random.default_rng(seed).logistic(centre, scale, count)))


def read(spread: ResidualSpread, now_s: float, row: int = 0) -> tuple[float, float]:
    return float(spread.shift(now_s)[row]), float(spread.scale(now_s)[row])


@pytest.mark.parametrize(("centre", "scale"), [(0.0, 0.05), (-0.3, 0.1), (0.5, 0.2), (1.0, 0.6)])
@pytest.mark.parametrize("seed", range(3))
def test_centre_and_width_are_learned(centre: float, scale: float, seed: int) -> None:
    """A memory of 200 leaves a standard error of some 9 % of the scale for the centre and 6 % for the scale."""
    spread = ResidualSpread(NAMES)
    shift, found = read(spread, teach(spread, logistic(seed, centre=centre, scale=scale)))
    assert shift == pytest.approx(centre, abs=0.3 * scale)
    assert found == pytest.approx(scale, rel=0.25)


def test_before_any_sample_the_prior_is_read_and_an_uncalibrated_replica_is_wider() -> None:
    spread = ResidualSpread(NAMES, uncalibrated={"b"}, prior_scale=0.3)
    assert spread.scale(0.0) == pytest.approx([0.3, WIDE_SCALE, 0.3])
    assert spread.shift(0.0).tolist() == [0.0, 0.0, 0.0]


def test_absurd_samples_move_little() -> None:
    clean, soiled = ResidualSpread(NAMES), ResidualSpread(NAMES)
    errors = logistic(1, centre=0.1, scale=0.1)
    wild = [math.log(50.0) if index % 50 == 7 else error for index, error in enumerate(errors)]
    (shift, scale), (other_shift, other_scale) = read(clean, teach(clean, errors)), read(soiled, teach(soiled, wild))
    assert other_shift == pytest.approx(shift, abs=0.03)
    assert other_scale == pytest.approx(scale, rel=0.25)


def test_a_replica_that_slows_down_is_first_wider_then_followed() -> None:
    spread = ResidualSpread(NAMES)
    now_s = teach(spread, logistic(2, centre=0.0, scale=0.08))
    settled = read(spread, now_s)[1]
    now_s = teach(spread, logistic(3, centre=math.log(2.0), scale=0.08, count=60), from_s=now_s + 1.0)
    assert read(spread, now_s)[1] > 2.0 * settled
    now_s = teach(spread, logistic(4, centre=math.log(2.0), scale=0.08, count=800), from_s=now_s + 1.0)
    assert read(spread, now_s)[0] == pytest.approx(math.log(2.0), abs=0.05)
    assert read(spread, now_s)[1] == pytest.approx(0.08, rel=0.3)


def test_a_replica_without_samples_is_read_as_the_fleet_unless_it_is_uncalibrated() -> None:
    spread = ResidualSpread(NAMES, uncalibrated={"c"})
    now_s = teach(spread, logistic(5, centre=0.2, scale=0.1))
    assert read(spread, now_s, row=1)[0] == pytest.approx(0.2, abs=0.05)
    assert read(spread, now_s, row=1)[1] < 0.2
    assert read(spread, now_s, row=2)[1] == pytest.approx(WIDE_SCALE)
    now_s = teach(spread, logistic(6, centre=0.2, scale=0.1), row=2, from_s=now_s + 1.0)
    assert read(spread, now_s, row=2)[1] < 0.2


def test_a_replica_with_enough_samples_is_read_as_itself() -> None:
    spread = ResidualSpread(NAMES)
    wide, narrow = logistic(7, centre=0.4, scale=0.3), logistic(8, centre=0.0, scale=0.05)
    for second, (first, other) in enumerate(zip(wide, narrow, strict=True)):
        teach(spread, [first], row=0, from_s=float(second))
        teach(spread, [other], row=1, from_s=float(second))
    shift, scale = spread.shift(600.0), spread.scale(600.0)
    assert shift[0] > 0.25
    assert shift[1] == pytest.approx(0.0, abs=0.06)
    assert scale[0] > 0.2
    assert scale[1] < 0.08
    assert scale[1] < scale[2] < scale[0]


def test_silence_widens_back_to_the_prior() -> None:
    spread = ResidualSpread(NAMES, memory_s=1000.0)
    now_s = teach(spread, logistic(9, centre=0.3, scale=0.05))
    scales = [read(spread, now_s + later_s)[1] for later_s in (0.0, 300.0, 2000.0, 1e6)]
    shifts = [read(spread, now_s + later_s)[0] for later_s in (0.0, 300.0, 2000.0, 1e6)]
    assert scales == sorted(scales)
    assert scales[-1] == pytest.approx(0.5)
    assert shifts == sorted(shifts, reverse=True)
    assert shifts[-1] == pytest.approx(0.0)


def test_reading_changes_nothing() -> None:
    spread = ResidualSpread(NAMES)
    now_s = teach(spread, [0.1, -0.2, 0.3])
    before = spread.state(now_s)
    for later_s in (now_s, now_s + 1e5, now_s):
        read(spread, later_s)
        spread.state(later_s)
    assert spread.state(now_s) == before


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(1e-6, 1e6), st.floats(0.0, 1e5)), max_size=60))
def test_whatever_comes_the_width_stays_within_its_bounds(samples: list[tuple[int, float, float]]) -> None:
    spread = ResidualSpread(NAMES)
    now_s = 0.0
    for row, observed_s, later_s in samples:
        now_s += later_s
        spread.observe(row, observed_s=observed_s, predicted_s=1.0, now_s=now_s)
        assert np.all((spread.scale(now_s) >= LEAST_SCALE * 0.999) & (spread.scale(now_s) <= 3.001))
        assert np.isfinite(spread.shift(now_s)).all()


def test_a_replaced_replica_is_read_as_the_fleet() -> None:
    spread = ResidualSpread(NAMES)
    now_s = teach(spread, logistic(10, centre=1.0, scale=0.05))
    spread.forget(0)
    assert read(spread, now_s, row=0) == read(spread, now_s, row=1)


def test_what_was_learned_survives_a_restart() -> None:
    spread = ResidualSpread(NAMES)
    now_s = teach(spread, logistic(11, centre=0.2, scale=0.1), row=1)
    other = ResidualSpread(["b", "new"])
    other.restore(json.loads(json.dumps(spread.state(now_s))), now_s=3.0)
    assert read(other, 3.0, row=0) == pytest.approx(read(spread, now_s, row=1))
    assert read(other, 3.0, row=1) == pytest.approx(read(spread, now_s, row=0))
    widths = []
    for age_s in (0.0, 3600.0, 86400.0, 1e7):
        late = ResidualSpread(NAMES)
        late.restore(spread.state(now_s), now_s=0.0, age_s=age_s)
        widths.append(read(late, 0.0, row=1)[1])
    assert widths == sorted(widths)
    assert widths[-1] == pytest.approx(0.5)


GOOD: dict[str, Any] = {"centre": 0.1, "log_scale": -2.0, "samples": 3.0}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"fleet": GOOD},
        {"fleet": GOOD, "replicas": []},
        {"fleet": None, "replicas": {}},
        {"fleet": {**GOOD, "centre": float("nan")}, "replicas": {}},
        {"fleet": GOOD, "replicas": {"a": {**GOOD, "samples": -1.0}}},
        {"fleet": GOOD, "replicas": {"a": {**GOOD, "log_scale": 50.0}}},
        {"fleet": GOOD, "replicas": {"a": {**GOOD, "log_scale": "-1"}}},
        {"fleet": GOOD, "replicas": {"a": GOOD, "elsewhere": 7}},
    ],
)
def test_garbage_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    spread = ResidualSpread(NAMES)
    now_s = teach(spread, [0.1, -0.2, 0.3])
    before = spread.state(now_s)
    with pytest.raises(ValueError, match=" is "):
        spread.restore(state, now_s=now_s)
    assert spread.state(now_s) == before


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), math.inf])
def test_times_and_settings_out_of_range_are_refused(bad: float) -> None:
    spread = ResidualSpread(NAMES)
    with pytest.raises(ValueError, match="observed_s"):
        spread.observe(0, observed_s=bad, predicted_s=1.0, now_s=0.0)
    with pytest.raises(ValueError, match="predicted_s"):
        spread.observe(0, observed_s=1.0, predicted_s=bad, now_s=0.0)
    with pytest.raises(ValueError, match="prior_scale"):
        ResidualSpread(NAMES, prior_scale=bad)
    with pytest.raises(ValueError, match="memory_s"):
        ResidualSpread(NAMES, memory_s=bad)


# Rows that are given to other replicas


def test_who_takes_a_row_is_read_as_the_fleet_and_others_stay_as_they_were() -> None:
    spread = ResidualSpread(NAMES)
    last_s = teach(spread, [0.4] * 50) + 1.0
    teach(spread, [-0.2] * 50, row=1)
    others = [read(spread, last_s, row) for row in (0, 2)]
    spread.renew(1, "d", calibrated=True)
    assert [read(spread, last_s, row) for row in (0, 2)] == others
    assert read(spread, last_s, 1) == read(spread, last_s, 2)  # which nobody has taught anything
    assert spread.names == ("a", "d", "c")


def test_who_takes_a_row_without_a_known_card_is_read_widely() -> None:
    spread = ResidualSpread(NAMES)
    spread.renew(1, "d", calibrated=False)
    assert read(spread, 0.0, 1)[1] == pytest.approx(WIDE_SCALE)
    spread.renew(1, "e", calibrated=True)
    assert read(spread, 0.0, 1) == read(spread, 0.0, 0)


def test_one_replicas_state_can_be_put_into_another_row() -> None:
    spread = ResidualSpread(NAMES)
    last_s = teach(spread, [0.4] * 50)
    taught, state = read(spread, last_s), json.loads(json.dumps(spread.state_of(0, last_s)))
    spread.renew(0, "gone", calibrated=True)
    spread.renew(2, "a", calibrated=True)
    spread.restore_row(2, state, now_s=last_s, age_s=0.0)
    assert read(spread, last_s, 2) == pytest.approx(taught)


def test_a_name_that_another_row_has_is_refused() -> None:
    with pytest.raises(ValueError, match="another row"):
        ResidualSpread(NAMES).renew(1, "a", calibrated=True)


def test_rows_that_are_nobodys_are_not_in_the_state() -> None:
    spread = ResidualSpread(NAMES)
    last_s = teach(spread, [0.4] * 5)
    spread.name(0, "(left 0)")
    assert spread.state(last_s)["replicas"] == {}


# Silence


def a_view(*reported_s: float, fresh_s: float = 2.0) -> FleetView:
    view = a_fleet(*["A100"] * len(reported_s))
    view.sampled_at_s[:] = reported_s
    view.oldest_report_s = float(np.fmin.reduce(view.sampled_at_s))
    view.fresh_s = fresh_s
    return view


def test_fresh_reports_change_nothing_and_cost_nothing() -> None:
    spread = ResidualSpread(NAMES)
    now_s = teach(spread, logistic(1, centre=0.0, scale=0.1))
    assert spread.scale_at(a_view(now_s, now_s - 1.9, math.nan), now_s) is spread.scale(now_s)
    assert spread.scale_at(a_view(math.nan, math.nan, math.nan), now_s) is spread.scale(now_s)


def test_who_stopped_reporting_is_read_wider_the_longer_it_is_silent_and_nobody_else_is() -> None:
    spread = ResidualSpread(NAMES)
    now_s = teach(spread, logistic(1, centre=0.0, scale=0.1)) + 600.0
    usual = spread.scale(now_s)
    widths = [
        spread.scale_at(a_view(now_s, now_s - silent_s, math.nan), now_s).tolist()
        for silent_s in (1.0, 3.0, 10.0, 60.0, 1e6)
    ]
    column = [width[1] for width in widths]
    assert column == sorted(column)
    assert column[0] == usual[1] < column[1]
    assert column[-1] == pytest.approx(WIDE_SCALE)
    assert all(width[0] == usual[0] and width[2] == usual[2] for width in widths)


def test_a_first_token_is_word_of_a_replica_too() -> None:
    spread = ResidualSpread(NAMES)
    last_s = teach(spread, logistic(1, centre=0.0, scale=0.1), row=1)
    silent = a_view(last_s - 300.0, last_s - 300.0, last_s - 300.0)
    wide = spread.scale_at(silent, last_s + 1.0)
    usual = spread.scale(last_s + 1.0)
    assert wide[1] == usual[1]
    assert wide[0] > usual[0]


def test_reports_far_apart_are_old_later() -> None:
    spread = ResidualSpread(NAMES)
    now_s = teach(spread, logistic(1, centre=0.0, scale=0.1))
    seldom = a_view(now_s, now_s - 15.0, now_s, fresh_s=20.0)
    assert spread.scale_at(seldom, now_s) is spread.scale(now_s)


@given(
    st.lists(st.floats(LEAST_SCALE, LARGEST_SCALE), min_size=1, max_size=5),
    st.floats(0.0, 1e9),
    st.floats(0.0, 1e3),
)
def test_silence_never_narrows_and_never_makes_wider_than_an_unknown_replica(
    scales: list[float], silent_s: float, fresh_s: float
) -> None:
    scale = np.array(scales)
    found = widened(scale, silent_s=np.full(len(scales), silent_s), fresh_s=fresh_s)
    assert np.all(found >= scale * (1 - 1e-12))
    assert np.all(found <= np.maximum(scale, WIDE_SCALE) * (1 + 1e-12))
    assert widened(scale, silent_s=np.full(len(scales), np.nan), fresh_s=fresh_s).tolist() == scales
