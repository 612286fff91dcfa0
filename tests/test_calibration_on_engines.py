"""The router's own dispatcher against simulated engines: from wrong start values to estimates that hold.

The engines have service times of their own (`sim_backends.service_times`), jitter included. Short runs on one or two
replicas; `loadtest/replay/bench_calibration.py` plays the whole grid of starts, loads and disturbances.
"""

from __future__ import annotations

from functools import cache

import pytest

from loadtest.replay.bench_calibration import (
    NOTHING,
    OUTLIER_SHARE,
    Disturbance,
    Errors,
    at_rate,
    conversations,
    errors_of,
    misread,
    one_at_a_time,
    play,
)
from loadtest.replay.fleets import of_cards
from loadtest.replay.run import Conditions
from router.config import PolicyConfig

TAKING_TURNS = Conditions(policy=PolicyConfig(name="round_robin"), seed=5, load_period_s=5.0)
WRONG_STARTS = (3.0, 1 / 3)
RPS = 2.6  # on two A100: about 0.8 of what they sustain


@cache
def idle(start: float, disturbance: Disturbance = NOTHING) -> Errors:
    """One replica, one request at a time. What counts begins after 500 requests, or 200 after a change."""
    rows = one_at_a_time(conversations(600, 5))
    seen = play(misread(of_cards(1, ["A100"]), start), rows, TAKING_TURNS, disturbance)
    if disturbance.slower_from is not None:
        return errors_of(seen, watched=200, from_index=disturbance.slower_from)
    return errors_of(seen)


@cache
def loaded(start: float, disturbance: Disturbance = NOTHING) -> Errors:
    """Two replicas that take turns, so that states are local, in the store, or nowhere."""
    rows = at_rate(conversations(1100, 5), RPS)
    return errors_of(play(misread(of_cards(2, ["A100"]), start), rows, TAKING_TURNS, disturbance))


@pytest.mark.parametrize("start", WRONG_STARTS)
def test_prefill_on_an_idle_replica_is_known_after_500_requests(start: float) -> None:
    errors = idle(start)
    assert len(errors.all) == 100
    assert errors.median() < 0.05
    assert abs(errors.bias()) < 0.02


@pytest.mark.parametrize("start", WRONG_STARTS)
def test_first_tokens_under_load_are_known_on_every_path_after_500_requests(start: float) -> None:
    errors = loaded(start)
    assert set(errors.by_path) == {"local", "remote", "recompute"}
    assert {path: round(errors.median(path), 3) for path in errors.by_path if not errors.median(path) < 0.1} == {}


def test_a_replica_that_becomes_twice_as_slow_is_followed_within_200_requests() -> None:
    errors = idle(1.0, Disturbance(slower_from=300))
    assert len(errors.all) == 100
    assert errors.median() < 0.05


def test_first_tokens_that_are_fifty_times_late_now_and_then_change_nothing() -> None:
    disturbance = Disturbance(outlier_share=OUTLIER_SHARE)
    assert idle(3.0, disturbance).median() < idle(3.0).median() + 0.01


def test_without_streams_the_time_of_whole_answers_is_learned() -> None:
    rows = at_rate(conversations(600, 5), 0.5)
    seen = play(misread(of_cards(1, ["A100"]), 3.0), rows, TAKING_TURNS, Disturbance(whole=True))
    errors = errors_of(seen, whole=True)
    assert len(errors.all) == 100
    assert errors.median() < 0.2
