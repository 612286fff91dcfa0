from __future__ import annotations

import pytest

from policies.base import Reason
from policies.by_load.two_choices import TwoChoices
from tests.policies.desk import Desk, rng, some_fleet


def test_of_two_replicas_the_one_with_fewer_requests() -> None:
    view = some_fleet(2)
    view.booked[:] = [9, 0]
    choice = Desk(TwoChoices(rng()), view).ask()
    assert (choice.row, choice.reason, choice.probability) == (1, Reason.LOWER_LOAD, 1.0)


def test_the_most_loaded_is_never_taken_and_chances_are_those_of_the_pairs() -> None:
    """Of six pairs the emptiest wins three, the next two, the third one."""
    view = some_fleet(4)
    view.booked[:] = [0, 3, 5, 8]
    desk = Desk(TwoChoices(rng()), view)
    shares = desk.shares(6000)
    assert shares[3] == 0
    for share, pairs in zip(shares[:3], (3, 2, 1), strict=True):
        assert abs(share - pairs / 6) < 0.03
    assert {round(6 * desk.ask().probability, 9) for _ in range(60)} == {1, 2, 3}


def test_ties_go_to_the_first_drawn_so_no_replica_is_favoured() -> None:
    desk = Desk(TwoChoices(rng()), some_fleet(3))
    assert all(abs(share - 1 / 3) < 0.05 for share in desk.shares(3000))
    assert desk.ask().probability == pytest.approx(1 / 3)
