"""A replica's discipline is named from what a router sees: its own placings, its estimates, and first tokens.

One simulated engine on a slow store, Poisson arrivals, half of them with a prefix to fetch, prompts and prefixes of
mixed lengths, 3 % chance on each step. The router's F comes from the links of the fleet file with its own promises on
them, its C from a fit to prompts that ran alone, then up to 15 % wrong for a whole run. Nothing of the engine's
insides is read.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
import numpy.typing as npt
import pytest

from estimators.discipline import DisciplineLearner, Verdict
from estimators.first_token import Discipline, Rest
from estimators.links import LinkTable, Promise
from estimators.turns import Standing, Turns
from sim_backends.requests import EngineRequest
from sim_backends.world import World
from tests.sim_backends.builders import a_block_request, a_world, run_out

TOKEN_BYTES = 147_456
LAYERS = 36
BLOCK = 16
STORE_GB_S = 2.0
LINKS = {"store": {"gb_s": STORE_GB_S, "start_ms": 10}, "pcie": {"gb_s": 25, "start_ms": 0}}
BUDGET = 512  # tokens in one step
LIMIT_S = 0.2
# Two short runs of each; TFIRST_DISCIPLINE_SEEDS=10 TFIRST_DISCIPLINE_FETCHES=300 makes a study of it, of 45 s.
SEEDS = int(os.environ.get("TFIRST_DISCIPLINE_SEEDS", "2"))
FETCHES = int(os.environ.get("TFIRST_DISCIPLINE_FETCHES", "100"))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; stored_tokens : its beginning that is in the store and nowhere else, 0 for none."""

    at_s: float
    prompt_tokens: int
    stored_tokens: int
    first_id: int
    output_tokens: int


def arrivals(seed: int, fetches: int, *, mean_gap_s: float = 0.5) -> list[Arrival]:
    rng = random.Random(f"{seed}/arrivals")
    made: list[Arrival] = []
    at_s, left = 1000.0, fetches
    while left:
        at_s += rng.expovariate(1.0 / mean_gap_s)
        stored = BLOCK * rng.randint(64, 500) if rng.random() < 0.5 else 0
        new = rng.randint(64, 3500)
        made.append(Arrival(at_s, stored + new, stored, 1_000 * (len(made) + 1), rng.randint(1, 24)))
        left -= stored > 0
    return made


def request_of(arrival: Arrival, tokens: int, *, output: int, name: str) -> EngineRequest:
    ids = list(range(arrival.first_id, arrival.first_id + tokens // BLOCK))
    return a_block_request(ids, tokens, output=output, max_tokens=output, request_id=name)


@cache
def costs() -> npt.NDArray[np.float64]:
    """Seconds per new token, pair, step and prefill, fitted to 40 prompts that ran alone without chance."""
    rng = random.Random(5)
    world = a_world("A100", use_store=False, outputs="ends", engine={"token_budget": BUDGET})
    rows, seconds = [], []
    for number in range(40):
        new, cached = rng.randint(64, 8000), BLOCK * rng.choice([0, 0, 100, 300, 500])
        at_s = 100.0 * (number + 1)
        part = Arrival(at_s, cached + new, cached, 1_000 * (number + 1), 1)
        if cached:
            world.submit(0, request_of(part, cached, output=1, name=f"c{number}"), at_s)
            run_out(world)
        world.submit(0, request_of(part, cached + new, output=1, name=f"x{number}"), at_s + 50.0)
        rows.append(features(new, cached))
        seconds.append(run_out(world)[0].at_s - at_s - 50.0)
    return np.asarray(np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)[0])


def features(new: float, cached: float) -> list[float]:
    return [new, new * cached + new * new / 2, ceil(new / BUDGET), 1.0]


class Router:
    """What a router books and learns about one replica. `wrong` : the factor by which its C is off."""

    def __init__(self, wrong: float) -> None:
        self.learner = DisciplineLearner(layers=LAYERS, limits_s=(0.05, LIMIT_S, 1.0))
        self._links = LinkTable(bytes_per_s=[STORE_GB_S * 1e9, 25e9], look_up_s=[0.010, 0.0])
        self._turns = Turns(layers=LAYERS)
        self._wrong = wrong
        self._open: dict[str, tuple[Standing, Promise]] = {}

    def placed(self, name: str, arrival: Arrival) -> None:
        now_s, stored, prompt = arrival.at_s, arrival.stored_tokens, arrival.prompt_tokens
        size = float(stored * TOKEN_BYTES)
        waits_s = sum(float(standing.rest.all_reused_s) for standing, _promise in self._open.values())
        fetch_s, first_byte_s = self._links.fetch_one([0, 1], size, now_s)
        in_turn_s, _ = self._links.fetch_one([0, 1], size, now_s + waits_s)
        per = costs() * self._wrong
        compute_s = float(per @ features(prompt - stored, stored))
        none_s = float(per @ features(prompt, 0))
        bend_s = float(per[1]) * stored * stored / 2
        rest = Rest(compute_s, max(none_s, compute_s), bend_s, step_share=BUDGET / max(stored, 1))
        standing = self._turns.placed(
            now_s,
            rest=rest,
            fetch_s=fetch_s,
            fetch_in_turn_s=in_turn_s,
            in_turn_at_s=waits_s,
            first_byte_s=first_byte_s,
        )
        self._open[name] = (standing, self._links.promise([0, 1], size, now_s=now_s))

    def first_token(self, name: str, at_s: float) -> None:
        standing, promise = self._open.pop(name)
        self._links.arrived(promise, at_s)
        seen = self._turns.first_token(standing, at_s)
        if seen is not None:
            self.learner.observe(seen)


def stocked(discipline: Discipline, work: list[Arrival], seed: int, *, limit_s: float) -> World:
    """Two replicas; the second has computed all prefixes, so the store has them."""
    fetch = {"by": "engine", "discipline": discipline.value, "minimum_tokens": 512, "limit_ms": limit_s * 1000}
    engine = {"jitter": 0.03, "seed": seed, "token_budget": BUDGET}
    world = a_world("A100", "A100", fetch=fetch, links=LINKS, engine=engine, outputs="ends")
    for number, arrival in enumerate(work):
        if arrival.stored_tokens:
            world.submit(1, request_of(arrival, arrival.stored_tokens, output=1, name=f"w{number}"), 0.0)
    run_out(world)
    return world


def judged(discipline: Discipline, seed: int, fetches: int = FETCHES, *, limit_s: float = LIMIT_S) -> Verdict:
    """What the router makes of one run."""
    work = arrivals(seed, fetches)
    world = stocked(discipline, work, seed, limit_s=limit_s)
    router = Router(wrong=random.Random(f"{seed}/wrong").uniform(0.85, 1.15))

    def hear(until_s: float) -> None:
        for output in world.advance(until_s):
            if output.index == 0:
                router.first_token(output.request_id, output.at_s)

    for number, arrival in enumerate(work):
        hear(arrival.at_s)
        name = f"r{number}"
        request = request_of(arrival, arrival.prompt_tokens, output=arrival.output_tokens, name=name)
        world.submit(0, request, arrival.at_s)
        router.placed(name, arrival)
    hear(work[-1].at_s + 1000.0)
    return router.learner.verdict()


@pytest.mark.parametrize("discipline", list(Discipline))
def test_the_discipline_of_a_simulated_engine_is_named_nine_times_in_ten(discipline: Discipline) -> None:
    named = sum(judged(discipline, seed).discipline is discipline for seed in range(SEEDS))
    assert named >= 0.9 * SEEDS


def test_patience_that_never_ends_a_fetch_is_reported_as_alike_to_overlapped() -> None:
    """Half a minute at the turn is more than any fetch takes: whichever of the two it is, it behaves as both."""
    alike = judged(Discipline.TIME_LIMITED, 3, 120, limit_s=30.0).alike
    assert alike == {Discipline.OVERLAPPED, Discipline.TIME_LIMITED}


def test_the_patience_of_a_simulated_engine_is_found_among_those_tried() -> None:
    assert judged(Discipline.TIME_LIMITED, 4, 150).limit_s == LIMIT_S
