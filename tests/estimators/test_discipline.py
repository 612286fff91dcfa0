"""Learning from fetches that the forms themselves have drawn; on simulated engines: test_disciplines_are_named.py."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest

from estimators.discipline import DisciplineLearner, Seen
from estimators.first_token import Discipline, Rest, service

LIMITS_S = (0.05, 0.2)


def drawn(rng: np.random.Generator, discipline: Discipline, *, limit_s: float = 0.2, idle: bool = False) -> Seen:
    """One fetch on a replica of `discipline`: the router's times, and a first token 5 % off."""
    queue_s = 0.0 if idle else float(rng.uniform(0.0, 1.0))
    fetch_s = float(rng.uniform(0.2, 1.2))
    all_s = float(rng.uniform(0.05, 0.3))
    rest = Rest(all_s, all_s + float(rng.uniform(0.2, 1.0)))
    served = service(
        discipline, queue_s=queue_s, fetch_s=fetch_s, first_byte_s=0.01, rest=rest, layers=36, limit_s=limit_s
    )
    return Seen(
        queue_s=queue_s,
        fetch_s=fetch_s,
        fetch_in_turn_s=fetch_s,
        first_byte_s=0.01,
        rest=rest,
        first_token_s=float(served.first_token_s) * float(rng.lognormal(0.0, 0.05)),
    )


def a_learner(**more: float) -> DisciplineLearner:
    return DisciplineLearner(layers=36, limits_s=LIMITS_S, memory=more.get("memory", 300.0))


def taught(discipline: Discipline, fetches: int, *, seed: int = 0, limit_s: float = 0.2) -> DisciplineLearner:
    learner, rng = a_learner(), np.random.default_rng(seed)
    for _ in range(fetches):
        learner.observe(drawn(rng, discipline, limit_s=limit_s))
    return learner


@pytest.mark.parametrize("discipline", list(Discipline))
def test_the_one_that_drew_the_fetches_is_named(discipline: Discipline) -> None:
    verdict = taught(discipline, 100).verdict()
    same = {Discipline.SERIAL, Discipline.BLOCKING}
    assert verdict.alike == (same if discipline in same else {discipline})
    assert verdict.discipline in verdict.alike
    assert verdict.probability > 0.99


def test_serial_and_blocking_are_told_apart_by_the_queue_behind_a_fetch() -> None:
    """Behind a request whose fetch holds the GPU, Q is longer by that fetch; if it does not, the turn comes before."""
    learner, rng = a_learner(), np.random.default_rng(3)
    for _ in range(60):
        seen = drawn(rng, Discipline.BLOCKING)
        assert isinstance(seen.queue_s, float)
        queues_s = dict.fromkeys(Discipline, seen.queue_s)
        queues_s[Discipline.SERIAL] = max(0.0, seen.queue_s - 0.4)
        learner.observe(replace(seen, queue_s=queues_s))
    assert learner.verdict().alike == {Discipline.BLOCKING}


@pytest.mark.parametrize("limit_s", LIMITS_S)
def test_the_patience_of_a_time_limited_replica_is_found_among_those_tried(limit_s: float) -> None:
    verdict = taught(Discipline.TIME_LIMITED, 100, limit_s=limit_s).verdict()
    assert (verdict.discipline, verdict.limit_s) == (Discipline.TIME_LIMITED, limit_s)


def test_patience_longer_than_any_fetch_is_reported_as_alike_to_overlapped() -> None:
    """With 1.2 s at most to fetch, and a turn that comes before, a second and a bit are as good as for ever."""
    learner = DisciplineLearner(layers=36, limits_s=(5.0,))
    rng = np.random.default_rng(1)
    for _ in range(200):
        learner.observe(drawn(rng, Discipline.OVERLAPPED))
    verdict = learner.verdict()
    assert verdict.alike == {Discipline.OVERLAPPED, Discipline.TIME_LIMITED}


def test_idle_replicas_do_not_tell_what_happens_in_a_queue() -> None:
    learner, rng = a_learner(), np.random.default_rng(2)
    for _ in range(100):
        learner.observe(drawn(rng, Discipline.SERIAL, idle=True))
    alike = learner.verdict().alike
    assert alike >= {Discipline.SERIAL, Discipline.BLOCKING, Discipline.OVERLAPPED}
    assert not alike & {Discipline.BEST_EFFORT, Discipline.LAYERWISE, Discipline.TWO_ENDS}


def test_before_the_first_fetch_nothing_is_named_and_all_are_alike() -> None:
    verdict = a_learner().verdict()
    assert verdict.discipline is None
    assert verdict.alike == set(Discipline)
    assert isnan(verdict.limit_s)
    assert (verdict.probability, verdict.fetches) == (1.0, 0.0)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_an_error_that_stays_on_one_side_does_not_change_the_name(factor: float) -> None:
    learner, rng = a_learner(), np.random.default_rng(4)
    for _ in range(200):
        seen = drawn(rng, Discipline.OVERLAPPED)
        learner.observe(replace(seen, rest=Rest(seen.rest.all_reused_s * factor, seen.rest.none_reused_s)))
    assert learner.verdict().discipline is Discipline.OVERLAPPED


def test_a_few_absurd_first_tokens_do_not_change_the_name() -> None:
    learner, rng = a_learner(), np.random.default_rng(5)
    for number in range(200):
        seen = drawn(rng, Discipline.TWO_ENDS)
        if number % 50 == 10:
            seen = replace(seen, first_token_s=seen.first_token_s * 50.0)
        learner.observe(seen)
    assert learner.verdict().alike == {Discipline.TWO_ENDS}


def test_a_replica_that_changes_is_followed_within_one_memory() -> None:
    learner, rng = a_learner(memory=100.0), np.random.default_rng(6)
    for _ in range(300):
        learner.observe(drawn(rng, Discipline.SERIAL))
    for _ in range(100):
        learner.observe(drawn(rng, Discipline.BEST_EFFORT))
    assert learner.verdict().discipline is Discipline.BEST_EFFORT


def test_evidence_grows_with_fetches_up_to_the_memory() -> None:
    few, many = taught(Discipline.SERIAL, 5).verdict(), taught(Discipline.SERIAL, 900).verdict()
    assert few.fetches == pytest.approx(5.0, abs=0.1)
    assert 270 < many.fetches < 301


def test_only_candidates_are_named() -> None:
    rng = np.random.default_rng(7)
    learner = DisciplineLearner(layers=36, candidates=(Discipline.BEST_EFFORT, Discipline.BLOCKING))
    for _ in range(50):
        learner.observe(drawn(rng, Discipline.SERIAL))
    assert learner.verdict().alike == {Discipline.BLOCKING}


def test_the_state_survives_a_restart() -> None:
    before = taught(Discipline.LAYERWISE, 40)
    after = a_learner()
    after.restore(json.loads(json.dumps(before.state())))
    assert after.verdict().alike == before.verdict().alike
    assert after.state() == before.state()
    seen = drawn(np.random.default_rng(8), Discipline.LAYERWISE)
    before.observe(seen)
    after.observe(seen)
    assert after.state() == before.state()


@pytest.mark.parametrize(
    "damage",
    [{"limits_s": [1.0]}, {"candidates": ["serial"]}, {"fetches": -1.0}, {"log": [[0.0]]}, {"fetches": "many"}],
)
def test_a_state_of_others_or_a_damaged_one_is_refused(damage: dict[str, object]) -> None:
    state = taught(Discipline.SERIAL, 3).state() | damage
    learner = a_learner()
    with pytest.raises(ValueError, match=next(iter(damage))):
        learner.restore(state)
    assert learner.verdict().discipline is None


@pytest.mark.parametrize("bad", [{"first_token_s": 0.0}, {"first_token_s": nan}, {"fetch_s": nan}, {"queue_s": -9.0}])
def test_what_cannot_have_been_seen_is_refused_and_not_counted(bad: dict[str, float]) -> None:
    learner = a_learner()
    seen = drawn(np.random.default_rng(9), Discipline.SERIAL)
    with pytest.raises(ValueError, match=next(iter(bad))):
        learner.observe(replace(seen, **bad))  # type: ignore[arg-type]
    assert learner.verdict().fetches == 0.0


def test_asking_in_between_does_not_change_what_is_learned() -> None:
    """Fetches are counted many at a time, or one by one when somebody asks after each."""
    quiet, asked, rng = a_learner(), a_learner(), np.random.default_rng(10)
    for _ in range(75):
        seen = drawn(rng, Discipline.SERIAL)
        quiet.observe(seen)
        asked.observe(seen)
        asked.verdict()
    assert quiet.verdict().fetches == pytest.approx(asked.verdict().fetches)
    assert np.allclose(np.array(quiet.state()["log"]), np.array(asked.state()["log"]))


def test_a_fetch_of_which_no_part_has_a_worth_is_refused() -> None:
    seen = drawn(np.random.default_rng(11), Discipline.SERIAL)
    with pytest.raises(ValueError, match="none_reused_s"):
        a_learner().observe(replace(seen, rest=Rest(0.1)))


@pytest.mark.parametrize(
    ("name", "bad"), [("layers", 0), ("limits_s", ()), ("limits_s", (0.0,)), ("memory", 1.0), ("candidates", ())]
)
def test_settings_out_of_range_are_refused(name: str, bad: object) -> None:
    settings: dict[str, object] = {"layers": 36, name: bad}
    with pytest.raises(ValueError, match=name):
        DisciplineLearner(**settings)  # type: ignore[arg-type]
