"""Failures in a row, rests after them, and who may be chosen."""

from __future__ import annotations

from itertools import pairwise

import pytest

from router.standing import FIRST_REST_S, LONGEST_REST_S, Standing, rested, serving


def up(*models: str) -> Standing:
    standing = Standing()
    standing.came_up(frozenset(models))
    return standing


def rest_s(standing: Standing, now_s: float) -> float:
    return standing.rests_until_s - now_s


def test_each_failure_in_a_row_doubles_the_rest_up_to_the_longest() -> None:
    standing, rests = up("m"), []
    for number in range(12):
        now_s = 100.0 * number
        standing.failed(now_s - 1.0, now_s)
        rests.append(rest_s(standing, now_s))
    assert rests[0] == FIRST_REST_S
    assert all(after == min(LONGEST_REST_S, 2 * before) for before, after in pairwise(rests))
    assert rests[-1] == LONGEST_REST_S


def test_requests_that_one_incident_took_together_are_one_failure() -> None:
    standing = up("m")
    for placed_at_s in (1.0, 2.0, 3.0):
        standing.failed(placed_at_s, 5.0)
    assert standing.failures == 1
    standing.failed(6.0, 7.0)
    assert standing.failures == 2


def test_coming_up_ends_a_rest_and_forgets_failures() -> None:
    standing = up("m")
    standing.failed(0.0, 1.0)
    standing.came_up(frozenset({"m"}))
    assert (standing.failures, rested([standing], [0], set(), 1.0)) == (0, [0])


def test_an_overloaded_answer_is_a_rest_and_no_failure_and_never_shortens_one() -> None:
    standing = up("m")
    standing.overloaded(10.0, 5.0)
    assert (standing.failures, rest_s(standing, 10.0)) == (0, 5.0)
    standing.overloaded(11.0, 1.0)
    assert standing.rests_until_s == 15.0


def test_resting_replicas_are_chosen_only_when_there_is_no_other() -> None:
    standings = [up("m"), up("m"), up("m")]
    standings[0].overloaded(0.0, 10.0)
    assert rested(standings, [0, 1, 2], set(), 5.0) == [1, 2]
    assert rested(standings, [0, 1, 2], {1}, 5.0) == [2]
    assert rested(standings, [0, 1, 2], {1, 2}, 5.0) == [0]
    assert rested(standings, [0, 1, 2], {0, 1, 2}, 5.0) == []
    assert rested(standings, [0, 1, 2], set(), 10.0) == [0, 1, 2]


@pytest.mark.parametrize(("model", "rows"), [("m", [0, 1]), ("n", [1, 3]), ("", [0, 1, 3]), ("x", [1])])
def test_a_replica_serves_what_it_named_and_anything_if_it_named_nothing(model: str, rows: list[int]) -> None:
    standings = [up("m"), up(), Standing(), up("n", "o")]
    assert serving(standings, model) == rows


def test_ends_are_counted_back_to_the_moment_asked_for() -> None:
    standing = up("m")
    standing.ended_at_s.extend([1.0, 2.0, 3.0, 3.0, 4.0])
    assert [standing.ended_since(at_s) for at_s in (5.0, 4.0, 3.0, 0.0)] == [0, 1, 3, 5]
