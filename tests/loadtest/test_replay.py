"""The router's own dispatcher against the simulated engines in virtual time, on a piece of the demo's traffic."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from estimators.paths import main_source
from loadtest.replay.run import Replay, Replayed
from loadtest.traffic import TrafficRow, read_traffic
from router.config import PolicyConfig

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"
REQUESTS = 200


@cache
def replayed(policy: str) -> Replayed:
    rows = read_traffic(DEMO / "traffic.jsonl.gz")[:REQUESTS]
    return Replay(DEMO / "fleet.yaml", PolicyConfig(name=policy)).run(rows)


def mean_first_token_s(policy: str) -> float:
    return float(np.mean([receipt.first_token_s for receipt in replayed(policy).receipts]))


@pytest.mark.parametrize("policy", ["round_robin", "ttft", "e2e"])
def test_every_request_ends_once_and_well(policy: str) -> None:
    result = replayed(policy)
    assert len({receipt.request_id for receipt in result.receipts}) == len(result.receipts) == REQUESTS
    assert result.failed == []


@pytest.mark.parametrize("policy", ["round_robin", "ttft", "e2e"])
def test_first_tokens_are_predicted_within_a_quarter_on_every_path(policy: str) -> None:
    errors: dict[str, list[float]] = {}
    for receipt in replayed(policy).receipts:
        choice = receipt.choice
        assert choice is not None
        assert receipt.first_token_s is not None
        source = main_source(
            local_tokens=choice.local_tokens,
            remote_tokens=choice.fetched_tokens,
            prompt_tokens=receipt.prompt_tokens,
        )
        errors.setdefault(source.value, []).append(
            abs(choice.first_token_s - receipt.first_token_s) / receipt.first_token_s
        )
    assert set(errors) == {"local", "remote", "recompute"}
    assert {
        path: round(float(np.median(values)), 3) for path, values in errors.items() if np.median(values) > 0.25
    } == {}


@pytest.mark.parametrize("policy", ["round_robin", "ttft", "e2e"])
def test_the_directory_believes_what_the_engines_reuse(policy: str) -> None:
    receipts = replayed(policy).receipts
    believed = sum(r.choice.local_tokens + r.choice.fetched_tokens for r in receipts if r.choice is not None)
    reused = sum(r.cached_tokens or 0 for r in receipts)
    assert believed == pytest.approx(reused, rel=0.1)


def test_estimating_beats_taking_turns() -> None:
    assert mean_first_token_s("ttft") < mean_first_token_s("round_robin") / 2
    assert mean_first_token_s("e2e") < mean_first_token_s("round_robin") / 2


def test_the_same_seed_gives_the_same_run() -> None:
    rows = read_traffic(DEMO / "traffic.jsonl.gz")[:60]
    first, second = (Replay(DEMO / "fleet.yaml", PolicyConfig(), seed=4).run(rows) for _ in range(2))
    assert [r.first_token_s for r in first.receipts] == [r.first_token_s for r in second.receipts]


@pytest.mark.parametrize("policy", ["round_robin", "e2e"])
def test_short_prompts_that_share_engine_steps_are_predicted_too(policy: str) -> None:
    """200-token chats at a rate at which several prefills share a step: no step may be charged to one alone."""
    chance = random.Random(3)
    rows = []
    at_s = 0.0
    for index in range(1500):
        at_s += chance.expovariate(120.0)
        length = chance.randrange(100, 300)
        rows.append(TrafficRow(at_s, length, chance.randrange(5, 40), [10_000 + index]))
    result = Replay(DEMO / "fleet.yaml", PolicyConfig(name=policy)).run(rows)
    errors = [
        (r.choice.first_token_s - r.first_token_s) / r.first_token_s
        for r in result.receipts[300:]
        if r.choice is not None and r.first_token_s is not None
    ]
    assert abs(float(np.median(errors))) < 0.25
    assert float(np.median(np.abs(errors))) < 0.35
