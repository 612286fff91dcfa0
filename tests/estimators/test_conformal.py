"""Coverage on made-up streams: predictions claim a logistic error of scale 0.1, and what really happens differs.

Streams mix five prompt lengths, 1,600 requests each in random order, seeded; an outcome is told 30 requests late. Pass
marks: each length covers 98.5 to 99.5 % at p99 and 88.5 to 91.5 % at p90. The true quantile covers within
these only 95 times in 100 by chance, so passing them all means that what was missed has been paid back.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.conformal import BUCKET_EDGES_TOKENS, Conformal, bucket_of

Array = npt.NDArray[np.float64]

LENGTHS = (500, 2_000, 8_000, 30_000, 100_000)
EACH = 1_600
DELAY = 30
CLAIMED_SCALE = 0.1
LEVELS = (0.9, 0.99)
ODDS = np.log([0.9 / 0.1, 0.99 / 0.01])
STUDENT_3 = np.array([1.6377, 4.5407])  # its quantiles with three degrees of freedom, from tables


@dataclass(frozen=True)
class World:
    """Log errors of requests in order, and the true quantiles of each, (requests, levels)."""

    errors: Array
    quantiles: Array


def steady(rng: np.random.Generator, count: int, *, centre: float = 0.0, scale: float = 0.1) -> World:
    return World(rng.logistic(centre, scale, count), np.tile(centre + scale * ODDS, (count, 1)))


def moving(rng: np.random.Generator, level: Array) -> World:
    """As claimed, but all of it `level` later on the log scale."""
    as_claimed = steady(rng, len(level))
    return World(as_claimed.errors + level, as_claimed.quantiles + level[:, None])


def wandering(rng: np.random.Generator, count: int) -> Array:
    """An error that decays by a tenth with each request and is pushed anew: standard deviation 0.11."""
    level = np.zeros(count)
    for i in range(1, count):
        level[i] = 0.9 * level[i - 1] + rng.normal(0.0, 0.05)
    return level


def a_world(kind: str, seed: int) -> World:
    rng = np.random.default_rng(seed)
    count = EACH * len(LENGTHS)
    slower = np.where(np.arange(count) < count // 2, 0.0, math.log(2.0))
    match kind:
        case "as claimed":
            return steady(rng, count)
        case "claimed too narrow":
            return steady(rng, count, centre=0.2, scale=0.2)
        case "claimed too wide":
            return steady(rng, count, centre=-0.1, scale=0.05)
        case "heavy tails":
            return World(0.12 * rng.standard_t(3, count), np.tile(0.12 * STUDENT_3, (count, 1)))
        case "twice as slow midway":
            return moving(rng, slower)
        case "twice as fast midway":
            return moving(rng, -slower)
        case "slowly twice as slow":
            return moving(rng, math.log(2.0) * np.arange(count) / count)
        case "errors that persist":
            return moving(rng, wandering(rng, count))
        case _:
            return moving(rng, wandering(rng, count) + slower)


KINDS = (
    "as claimed",
    "claimed too narrow",
    "claimed too wide",
    "heavy tails",
    "twice as slow midway",
    "twice as fast midway",
    "slowly twice as slow",
    "errors that persist",
    "errors that persist, twice as slow midway",
)


@dataclass(frozen=True)
class Told:
    lengths: npt.NDArray[np.int64]
    covered: npt.NDArray[np.bool_]  # (requests, levels)
    width: Array  # issued over true quantile, (requests, levels)


@cache
def told(kind: str, seed: int) -> Told:
    world = a_world(kind, seed)
    count = len(world.errors)
    lengths = np.random.default_rng(seed + 1000).permutation(np.tile(LENGTHS, EACH))
    work_s = lengths * 1e-4
    observed_s = work_s * np.exp(world.errors)
    predicted_s = work_s[:, None] * np.exp(CLAIMED_SCALE * ODDS)
    issued_s = np.empty_like(predicted_s)
    conformal = Conformal(LEVELS)
    for now in range(count):
        issued_s[now] = conformal.corrected(int(lengths[now]), predicted_s[now])
        if now >= DELAY:
            then = now - DELAY
            conformal.observe(
                int(lengths[then]),
                observed_s=float(observed_s[then]),
                predicted_s=predicted_s[then].tolist(),
                issued_s=issued_s[then].tolist(),
            )
    width = issued_s / (work_s[:, None] * np.exp(world.quantiles))
    return Told(lengths, observed_s[:, None] <= issued_s, width)


@pytest.mark.parametrize("kind", KINDS)
def test_each_length_covers_what_is_claimed(kind: str) -> None:
    run = told(kind, seed=0)
    for length in LENGTHS:
        p90, p99 = run.covered[run.lengths == length].mean(axis=0)
        assert 0.885 <= p90 <= 0.915, length
        assert 0.985 <= p99 <= 0.995, length


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "slow midway" not in kind])
def test_coverage_holds_within_windows_too(kind: str) -> None:
    """Of 400 requests of a length; drawn from the true quantiles, three standard errors are 4.5 and 1.5 %."""
    run = told(kind, seed=0)
    for length in LENGTHS:
        windows = run.covered[run.lengths == length].reshape(-1, 400, 2).mean(axis=1)
        assert windows[:, 0].min() >= 0.855
        assert windows[:, 1].min() >= 0.975


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "slow midway" in kind])
def test_a_sudden_change_is_over_within_four_hundred_requests_of_a_length(kind: str) -> None:
    """Before any outcome is back, some six requests of a length are misses that nothing could have prevented."""
    run = told(kind, seed=0)
    for length in LENGTHS:
        windows = run.covered[run.lengths == length].reshape(-1, 400, 2).mean(axis=1)
        assert windows[[1, 2], 1].min() >= 0.94  # it falls near the border of these two
        assert windows[[0, 3], 1].min() >= 0.975


@pytest.mark.parametrize("kind", KINDS)
def test_cover_is_not_bought_with_width(kind: str) -> None:
    """Median of issued over true quantile. Where the truth wanders by itself the true one moves with it."""
    p90, p99 = np.median(told(kind, seed=0).width, axis=0)
    assert 0.9 < p90 < 1.15
    assert 0.9 < p99 < 1.35


def test_without_correction_a_narrow_claim_covers_far_less() -> None:
    """What the streams above are measured against."""
    world = a_world("claimed too narrow", seed=0)
    covered = (world.errors[:, None] <= CLAIMED_SCALE * ODDS).mean(axis=0)
    assert covered[0] < 0.6
    assert covered[1] < 0.85


def test_prompt_outcomes_leave_hardly_a_miss_too_many() -> None:
    """With no delay, what is missed beyond the allowed is bounded by how far theta moved, in steps of the gain."""
    rng = np.random.default_rng(3)
    conformal, missed = Conformal((0.99,)), 0
    for error in rng.logistic(0.0, 0.1, 5000).tolist():
        issued_s = float(conformal.corrected(500, np.array([1.5]))[0])
        observed_s = math.exp(error)
        missed += observed_s > issued_s
        conformal.observe(500, observed_s=observed_s, predicted_s=[1.5], issued_s=[issued_s])
    assert missed == pytest.approx(50, abs=3)


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, 0), (1023, 0), (1024, 1), (4096, 2), (65535, 3), (65536, 4), (10**9, 4)]
)
def test_prompts_fall_into_buckets_by_length(tokens: int, bucket: int) -> None:
    assert bucket_of(tokens) == bucket
    assert len(BUCKET_EDGES_TOKENS) == 4


def teach(conformal: Conformal, ratio: float, *, prompt_tokens: int = 500, count: int = 1) -> None:
    """First tokens that took `ratio` times what both levels predicted."""
    for _ in range(count):
        issued_s = conformal.corrected(prompt_tokens, np.ones(2)).tolist()
        conformal.observe(prompt_tokens, observed_s=ratio, predicted_s=[1.0, 1.0], issued_s=issued_s)


def test_nothing_is_corrected_before_the_first_outcome() -> None:
    assert Conformal().factors(500).tolist() == [1.0, 1.0]
    assert Conformal().corrected(500, np.array([0.2, 0.3])).tolist() == [0.2, 0.3]


@given(st.lists(st.floats(0.001, 100.0), min_size=2, max_size=2), st.floats(-3.0, 3.0), st.floats(-3.0, 3.0))
def test_one_candidate_is_corrected_as_it_would_be_among_many(
    predicted_s: list[float], theta: float, higher: float
) -> None:
    conformal = Conformal()
    conformal.restore(
        {
            **conformal.state(),
            "all": [{**t, "theta": x} for t, x in zip(conformal.state()["all"], (theta, higher), strict=True)],
        }
    )
    assert conformal.corrected_one(500, predicted_s) == conformal.corrected(500, np.array(predicted_s)).tolist()


def test_lengths_are_corrected_apart_and_a_new_one_starts_where_all_stand() -> None:
    conformal = Conformal()
    teach(conformal, 2.0, prompt_tokens=500, count=200)
    assert conformal.factors(500)[1] > 1.8
    assert conformal.factors(30_000)[1] > 1.8
    teach(conformal, 1.0, prompt_tokens=30_000, count=2000)
    assert conformal.factors(30_000)[1] < 1.3
    assert conformal.factors(500)[1] > 1.8


def test_a_miss_raises_and_a_cover_lowers_the_quantile() -> None:
    conformal = Conformal()
    before = conformal.factors(500)
    teach(conformal, 3.0)
    raised = conformal.factors(500)
    teach(conformal, 0.01)
    assert np.all(raised > before)
    assert np.all(conformal.factors(500) < raised)


def test_late_misses_that_would_be_covered_by_now_do_not_raise_it_further() -> None:
    """A burst of outcomes from before the change was noticed: the factor stops near what covers them."""
    conformal = Conformal()
    for _ in range(200):
        conformal.observe(500, observed_s=2.0, predicted_s=[1.0, 1.0], issued_s=[1.0, 1.0])
    assert np.all(conformal.factors(500) < 2.0 * 1.5)


def test_a_higher_level_never_comes_out_below_a_lower_one() -> None:
    conformal = Conformal()
    rng = np.random.default_rng(2)
    for ratio in rng.lognormal(0.0, 0.5, 400).tolist():
        conformal.observe(500, observed_s=ratio, predicted_s=[1.0, 9.0], issued_s=[1.0, 9.0])
    predicted_s = rng.uniform(0.1, 1.0, (2, 5, 3))
    issued_s = conformal.corrected(500, predicted_s)
    assert issued_s.shape == (2, 5, 3)
    assert np.all(issued_s[0] <= issued_s[1])
    assert issued_s[0] == pytest.approx(predicted_s[0] * conformal.factors(500)[0])


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)), max_size=50))
def test_whatever_comes_the_correction_stays_within_a_factor_of_a_hundred(seen: list[tuple[int, float, float]]) -> None:
    conformal = Conformal()
    for tokens, observed_s, predicted_s in seen:
        both_s = [predicted_s, predicted_s]
        conformal.observe(tokens, observed_s=observed_s, predicted_s=both_s, issued_s=both_s)
        assert np.all((conformal.factors(tokens) >= 0.0099) & (conformal.factors(tokens) <= 101.0))


def test_what_was_learned_survives_a_restart() -> None:
    conformal, other = Conformal(), Conformal()
    teach(conformal, 1.4, count=70)
    teach(conformal, 0.6, prompt_tokens=9000, count=30)
    other.restore(json.loads(json.dumps(conformal.state())))
    assert other.state() == conformal.state()
    for both in (conformal, other):
        teach(both, 1.1, prompt_tokens=100_000, count=5)
    assert other.state() == conformal.state()


def broken(path: list[Any], value: object) -> dict[str, Any]:
    conformal = Conformal()
    teach(conformal, 1.4, count=7)
    state: dict[str, Any] = json.loads(json.dumps(conformal.state()))
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return state


@pytest.mark.parametrize(
    "state",
    [
        {},
        Conformal((0.5, 0.9)).state(),
        broken(["all"], None),
        broken(["all"], []),
        broken(["buckets"], [None]),
        broken(["buckets", 0], [{}]),
        broken(["buckets", 0, 1], 3.0),
        broken(["all", 0, "theta"], float("nan")),
        broken(["all", 0, "theta"], 40.0),
        broken(["all", 1, "scale"], 0.0),
        broken(["all", 1, "owed"], "much"),
        broken(["buckets", 0, 0, "samples"], -1),
    ],
)
def test_garbage_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    conformal = Conformal()
    teach(conformal, 0.7, count=9)
    before = conformal.state()
    with pytest.raises(ValueError, match=" is "):
        conformal.restore(state)
    assert conformal.state() == before


@pytest.mark.parametrize("levels", [(), (0.0, 0.5), (0.5, 1.0), (0.9, 0.5), (0.9, 0.9), (float("nan"),)])
def test_levels_that_are_no_rising_quantiles_are_refused(levels: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="levels"):
        Conformal(levels)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), math.inf])
def test_times_out_of_range_are_refused(bad: float) -> None:
    conformal = Conformal()
    with pytest.raises(ValueError, match="observed_s"):
        conformal.observe(5, observed_s=bad, predicted_s=[1.0, 1.0], issued_s=[1.0, 1.0])
    with pytest.raises(ValueError, match="predicted_s"):
        conformal.observe(5, observed_s=1.0, predicted_s=[1.0, bad], issued_s=[1.0, 1.0])
    with pytest.raises(ValueError, match="issued_s"):
        conformal.observe(5, observed_s=1.0, predicted_s=[1.0, 1.0], issued_s=[bad])
    with pytest.raises(ValueError, match="predicted_s"):
        conformal.corrected(5, np.ones(3))
