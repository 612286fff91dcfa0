from __future__ import annotations

import pytest

from sim_backends.prefetch_space import PrefetchSpace


def test_a_fetch_that_does_not_fit_is_told_so_and_counted() -> None:
    space = PrefetchSpace(100)
    space.take(60)
    assert (space.has(40), space.has(41), space.refused) == (True, False, 1)
    space.give_back(60)
    assert (space.has(100), space.used_bytes) == (True, 0)


def test_without_a_limit_everything_fits() -> None:
    space = PrefetchSpace()
    space.take(10**15)
    assert space.has(10**15)


def test_taking_what_does_not_fit_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        PrefetchSpace(10).take(11)
