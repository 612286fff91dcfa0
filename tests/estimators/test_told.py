"""Which paths are left where engines are told, or look up by themselves; for few and for many replicas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.estimates import Doubt, Estimates, Estimator
from estimators.few_replicas import MOST_ROWS
from estimators.first_token import Discipline
from estimators.links import LinkTable
from estimators.paths import COLUMN, Path
from estimators.routes import Held, Routes
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from estimators.told import Told
from estimators.view import FleetView
from tests.builders import a_fleet, a_request, held, quiet
from tests.router.learning_bench import a_doubt

FEW, MANY = 3, MOST_ROWS + 1
LOCAL, RECOMPUTE, REMOTE, PEER = (COLUMN[path] for path in (Path.LOCAL, Path.RECOMPUTE, Path.REMOTE, Path.PEER))


def an_estimator(rows: int, *, decides: bool, doubt: Doubt | None = None, tiers: bool = False) -> Estimator:
    """A store behind 10 GB/s, peers behind 25 GB/s; with `tiers` host memory behind the store's link to each."""
    table = LinkTable(bytes_per_s=[10e9] + [25e9] * (2 * rows))
    routes = Routes(
        table=table,
        store=[[0, 1 + row] for row in range(rows)],
        egress=[1 + rows + row for row in range(rows)],
        host=[[1 + row] for row in range(rows)] if tiers else [],
    )
    return Estimator(
        costs=costs_of(QWEN3_8B),
        layers=QWEN3_8B.layers,
        rows=rows,
        routes=routes,
        minimum_fetch_tokens=64,
        engine_decides=decides,
        doubt=doubt,
    )


def told(rows: int, **masks: bool) -> Told:
    one = Told.nothing(rows)
    for name, value in masks.items():
        getattr(one, name)[:] = value
    return one


def estimated(
    where: Held,
    rows: int,
    *,
    told: Told | None,
    decides: bool = False,
    doubts: bool = False,
    discipline: Discipline = Discipline.OVERLAPPED,
    change: Callable[[FleetView], object] = lambda view: None,
    tiers: bool = False,
) -> Estimates:
    view = a_fleet(*["A100"] * rows, discipline=discipline)
    view.told = told
    change(view)
    estimator = an_estimator(rows, decides=decides, doubt=a_doubt(view) if doubts else None, tiers=tiers)
    return estimator.estimate(a_request(), where, view, quiet(), 0.0)


def somewhere(rows: int, *, own: int = 0, peer: int = 400, store: int = 0) -> Held:
    """Replica 0 has `own` blocks, the last one `peer`."""
    blocks = [own] + [0] * (rows - 2) + [peer]
    return held(blocks, store)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_a_peer_is_read_only_by_who_can_be_told(rows: int) -> None:
    where = somewhere(rows)
    assert estimated(where, rows, told=told(rows, peer=True)).possible[PEER, 0]
    assert not estimated(where, rows, told=told(rows)).possible[PEER, 0]
    mixed = told(rows, peer=True)
    mixed.peer[0] = False
    possible = estimated(where, rows, told=mixed).possible
    assert possible[PEER].tolist() == [False, *[True] * (rows - 2), False]
    assert possible[RECOMPUTE].tolist() == [True] * (rows - 1) + [False]


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("doubts", [False, True])
@pytest.mark.parametrize("discipline", [Discipline.OVERLAPPED, Discipline.SERIAL])
def test_who_looks_the_store_up_and_is_told_nothing_is_estimated_as_one_who_decides(
    rows: int, doubts: bool, discipline: Discipline
) -> None:
    where = somewhere(rows, own=100, store=300)
    alone = estimated(where, rows, told=None, decides=True, doubts=doubts, discipline=discipline)
    told_nothing = estimated(where, rows, told=told(rows, asks_store=True), doubts=doubts, discipline=discipline)
    assert np.array_equal(told_nothing.possible, alone.possible)
    for grid in ("first_token_s", "hit_probability", "stored_probability", "expected_s"):
        ours, theirs = getattr(told_nothing, grid), getattr(alone, grid)
        assert ours[alone.possible] == pytest.approx(theirs[alone.possible]), grid


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_who_can_be_told_everything_is_estimated_as_without_a_word(rows: int) -> None:
    where = somewhere(rows, own=100, store=300)
    free = estimated(where, rows, told=None, doubts=True)
    told_all = estimated(where, rows, told=told(rows, peer=True, store=True), doubts=True)
    assert np.array_equal(told_all.possible, free.possible)
    assert np.array_equal(told_all.expected_s, free.expected_s)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_a_store_that_nobody_reads_is_no_path(rows: int) -> None:
    possible = estimated(somewhere(rows, peer=0, store=300), rows, told=told(rows)).possible
    assert not possible[REMOTE].any()
    assert possible[RECOMPUTE].all()


@pytest.mark.parametrize(("peer", "worth"), [(300, False), (200, False), (301, True)])
def test_a_peer_is_worth_telling_where_it_has_more_than_the_store_that_is_read_anyway(peer: int, worth: bool) -> None:
    where = somewhere(FEW, peer=peer, store=300)
    possible = estimated(where, FEW, told=told(FEW, peer=True, asks_store=True)).possible
    assert possible[:, 0].tolist() == [False, False, True, worth]


@pytest.mark.parametrize(
    ("discipline", "queue_s", "possible"),
    [
        (Discipline.OVERLAPPED, 5.0, False),  # it has looked before the state is there
        (Discipline.SERIAL, 0.0, False),
        (Discipline.SERIAL, 5.0, True),
    ],
)
def test_what_is_brought_ahead_counts_where_the_turn_comes_later_than_that_takes(
    discipline: Discipline, queue_s: float, possible: bool
) -> None:
    def queue(view: FleetView) -> None:
        view.head_ends_s[:] = queue_s
        view.head_compute_s[:] = queue_s

    ahead = told(FEW, peer=True, store=True, ahead_peer=True, ahead_store=True)
    where = somewhere(FEW, peer=400, store=300)
    got = estimated(where, FEW, told=ahead, discipline=discipline, change=queue if queue_s else lambda view: None)
    assert got.possible[[REMOTE, PEER], 0].tolist() == [possible, possible]
    assert got.possible[RECOMPUTE, 0]


MASKS = st.lists(st.booleans(), min_size=FEW, max_size=FEW)
COUNTS = st.integers(0, 500)


@given(
    st.tuples(*[MASKS] * 5),
    st.tuples(*[COUNTS] * FEW),
    st.tuples(*[COUNTS] * FEW),
    COUNTS,
    st.sampled_from([Discipline.OVERLAPPED, Discipline.SERIAL]),
    st.booleans(),
)
def test_every_replica_keeps_a_path_whatever_it_can_be_told(
    masks: tuple[list[bool], ...],
    local: tuple[int, ...],
    more: tuple[int, ...],
    store: int,
    discipline: Discipline,
    tiers: bool,
) -> None:
    where = held(list(local), store)
    if tiers:
        where.host_blocks = where.local_blocks + np.array(more, dtype=np.int32)
    one = Told(*(np.array(mask) for mask in masks))
    got = estimated(where, FEW, told=one, doubts=True, discipline=discipline, tiers=tiers)
    assert got.usable_rows.all()
    assert not got.possible[PEER, ~one.peer].any()
    assert not got.possible[REMOTE, ~(one.store | one.asks_store)].any()
    hit, stored = got.hit_probability, got.stored_probability
    assert (stored >= -1e-12).all()
    assert (hit + stored <= 1.0 + 1e-12).all()


def test_what_is_gone_at_a_peer_is_computed_unless_the_store_is_looked_up_unasked() -> None:
    where = somewhere(FEW, peer=400, store=300)
    for asks in (False, True):
        got = estimated(where, FEW, told=told(FEW, peer=True, store=True, asks_store=asks), doubts=True)
        hit, stored = got.hit_probability[PEER, 0], got.stored_probability[PEER, 0]
        assert 0.0 < hit < 1.0
        assert (stored > 0.0) == asks
        assert hit + stored <= 1.0 + 1e-12
