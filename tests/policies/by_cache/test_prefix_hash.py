from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from policies.base import Reason
from policies.by_cache.prefix_hash import PrefixHash
from tests.builders import a_request
from tests.policies.desk import Desk, rng, some_fleet


def test_equal_beginnings_go_to_one_replica_whatever_follows() -> None:
    desk = Desk(PrefixHash(rng(), prefix_tokens=32), some_fleet(5))
    assert len({desk.ask(a_request(chain=[11, 22, tail])).row for tail in range(30)}) == 1


def test_the_first_block_alone_is_never_all_that_counts() -> None:
    """It is common to all prompts of a chat trace, so one replica would get them all."""
    desk = Desk(PrefixHash(rng(), prefix_tokens=1), some_fleet(5))
    seconds = np.random.default_rng(3).integers(0, 2**63, size=60).tolist()
    assert len({desk.ask(a_request(chain=[11, second])).row for second in seconds}) == 5


def test_different_beginnings_are_spread() -> None:
    desk = Desk(PrefixHash(rng()), some_fleet(4))
    keys = np.random.default_rng(3).integers(0, 2**63, size=2000).tolist()
    drawn = Counter(desk.ask(a_request(chain=[key])).row for key in keys)
    assert min(drawn.values()) > 2000 / 4 / 2


@pytest.mark.parametrize("overflow", ["clockwise", "least_loaded"])
def test_it_never_goes_over_its_bound(overflow: str) -> None:
    view = some_fleet(4)
    desk = Desk(PrefixHash(rng(), overflow=overflow), view)
    hot = a_request(chain=[42, 43])
    reasons: Counter[Reason] = Counter()
    for _ in range(40):
        choice = desk.ask(hot)
        reasons[choice.reason] += 1
        view.booked[choice.row] += 1
        assert view.booked.max() <= np.ceil(1.25 * view.booked.sum() / 4)
    assert reasons[Reason.OVERFLOW] > 0
    assert reasons[Reason.PREFIX_HASH] > 0


def test_overflow_goes_on_along_the_ring_or_to_the_least_loaded_as_it_is_set() -> None:
    hot = a_request(chain=[42, 43])
    view = some_fleet(4)
    desk = Desk(PrefixHash(rng()), view)
    own = desk.ask(hot).row
    view.booked[:] = 2
    view.booked[own] = 9
    following = desk.ask(hot)
    least = next(row for row in range(4) if row not in (own, following.row))
    view.booked[least] = 0  # emptier than the next on the ring, which still has room
    assert (desk.ask(hot).row, following.reason) == (following.row, Reason.OVERFLOW)
    choice = Desk(PrefixHash(rng(), overflow="least_loaded"), view).ask(hot)
    assert (choice.row, choice.reason) == (least, Reason.OVERFLOW)


def test_few_prefixes_move_when_a_replica_leaves() -> None:
    view = some_fleet(8)
    desk = Desk(PrefixHash(rng()), view)
    keys = np.random.default_rng(4).integers(0, 2**63, size=800).tolist()
    before = [desk.ask(a_request(chain=[key])).row for key in keys]
    view.ready[3] = False
    after = [desk.ask(a_request(chain=[key])).row for key in keys]
    assert sum(a != b for a, b in zip(before, after, strict=True)) == before.count(3)


def test_without_known_tokens_it_goes_to_the_least_loaded() -> None:
    view = some_fleet(2)
    view.booked[:] = [4, 1]
    assert Desk(PrefixHash(rng()), view).ask(a_request(chain=[])).row == 1


@pytest.mark.parametrize(
    "bad", [{"prefix_tokens": 0}, {"load_factor": 0.9}, {"virtual_nodes": 0}, {"overflow": "anywhere"}]
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PrefixHash(rng(), **bad)
