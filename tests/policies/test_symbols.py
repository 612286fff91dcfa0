from __future__ import annotations

import numpy as np

from estimators.paths import Path
from policies import symbols
from policies.by_load.uniform import Uniform
from tests.builders import a_request, an_estimator
from tests.policies.desk import Desk, blocks, rng, some_fleet


def test_what_is_still_being_computed_is_not_cached() -> None:
    request = a_request(prompt_tokens=1000)
    desk = Desk(Uniform(rng()), some_fleet(3), blocks(10, 4, 0, confirmed=[2, 4, 0]))
    estimates = desk.estimates(request)
    assert symbols.cached_tokens(request, estimates).tolist() == [32, 64, 0]
    assert symbols.reach_tokens(estimates, Path.LOCAL).tolist() == [160, 64, 0]


def test_one_token_is_always_computed() -> None:
    request = a_request(prompt_tokens=160)
    estimates = Desk(Uniform(rng()), some_fleet(1), blocks(10)).estimates(request)
    assert symbols.cached_tokens(request, estimates).tolist() == [159]


def test_a_place_the_fleet_has_not_reaches_as_far_as_hbm() -> None:
    estimates = Desk(Uniform(rng()), some_fleet(2), blocks(3, 0)).estimates(a_request())
    for path in (Path.REMOTE, Path.PEER, Path.HOST, Path.DISK):
        assert symbols.reach_tokens(estimates, path).tolist() == [48, 0]


def test_bookings_are_running_or_queued_and_never_both() -> None:
    desk = Desk(Uniform(rng()), some_fleet(2))
    sent = [desk.place(0) for _ in range(4)]
    assert (symbols.queued(desk.view).tolist(), symbols.running(desk.view).tolist()) == ([3, 0], [1, 0])
    desk.first_token(sent[0], 1.0)
    assert (symbols.queued(desk.view).tolist(), symbols.running(desk.view).tolist()) == ([2, 0], [2, 0])
    for one in sent:
        desk.end(one, 2.0)
    assert symbols.queued(desk.view).sum() + symbols.running(desk.view).sum() == 0


def test_requests_of_others_count_as_reported_and_as_elsewhere_where_nobody_reports() -> None:
    view = some_fleet(3)
    view.foreign_waiting[:] = [4.0, 2.0, np.nan]
    assert symbols.queued(view).tolist() == [4, 2, 3]


def test_without_fetching_is_local_or_recompute_unless_the_engine_fetches_by_itself() -> None:
    request = a_request()
    for decides, path in ((True, Path.REMOTE), (False, Path.LOCAL)):
        estimator = an_estimator(network_bytes_per_s=12.5e9, engine_decides=decides)
        estimates = Desk(Uniform(rng()), some_fleet(2), blocks(2, 0, store=400), estimator).estimates(request)
        assert symbols.path_without_fetch(estimates, 0) is path
    assert symbols.path_without_fetch(estimates, 1) is Path.RECOMPUTE


def test_the_peak_rate_is_that_of_matrix_work_alone() -> None:
    view = some_fleet(1)
    assert symbols.peak_prefill_tokens_per_s(view)[0] * view.linear_s_per_token[0] == 1.0
