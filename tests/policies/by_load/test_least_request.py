from __future__ import annotations

from policies.by_load.least_request import LeastRequest
from tests.policies.desk import Desk, blocks, rng, some_fleet


def test_the_fewest_requests_are_taken_and_ties_are_broken_evenly() -> None:
    desk = Desk(LeastRequest(rng()), some_fleet(4))
    desk.view.booked[:] = [3, 1, 2, 1]
    shares = desk.shares(2000)
    assert shares[0] == shares[2] == 0
    assert abs(shares[1] - 0.5) < 0.06
    assert desk.ask().probability == 0.5


def test_the_cache_is_ignored() -> None:
    desk = Desk(LeastRequest(rng()), some_fleet(2), blocks(528, 0))
    desk.view.booked[:] = [1, 0]
    assert desk.ask().row == 1
