from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.hit_probability import TIERS, Evidence, HitProbability, hit_posterior
from estimators.survival import PRIOR_FALSE, PRIOR_TRUE
from estimators.tiers import Tier

UNKNOWN = float("nan")
AGE_S = 30.0


def three(**options: float) -> HitProbability:
    return HitProbability(["a", "b", "c"], **options)


def reports(hits: HitProbability, outcomes: str, *, row: int = 0, tier: Tier = Tier.HBM, from_s: float = 0.0) -> float:
    """One answer a second, `y` with all expected blocks reused, `n` with none; returns the time of the last."""
    for second, outcome in enumerate(outcomes):
        now_s = from_s + second
        hits.reported(row, tier, expected_blocks=8, reported_blocks=8 * (outcome == "y"), age_s=AGE_S, now_s=now_s)
    return from_s + len(outcomes) - 1


def times(hits: HitProbability, outcomes: str, *, miss_s: float = 2.0, from_s: float = 0.0) -> float:
    """First tokens of one replica that took as long as a hit (`y`, 0.2 s) or as a miss (`n`) should."""
    for second, outcome in enumerate(outcomes):
        hits.timed(
            0,
            Tier.HBM,
            observed_s=0.2 if outcome == "y" else miss_s,
            hit_s=0.2,
            miss_s=miss_s,
            scale=0.1,
            age_s=AGE_S,
            now_s=from_s + second,
        )
    return from_s + len(outcomes) - 1


def counts(hits: HitProbability, share: float, *, windows: int, foreign_tokens: float = 0.0) -> float:
    """Windows of ten requests, one a second, of which `share` of the tokens hit."""
    now_s = 0.0
    for _ in range(windows):
        for _ in range(10):
            now_s += 1.0
            hits.expected(0, Tier.HBM, reuse_tokens=800.0, prompt_tokens=1000.0, age_s=AGE_S)
        hits.counted(0, Tier.HBM, hit_tokens=8000.0 * share, query_tokens=10000.0 + foreign_tokens, now_s=now_s)
    return now_s


def at(hits: HitProbability, now_s: float, *, row: int = 0, tier: Tier = Tier.HBM, age_s: float = AGE_S) -> float:
    return float(hits.survival(tier, np.full(len(hits.names), age_s), now_s)[row])


def uncertainty_of(hits: HitProbability, now_s: float) -> npt.NDArray[np.float64]:
    """For equal beliefs, so that only the evidence differs."""
    return hits.uncertainty(Tier.HBM, np.full(len(hits.names), 0.8), now_s)


def test_without_evidence_the_prior_is_read_and_faster_tiers_are_less_lasting() -> None:
    hits = three()
    survival = np.stack([hits.survival(tier, np.full(3, 600.0), 5.0) for tier in TIERS])
    assert np.all(np.diff(survival[:3], axis=0) > 0.0)
    assert at(hits, 5.0, age_s=0.0) == pytest.approx(PRIOR_TRUE / (PRIOR_TRUE + PRIOR_FALSE), rel=1e-3)
    assert all(hits.evidence(row, tier, 5.0) is Evidence.NONE for row in range(3) for tier in TIERS)


@given(st.lists(st.floats(0.0, 1e7), min_size=3, max_size=3), st.floats(0.0, 1e5))
def test_whatever_was_seen_and_when_survival_is_a_probability(ages: list[float], now_s: float) -> None:
    hits = three()
    reports(hits, "yyn")
    reports(hits, "nn", row=1, tier=Tier.REMOTE)
    for tier in TIERS:
        for age_s in (np.array(ages), np.array([UNKNOWN, *ages[1:]]), None):
            survival = hits.survival(tier, age_s, now_s)
            assert np.all((survival >= 0.0) & (survival <= 1.0))


def test_reading_changes_nothing() -> None:
    hits = three()
    now_s = reports(hits, "yyyyn")
    before = hits.state(now_s)
    for later_s in (now_s, now_s + 1e4, now_s):
        hits.survival(Tier.HBM, np.full(3, AGE_S), later_s)
        hits.uncertainty(Tier.HBM, np.full(3, 0.5), later_s)
        hits.evidence(0, Tier.HBM, later_s)
        hits.state(later_s)
    assert hits.state(now_s) == before


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_every_level_of_evidence_finds_how_many_hit(share: float) -> None:
    """With times clearly apart. The tolerance is three standard errors of some two hundred observations."""
    rng = np.random.default_rng(4)
    drawn = "".join("yn"[int(hit)] for hit in rng.random(600) > share)
    by_report, by_counter, by_time = three(), three(), three()
    assert at(by_report, reports(by_report, drawn)) == pytest.approx(share, abs=0.1)
    assert at(by_counter, counts(by_counter, share, windows=60)) == pytest.approx(share, abs=0.1)
    assert at(by_time, times(by_time, drawn)) == pytest.approx(share, abs=0.1)


def test_times_that_overlap_still_find_how_many_hit() -> None:
    """A miss takes half as long again at a scale of 0.1: a single time proves little, six hundred do."""
    rng = np.random.default_rng(6)
    hits = three()
    for second in range(600):
        took_s = (0.2 if rng.random() < 0.7 else 0.3) * math.exp(rng.logistic(0.0, 0.1))
        hits.timed(0, Tier.HBM, observed_s=took_s, hit_s=0.2, miss_s=0.3, scale=0.1, age_s=AGE_S, now_s=float(second))
    assert at(hits, 600.0) == pytest.approx(0.7, abs=0.12)


def test_a_time_that_cannot_tell_hit_from_miss_teaches_nothing() -> None:
    hits = three()
    before = at(hits, 0.0)
    for second in range(50):
        hits.timed(0, Tier.HBM, observed_s=9.0, hit_s=0.2, miss_s=0.2, scale=0.1, age_s=AGE_S, now_s=float(second))
    assert at(hits, 50.0) == pytest.approx(before)
    assert hits.evidence(0, Tier.HBM, 50.0) is Evidence.NONE


@given(st.floats(0.0, 1.0), st.floats(0.01, 10.0), st.floats(1.1, 20.0), st.floats(0.02, 1.0))
def test_a_posterior_is_a_probability_on_the_side_the_time_points_to(
    prior: float, hit_s: float, ratio: float, scale: float
) -> None:
    def after(observed_s: float) -> float:
        return hit_posterior(prior=prior, observed_s=observed_s, hit_s=hit_s, miss_s=ratio * hit_s, scale=scale)

    assert 0.0 <= after(ratio * hit_s) <= prior + 1e-12
    assert prior - 1e-12 <= after(hit_s) <= 1.0
    assert after(math.sqrt(ratio) * hit_s) == pytest.approx(prior, abs=1e-9)


def test_a_wild_time_says_little() -> None:
    wild = hit_posterior(prior=0.5, observed_s=1e6, hit_s=0.2, miss_s=0.4, scale=0.1)
    assert 0.3 < wild < 0.5


def test_each_level_is_named_and_outranks_those_below() -> None:
    hits = three()
    now_s = times(hits, "y" * 8)
    assert hits.evidence(0, Tier.HBM, now_s) is Evidence.RESIDUAL
    now_s = counts(hits, 1.0, windows=1)
    assert hits.evidence(0, Tier.HBM, now_s) is Evidence.COUNTERS
    now_s = reports(hits, "y", from_s=now_s + 1.0)
    assert hits.evidence(0, Tier.HBM, now_s) is Evidence.REPORTED
    assert hits.evidence(1, Tier.HBM, now_s) is Evidence.NONE
    assert hits.evidence(0, Tier.HOST, now_s) is Evidence.NONE


def test_a_request_is_not_counted_twice_by_weaker_evidence() -> None:
    alone, both = three(), three()
    for second in range(100):
        for hits in (alone, both):
            reports(hits, "y", from_s=float(second))
        times(both, "n", from_s=float(second))
    assert at(both, 100.0) == at(alone, 100.0) > 0.95


def test_weaker_evidence_speaks_again_after_reports_have_stopped() -> None:
    hits = three()
    now_s = times(hits, "n" * 80, from_s=reports(hits, "y" * 100) + 1.0)
    assert at(hits, now_s) < 0.5
    assert hits.evidence(0, Tier.HBM, now_s) is Evidence.RESIDUAL


def test_evidence_fades_and_uncertainty_widens_with_time() -> None:
    hits = three(memory_s=1000.0)
    now_s = reports(hits, "y" * 100)
    fresh, prior = at(hits, now_s), at(three(), 0.0)
    read = [at(hits, now_s + later_s) for later_s in (0.0, 500.0, 2000.0, 1e5)]
    doubts = [float(uncertainty_of(hits, now_s + later_s)[0]) for later_s in (0.0, 500.0, 2000.0, 1e5)]
    assert read == sorted(read, reverse=True)
    assert read[0] == fresh
    assert read[-1] == pytest.approx(prior)
    assert doubts == sorted(doubts)
    assert doubts[-1] == pytest.approx(float(uncertainty_of(three(), 0.0)[0]))
    assert hits.evidence(0, Tier.HBM, now_s) is Evidence.REPORTED
    assert hits.evidence(0, Tier.HBM, now_s + 1e5) is Evidence.NONE


def test_own_evidence_narrows_more_than_that_of_others() -> None:
    hits = three()
    before = uncertainty_of(hits, 0.0)
    now_s = reports(hits, "y" * 50)
    after = uncertainty_of(hits, now_s)
    assert after[0] < after[1] == after[2] < before[1]


def test_a_replica_nobody_has_asked_is_read_as_the_fleet() -> None:
    hits = three()
    now_s = reports(hits, "n" * 30, row=1, from_s=reports(hits, "n" * 30) + 1.0)
    assert at(hits, now_s, row=2) < 0.3
    assert at(hits, now_s, row=2, tier=Tier.HOST) == at(three(), 0.0, tier=Tier.HOST)


def test_one_wrong_directory_is_told_from_the_others_within_ten_requests() -> None:
    hits = three()
    for second in range(100):
        for row in range(3):
            reports(hits, "y", row=row, from_s=float(second))
    for second in range(100, 110):
        for row in range(3):
            reports(hits, "n" if row == 1 else "y", row=row, from_s=float(second))
    read = hits.survival(Tier.HBM, np.full(3, AGE_S), 110.0)
    assert read[1] < 0.6
    assert min(read[0], read[2]) > 0.95
    for second in range(110, 120):
        reports(hits, "y", row=1, from_s=float(second))
    assert at(hits, 120.0, row=1) > 0.6


def test_part_of_a_chain_counts_as_that_part() -> None:
    hits = three()
    for second in range(200):
        hits.reported(0, Tier.HBM, expected_blocks=8, reported_blocks=2, age_s=AGE_S, now_s=float(second))
    assert at(hits, 200.0) == pytest.approx(0.25, abs=0.03)


def test_more_reuse_than_expected_is_a_hit() -> None:
    exact, more = three(), three()
    reports(exact, "y")
    more.reported(0, Tier.HBM, expected_blocks=8, reported_blocks=50, age_s=AGE_S, now_s=0.0)
    assert at(more, 0.0) == at(exact, 0.0)


def test_tokens_of_other_clients_weaken_what_counters_say() -> None:
    alone, shared, hidden = three(), three(), three()
    read = [
        at(alone, counts(alone, 0.0, windows=2)),
        at(shared, counts(shared, 0.0, windows=2, foreign_tokens=5000.0)),
        at(hidden, counts(hidden, 0.5, windows=2, foreign_tokens=1e6)),
    ]
    assert read[0] == pytest.approx(read[1])  # no hit at all is no hit of ours, whoever else asked
    assert read[1] < read[2]
    # Half the hits of a crowd could all be ours or not: that leaves nearly everything open.
    assert read[2] > 0.4


def test_counters_without_requests_of_ours_teach_nothing_later() -> None:
    clean, busy = three(), three()
    for now_s in range(100):
        busy.counted(0, Tier.HBM, hit_tokens=1e6, query_tokens=1e6, now_s=-1000.0 + now_s)
    assert at(busy, counts(busy, 0.0, windows=3)) == at(clean, counts(clean, 0.0, windows=3))


def test_counter_windows_wait_until_they_hold_enough_requests() -> None:
    hits = three()
    before = at(hits, 0.0)
    for now_s in range(7):
        hits.expected(0, Tier.HBM, reuse_tokens=800.0, prompt_tokens=1000.0, age_s=AGE_S)
        hits.counted(0, Tier.HBM, hit_tokens=0.0, query_tokens=1000.0, now_s=float(now_s))
    assert at(hits, 7.0) == before
    hits.expected(0, Tier.HBM, reuse_tokens=800.0, prompt_tokens=1000.0, age_s=AGE_S)
    hits.counted(0, Tier.HBM, hit_tokens=0.0, query_tokens=1000.0, now_s=8.0)
    assert at(hits, 8.0) < before


def test_a_restarted_replica_is_read_as_the_fleet_but_for_the_store() -> None:
    hits = three()
    now_s = reports(hits, "n" * 60)
    now_s = reports(hits, "n" * 60, tier=Tier.REMOTE, from_s=now_s + 1.0)
    now_s = reports(hits, "y" * 60, row=1, from_s=now_s + 1.0)
    store = at(hits, now_s, tier=Tier.REMOTE)
    hits.forget(0)
    assert at(hits, now_s) == at(hits, now_s, row=2)
    assert at(hits, now_s, tier=Tier.REMOTE) == store
    assert hits.evidence(0, Tier.HBM, now_s) is Evidence.NONE
    assert hits.evidence(0, Tier.REMOTE, now_s) is Evidence.REPORTED


def a_history() -> tuple[HitProbability, float]:
    hits = three()
    now_s = reports(hits, "yyynyyyy")
    now_s = reports(hits, "nnn", row=2, tier=Tier.REMOTE, from_s=now_s + 1.0)
    return hits, now_s


def test_what_was_learned_survives_a_restart() -> None:
    hits, now_s = a_history()
    other = HitProbability(["new", "c", "b", "a"])
    other.restore(json.loads(json.dumps(hits.state(now_s))), now_s=7.0)
    for tier in TIERS:
        for row, name in enumerate(hits.names):
            moved = other.names.index(name)
            assert at(other, 7.0, row=moved, tier=tier) == pytest.approx(at(hits, now_s, row=row, tier=tier), abs=1e-4)
            assert other.evidence(moved, tier, 7.0) is hits.evidence(row, tier, now_s)
    assert at(other, 7.0, row=0) == pytest.approx(at(hits, now_s, row=1), abs=1e-4)  # as the fleet


def test_an_old_state_counts_for_less() -> None:
    hits, now_s = a_history()
    state, doubts = hits.state(now_s), []
    for age_s in (0.0, 3600.0, 86400.0):
        other = three()
        other.restore(state, now_s=0.0, age_s=age_s)
        doubts.append(float(uncertainty_of(other, 0.0)[0]))
    assert doubts == sorted(doubts)
    assert at(other, 0.0) == pytest.approx(at(three(), 0.0), abs=1e-3)


def broken(path: list[Any], value: object) -> dict[str, Any]:
    hits, now_s = a_history()
    state: dict[str, Any] = json.loads(json.dumps(hits.state(now_s)))
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return state


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"fleet": {}, "replicas": []},
        broken(["fleet"], None),
        broken(["fleet", "hbm", "curve"], 3),
        broken(["fleet", "hbm", "curve", "seen"], float("nan")),
        broken(["replicas", "a", "vram"], {}),
        broken(["replicas", "a", "hbm"], []),
        broken(["replicas", "a", "hbm", "levels"], [1.0]),
        broken(["replicas", "a", "hbm", "levels", 1], -1.0),
        broken(["replicas", "c", "remote", "curve", "evictions"], "none"),
    ],
)
def test_garbage_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    hits, now_s = a_history()
    before = hits.state(now_s)
    with pytest.raises(ValueError, match=" is "):
        hits.restore(state, now_s=now_s)
    assert hits.state(now_s) == before


@pytest.mark.parametrize("bad", [-1.0, UNKNOWN, math.inf])
def test_numbers_out_of_range_are_refused(bad: float) -> None:
    hits = three()
    with pytest.raises(ValueError, match="expected_blocks"):
        hits.reported(0, Tier.HBM, expected_blocks=bad, reported_blocks=1, age_s=1.0, now_s=0.0)
    with pytest.raises(ValueError, match="reported_blocks"):
        hits.reported(0, Tier.HBM, expected_blocks=1, reported_blocks=bad, age_s=1.0, now_s=0.0)
    with pytest.raises(ValueError, match="scale"):
        hits.timed(0, Tier.HBM, observed_s=1.0, hit_s=1.0, miss_s=2.0, scale=bad, age_s=1.0, now_s=0.0)
    with pytest.raises(ValueError, match="memory"):
        HitProbability(["a"], memory=bad)
    with pytest.raises(ValueError, match="age_s"):
        hits.restore(three().state(0.0), now_s=0.0, age_s=bad)


def test_a_negative_age_and_an_unknown_replica_are_refused() -> None:
    hits = three()
    with pytest.raises(ValueError, match="age_s"):
        hits.reported(0, Tier.HBM, expected_blocks=1, reported_blocks=1, age_s=-1.0, now_s=0.0)
    with pytest.raises(ValueError, match="row"):
        hits.reported(3, Tier.HBM, expected_blocks=1, reported_blocks=1, age_s=1.0, now_s=0.0)
    with pytest.raises(ValueError, match="names"):
        HitProbability(["a", "a"])
