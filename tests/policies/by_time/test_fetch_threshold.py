from __future__ import annotations

from typing import Any

import pytest

from estimators.paths import Path
from policies.by_time.fetch_threshold import FetchThreshold
from tests.policies.by_time.places import told
from tests.policies.desk import blocks, rng, some_fleet


def test_the_fewest_tokens_in_flight_decide_whatever_is_cached() -> None:
    desk = told(FetchThreshold(rng()), rows=3)
    desk.held = blocks(500, 0, 0)
    desk.view.prefill_tokens[:] = [101, 100, 200]
    assert desk.ask().row == 1


@pytest.mark.parametrize(("decodes", "share"), [(0, 1.0), (128, 0.75), (256, 0.5), (900, 0.5)])
def test_it_fetches_what_it_would_take_longer_to_compute_at_the_rate_the_batch_leaves(
    decodes: int, share: float
) -> None:
    """delta = t0 / (1/R - beta) is the threshold; a block above it is fetched, a block below is computed."""
    view = some_fleet(2)
    compute_s = float(view.linear_s_per_token[0]) / share
    delta = 0.1 / (compute_s - 11.8e-6)
    view.decode_batch[:] = decodes
    for stored, path in ((int(delta // 16) + 1, Path.REMOTE), (int(delta // 16), Path.RECOMPUTE)):
        desk = told(FetchThreshold(rng(), start_s=0.1), view=view)
        desk.held = blocks(0, 0, store=stored)
        assert desk.ask().path is path


def test_only_what_a_holder_has_beyond_the_replica_is_weighed() -> None:
    desk = told(FetchThreshold(rng(), start_s=0.1))
    desk.held = blocks(400, 400, store=401)
    assert desk.ask().path is Path.LOCAL
    desk.held = blocks(0, 0, store=401)
    assert desk.ask().path is Path.REMOTE


def test_the_longest_of_store_and_peer_is_fetched() -> None:
    desk = told(FetchThreshold(rng()), rows=3, peer_bytes_per_s=12.5e9)
    desk.view.prefill_tokens[:] = [0, 1000, 1000]
    for stored, path in ((300, Path.PEER), (500, Path.REMOTE)):
        desk.held = blocks(0, 400, 0, store=stored)
        assert desk.ask().path is path


def test_a_link_slower_than_computing_is_never_used() -> None:
    desk = told(FetchThreshold(rng(), token_s=0.01))
    desk.held = blocks(0, 0, store=528)
    assert desk.ask().path is Path.RECOMPUTE


def test_an_engine_that_decides_by_itself_is_not_told_otherwise() -> None:
    desk = told(FetchThreshold(rng(), token_s=0.01), engine_decides=True)
    desk.held = blocks(0, 0, store=528)
    assert desk.ask().path is Path.REMOTE


@pytest.mark.parametrize("bad", [{"start_s": -1.0}, {"token_s": 0.0}, {"full_batch": 0}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FetchThreshold(rng(), **bad)
