"""Nothing is lost and nothing made up: requests, tokens, blocks and bytes under random load."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from sim_backends.engine import Engine
from sim_backends.links import Done, FairLink, Transfer
from sim_backends.requests import Output, Phase
from sim_backends.world import World
from tests.sim_backends.builders import a_block_request, a_world, run_out

BLOCK_TOKENS = 64
BLOCK_BYTES = BLOCK_TOKENS * 144 * 1024
TINY = {"memory_share": 0.2114, "token_budget": 512}  # about 12 000 tokens of memory


def a_shared_world(discipline: str = "overlapped", **engine: Any) -> World:
    fetch = {"by": "engine", "discipline": discipline, "minimum_tokens": 128}
    return a_world("A100", "H20", fetch=fetch, block_tokens=BLOCK_TOKENS, engine=engine)


class Metered:
    """Counts the bytes that start on a link and those that come out."""

    def __init__(self, link: FairLink, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started_bytes = self.ended_bytes = self.cancelled_bytes = 0.0
        self._start, self._cancel = link.start, link.cancel
        monkeypatch.setattr(link, "start", self.start)
        monkeypatch.setattr(link, "cancel", self.cancel)

    def start(self, size_bytes: float, now_s: float, done: Done, *, look_up: bool = True) -> Transfer:
        def ended(at_s: float) -> None:
            self.ended_bytes += size_bytes
            done(at_s)

        self.started_bytes += size_bytes
        return self._start(size_bytes, now_s, ended, look_up=look_up)

    def cancel(self, transfer: Transfer, now_s: float) -> None:
        self.cancelled_bytes += transfer.size_bytes * (not transfer.over)
        self._cancel(transfer, now_s)


class Load:
    """Random requests with shared beginnings, and clients that leave; looks at the world after each."""

    def __init__(self, world: World, seed: int, *, aborts: float) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.aborts = aborts
        self.wanted: dict[str, int] = {}
        self.prompt_tokens: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.outputs: list[Output] = []

    def play(self, requests: int, *, per_s: float) -> None:
        rng, now_s = self.rng, 0.0
        for number in range(requests):
            now_s += rng.expovariate(per_s)
            self.outputs += self.world.advance(now_s)
            self._ask(str(number), now_s)
            if rng.random() < self.aborts:
                victim = rng.choice(list(self.wanted)[-6:])
                if self.world.abort(self.rows[victim], victim, now_s):
                    self.aborted.add(victim)
            for engine in self.world.engines:
                check_blocks(engine)
        self.outputs += run_out(self.world)

    def _ask(self, name: str, now_s: float) -> None:
        rng = self.rng
        tokens, output, shared = rng.randrange(1, 3000), rng.choice([1, 5, 300, 800]), rng.randrange(4)
        common = rng.randrange(40)
        ids = [shared * 100 + i if i < common else 10_000 + 100 * int(name) + i for i in range(tokens // BLOCK_TOKENS)]
        request = a_block_request(ids, tokens, output=output, max_tokens=800, request_id=name)
        self.rows[name] = row = rng.randrange(2)
        self.world.submit(row, request, now_s)
        self.wanted[name], self.prompt_tokens[name] = output, tokens


def check_blocks(engine: Engine) -> None:
    """Each block is free or held by exactly the live requests that list it."""
    cache = engine.cache
    held = Counter(block for live in engine._live.values() for block in live.blocks)
    assert [held[block] for block in range(cache.size)] == cache._holders
    assert set(cache._free) == {block for block in range(cache.size) if not held[block]}
    for live in engine._live.values():
        assert live.computed <= len(live.blocks) * BLOCK_TOKENS
        assert live.registered * BLOCK_TOKENS <= live.computed or live.phase is Phase.FETCHING


@pytest.mark.parametrize("discipline", ["overlapped", "serial", "layerwise"])
@pytest.mark.parametrize("seed", [1, 2])
def test_requests_tokens_and_blocks_are_all_accounted_for(seed: int, discipline: str) -> None:
    world = a_shared_world(discipline, **TINY)
    load = Load(world, seed, aborts=0.1)
    load.play(120, per_s=8.0)
    counters = [engine.counters for engine in world.engines]
    made = Counter(output.request_id for output in load.outputs)
    finished = {output.request_id for output in load.outputs if output.finish_reason}
    started = {output.request_id for output in load.outputs if output.index == 0}

    assert sum(each.preemptions for each in counters) > 0
    assert load.aborted
    assert finished | load.aborted == set(load.wanted)
    assert not finished & load.aborted
    assert sum(sum(each.finished.values()) for each in counters) == len(load.wanted)
    assert all(made[name] == load.wanted[name] for name in finished)
    assert all(made[name] < load.wanted[name] for name in load.aborted)
    assert sum(each.generation for each in counters) == len(load.outputs)
    assert sum(each.prompt for each in counters) == sum(load.prompt_tokens[name] for name in started)
    assert [engine.cache.free_blocks for engine in world.engines] == [engine.cache.size for engine in world.engines]
    assert [(engine.running, engine.waiting) for engine in world.engines] == [(0, 0), (0, 0)]


def test_each_prompt_token_is_computed_or_cached_exactly_once_when_nothing_is_thrown_out() -> None:
    world = a_shared_world()
    load = Load(world, seed=5, aborts=0.0)
    load.play(120, per_s=2.0)
    counters = [engine.counters for engine in world.engines]
    assert sum(each.preemptions for each in counters) == 0
    known = sum(each.computed + each.prefix_hits + each.external_hits for each in counters)
    assert known == sum(load.prompt_tokens.values())
    cached = {output.request_id: output.cached_tokens for output in load.outputs if output.index == 0}
    assert sum(cached.values()) == sum(each.prefix_hits + each.external_hits for each in counters)


@pytest.mark.parametrize("discipline", ["overlapped", "serial", "layerwise"])
def test_all_bytes_of_all_fetches_pass_the_store_link_and_then_pcie(
    discipline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = a_shared_world(discipline)
    network, *hosts = [Metered(link, monkeypatch) for link in world.links]
    Load(world, seed=5, aborts=0.0).play(120, per_s=2.0)
    fetched = [engine.counters.external_hits // BLOCK_TOKENS * BLOCK_BYTES for engine in world.engines]
    assert min(fetched) > 0
    assert network.ended_bytes == pytest.approx(sum(fetched))
    assert [host.ended_bytes for host in hosts] == pytest.approx(fetched)


@pytest.mark.parametrize("discipline", ["overlapped", "serial", "layerwise"])
def test_bytes_that_start_on_a_link_come_out_or_are_cancelled(discipline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store, so that many leave while their blocks are on the way."""
    slow = {"store": {"gb_s": 0.2, "start_ms": 10}, "pcie": {"gb_s": 5, "start_ms": 0}}
    fetch = {"by": "engine", "discipline": discipline, "minimum_tokens": 128}
    world = a_world("A100", "H20", fetch=fetch, block_tokens=BLOCK_TOKENS, engine=TINY, links=slow)
    network, *hosts = [Metered(link, monkeypatch) for link in world.links]
    Load(world, seed=1, aborts=0.5).play(150, per_s=8.0)
    assert network.cancelled_bytes > 0
    for meter in (network, *hosts):
        assert meter.started_bytes == pytest.approx(meter.ended_bytes + meter.cancelled_bytes)
    assert sum(host.started_bytes for host in hosts) == pytest.approx(network.ended_bytes)
    assert [link.active_transfers for link in world.links] == [0, 0, 0]
