from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from estimators.paths import COLUMN, Path
from policies.base import Refused
from policies.by_time.conductor import Conductor
from tests.builders import a_request
from tests.policies.by_time.places import busy, told
from tests.policies.desk import Desk, blocks, rng, some_fleet


@pytest.mark.parametrize(("stored", "path"), [(121, Path.REMOTE), (120, Path.LOCAL)])
def test_a_prefix_is_fetched_when_it_is_more_than_a_fifth_longer_than_the_local_one(stored: int, path: Path) -> None:
    desk = told(Conductor(rng()))
    desk.held = blocks(100, 0, store=stored)
    busy(desk, 1, 99.0)
    choice = desk.ask()
    assert (choice.row, choice.path) == (0, path)


def test_a_factor_of_four_fetches_less_often() -> None:
    desk = told(Conductor(rng(), factor=4.0))
    busy(desk, 1, 99.0)
    for stored, path in ((399, Path.LOCAL), (401, Path.REMOTE)):
        desk.held = blocks(100, 0, store=stored)
        assert desk.ask().path is path


def test_with_nothing_of_its_own_a_replica_fetches_whatever_there_is() -> None:
    desk = told(Conductor(rng()))
    desk.held = blocks(0, 0, store=1)
    assert desk.ask().path is Path.REMOTE


def test_the_best_holder_is_the_one_with_most_of_it() -> None:
    desk = told(Conductor(rng()), rows=3, peer_bytes_per_s=12.5e9)
    busy(desk, 1, 99.0)
    busy(desk, 2, 99.0)
    for stored, path in ((300, Path.PEER), (500, Path.REMOTE)):
        desk.held = blocks(0, 400, 0, store=stored)
        choice = desk.ask()
        assert (choice.row, choice.path) == (0, path)


def test_transfer_queue_and_prefill_are_added_although_they_overlap() -> None:
    """The holder is busy for less than the fetch takes elsewhere, so waiting for it is better by the sum."""
    desk = told(Conductor(rng()), store_bytes_per_s=1e9)
    desk.held = blocks(528, 0, store=528)
    request = a_request()
    estimates = desk.estimates(request)
    fetch_s = float(estimates.fetch_s[COLUMN[Path.REMOTE], 1])
    for queue_s, row in ((fetch_s - 0.02, 0), (fetch_s + 0.02, 1)):
        busy(desk, 0, queue_s)
        assert desk.ask(request).row == row
    busy(desk, 1, fetch_s)  # an overlapped fetch would be free now; the rule adds it
    busy(desk, 0, 2 * fetch_s - 0.02)
    assert desk.ask(request).row == 0


def test_nobody_is_refused_without_a_deadline_and_with_one_nobody_in_time_refuses() -> None:
    view = some_fleet(2)
    desk = Desk(Conductor(rng()), view)
    busy(desk, 0, 60.0)
    busy(desk, 1, 50.0)
    assert desk.ask().row == 1
    strict = Desk(Conductor(rng(), deadline_s=10.0), view)
    with pytest.raises(Refused, match=r"within 10 s; the soonest would take 5\d"):
        strict.ask()
    busy(strict, 1, 1.0)
    assert strict.ask().row == 1


def test_on_engines_that_decide_by_themselves_it_says_what_they_will_do() -> None:
    desk = told(Conductor(rng()), engine_decides=True)
    desk.held = blocks(100, 100, store=101)  # not worth it to the rule, and fetched all the same
    assert desk.ask().path is Path.REMOTE


def test_only_what_is_possible_is_chosen() -> None:
    desk = told(Conductor(rng()), rows=4, peer_bytes_per_s=12.5e9)
    chance = np.random.default_rng(5)
    for _ in range(60):
        desk.held = blocks(*chance.integers(0, 500, 4).tolist(), store=int(chance.integers(0, 500)))
        desk.view.ready[:] = chance.random(4) < 0.6
        desk.view.ready[chance.integers(4)] = True
        estimates = desk.estimates(a_request())
        choice = desk.policy.choose(a_request(), desk.view, estimates)
        assert estimates.possible[COLUMN[choice.path], choice.row]


@pytest.mark.parametrize("bad", [{"factor": 0.9}, {"deadline_s": 0.0}, {"deadline_s": float("nan")}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Conductor(rng(), **bad)
