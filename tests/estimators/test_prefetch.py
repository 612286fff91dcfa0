from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from estimators.prefetch import PrefetchSpace


def test_a_fetch_that_does_not_fit_beside_those_under_way_is_not_made() -> None:
    space = PrefetchSpace([10e9, 10e9, inf])
    space.hold(0, 8e9, until_s=5.0)
    assert space.fits(np.full(3, 4e9)).tolist() == [False, True, True]
    assert space.fits(np.array([[2e9] * 3, [11e9] * 3])).tolist() == [[True, True, True], [False, False, True]]


def test_nothing_to_fetch_always_fits() -> None:
    space = PrefetchSpace([1e9])
    space.hold(0, 2e9, until_s=5.0)
    assert space.fits(np.zeros(1)).tolist() == [True]


def test_room_given_back_is_all_there_again_and_only_once() -> None:
    space = PrefetchSpace([1e9])
    holds = [space.hold(0, 0.1e9, until_s=1.0) for _ in range(3)]
    for hold in holds * 2:
        space.give_back(hold)
    assert space.outstanding_bytes.tolist() == [0.0]


def test_the_wait_lasts_until_enough_of_those_under_way_should_have_ended() -> None:
    space = PrefetchSpace([10e9])
    space.hold(0, 6e9, until_s=7.0)
    space.hold(0, 4e9, until_s=3.0)
    waits_s = [space.wait_s(0, size, now_s=1.0) for size in (0.0, 4e9, 5e9, 11e9)]
    assert waits_s == [0.0, 2.0, 6.0, inf]


def test_one_that_is_overdue_ends_at_any_moment() -> None:
    space = PrefetchSpace([1e9])
    space.hold(0, 1e9, until_s=2.0)
    assert space.wait_s(0, 1e9, now_s=9.0) == 0.0
    assert not space.fits(np.array([1e9]))[0]


@pytest.mark.parametrize("bad", [-1.0, nan])
def test_a_capacity_or_size_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        PrefetchSpace([bad])
    with pytest.raises(ValueError, match="size_bytes"):
        PrefetchSpace([1e9]).hold(0, bad, until_s=1.0)
