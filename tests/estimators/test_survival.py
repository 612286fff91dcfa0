from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.survival import AGE_EDGES_S, COLUMNS, OLDEST_S, SurvivalCurve

UNKNOWN = float("nan")

seen_copies = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 20.0), st.one_of(st.floats(0.0, 1e6), st.just(UNKNOWN))), max_size=40
)


def a_curve(memory: float = 200.0) -> SurvivalCurve:
    return SurvivalCurve(lifetime_s=600.0, memory=memory)


def told(curve: SurvivalCurve, hits: str, age_s: float = 30.0) -> SurvivalCurve:
    """One observation for each letter: `y` there, `n` gone."""
    for hit in hits:
        curve.learn(share=float(hit == "y"), weight=1.0, age_s=age_s)
    return curve


def taught(alive: Callable[[float], float], seed: int, observations: int = 800) -> SurvivalCurve:
    """Copies of exponential age, mean 150 s, that survive with probability `alive(age)`."""
    rng = np.random.default_rng(seed)
    curve = a_curve()
    for age_s in rng.exponential(150.0, observations).tolist():
        curve.learn(share=float(rng.random() < alive(age_s)), weight=1.0, age_s=age_s)
    return curve


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_hazard_and_a_partly_wrong_directory_are_learned(seed: int) -> None:
    """The tolerance is three standard errors of about a hundred observations near each age."""

    def alive(age_s: float) -> float:
        return 0.95 * math.exp(-age_s / 300.0)

    curve = taught(alive, seed)
    for age_s in (5.0, 30.0, 100.0, 200.0, 400.0):
        assert curve.at(age_s) == pytest.approx(alive(age_s), abs=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_an_age_limit_is_learned_as_one(seed: int) -> None:
    """What least-recently-used eviction does: everything younger than a turn-over is there, nothing older."""
    curve = taught(lambda age_s: float(age_s < 256.0), seed)
    assert curve.at(60.0) > 0.98
    assert curve.at(120.0) > 0.95
    assert curve.at(600.0) < 0.15


@pytest.mark.parametrize("seed", range(3))
def test_what_age_does_not_matter_for_is_learned_as_a_constant(seed: int) -> None:
    curve = taught(lambda age_s: 0.8, seed)
    for age_s in (60.0, 100.0, 150.0, 300.0):
        assert curve.at(age_s) == pytest.approx(0.8, abs=0.1)
    assert curve.at(UNKNOWN) == pytest.approx(0.8, abs=0.08)


def test_before_anything_is_known_older_copies_are_less_certain() -> None:
    curve = a_curve()
    assert curve.at(0.0) == pytest.approx(0.95)
    assert 0.8 < curve.at(60.0) < 0.9
    assert curve.at(UNKNOWN) == pytest.approx(curve.at(64.0))


@given(seen_copies)
def test_survival_is_a_probability_and_never_rises_with_age(seen: list[tuple[float, float, float]]) -> None:
    curve = a_curve()
    for share, weight, age_s in seen:
        curve.learn(share=share, weight=weight, age_s=age_s)
    table = curve.table()
    assert np.all((table >= 0.0) & (table <= 1.0))
    assert np.all(np.diff(table[:-1]) <= 1e-12)


@given(seen_copies)
def test_the_table_is_the_curve(seen: list[tuple[float, float, float]]) -> None:
    curve = a_curve()
    for share, weight, age_s in seen:
        curve.learn(share=share, weight=weight, age_s=age_s)
    table = curve.table()
    assert table.shape == (COLUMNS,)
    for column, age_s in enumerate(AGE_EDGES_S.tolist()):
        assert table[column] == pytest.approx(curve.at(min(age_s, OLDEST_S)), rel=1e-9)
    assert table[-1] == pytest.approx(curve.at(UNKNOWN), rel=1e-12)


@given(st.floats(1.0, 1e5), st.floats(0.0, 1e5))
def test_a_hit_raises_what_is_believed_at_every_age(seen_at_s: float, asked_s: float) -> None:
    assert told(a_curve(), "y", seen_at_s).at(asked_s) >= a_curve().at(asked_s)


@given(seen_copies, st.floats(0.0, 1e5))
def test_a_miss_lowers_what_is_believed_at_its_age(seen: list[tuple[float, float, float]], age_s: float) -> None:
    """But for half a percent: sharing a miss out over its causes is one step towards the answer, not the answer."""
    curve = a_curve(memory=1e9)  # nothing fades: a miss could else shorten the memory of worse
    for share, weight, at_s in seen:
        curve.learn(share=share, weight=weight, age_s=at_s)
    before = curve.at(age_s)
    assert told(curve, "n", age_s).at(age_s) <= before + 5e-3


def test_lost_events_are_believed_within_ten_requests_however_good_the_past() -> None:
    curve = told(a_curve(), "y" * 300)
    assert curve.at(30.0) > 0.99
    assert told(curve, "n" * 4).at(30.0) < 0.75
    assert told(curve, "n" * 6).at(30.0) < 0.5
    assert told(curve, "n" * 40).at(30.0) < 0.2


def test_a_directory_that_was_never_right_is_believed_less_with_every_request() -> None:
    curve = a_curve()
    answers = [told(curve, "n").at(30.0) for _ in range(12)]
    assert answers == sorted(answers, reverse=True)
    assert answers[2] < 0.5
    assert answers[-1] < 0.25


def test_a_repaired_directory_is_trusted_again_within_ten_hits() -> None:
    curve = told(told(a_curve(), "y" * 300), "n" * 100)
    assert curve.at(30.0) < 0.1
    assert told(curve, "y" * 10).at(30.0) > 0.75


def test_one_miss_among_many_hits_is_not_taken_for_a_change() -> None:
    assert told(a_curve(), "y" * 100 + "n" + "y" * 20).at(30.0) > 0.97


def test_the_past_fades_with_new_observations() -> None:
    """From nine in ten to eight in ten raises no alarm: the memory alone decides how fast it is followed."""
    short, long = (told(told(a_curve(memory), "yyyyyyyyyn" * 60), "yyyyn" * 8).at(30.0) for memory in (20.0, 2000.0))
    assert short == pytest.approx(0.8, abs=0.05)
    assert long > 0.87


def test_half_a_prefix_counts_as_half_a_hit() -> None:
    halves = a_curve()
    for _ in range(200):
        halves.learn(share=0.5, weight=1.0, age_s=30.0)
    assert halves.at(30.0) == pytest.approx(0.5, abs=0.03)


def test_fading_all_leaves_the_prior() -> None:
    curve = told(a_curve(), "n" * 50)
    curve.fade(0.0)
    assert curve.table() == pytest.approx(a_curve().table())
    assert curve.seen == 0.0


@given(seen_copies)
def test_what_was_learned_survives_a_restart(seen: list[tuple[float, float, float]]) -> None:
    curve, other = a_curve(), a_curve()
    for share, weight, age_s in seen:
        curve.learn(share=share, weight=weight, age_s=age_s)
    other.restore(json.loads(json.dumps(curve.state())))
    assert other.table().tolist() == curve.table().tolist()
    assert other.state() == curve.state()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("true", -1.0),
        ("true", "1"),
        ("true", True),
        ("false", None),
        ("seen", float("nan")),
        ("seen", float("inf")),
        ("misses", None),
        ("evictions", [1.0]),
        ("evictions", None),
        ("exposure_s", [-1.0] * 12),
    ],
)
def test_garbage_is_refused_and_changes_nothing(name: str, value: object) -> None:
    curve = told(a_curve(), "yyn")
    before = curve.state()
    with pytest.raises(ValueError, match=name):
        curve.restore({**told(a_curve(), "nnnn").state(), name: value})
    assert curve.state() == before
