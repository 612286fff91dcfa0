from __future__ import annotations

import math

import pytest

from loadtest.replay import bench_directory
from loadtest.replay.bench_directory import (
    LIMITS,
    PROMPT,
    Fleet,
    chain_times,
    event_rates,
    failures,
    match_times,
    p99_ms,
)
from router.blocks import ledger
from router.identity import chain


@pytest.fixture(params=[0, 1 << 60], ids=["tables", "dictionaries"])
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(ledger, "_FEW", request.param)
    monkeypatch.setattr(bench_directory, "TIMES", 2)
    return Fleet(4 * PROMPT)


def test_the_fleet_holds_the_prompts_that_are_asked_for(fleet: Fleet) -> None:
    for tokens in [*fleet.prompts, *fleet.long, *fleet.lone]:
        hashes = chain(fleet.root, tokens, 16)
        assert fleet.directory.match(hashes).hbm_blocks.max() == len(hashes)


def test_what_the_messages_store_they_remove_again(fleet: Fleet) -> None:
    before = fleet.directory.stats()
    stores, removals = fleet.frames(8, 20)
    fleet.take(stores)
    assert fleet.directory.stats().engine_hashes == before.engine_hashes + 160
    fleet.take(removals)
    after = fleet.directory.stats()
    assert (after.engine_hashes, after.totals.unheld) == (before.engine_hashes, 0)


def test_every_number_with_a_limit_is_measured(fleet: Fleet) -> None:
    numbers = {"bytes a block": fleet.bytes_a_block, **match_times(fleet), **chain_times(fleet)}
    numbers |= {**event_rates(fleet, 8), **event_rates(fleet, 64)}
    late_ms = p99_ms(fleet, blocks_per_s=2000.0, decisions_per_s=50.0, seconds=0.2)
    numbers |= {"p99 later by, ms": late_ms, "memory after churn, ratio": 1.0}
    assert numbers.keys() >= LIMITS.keys()
    assert all(math.isfinite(number) for number in numbers.values())


def test_what_misses_its_limit_is_named_in_either_direction() -> None:
    just = dict(LIMITS)
    assert failures(just) == []
    assert failures(just, {"bytes a block": 131.0}) == []
    assert failures(just, {"bytes a block": 129.0}) == ["bytes a block: 130, more than 129"]
    wrong = failures(just | {"match 512, us": 41.0, "store 8, blocks/s": 399_000.0})
    assert wrong == ["store 8, blocks/s: 3.99e+05, less than 400,000", "match 512, us: 41, more than 40"]
