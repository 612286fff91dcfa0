from __future__ import annotations

import pytest

from estimators.paths import COLUMN, Path
from policies.base import Reason
from policies.by_time.greedy_ttft import GreedyTtft
from tests.builders import a_request
from tests.policies.by_time.places import busy, told
from tests.policies.desk import Desk, blocks, rng, some_fleet


def test_the_shortest_queue_and_prefill_is_taken() -> None:
    desk = Desk(GreedyTtft(rng()), some_fleet(2), blocks(500, 0))
    estimates = desk.estimates(a_request())
    saved_s = float(estimates.prefill_s[COLUMN[Path.RECOMPUTE], 0] - estimates.prefill_s[COLUMN[Path.LOCAL], 0])
    for queue_s, row in ((saved_s - 0.01, 0), (saved_s + 0.01, 1)):
        busy(desk, 0, queue_s)
        choice = desk.ask()
        assert (choice.row, choice.reason) == (row, Reason.LOWEST_ESTIMATE)


def test_it_recomputes_elsewhere_rather_than_wait_a_little_which_is_what_it_gets_wrong() -> None:
    """The holder would be 50 ms later, and the fleet spends a whole prefill to save them."""
    desk = Desk(GreedyTtft(rng()), some_fleet(2), blocks(528, 0))
    estimates = desk.estimates(a_request())
    busy(
        desk,
        0,
        float(estimates.prefill_s[COLUMN[Path.RECOMPUTE], 1] - estimates.prefill_s[COLUMN[Path.LOCAL], 0]) + 0.05,
    )
    choice = desk.ask()
    assert (choice.row, choice.path) == (1, Path.RECOMPUTE)


@pytest.mark.parametrize(("leading", "path"), [(2, Path.LOCAL), (0, Path.RECOMPUTE)])
def test_it_tells_no_engine_to_fetch(leading: int, path: Path) -> None:
    desk = told(GreedyTtft(rng()), peer_bytes_per_s=12.5e9)
    desk.held = blocks(leading, leading, store=528)
    assert desk.ask().path is path


def test_an_engine_that_fetches_by_itself_is_not_believed_to() -> None:
    """The store has all of it, and the choice is that of a fleet without a store; the path is what the engine does."""
    desk = told(GreedyTtft(rng()), engine_decides=True)
    desk.held = blocks(100, 0, store=528)
    busy(desk, 0, 0.001)
    choice = desk.ask()
    assert (choice.row, choice.path) == (0, Path.REMOTE)
