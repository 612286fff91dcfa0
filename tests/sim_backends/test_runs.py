"""Many steps at once against the same steps one by one: nothing that can be seen may differ."""

from __future__ import annotations

import random
from dataclasses import astuple
from typing import Any

import pytest

from sim_backends.engine import Engine, Outputs
from sim_backends.requests import EngineRequest, Output
from sim_backends.world import World
from tests.sim_backends.builders import a_block_request, a_request, a_world, an_engine, prompt, run_out

Told = tuple[float, int, EngineRequest | str]  # time, row, a request or the id of one to abort


def a_workload(seed: int, *, rows: int, requests: int = 120) -> list[Told]:
    """Shared prefixes of blocks and of tokens, long and short answers, aborts; often the same moment twice."""
    rng = random.Random(seed)
    told: list[Told] = []
    at_s = 0.0
    for number in range(requests):
        if rng.random() < 0.9:
            at_s += rng.expovariate(10.0)
        shared = rng.randrange(1, 6)
        tokens = rng.randrange(1, 3000)
        output = rng.choice([1, 2, 60, 400, 600])
        more: dict[str, Any] = {"output": output, "max_tokens": 600, "request_id": str(number)}
        if number % 3:
            common = rng.randrange(50)
            ids = [1000 * shared + i if i < common else 10**6 + 100 * number + i for i in range(tokens // 64)]
            request = a_block_request(ids, tokens, **more)
        else:
            request = a_request(prompt(tokens, start=9000 * shared), **more)
        row = rng.randrange(rows)
        told.append((at_s, row, request))
        if rng.random() < 0.2:
            told.append((at_s + rng.expovariate(1.0), row, str(number)))
    return sorted(told, key=lambda each: each[0])


def seen(world: World, told: list[Told], *, advance_rng: random.Random | None = None) -> dict[str, Any]:
    """All that a driver can see of a run. `advance_rng` makes it look in between."""
    outputs: list[Output] = []
    batches: list[list[Any]] = [[] for _ in world.engines]

    def look(now_s: float) -> None:
        outputs.extend(world.advance(now_s))
        for engine, mine in zip(world.engines, batches, strict=True):
            mine.extend(engine.take_event_batches())

    before_s = 0.0
    for at_s, row, what in told:
        if advance_rng is not None:
            for _ in range(advance_rng.randrange(4)):
                before_s += (at_s - before_s) * advance_rng.random()
                look(before_s)
        before_s = at_s
        if isinstance(what, str):
            world.abort(row, what, at_s)
        else:
            world.submit(row, what, at_s)
    while (due_s := world.next_due_s()) is not None:
        look(due_s)
    return {
        "outputs": outputs,
        "batches": batches,
        "counters": [engine.counters for engine in world.engines],
        "blocks": [(engine.cache._block_of, list(engine.cache._free)) for engine in world.engines],
        "store": None if world.store is None else list(world.store._blocks),
    }


def a_small_world(*, runs: bool = True, outputs: Outputs = "ends", jitter: float = 0.0, **sections: Any) -> World:
    """Two cards with about 12 000 tokens of memory each: some decodes are thrown out."""
    engine = {"memory_share": 0.2114, "token_budget": 1024, "jitter": jitter}
    world = a_world("A100", "H20", record_events=True, outputs=outputs, block_tokens=64, engine=engine, **sections)
    for each in world.engines:
        each._runs = each._runs and runs
    return world


def a_fetch(discipline: str) -> dict[str, Any]:
    return {"by": "engine", "discipline": discipline, "minimum_tokens": 128}


@pytest.mark.parametrize("jitter", [0.0, 0.03])
@pytest.mark.parametrize("discipline", ["overlapped", "serial", "layerwise"])
@pytest.mark.parametrize("seed", range(3))
def test_runs_show_nothing_that_single_steps_do_not(seed: int, discipline: str, jitter: float) -> None:
    told = a_workload(seed, rows=2)
    in_runs = seen(a_small_world(jitter=jitter, fetch=a_fetch(discipline)), told)
    in_steps = seen(a_small_world(jitter=jitter, fetch=a_fetch(discipline), runs=False), told)
    assert in_runs == in_steps


@pytest.mark.parametrize("seed", range(3))
def test_the_ends_are_those_of_all_outputs(seed: int) -> None:
    told = a_workload(seed, rows=2)
    ends, everything = seen(a_small_world(), told), seen(a_small_world(outputs="all"), told)
    picked = [each for each in everything.pop("outputs") if each.index == 0 or each.finish_reason]
    assert ends.pop("outputs") == picked
    assert ends == everything


@pytest.mark.parametrize("seed", range(3))
def test_results_do_not_depend_on_how_often_the_world_is_advanced(seed: int) -> None:
    told = a_workload(seed, rows=2)
    never = seen(a_small_world(jitter=0.03), told)
    often = seen(a_small_world(jitter=0.03), told, advance_rng=random.Random(seed))
    assert never == often


def test_the_workloads_throw_out_fetch_and_abort() -> None:
    """What the comparisons above would be worth without it: little."""
    world = a_small_world(fetch=a_fetch("overlapped"))
    counters = seen(world, a_workload(0, rows=2))["counters"]
    assert sum(each.preemptions for each in counters) > 0
    assert sum(each.external_hits for each in counters) > 0
    assert sum(each.finished["abort"] for each in counters) > 5


def test_a_run_saves_most_of_the_things_that_are_due() -> None:
    def calls(runs: bool) -> int:
        engine = an_engine(outputs="ends", block_tokens=512)
        engine._runs = runs
        engine.submit(a_block_request([1], 700, output=400, max_tokens=400), 0.0)
        times = 0
        while engine.next_due_s() is not None:
            engine.run_due()
            times += 1
        return times

    assert (calls(runs=False), calls(runs=True)) == (401, 4)  # start, prefill, to the full block, to the end


def test_one_told_in_the_middle_of_a_run_joins_at_the_next_step() -> None:
    """With 10 ms steps, the newcomer's prefill starts at most one of them after it came."""
    engine = an_engine(outputs="ends", block_tokens=512)
    engine.submit(a_block_request([], 100, output=300, max_tokens=300, request_id="long"), 0.0)
    engine.advance(1.0)
    engine.submit(a_block_request([], 100, request_id="new"), 1.0)
    outputs = run_out(engine)
    alone = an_engine(outputs="ends", block_tokens=512)
    alone.submit(a_block_request([], 100, request_id="new"), 0.0)
    alone_s = run_out(alone)[0].at_s
    first_s = next(each.at_s for each in outputs if each.request_id == "new")
    assert 1.0 + alone_s < first_s < 1.0 + alone_s + 0.015


def test_a_first_token_that_needs_one_computed_token_is_not_lost_in_a_run() -> None:
    """All but one token cached makes its first step look like a decode."""
    engine = an_engine(outputs="ends", block_tokens=64)
    for at_s in (0.0, 50.0):
        engine.submit(a_block_request([1, 2, 3], 193, output=30, max_tokens=30), at_s)
        outputs = run_out(engine)
        assert [each.index for each in outputs] == [0, 29]
    assert outputs[0].cached_tokens == 192


def test_catching_up_counts_the_steps_that_have_ended() -> None:
    def made(engine: Engine) -> tuple[Any, ...]:
        engine.submit(a_block_request([], 100, output=300, max_tokens=300), 0.0)
        engine.advance(1.0)
        return astuple(engine.counters)

    in_runs, in_steps = made(an_engine(outputs="ends", block_tokens=512)), made(an_engine(block_tokens=512))
    assert in_runs == in_steps


def test_with_jitter_the_mean_completion_is_that_without() -> None:
    """400 decodes of about 11 ms with 5 % jitter: standard error of one completion 0.25 %, of the mean of 40 0.04 %."""

    def mean_end_s(jitter: float) -> float:
        ends = []
        for seed in range(40):
            engine = an_engine(outputs="ends", block_tokens=512, jitter=jitter, seed=seed)
            engine.submit(a_block_request([], 100, output=400, max_tokens=400), 0.0)
            ends.append(run_out(engine)[-1].at_s)
        return sum(ends) / len(ends)

    assert mean_end_s(0.05) == pytest.approx(mean_end_s(0.0), rel=0.0016)
