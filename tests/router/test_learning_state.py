"""What was learned, kept over a restart: taken over whole, and a part that is damaged costs only itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from estimators.paths import Path
from estimators.prefill_features import prior_coefficients
from tests.builders import a_request, held
from tests.router.learning_bench import LearningBench

LEARNED_AT_S = 3920.0  # end of the last answer


def learned() -> LearningBench:
    """Two replicas of which the first is slow and loses its blocks."""
    bench = LearningBench("A100", "H20", names=["slow", "other"])
    for index in range(40):
        now_s = 100.0 * index
        booking = bench.place(now_s, path=Path.LOCAL, where=held([100, 100]))
        bench.first_token(booking, now_s + 3.0)
        bench.answer(booking, now_s + 20.0, cached_tokens=0)
    return bench


@cache
def learned_file() -> bytes:
    return msgspec.json.encode(learned().learning.state(LEARNED_AT_S))


@cache
def both_learned_file() -> bytes:
    bench = learned()
    bench.taught(0.3, row=1, start_s=1e5)
    return msgspec.json.encode(bench.learning.state(1e6))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON."""
    return msgspec.json.decode(msgspec.json.encode(state), type=dict[str, Any])


def learned_state() -> dict[str, Any]:
    return msgspec.json.decode(learned_file(), type=dict[str, Any])


def expects(bench: LearningBench, now_s: float) -> list[float]:
    estimates = bench.estimate(a_request(), now_s, held([100, 100]))
    return [
        *estimates.expected_s.ravel().tolist(),
        *estimates.pace_s.tolist(),
        *estimates.quantiles_s(Path.LOCAL, 0)[1],
        *estimates.hit_probability.ravel().tolist(),
    ]


def test_what_was_learned_survives_a_restart() -> None:
    before, after = learned(), LearningBench("A100", "H20", names=["slow", "other"])
    state = through_a_file(before.learning.state(LEARNED_AT_S))
    assert expects(after, LEARNED_AT_S) != pytest.approx(expects(before, LEARNED_AT_S), rel=0.05)
    assert after.learning.restore(state, now_s=0.0, age_s=0.0) == []
    assert expects(after, 0.0) == pytest.approx(expects(before, LEARNED_AT_S), rel=1e-6)
    assert after.view.samples.tolist() == before.view.samples.tolist() == [40, 0]
    assert after.view.pace_scale.tolist() == pytest.approx(before.view.pace_scale.tolist())


def test_a_restored_router_goes_on_learning() -> None:
    bench = LearningBench("A100", "H20", names=["slow", "other"])
    bench.learning.restore(learned_state(), now_s=0.0, age_s=0.0)
    bench.taught(1.0, count=60)
    assert bench.compute_s() == pytest.approx(1.0, rel=0.1)


def test_replicas_are_known_again_by_name_wherever_they_are_in_the_fleet() -> None:
    before, after = learned(), LearningBench("H20", "A100", names=["new", "slow"])
    assert after.learning.restore(learned_state(), now_s=0.0, age_s=0.0) == []
    assert after.compute_s(1) == pytest.approx(before.compute_s(0))
    assert np.array_equal(after.view.coefficients[0], prior_coefficients())


def test_a_replica_of_another_card_does_not_take_over_corrections() -> None:
    after = LearningBench("H100", "H20", names=["slow", "other"])
    (sentence,) = after.learning.restore(learned_state(), now_s=0.0, age_s=0.0)
    assert "'slow'" in sentence
    assert "another card" in sentence
    assert np.array_equal(after.view.coefficients[0], prior_coefficients())
    assert after.view.samples.tolist() == [0, 0]


BAD_VALUES: list[Any] = [None, 3, "x", [], {}, [1, 2], {"coefficients": "x", "scale": None}]


@pytest.mark.parametrize("bad", BAD_VALUES, ids=repr)
@pytest.mark.parametrize("part", ["hits", "spread", "conformal"])
def test_a_bad_part_of_a_state_costs_only_itself(part: str, bad: Any) -> None:
    after, state = LearningBench("A100", "H20", names=["slow", "other"]), learned_state()
    fresh = part_of(after, part)
    (sentence,) = after.learning.restore({**state, part: bad}, now_s=LEARNED_AT_S, age_s=0.0)
    assert repr(part) in sentence
    assert part_of(after, part) == fresh
    assert after.view.samples.tolist() == [40, 0]
    for other in {"hits", "spread", "conformal"} - {part}:
        assert part_of(after, other) == through_a_file(state)[other]


def part_of(bench: LearningBench, part: str) -> dict[str, Any]:
    found: dict[str, Any] = through_a_file(bench.learning.state(LEARNED_AT_S))[part]
    return found


@pytest.mark.parametrize("bad", BAD_VALUES, ids=repr)
@pytest.mark.parametrize("piece", ["rates", "prefill", "pace"])
def test_a_bad_piece_of_one_replica_costs_that_replica_alone(piece: str, bad: Any) -> None:
    state = msgspec.json.decode(both_learned_file(), type=dict[str, Any])
    state["replicas"]["slow"][piece] = bad
    after = LearningBench("A100", "H20", names=["slow", "other"])
    (sentence,) = after.learning.restore(state, now_s=0.0, age_s=0.0)
    assert "'slow'" in sentence
    assert np.array_equal(after.view.coefficients[0], prior_coefficients())
    assert (after.view.samples[0], after.view.pace_scale[0]) == (0, 1.0)
    assert after.view.coefficients[1].tolist() == state["replicas"]["other"]["prefill"]["coefficients"]
    assert after.view.samples[1] == 30


@pytest.mark.parametrize("bad", [None, 3, "x", []])
def test_replicas_that_are_not_there_are_said_to_be_missing(bad: Any) -> None:
    state = {**learned_state(), "replicas": bad}
    (sentence,) = LearningBench("A100", "H20", names=["slow", "other"]).learning.restore(state, now_s=0.0, age_s=0.0)
    assert "replicas" in sentence


@pytest.mark.parametrize("bad", [None, 3, [], "x"])
def test_one_replica_that_is_no_record_costs_itself_alone(bad: Any) -> None:
    state = learned_state()
    state["replicas"]["slow"] = bad
    sentences = LearningBench("A100", "H20", names=["slow", "other"]).learning.restore(state, now_s=0.0, age_s=0.0)
    assert len(sentences) == 1
    assert "'slow'" in sentences[0]


def test_an_empty_state_changes_nothing() -> None:
    bench = LearningBench()
    before = through_a_file(bench.learning.state(0.0))
    bench.learning.restore({}, now_s=0.0, age_s=0.0)
    assert through_a_file(bench.learning.state(0.0)) == before


def test_an_old_state_is_believed_less_than_a_new_one() -> None:
    """Two days later hits fade towards the prior, and new first tokens count for more against the old."""
    state = learned_state()
    new, old, fresh = (LearningBench("A100", "H20", names=["slow", "other"]) for _ in range(3))
    new.learning.restore(state, now_s=LEARNED_AT_S, age_s=0.0)
    old.learning.restore(state, now_s=LEARNED_AT_S, age_s=2 * 86_400.0)
    assert new.survival() < old.survival() == pytest.approx(fresh.survival(), abs=0.02)
    for bench in (new, old):
        bench.taught(1.5, count=3, start_s=1e4)
    assert abs(old.compute_s() - 1.5) < abs(new.compute_s() - 1.5)


def test_without_doubt_only_times_are_kept() -> None:
    bench = LearningBench(doubts=False)
    assert set(bench.learning.state(0.0)) == {"replicas"}
    assert bench.learning.restore(learned_state(), now_s=0.0, age_s=0.0) == []
