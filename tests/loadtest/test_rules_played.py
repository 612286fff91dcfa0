"""Every rule plays a piece of the demo's traffic through the dispatcher, and does there what it is known for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from loadtest.replay.fleets import of_file
from loadtest.replay.results import Result
from loadtest.replay.run import Conditions, Replay
from loadtest.traffic import read_traffic
from router.config import PolicyConfig
from tests.policies.test_policies import PUBLISHED

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"
REQUESTS = 100


@cache
def played(rule: str, *, directed: bool = False) -> Result:
    conditions = Conditions(policy=PolicyConfig(name=rule), directed=directed)
    return Replay(of_file(DEMO / "fleet.yaml"), conditions).run(read_traffic(DEMO / "traffic.jsonl.gz")[:REQUESTS])


@pytest.mark.parametrize("rule", sorted(PUBLISHED))
def test_every_rule_answers_every_request_and_all_but_one_use_every_replica(rule: str) -> None:
    result = played(rule)
    assert result.answered.all()
    assert len(set(result.row.tolist())) == (1 if rule == "kv_affinity" else 4)


def test_a_seed_makes_a_run() -> None:
    assert played("prequal").row.tolist() == played.__wrapped__("prequal").row.tolist()


def test_following_the_cache_wherever_it_is_overloads_its_holder() -> None:
    """All prompts share their first block, so whoever gets the first request gets all."""
    assert len(set(played("kv_affinity").row.tolist())) == 1
    assert played("kv_affinity").first_token_s.mean() > 3 * played("least_request").first_token_s.mean()


def test_who_ignores_the_cache_reuses_less_of_it_and_answers_later() -> None:
    for rule in ("lmetric", "dynamo"):
        assert played(rule).local_tokens.sum() > played("least_request").local_tokens.sum()
        assert played(rule).first_token_s.mean() < played("least_request").first_token_s.mean()


def test_where_engines_are_told_some_rules_fetch_and_one_never_does() -> None:
    fetched = {
        rule: played(rule, directed=True).fetched_bytes for rule in ("conductor", "fetch_threshold", "greedy_ttft")
    }
    assert fetched["greedy_ttft"] == 0
    assert fetched["conductor"] > 0
    assert fetched["fetch_threshold"] > 0
