from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.discipline import Seen
from estimators.first_token import Discipline, Rest
from estimators.turns import KEPT, Turns

NEVER_AWAY = [Discipline.BLOCKING, Discipline.BEST_EFFORT, Discipline.TIME_LIMITED, Discipline.TWO_ENDS]


def queues_s(seen: Seen | None) -> dict[Discipline, float]:
    assert seen is not None
    assert isinstance(seen.queue_s, dict)
    return seen.queue_s


def watched(*told: tuple[float, float, float, float]) -> Seen:
    """What is seen at the last request's first token.

    told : moment of arrival, fetch (0: none), C and moment of the first token of each request, by arrival
    """
    turns = Turns(layers=10)
    events = [(arrived_s, 0, number) for number, (arrived_s, *_) in enumerate(told)]
    events += [(first_s, 1, number) for number, (*_, first_s) in enumerate(told)]
    standing = {}
    for at_s, what, number in sorted(events):
        _arrived_s, fetch_s, compute_s, _first_s = told[number]
        if what == 0:
            rest = Rest(compute_s)
            standing[number] = turns.placed(at_s, rest=rest, fetch_s=fetch_s, fetch_in_turn_s=fetch_s)
        elif (seen := turns.first_token(standing[number], at_s)) is not None and number == len(told) - 1:
            return seen
    raise AssertionError("the last request has a fetch")


def test_alone_the_turn_comes_at_once_and_a_request_without_a_fetch_tells_nothing() -> None:
    turns = Turns(layers=10)
    plain = turns.placed(0.0, rest=Rest(1.0))
    assert turns.first_token(plain, 1.0) is None
    seen = watched((5.0, 2.0, 0.5, 7.5))
    assert set(queues_s(seen).values()) == {0.0}
    assert (seen.first_token_s, seen.free_s, seen.beside_s, seen.held_s) == (2.5, 0.0, 0.0, 2.0)


def test_the_turn_comes_with_the_first_token_of_the_last_of_those_ahead() -> None:
    seen = watched((0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 2.0, 3.0), (0.5, 1.0, 0.5, 3.5))
    assert set(queues_s(seen).values()) == {2.5}
    assert (seen.free_s, seen.free_work_s) == (2.5, 2.0)


def test_who_fetches_ahead_is_in_the_way_only_where_a_fetch_keeps_its_place() -> None:
    """The first arrived at 0 and was served from 4 to 5, after a fetch of 4. The second, at 1, fetched for 1 s."""
    queues = queues_s(watched((0.0, 4.0, 1.0, 5.0), (1.0, 1.0, 0.5, 5.5)))
    assert queues[Discipline.OVERLAPPED] == 0.0
    assert queues[Discipline.SERIAL] == 0.0
    assert [queues[one] for one in NEVER_AWAY] == [4.0] * 4


def test_a_fetch_in_turn_leaves_the_line_only_at_its_turn() -> None:
    """Ahead of both a prefill until 3; the first then fetches for 4 s, the second has its turn at 3 if that is so."""
    queues = queues_s(watched((0.0, 0.0, 3.0, 3.0), (1.0, 4.0, 0.5, 7.5), (2.0, 6.0, 0.5, 9.5)))
    assert queues[Discipline.SERIAL] == 1.0
    assert queues[Discipline.BLOCKING] == 5.5


def test_layer_by_layer_a_place_is_taken_again_with_the_first_layer() -> None:
    """A tenth of 4 s: away from 0 to 0.4, so whoever comes at 0.2 is let past, and at 1 waits for the prefill."""
    early = queues_s(watched((0.0, 4.0, 4.0, 5.0), (0.2, 6.0, 0.5, 6.5)))
    late = queues_s(watched((0.0, 4.0, 4.0, 5.0), (1.0, 6.0, 0.5, 7.5)))
    assert (early[Discipline.LAYERWISE], late[Discipline.LAYERWISE]) == (0.0, 4.0)


def test_who_got_its_first_token_later_was_not_in_the_way() -> None:
    turns = Turns(layers=10)
    turns.placed(0.0, rest=Rest(1.0), fetch_s=9.0, fetch_in_turn_s=9.0)
    second = turns.placed(1.0, rest=Rest(1.0), fetch_s=1.0, fetch_in_turn_s=1.0)
    assert set(queues_s(turns.first_token(second, 3.0)).values()) == {0.0}


def test_first_tokens_of_one_step_share_its_work_and_none_was_before_the_other() -> None:
    seen = watched((0.0, 0.0, 0.3, 2.0), (0.1, 1.0, 0.5, 2.0))
    assert (seen.beside_s, seen.free_s) == (0.3, 0.0)
    assert set(queues_s(seen).values()) == {0.0}


def test_a_blocking_fetch_is_counted_to_the_step_that_it_holds_up() -> None:
    """The second came in time to fetch within the first one's last step; the third came in time for the second's."""
    turns = Turns(layers=10)
    first = turns.placed(0.0, rest=Rest(1.0), fetch_s=1.0, fetch_in_turn_s=1.0)
    second = turns.placed(0.5, rest=Rest(1.0), fetch_s=2.0, fetch_in_turn_s=2.0)
    first_seen = turns.first_token(first, 4.0)
    turns.placed(4.1, rest=Rest(1.0), fetch_s=0.5, fetch_in_turn_s=0.5)
    second_seen = turns.first_token(second, 5.5)
    assert first_seen is not None
    assert second_seen is not None
    assert (first_seen.held_s, second_seen.held_s) == (3.0, 0.5)


def test_a_request_that_left_is_in_nobodys_way() -> None:
    turns = Turns(layers=10)
    left = turns.placed(0.0, rest=Rest(1.0))
    turns.gone(left)
    after = turns.placed(0.5, rest=Rest(1.0), fetch_s=1.0, fetch_in_turn_s=1.0)
    turns.gone(left)
    assert set(queues_s(turns.first_token(after, 3.0)).values()) == {0.0}


def test_a_request_that_was_forgotten_tells_nothing() -> None:
    turns = Turns(layers=10)
    oldest = turns.placed(0.0, rest=Rest(1.0), fetch_s=1.0, fetch_in_turn_s=1.0)
    for number in range(KEPT):
        turns.placed(0.1 * (number + 1), rest=Rest(1.0))
    assert turns.first_token(oldest, 50.0) is None


def walked_turn(told: list[tuple[int, int, int, int]], discipline: Discipline) -> int:
    """Independent route for whole numbers: ask at every moment from the arrival on who stands in line."""
    arrived, _fetch, _compute, first = told[-1]
    for at in range(arrived, first):
        in_line = False
        for other_arrived, fetch, compute, other_first in told[:-1]:
            if other_first >= first or not other_arrived <= at < other_first:
                continue
            away = (
                discipline is Discipline.OVERLAPPED
                and fetch > 0
                and at < max(other_arrived + fetch, other_first - compute)
            )
            in_line = in_line or not away
        if not in_line:
            return at
    return first


requests = st.tuples(st.integers(0, 10), st.integers(0, 8), st.integers(1, 4), st.integers(1, 12))


@settings(max_examples=100, deadline=None)
@given(st.lists(requests, max_size=6), requests, st.sampled_from([Discipline.OVERLAPPED, Discipline.BLOCKING]))
def test_the_turn_is_the_first_moment_at_which_nobody_ahead_stands_in_line(
    ahead: list[tuple[int, int, int, int]], last: tuple[int, int, int, int], discipline: Discipline
) -> None:
    told = [(arrived, fetch, compute, arrived + took) for arrived, fetch, compute, took in sorted(ahead)]
    arrived, fetch, compute, took = last
    arrived = max([arrived, *(other[0] for other in told)])
    told.append((arrived, fetch + 1, compute, arrived + took))
    seen = watched(*((float(a), float(f), float(c), float(t)) for a, f, c, t in told))
    assert queues_s(seen)[discipline] == pytest.approx(walked_turn(told, discipline) - arrived)
