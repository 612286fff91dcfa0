"""Who may be chosen, and what else is known of each replica."""

from __future__ import annotations

import pytest

from router.health import Health, HealthConfig, Trouble
from router.standing import Standing, fit, in_turn, next_change_s, on_trial, serving

CONFIG = HealthConfig(failures_to_open=1, trial_interval_s=5.0, avoid_s=1.0)


def up(*models: str) -> Standing:
    standing = Standing(Health(CONFIG), frozenset(models))
    standing.health.came_up(0.0)
    return standing


def test_those_left_alone_for_a_moment_are_chosen_only_when_there_is_no_other() -> None:
    standings = [up("m"), up("m"), up("m")]
    standings[0].health.overloaded(0.0, 10.0)
    assert fit(standings, [0, 1, 2], set(), 5.0) == [1, 2]
    assert fit(standings, [0, 1, 2], {1}, 5.0) == [2]
    assert fit(standings, [0, 1, 2], {1, 2}, 5.0) == [0]
    assert fit(standings, [0, 1, 2], {0, 1, 2}, 5.0) == []
    assert fit(standings, [0, 1, 2], set(), 10.0) == [0, 1, 2]


def test_a_replica_that_answers_errors_is_better_than_nobody_and_a_silent_one_is_not() -> None:
    standings = [up("m"), up("m"), up("m")]
    standings[0].health.failed(Trouble.ERRORS, 0.0)
    standings[1].health.failed(Trouble.SILENT, 0.0)
    assert fit(standings, [0, 1, 2], set(), 2.0) == [2]
    assert fit(standings, [0, 1], set(), 2.0) == [0]
    assert fit(standings, [1], set(), 2.0) == []
    assert fit(standings, [1], set(), 5.0) == [1]  # its trial


def test_a_trial_that_is_due_is_named_alone() -> None:
    standings = [up("m"), up("m"), up("m")]
    standings[1].health.failed(Trouble.SILENT, 0.0)
    assert on_trial(standings, [0, 1, 2], 4.9) == []
    assert on_trial(standings, [0, 1, 2], 5.0) == [1]
    assert on_trial(standings, [0, 2], 5.0) == []
    standings[1].health.chosen(5.0)
    assert on_trial(standings, [0, 1, 2], 5.0) == []


def test_a_request_that_failed_elsewhere_is_a_trial_only_where_there_is_nobody_else() -> None:
    standings = [up("m"), up("m"), up("m")]
    standings[0].health.failed(Trouble.SILENT, 0.0)
    assert fit(standings, [0, 1, 2], set(), 5.0) == [0, 1, 2]
    assert fit(standings, [0, 1, 2], {1}, 5.0) == [2]
    assert fit(standings, [0, 1, 2], {1, 2}, 5.0) == [0]


def test_who_starts_slowly_gets_its_share_of_turns_and_all_of_them_when_alone() -> None:
    standings = [up("m"), up("m")]
    standings[0].health.went_down()
    standings[0].health.came_up(0.0)
    offered = [in_turn(standings, [0, 1], 0.0) for _ in range(100)]
    assert sum(0 in rows for rows in offered) == pytest.approx(100 * standings[0].health.share(0.0), abs=1)
    assert all(1 in rows for rows in offered)
    assert all(in_turn(standings, [0], 0.0) == [0] for _ in range(10))


def test_time_alone_ends_a_pause_and_brings_a_trial() -> None:
    standings = [up("m"), up("m"), up("m")]
    assert next_change_s(standings, 0.0) is None
    standings[0].health.overloaded(0.0, 3.0)
    standings[1].health.failed(Trouble.SILENT, 0.0)
    assert [next_change_s(standings, now_s) for now_s in (0.0, 1.0, 3.0, 5.0)] == [1.0, 3.0, 5.0, None]


@pytest.mark.parametrize(("model", "rows"), [("m", [0, 1]), ("n", [1, 3]), ("", [0, 1, 3]), ("x", [1])])
def test_a_replica_serves_what_it_named_and_anything_if_it_named_nothing(model: str, rows: list[int]) -> None:
    standings = [up("m"), up(), Standing(Health(CONFIG)), up("n", "o")]
    assert serving(standings, model) == rows


def test_ends_are_counted_back_to_the_moment_asked_for() -> None:
    standing = up("m")
    standing.ended_at_s.extend([1.0, 2.0, 3.0, 3.0, 4.0])
    assert [standing.ended_since(at_s) for at_s in (5.0, 4.0, 3.0, 0.0)] == [0, 1, 3, 5]
