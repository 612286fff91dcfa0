"""Both routes of the estimator, arrays and plain numbers, against one candidate at a time."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimates, Estimator, Surroundings
from estimators.few_replicas import MOST_ROWS
from estimators.first_token import Discipline
from estimators.hardware import CARDS
from estimators.hit_probability import TIERS, HitProbability
from estimators.links import LinkTable, Sharing
from estimators.paths import PATHS
from estimators.prefetch import PrefetchSpace
from estimators.roofline import rates_of
from estimators.routes import Blocks, Held, Routes
from estimators.shape_costs import costs_of
from estimators.shape_parts import Experts
from estimators.shapes import QWEN3_8B, ModelShape
from estimators.spread import ResidualSpread
from estimators.view import Column, FleetView
from policies.base import pick_smallest, pick_smallest_of_few
from policies.objectives import EndToEnd, FirstToken
from tests.builders import a_request
from tests.estimators.one_candidate import Candidate, OnReplica, World

WINDOWED = msgspec.structs.replace(QWEN3_8B, pattern=("window", "full"), window=4096)
EXPERTS = msgspec.structs.replace(QWEN3_8B, experts=Experts(count=64, chosen=4, intermediate=768))
SHAPES = (QWEN3_8B, WINDOWED, EXPERTS)
DISCIPLINES: tuple[Discipline | None, ...] = (*Discipline, None)  # None: each replica its own


class Chance:
    """A world drawn from a seed; what decides the course of the code is asked for by name."""

    def __init__(self, seed: int, rows: int) -> None:
        self.rng, self.rows = np.random.default_rng(seed), rows

    def some(self, low: float, high: float, share: float = 1.0, otherwise: float = 0.0) -> Column:
        """A column of which only `share` is drawn."""
        drawn = self.rng.uniform(low, high, self.rows)
        return np.where(self.rng.random(self.rows) < share, drawn, otherwise)

    def blocks(self, high: int) -> Blocks:
        return (self.rng.integers(0, high, self.rows) * self.rng.integers(0, 2, self.rows)).astype(np.int32)

    def view(self, shape: ModelShape, discipline: Discipline | None, *, heard: float, known: float) -> FleetView:
        names = [f"r{row}" for row in range(self.rows)]
        cards = self.rng.choice(["A100", "H20", "H100"], self.rows)
        view = FleetView(names, [rates_of(shape, CARDS[str(card)]) for card in cards])
        view.ready[:] = self.rng.random(self.rows) < 0.8
        view.coefficients[:] *= self.rng.uniform(0.5, 2.0, (self.rows, 5))
        view.coefficients[:, 2:4] = self.rng.uniform(0.0, 1.0, (self.rows, 2))
        view.pace_scale[:], view.occupancy[:] = self.some(0.5, 3.0), self.some(0.3, 1.0)
        view.head_ends_s[:] = self.some(9.0, 12.0, 0.6, -np.inf)
        view.head_compute_s[:] = np.where(view.head_ends_s > -np.inf, self.some(0.1, 2.0), 0.0)
        view.head_tokens[:] = np.where(view.head_ends_s > -np.inf, self.some(1.0, 9000.0), 0.0)
        view.waiting[:] = self.rng.uniform(0.1, 3.0, (5, self.rows)) * (self.rng.random(self.rows) < 0.5)
        view.waiting_tokens[:] *= 4000.0
        view.waiting_context_tokens[:] *= 6000.0
        view.decode_batch[:] = np.floor(self.some(1.0, 60.0, 0.7))
        view.decode_context_tokens[:] = view.decode_batch * self.some(100.0, 9000.0)
        view.decode_read_tokens[:] = view.decode_context_tokens * self.some(0.2, 1.0)
        view.chosen_share = costs_of(shape).chosen_share
        view.remaining_tokens[:] = view.decode_batch * 100.0
        view.foreign_waiting[:] = np.floor(self.some(0.0, 4.0, heard, np.nan))
        view.foreign_decoding[:] = np.floor(self.some(0.0, 20.0, heard, np.nan))
        for row in np.flatnonzero(self.rng.random(self.rows) < known):
            view.has_capacity(int(row), float(self.rng.uniform(20_000, 400_000)))
        each = [list(Discipline)[number] for number in self.rng.integers(0, len(Discipline), self.rows)]
        view.disciplines[:] = each if discipline is None else [discipline] * self.rows
        view.limit_s[:] = self.some(0.0, 0.5)
        return view

    def routes(self, *, store: bool, peers: bool, tiers: bool, busy: bool, sharing: Sharing) -> Routes:
        """One network link, and for each replica a host link, a disk, and a link that leaves it."""
        rows = range(self.rows)
        host, disk, egress = (range(1 + place * self.rows, 1 + (place + 1) * self.rows) for place in range(3))
        rates = self.rng.uniform(2e9, 50e9, 1 + 3 * self.rows)
        look_up_s = self.rng.uniform(0.0, 0.02, len(rates))
        table = LinkTable(bytes_per_s=rates, look_up_s=look_up_s, start_s=0.001, sharing=sharing)
        for _ in range(busy * 6):
            ways = self.rng.choice(len(rates), 2, replace=False).tolist()
            table.promise([0, *ways], float(self.rng.uniform(1e8, 2e10)), now_s=9.5)
        return Routes(
            table=table,
            store=[[0, host[row]] for row in rows] if store else [],
            host=[[host[row]] for row in rows] if tiers else [],
            disk=[[disk[row], host[row]] for row in rows] if tiers else [],
            egress=list(egress) if peers else [],
        )

    def held(self, *, tiers: bool, ages: bool) -> Held:
        hbm = self.blocks(530)
        host = np.maximum(hbm, self.blocks(530)) if tiers else None
        disk = np.maximum(host, self.blocks(530)) if host is not None else None
        age_s = np.where(self.rng.random((4, self.rows)) < 0.8, self.rng.uniform(0.0, 900.0, (4, self.rows)), np.nan)
        return Held(hbm, int(self.rng.integers(0, 540)), host, disk, age_s if ages else None)

    def doubt(self, names: tuple[str, ...]) -> Doubt:
        hits = HitProbability(names)
        for tier in TIERS:
            for came, row in enumerate(self.rng.integers(0, self.rows, 5)):
                told = {"expected_blocks": 1.0, "reported_blocks": float(came > 1), "age_s": 20.0}
                hits.reported(int(row), tier, now_s=float(self.rng.uniform(0.0, 10.0)), **told)
        return Doubt(hits, ResidualSpread(names), Conformal(LEVELS))


flags = st.booleans()


@st.composite
def worlds(
    draw: st.DrawFn, rows: st.SearchStrategy[int], discipline: Discipline | None, *, bare: bool = False
) -> World:
    """bare : without tiers and limits of room, as the route in plain numbers needs it"""
    chance = Chance(draw(st.integers(0, 2**32)), draw(rows))
    tiers, limited = (draw(flags) and not bare for _ in range(2))
    shape, shares = draw(st.sampled_from(SHAPES)), st.sampled_from((0.0, 0.5, 1.0))
    view = chance.view(shape, discipline, heard=draw(shares), known=draw(shares))
    routes = chance.routes(
        store=draw(flags),
        peers=draw(flags),
        tiers=tiers,
        busy=draw(flags),
        sharing=draw(st.sampled_from(list(Sharing))),
    )
    return World(
        costs=costs_of(shape),
        layers=shape.layers,
        routes=routes,
        space=PrefetchSpace(chance.some(1e8, 3e9)) if limited else None,
        step_tokens=draw(st.sampled_from((40, 2048))),
        minimum_fetch_tokens=draw(st.sampled_from((1, 600))),
        engine_decides=draw(flags),
        doubt=chance.doubt(view.names) if draw(flags) else None,
        view=view,
        held=chance.held(tiers=tiers, ages=draw(flags)),
        request=a_request(draw(st.sampled_from((0, 1, 17, 8448)))),
        around=Surroundings(
            arrival_rps=1.0,
            mean_compute_s=0.4,
            mean_context_tokens=1700.0,
            output_tokens=200.0,
            others_output_tokens=150.0,
        ),
        now_s=10.0,
    )


def estimated(world: World) -> Estimates:
    estimator = Estimator(
        costs=world.costs,
        layers=world.layers,
        rows=world.view.rows,
        routes=world.routes,
        space=world.space,
        minimum_fetch_tokens=world.minimum_fetch_tokens,
        step_tokens=world.step_tokens,
        engine_decides=world.engine_decides,
        doubt=world.doubt,
    )
    return estimator.estimate(world.request, world.held, world.view, world.around, world.now_s)


def check(world: World) -> None:
    estimates = estimated(world)
    for row in range(world.view.rows):
        one = OnReplica(world, row, None if estimates.peers is None else int(estimates.peers[row]))
        assert estimates.queue_s[row] == pytest.approx(one.queue_s, rel=1e-9, abs=1e-12)
        assert estimates.pace_s[row] == pytest.approx(one.pace_s, rel=1e-9)
        assert estimates.decoding[row] == pytest.approx(one.decodes)
        remaining = float(world.view.remaining_tokens[row]) + one.decoding * world.around.others_output_tokens
        assert estimates.remaining_tokens[row] == pytest.approx(remaining, abs=1e-9)
        assert estimates.stored_s[row] == pytest.approx(one.stored_s, rel=1e-7, abs=1e-7)
        for column, path in enumerate(PATHS[: len(estimates.possible)]):
            candidate = one.candidate(path)
            for field in fields(Candidate):
                value = getattr(estimates, field.name)[column, row]
                wanted = pytest.approx(getattr(candidate, field.name), rel=1e-7, abs=1e-7)
                assert value == wanted, (path, row, field.name)


few, many = st.integers(1, 6), st.integers(MOST_ROWS + 1, MOST_ROWS + 3)


@settings(max_examples=60, deadline=None)
@given(worlds(few, Discipline.OVERLAPPED, bare=True))
def test_a_few_replicas_are_estimated_as_each_candidate_alone(world: World) -> None:
    check(world)


@settings(max_examples=15, deadline=None)
@given(worlds(many, Discipline.OVERLAPPED))
def test_many_replicas_are_estimated_as_each_candidate_alone(world: World) -> None:
    check(world)


@pytest.mark.parametrize("discipline", DISCIPLINES)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_every_discipline_and_a_mixture_is_estimated_as_each_candidate_alone(
    discipline: Discipline | None, data: st.DataObject
) -> None:
    check(data.draw(worlds(few, discipline)))


@settings(max_examples=40, deadline=None)
@given(worlds(few, Discipline.OVERLAPPED, bare=True))
def test_numbers_of_one_candidate_are_those_of_the_grids(world: World) -> None:
    estimates = estimated(world)
    grids = estimates.narrowed(np.ones(world.view.rows, dtype=np.bool_))
    assert estimates.few is not None
    assert grids.few is None
    assert [[one.column, one.row] for one in estimates.few] == np.argwhere(grids.possible).tolist()
    assert estimates.ready_rows == grids.ready_rows
    for one in estimates.few:
        at = one.column, one.row
        assert (one.expected_s, one.pace_s) == (grids.expected_s[at], grids.pace_s[one.row])
        assert (one.queue_price_s, one.decode_price_s) == (grids.queue_price_s[at], grids.decode_price_s[at])
        assert one.joining_price_s == grids.joining_price_s[at]
        assert one.queue_s == grids.queue_s[one.row]
    for column, path in enumerate(PATHS[: len(grids.possible)]):
        for row in range(world.view.rows):
            assert repr(estimates.one(path, row)) == repr(grids.one(path, row)), (column, row)  # NaN equals NaN so


@settings(max_examples=40, deadline=None)
@given(worlds(few, Discipline.OVERLAPPED, bare=True), st.integers(0, 99))
def test_a_rule_chooses_alike_among_numbers_and_grids(world: World, seed: int) -> None:
    assume(world.view.ready.any())
    estimates = estimated(world)
    grids = estimates.narrowed(np.ones(world.view.rows, dtype=np.bool_))
    for rule in (FirstToken, EndToEnd):
        for twice in range(2):
            one, other = (rule(np.random.default_rng(seed + twice)) for _ in range(2))
            chosen = one.choose(world.request, world.view, estimates)
            assert chosen == other.choose(world.request, world.view, grids)


def test_equal_numbers_are_chosen_among_by_the_same_draw_as_equal_grids() -> None:
    values = [2.0, 1.0, 1.0 + 1e-13, 3.0, 1.0]
    draws = [pick_smallest_of_few(values, np.random.default_rng(seed)) for seed in range(20)]
    assert draws == [pick_smallest(np.array(values), np.random.default_rng(seed)) for seed in range(20)]
    assert {place for place, _ in draws} == {1, 2, 4}
