"""When a replica is left alone, and how it comes back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.health import LEAST_SHARE, Health, HealthConfig, State, Trouble

CONFIG = HealthConfig(trial_interval_s=2.0, frozen_s=2.0, slow_start_s=10.0)


def healthy(config: HealthConfig = CONFIG) -> Health:
    health = Health(config)
    health.came_up(0.0)
    return health


def opened(trouble: Trouble, now_s: float = 0.0) -> Health:
    health = healthy()
    for _ in range(CONFIG.failures_to_open):
        health.failed(trouble, now_s)
    assert health.state() is State.OPEN
    return health


# Probes


def test_a_replica_is_down_until_it_answers_and_after_several_misses_in_a_row() -> None:
    health = Health(CONFIG)
    assert health.state() is State.DOWN
    health.probed(0.0, alive=True)
    states = []
    for now_s in (1.0, 2.0, 3.0):
        health.probed(now_s, alive=False)
        states.append(health.state())
    assert states == [State.CLOSED, State.CLOSED, State.DOWN]


def test_one_missed_probe_changes_nothing() -> None:
    health = healthy()
    for now_s in range(1, 40):
        health.probed(float(now_s), alive=now_s % 3 != 0)
        assert health.may_take(float(now_s))
        assert health.share(float(now_s)) == 1.0


def test_a_probe_that_is_late_while_streams_flow_is_ignored() -> None:
    health = healthy()
    for second in range(1, 60):
        health.heard(second - 0.1)
        health.probed(float(second), alive=False)
        assert health.may_take(float(second))
    for now_s in (60.0, 61.0, 62.0):  # and now the streams have stopped too
        health.probed(now_s, alive=False)
    assert not health.may_take(62.0)


def test_a_frozen_engine_whose_probes_are_answered_is_noticed_when_a_first_byte_is_overdue() -> None:
    health, found_s = healthy(), None
    for step in range(1, 20):
        now_s = step * 0.5
        health.probed(now_s, alive=True, progress=False, running=2.0)
        if found_s is None and health.state() is State.OPEN:
            found_s = now_s
    assert found_s == 0.5 + CONFIG.frozen_s, "counted from when it was first seen to stand still"
    assert health.trouble is Trouble.FROZEN


@pytest.mark.parametrize("sign", ["counters", "bytes", "idle", "unknown"])
def test_an_engine_is_not_frozen_while_anything_moves_or_nothing_runs_or_nothing_is_known(sign: str) -> None:
    health = healthy()
    for step in range(1, 40):
        now_s = step * 0.5
        if sign == "bytes":
            health.heard(now_s - 0.1)
        progress = {"counters": True, "unknown": None}.get(sign, False)
        health.probed(now_s, alive=True, progress=progress, running=0.0 if sign == "idle" else 2.0)
        assert health.state() is State.CLOSED


# Requests


def test_failures_open_the_breaker_only_when_no_success_comes_between() -> None:
    health = healthy()
    for number in range(20):
        health.failed(Trouble.SILENT, number + 0.1)
        health.failed(Trouble.SILENT, number + 0.2)
        health.answered(number + 0.1, number + 0.3)
    assert health.state() is State.CLOSED
    for _ in range(3):
        health.failed(Trouble.SILENT, 30.0)
    assert health.state() is State.OPEN


def test_overloaded_answers_and_client_errors_never_open_it() -> None:
    health = healthy()
    for number in range(100):
        health.overloaded(float(number), 3.0)
        health.trial_over(float(number))
    assert health.state() is State.CLOSED
    assert health.avoid_until_s == 102.0
    health.overloaded(99.5, 0.1)
    assert health.avoid_until_s == 102.0


def test_an_open_breaker_lets_one_trial_through_in_each_interval() -> None:
    health, trials = opened(Trouble.SILENT), []
    for step in range(1, 400):
        now_s = step * 0.1
        if health.may_take(now_s):
            assert health.chosen(now_s)
            trials.append(now_s)
            assert not health.may_take(now_s)
            health.failed(Trouble.SILENT, now_s + 0.05)
    gaps_s = [later - first for first, later in pairwise(trials)]
    assert len(trials) > 10
    assert min(gaps_s) >= CONFIG.trial_interval_s - 1e-9


@pytest.mark.parametrize("phase_s", [0.0, 0.7, 1.3, 1.999])
def test_a_silent_replica_is_back_within_two_intervals_after_it_answers_again(phase_s: float) -> None:
    """Clients send all the time; a first byte may take 2 s; it works again from `mended_s` on."""
    health, mended_s, out = opened(Trouble.SILENT), 11.0 + phase_s, None
    for step in range(1, 400):
        now_s = step * 0.05
        if out is not None and now_s - out >= 2.0:
            health.failed(Trouble.SILENT, now_s)
            out = None
        if health.may_take(now_s):
            assert health.chosen(now_s)
            out = now_s
            if now_s >= mended_s:
                health.answered(now_s, now_s + 0.01)
                break
    assert now_s - mended_s <= 2 * CONFIG.trial_interval_s
    assert health.state() is State.CLOSED


def test_what_could_not_be_reached_is_back_with_the_next_probe_and_without_user_traffic() -> None:
    health = opened(Trouble.UNREACHABLE, 1.0)
    assert not health.may_take(1.1)
    health.probed(1.5, alive=True)
    assert health.may_take(1.5)


def test_a_probe_does_not_clear_a_replica_that_answers_probes_and_no_requests() -> None:
    health = opened(Trouble.SILENT, 1.0)
    health.probed(1.5, alive=True)
    assert health.state() is State.OPEN
    health.probed(2.0, alive=True, progress=True, running=1.0)  # its engine moves again: worth a trial at once
    assert health.may_take(2.0)


def test_a_return_after_being_down_voids_what_was_held_against_it() -> None:
    health = opened(Trouble.SILENT)
    health.went_down()
    health.came_up(5.0)
    assert health.state() is State.CLOSED
    assert health.share(5.0) == LEAST_SHARE


def test_an_answer_to_a_request_from_before_the_trouble_does_not_close_the_breaker() -> None:
    health = opened(Trouble.SILENT, 10.0)
    health.answered(9.0, 11.0)
    assert health.state() is State.OPEN
    health.chosen(12.0)
    health.answered(12.0, 12.5)
    assert health.state() is State.CLOSED


def test_a_trial_whose_client_leaves_makes_way_for_the_next() -> None:
    health = opened(Trouble.SILENT)
    health.chosen(2.0)
    assert (health.state(), health.may_take(2.5), health.next_trial_s()) == (State.TRIAL, False, None)
    health.trial_over(2.5)
    assert (health.state(), health.may_take(2.5), health.next_trial_s()) == (State.OPEN, True, 2.5)


# The way back


def test_the_first_start_is_not_slow_and_a_return_is() -> None:
    health = healthy()
    assert health.share(0.0) == 1.0
    health.went_down()
    health.came_up(100.0)
    shares = [health.share(100.0 + after_s) for after_s in (0.0, 5.0, 10.0, 11.0)]
    assert shares == pytest.approx([LEAST_SHARE, (1 + LEAST_SHARE) / 2, 1.0, 1.0])


def test_turns_of_a_slow_start_add_up_to_its_share() -> None:
    health = healthy()
    health.went_down()
    health.came_up(0.0)
    taken = sum(health.takes_turn(step / 100) for step in range(1000))
    assert taken == pytest.approx(1000 * (1 + LEAST_SHARE) / 2, abs=2)


def test_without_slow_start_a_return_is_whole_at_once() -> None:
    health = healthy(HealthConfig(slow_start_s=0.0))
    health.went_down()
    health.came_up(50.0)
    assert health.share(50.0) == 1.0
    assert health.takes_turn(50.0)


def test_a_page_that_is_missed_now_and_then_hides_no_frozen_engine() -> None:
    health = healthy()
    for step in range(1, 10):
        health.probed(step * 0.5, alive=True, progress=None if step % 2 else False, running=2.0)
    assert health.trouble is Trouble.FROZEN


def test_counters_that_nobody_sees_freeze_nobody() -> None:
    health = healthy()
    for step in range(1, 100):
        health.probed(step * 0.5, alive=True, progress=None, running=2.0)
    assert health.state() is State.CLOSED


def test_another_backend_at_the_same_address_is_noticed_once() -> None:
    health = healthy()
    said = ("v1", "v1", "v2", "v2", "v1")
    assert [health.identified({"model": name}, 1.0) for name in said] == [False, False, True, False, True]


def test_what_was_not_known_of_a_backend_before_makes_it_no_other() -> None:
    health = healthy()
    assert not health.identified({"model": "m"}, 1.0)
    assert not health.identified({"started": 5.0}, 1.0)
    assert not health.identified({}, 1.0)
    assert health.identified({"started": 6.0}, 1.0)
    assert not health.identified({"model": "other"}, 1.0), "of the new one only its start was known"


def test_another_backend_starts_slowly_and_owes_nothing_for_the_one_before() -> None:
    health = healthy()
    health.identified({"started": 1.0}, 0.0)
    for now_s in (1.0, 1.1, 1.2):
        health.failed(Trouble.SILENT, now_s)
    assert health.state() is State.OPEN
    health.identified({"started": 2.0}, 3.0)
    assert health.state() is State.CLOSED
    assert health.share(3.0) < 1.0


STEP = st.tuples(
    st.floats(0, 3),
    st.sampled_from(["miss", "alive", "moving", "frozen", "fail", "refused", "error", "ok", "choose", "left", "heard"]),
)


@given(st.lists(STEP, max_size=80))
def test_whatever_happens_a_replica_that_answers_everything_again_is_back_within_two_intervals(
    steps: list[tuple[float, str]],
) -> None:
    health, now_s = healthy(), 0.0
    for gap_s, what in steps:
        now_s += gap_s
        match what:
            case "miss" | "alive":
                health.probed(now_s, alive=what == "alive")
            case "moving" | "frozen":
                health.probed(now_s, alive=True, progress=what == "moving", running=1.0)
            case "fail" | "refused" | "error":
                troubles = {"fail": Trouble.SILENT, "refused": Trouble.UNREACHABLE, "error": Trouble.ERRORS}
                health.failed(troubles[what], now_s)
            case "ok":
                health.answered(now_s, now_s)
            case "choose" if health.may_take(now_s):
                health.chosen(now_s)
            case "left":
                health.trial_over(now_s)
            case "heard":
                health.heard(now_s)
    health.trial_over(now_s)  # what was out has ended
    health.probed(now_s, alive=True, progress=True, running=1.0)
    late_s = now_s + CONFIG.trial_interval_s
    assert health.may_take(late_s)
    health.chosen(late_s)
    health.answered(late_s, late_s)
    assert health.state() is State.CLOSED
