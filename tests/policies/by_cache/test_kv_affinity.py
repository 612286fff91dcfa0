from __future__ import annotations

from policies.base import Reason
from policies.by_cache.kv_affinity import KvAffinity
from tests.policies.desk import Desk, blocks, rng, some_fleet


def test_the_longest_prefix_is_followed_however_long_the_queue() -> None:
    desk = Desk(KvAffinity(rng()), some_fleet(3), blocks(10, 11, 0))
    desk.view.booked[:] = [0, 500, 0]
    choice = desk.ask()
    assert (choice.row, choice.reason) == (1, Reason.LONGEST_PREFIX)


def test_equal_prefixes_go_to_the_fewest_requests_and_then_to_chance() -> None:
    desk = Desk(KvAffinity(rng()), some_fleet(4), blocks(7, 7, 7, 0))
    desk.view.booked[:] = [2, 1, 1, 0]
    shares = desk.shares(2000)
    assert shares[0] == shares[3] == 0
    assert abs(shares[1] - 0.5) < 0.06


def test_blocks_that_are_still_being_computed_are_not_followed() -> None:
    desk = Desk(KvAffinity(rng()), some_fleet(2), blocks(9, 4, confirmed=[2, 4]))
    assert desk.ask().row == 1
