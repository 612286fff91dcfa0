"""Life of replicas, several models and ranks, and conservation with everything on."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from sim_backends.directives import Directive, Path
from sim_backends.engine import Outputs
from sim_backends.lifecycle import NotServing, State
from sim_backends.requests import Output
from sim_backends.world import World
from tests.sim_backends.builders import a_fleet, a_request, a_world, first_tokens, prompt, run_out

LONG = 8000
BLOCK_BYTES = 16 * 147_456
LINKS = {
    "store": {"gb_s": 25, "start_ms": 10},
    "pcie": {"gb_s": 25, "start_ms": 0},
    "ssd": {"gb_s": 5, "start_ms": 1},
    "nic": {"gb_s": 12.5, "start_ms": 2},
}
TINY = {
    "name": "tiny",
    "layers": 4,
    "hidden": 1024,
    "intermediate": 4096,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 128,
    "vocab": 151936,
}


def replicas(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": f"r{number}", "card": "A100", **row} for number, row in enumerate(rows)]


# Start-up, drain, crash.


def test_a_replica_answers_only_after_its_start_up_time() -> None:
    world = a_world(replicas=replicas({"start_s": 30}, {}))
    with pytest.raises(NotServing, match="r0 is starting"):
        world.submit(0, a_request(), 29.9)
    world.submit(1, a_request(), 29.9)
    world.advance(30.0)
    world.submit(0, a_request(request_id="x"), 30.0)
    assert first_tokens(run_out(world))["x"] > 30.0


def test_faster_hardware_starts_sooner() -> None:
    """A fixed time is divided by the speed: 30 s at speed 10 are 3."""
    world = a_world(replicas=replicas({"start_s": 30}), speed=10)
    world.advance(3.0)
    world.submit(0, a_request(), 3.0)


def test_a_draining_replica_takes_nothing_new_and_finishes_what_it_has() -> None:
    world = a_world("A100", use_store=False)
    world.submit(0, a_request(output=40, max_tokens=40, request_id="a"), 0.0)
    world.drain(0, 0.1)
    assert not world.engines[0].drained
    with pytest.raises(NotServing, match="draining"):
        world.submit(0, a_request(), 0.1)
    outputs = run_out(world)
    assert (len(outputs), outputs[-1].finish_reason, world.engines[0].drained) == (40, "length", True)
    world.resume(0, 50.0)
    world.submit(0, a_request(), 50.0)
    assert len(run_out(world)) == 4


def busy(world: World) -> None:
    """On replica 0 at 100.02: `run` decodes, `fetch` fetches, `wait` waits; replica 1 has the long prompt."""
    world.submit(1, a_request(prompt(LONG), output=1), 0.0)
    world.submit(0, a_request(prompt(64, start=90_000), output=900, max_tokens=900, request_id="run"), 99.0)
    world.advance(100.0)
    world.submit(0, a_request(prompt(LONG), request_id="fetch"), 100.0)
    world.submit(0, a_request(prompt(30_000, start=50_000), request_id="pre"), 100.0)
    world.submit(0, a_request(prompt(64, start=40_000), request_id="wait"), 100.0)
    world.advance(100.02)


def test_a_crash_ends_every_request_at_once_with_an_error() -> None:
    world = a_world("A100", "A100")
    busy(world)
    world.crash(0, 100.02)
    assert world.next_due_s() == 100.02
    outputs = world.advance(100.02)
    assert {(output.request_id, output.at_s, output.index, output.finish_reason) for output in outputs} == {
        (name, 100.02, -1, "error") for name in ("run", "fetch", "pre", "wait")
    }
    assert run_out(world) == []
    assert [link.active_transfers for link in world.links] == [0, 0, 0]


def test_a_crashed_replica_has_lost_everything_and_comes_back_by_its_time() -> None:
    tiers = {"host": {"capacity_gib": 10, "link": "pcie"}}
    world = a_world("A100", use_store=False, links=LINKS, engine={"memory_share": 0.2114}, tiers=tiers)
    engine = world.engines[0]
    for at_s, start in ((0.0, 1000), (10.0, 50_000)):
        world.submit(0, a_request(prompt(LONG, start=start), output=1), at_s)
        run_out(world)
    assert engine.fetcher is not None
    assert len(engine.fetcher.tiers.tiers["host"]) == 247
    world.crash(0, 20.0, back_after_s=15.0)
    assert len(engine.fetcher.tiers.tiers["host"]) == 0
    with pytest.raises(NotServing, match="down"):
        world.submit(0, a_request(), 34.9)
    world.advance(35.0)
    assert (engine.counters.prompt, engine.cache.free_blocks, engine.lifecycle.starts) == (0, engine.cache.size, 2)
    world.submit(0, a_request(prompt(LONG)), 35.0)
    assert run_out(world)[0].cached_tokens == 0


def test_what_a_crashed_replica_wrote_to_the_store_is_found_there() -> None:
    world = a_world("A100")
    world.submit(0, a_request(prompt(LONG), output=1), 0.0)
    run_out(world)
    world.crash(0, 10.0, back_after_s=1.0)
    world.advance(11.0)
    world.submit(0, a_request(prompt(LONG)), 11.0)
    assert run_out(world)[0].cached_tokens == 499 * 16


def test_a_crash_says_nothing_about_the_blocks_that_are_gone() -> None:
    world = a_world("A100", record_events=True)
    world.submit(0, a_request(prompt(LONG), output=1), 0.0)
    run_out(world)
    world.engines[0].take_event_batches()
    world.crash(0, 10.0, back_after_s=1.0)
    run_out(world)
    assert world.engines[0].take_event_batches() == []


# Models and ranks.


def test_each_replica_runs_the_model_it_names() -> None:
    world = a_world(replicas=replicas({}, {"model": "small"}), models={"small": TINY})
    for row in (0, 1):
        world.submit(row, a_request(prompt(LONG), request_id=str(row)), 0.0)
    firsts = first_tokens(run_out(world))
    assert firsts["1"] < firsts["0"] / 10
    assert world.engines[1].cache.size > 10 * world.engines[0].cache.size


def test_models_share_no_state_in_the_store() -> None:
    rows = replicas({}, {"model": "small"}, {"model": "small"})
    world = a_world(replicas=rows, models={"small": TINY})
    for row, at_s, cached in ((0, 0.0, 0), (1, 100.0, 0), (2, 200.0, 499 * 16)):
        world.submit(row, a_request(prompt(LONG), output=1), at_s)
        assert run_out(world)[0].cached_tokens == cached
    fleet = a_fleet(replicas=rows, models={"small": TINY})
    assert world.store is world.stores[fleet.model.name]
    assert [len(store) for store in world.stores.values()] == [500, 500]


def test_a_replica_of_several_ranks_is_several_engines() -> None:
    world = a_world(replicas=replicas({"ranks": 2}, {}))
    assert [list(rows) for rows in world.rows] == [[0, 1], [2]]
    assert [engine.settings.name for engine in world.engines] == ["r0/0", "r0/1", "r1"]
    world.submit(0, a_request(prompt(LONG), output=1), 0.0)
    run_out(world)
    world.submit(1, a_request(prompt(LONG), output=1), 100.0)
    run_out(world)
    assert [engine.counters.external_hits for engine in world.engines] == [0, 499 * 16, 0]


def test_a_world_names_the_store_link_and_each_ranks_own_host_link() -> None:
    """Where tiers and peers add links of their own too."""
    tiers = {"host": {"capacity_gib": 1, "link": "pcie"}, "disk": {"capacity_gib": 1, "link": "ssd"}}
    links = {**LINKS, "pcie": {"gb_s": 17, "start_ms": 0}}
    world = a_world(replicas=replicas({"ranks": 2}, {}), links=links, tiers=tiers, peers={"link": "nic"})
    assert world.network is not None
    assert (world.network.rate_bytes_per_s, world.network.start_s) == (25e9, 0.010)
    assert [link.rate_bytes_per_s for link in world.hosts if link is not None] == [17e9] * 3
    assert len({id(link) for link in world.hosts}) == 3
    assert len(world.links) == 1 + 3 * 3


def test_without_anything_beyond_hbm_there_are_no_links() -> None:
    world = a_world("A100", "A100", use_store=False)
    assert (world.network, world.hosts, world.links) == (None, [None, None], [])


# Conservation.

EVERYTHING: dict[str, Any] = {
    "links": LINKS,
    "tiers": {
        "host": {"capacity_gib": 150 * BLOCK_BYTES / 2**30, "link": "pcie"},
        "disk": {"capacity_gib": 900 * BLOCK_BYTES / 2**30, "link": "ssd"},
    },
    "peers": {"link": "nic"},
    "models": {"small": TINY},
    "engine": {"memory_share": 0.199, "token_budget": 512, "max_running": 6, "jitter": 0.03},  # about 300 blocks
    "replicas": replicas(
        {"ranks": 2}, {"role": "prefill"}, {"role": "decode"}, {"start_s": 3.0}, {"model": "small"}, {"model": "small"}
    ),
}


PREFILL, DECODE = 2, 3  # rows


class Storm:
    """Random arrivals, directives, hand-offs, aborts, drains and crashes on every kind of replica."""

    def __init__(self, seed: int, discipline: str, by: str, *, outputs: Outputs = "all") -> None:
        fetch = {"by": by, "discipline": discipline, "minimum_tokens": 64, "limit_ms": 30, "prefetch_gib": 0.4}
        self.world = a_world(fetch=fetch, record_events=True, outputs=outputs, **EVERYTHING)
        self.rng = random.Random(seed)
        self.sent: dict[str, int] = {}
        self.prefills: list[tuple[str, list[int]]] = []
        self.refused = 0
        self.aborted: set[str] = set()
        self.outputs: list[Output] = []

    def run(self, requests: int) -> None:
        now_s = 0.0
        for number in range(requests):
            now_s += self.rng.expovariate(40.0)
            self.outputs += self.world.advance(now_s)
            self.submit(str(number), now_s)
            if number % 8 == 7:
                self.disturb(now_s)
        self.outputs += run_out(self.world)

    def submit(self, name: str, now_s: float) -> None:
        rng = self.rng
        tokens = prompt(rng.randrange(1, 3500), start=10_000 * rng.randrange(1, 4))
        output = rng.randrange(1, 100)
        row = rng.randrange(len(self.world.engines))
        directive = self.directive()
        if self.prefills and rng.random() < 0.15:  # take a prefill over, if it is still kept
            prefill, tokens = self.prefills.pop()
            row, directive = DECODE, Directive(Path.HAND_OFF, source="r1", request_id=prefill)
        request = a_request(tokens, output=output, max_tokens=120, request_id=name, directive=directive)
        try:
            self.world.submit(row, request, now_s)
        except NotServing:
            self.refused += 1
        else:
            self.sent[name] = 1 if row == PREFILL else output
            if row == PREFILL:
                self.prefills.append((name, tokens))

    def directive(self) -> Directive | None:
        path = self.rng.choice([None, *Path])
        if path is None:
            return None
        source = self.rng.choice([engine.settings.name for engine in self.world.engines])
        prefill = self.rng.choice(list(self.sent) or ["none"])
        return Directive(path, source=source, request_id=prefill)

    def disturb(self, now_s: float) -> None:
        rng, world = self.rng, self.world
        row = rng.randrange(len(world.engines))
        event = rng.choice(["abort", "abort", "drain", "resume", "crash"])
        if event == "crash":
            world.crash(row, now_s, back_after_s=rng.uniform(0.1, 1.0))
        elif event == "drain":
            world.drain(row, now_s)
        elif event == "resume":
            for each in range(len(world.engines)):
                world.resume(each, now_s)
        else:
            name = rng.choice(list(self.sent) or ["none"])
            if any(world.abort(each, name, now_s) for each in range(len(world.engines))):
                self.aborted.add(name)


@pytest.mark.parametrize("by", ["engine", "directed"])
@pytest.mark.parametrize(
    "discipline",
    ["overlapped", "serial", "blocking", "layerwise", "layerwise_in_turn", "best_effort", "time_limited", "two_ends"],
)
def test_nothing_is_lost_with_everything_on(discipline: str, by: str) -> None:
    storm = Storm(seed=len(discipline), discipline=discipline, by=by)
    storm.run(240)
    world = storm.world
    ends = Counter(output.request_id for output in storm.outputs if output.finish_reason)
    lost = {output.request_id for output in storm.outputs if output.finish_reason == "error"}
    made = Counter(output.request_id for output in storm.outputs if output.index >= 0)
    assert set(ends) | storm.aborted == set(storm.sent)
    assert not set(ends) & storm.aborted
    assert set(ends.values()) == {1}
    assert all(made[name] == storm.sent[name] for name in ends if name not in lost)
    assert lost
    assert storm.refused
    assert len(storm.sent) + storm.refused == 240
    assert [link.active_transfers for link in world.links] == [0] * len(world.links)
    for engine in world.engines:
        assert (engine.cache.free_blocks, engine.running, engine.waiting) == (engine.cache.size, 0, 0)
        assert len(engine.kept) == 0
        assert engine.peer is not None
        assert not engine.peer.readers
        assert engine.fetcher is not None
        assert engine.fetcher.space.used_bytes == 0
        assert engine.lifecycle.state in (State.READY, State.DRAINING)
        assert all(len(tier) <= tier.capacity_blocks for tier in engine.peer.tiers.tiers.values())
    assert [output.at_s for output in storm.outputs] == sorted(output.at_s for output in storm.outputs)


def test_the_storm_has_everything_in_it() -> None:
    """Otherwise the test above would say nothing about what never happened."""
    fetched: Counter[str] = Counter()
    preemptions = no_space = wasted_tokens = expired = 0
    for discipline in ("serial", "best_effort", "two_ends"):
        storm = Storm(seed=len(discipline), discipline=discipline, by="directed")
        storm.run(240)
        for engine in storm.world.engines:
            assert engine.fetcher is not None
            fetched += engine.fetcher.fetched_tokens
            wasted_tokens += engine.fetcher.wasted_tokens
            no_space += engine.fetcher.space.refused
            preemptions += engine.counters.preemptions
            expired += engine.kept.expired
    assert set(fetched) == {"host", "disk", "store", "peer", "hand_off"}
    assert min(preemptions, no_space, wasted_tokens, expired) > 0


@pytest.mark.parametrize("discipline", ["overlapped", "two_ends", "time_limited"])
def test_the_same_seed_gives_the_same_storm(discipline: str) -> None:
    def outputs() -> list[Output]:
        storm = Storm(seed=3, discipline=discipline, by="engine")
        storm.run(60)
        return storm.outputs

    assert outputs() == outputs()


@pytest.mark.parametrize("discipline", ["serial", "blocking", "layerwise", "best_effort", "time_limited", "two_ends"])
def test_many_steps_at_once_give_the_same_storm_as_one_by_one(discipline: str) -> None:
    def seen(*, runs: bool) -> tuple[Any, ...]:
        storm = Storm(seed=5, discipline=discipline, by="directed", outputs="ends")
        for engine in storm.world.engines:
            engine._runs = runs
        storm.run(120)
        engines = storm.world.engines
        return (
            storm.outputs,
            [engine.take_event_batches() for engine in engines],
            [engine.counters for engine in engines],
            [(engine.cache._block_of, list(engine.cache._free)) for engine in engines],
        )

    assert seen(runs=True) == seen(runs=False)
