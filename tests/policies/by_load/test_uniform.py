from __future__ import annotations

from policies.base import Reason
from policies.by_load.uniform import Uniform
from tests.policies.desk import Desk, rng, some_fleet


def test_every_ready_replica_is_drawn_alike_whatever_its_load() -> None:
    view = some_fleet(4)
    view.booked[:] = [90, 0, 0, 0]
    view.ready[2] = False
    shares = Desk(Uniform(rng()), view).shares(3000)
    assert shares[2] == 0
    assert all(abs(share - 1 / 3) < 0.05 for row, share in enumerate(shares) if row != 2)


def test_the_chance_of_a_draw_is_said() -> None:
    choice = Desk(Uniform(rng()), some_fleet(4)).ask()
    assert (choice.reason, choice.probability) == (Reason.DRAWN, 0.25)
