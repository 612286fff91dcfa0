"""The router's own dispatcher against the simulated engines in virtual time, on a piece of the demo's traffic."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from estimators.paths import COLUMN, main_source
from estimators.paths import Path as PathKind
from estimators.tiers import Tier
from loadtest.replay.fleets import Fleets, of_file, of_text, with_blocks
from loadtest.replay.results import Result
from loadtest.replay.run import Conditions, Replay, known
from loadtest.traffic import TrafficRow, read_traffic
from router.config import PolicyConfig
from router.receipts import Candidate, Receipt

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"
REQUESTS = 200


def demo_fleet() -> Fleets:
    return of_file(DEMO / "fleet.yaml")


def demo_rows(requests: int = REQUESTS) -> list[TrafficRow]:
    return read_traffic(DEMO / "traffic.jsonl.gz")[:requests]


def played(conditions: Conditions, requests: int = REQUESTS) -> tuple[Result, list[Receipt]]:
    receipts: list[Receipt] = []
    result = Replay(demo_fleet(), conditions, on_receipt=receipts.append).run(demo_rows(requests))
    return result, receipts


def played_rows(rows: list[TrafficRow]) -> tuple[Result, list[Receipt]]:
    receipts: list[Receipt] = []
    return Replay(demo_fleet(), Conditions(), on_receipt=receipts.append).run(rows), receipts


@cache
def replayed(policy: str) -> tuple[Result, list[Receipt]]:
    return played(Conditions(policy=PolicyConfig(name=policy)))


def mean_first_token_s(policy: str) -> float:
    return float(replayed(policy)[0].first_token_s.mean())


@pytest.mark.parametrize("policy", ["round_robin", "ttft", "e2e"])
def test_every_request_ends_once_and_well(policy: str) -> None:
    result, receipts = replayed(policy)
    assert len({receipt.request_id for receipt in receipts}) == len(receipts) == REQUESTS
    assert result.answered.all()
    assert {receipt.outcome for receipt in receipts} == {"ok"}


@pytest.mark.parametrize("policy", ["round_robin", "ttft", "e2e"])
def test_columns_say_what_the_receipts_say(policy: str) -> None:
    result, receipts = replayed(policy)
    for receipt in receipts:
        index = int(receipt.request_id.removeprefix("replay-"))
        choice = receipt.choice
        assert choice is not None
        assert result.first_token_s[index] == receipt.first_token_s
        assert result.ended_s[index] == receipt.ended_s
        assert result.predicted_s[index] == choice.expected_s
        assert result.replicas[result.row[index]] == choice.replica
        assert result.cached_tokens[index] == receipt.cached_tokens


@pytest.mark.parametrize("policy", ["round_robin", "ttft", "e2e"])
def test_first_tokens_are_predicted_within_a_quarter_on_every_path(policy: str) -> None:
    errors: dict[str, list[float]] = {}
    for receipt in replayed(policy)[1]:
        choice = receipt.choice
        assert choice is not None
        assert receipt.first_token_s is not None
        source = main_source(
            local_tokens=choice.local_tokens,
            remote_tokens=choice.fetched_tokens,
            prompt_tokens=receipt.prompt_tokens,
        )
        errors.setdefault(source.value, []).append(
            abs(choice.expected_s - receipt.first_token_s) / receipt.first_token_s
        )
    assert set(errors) == {"local", "remote", "recompute"}
    assert {
        path: round(float(np.median(values)), 3) for path, values in errors.items() if np.median(values) > 0.25
    } == {}


@pytest.mark.parametrize("policy", ["round_robin", "ttft", "e2e"])
def test_the_directory_believes_what_the_engines_reuse(policy: str) -> None:
    result = replayed(policy)[0]
    believed = result.local_tokens.sum() + result.fetched_tokens.sum()
    assert believed == pytest.approx(result.cached_tokens.sum(), rel=0.1)


def test_nothing_is_expected_of_requests_that_have_ended() -> None:
    run = Replay(demo_fleet(), Conditions())
    run.run(demo_rows())
    assert run.core.directory.stats().expected == 0
    assert run.core.dispatcher.in_flight == 0


def test_a_run_that_keeps_no_receipts_gives_the_same_numbers() -> None:
    kept, bare = played(Conditions(), 120)[0], Replay(demo_fleet(), Conditions()).run(demo_rows(120))
    for name in ("row", "predicted_s", "predicted_p99_s", "local_tokens", "fetched_tokens", "first_token_s", "ended_s"):
        assert getattr(kept, name).tolist() == getattr(bare, name).tolist()


def test_turns_that_come_while_the_one_before_waits_stay_where_it_waits() -> None:
    """Five turns of one conversation in less than a prefill, between prompts nobody shares."""
    rows = []
    for turn in range(5):
        at_s, blocks = 0.05 * turn, 20 + 2 * turn
        rows.append(TrafficRow(at_s, blocks * 512 + 40, 5, [*range(1, blocks + 1), 9000 + turn]))
        rows.append(TrafficRow(at_s + 0.01, 4 * 512 + 40, 5, [*range(500 + 10 * turn, 504 + 10 * turn), 9100 + turn]))
    result, receipts = played_rows(rows)
    turns = [index for index in range(10) if index % 2 == 0]
    assert len({int(result.row[index]) for index in turns}) == 1
    assert [int(result.local_tokens[index]) for index in turns] == [0, *(512 * (20 + 2 * turn) for turn in range(4))]
    missed = result.local_tokens[turns] - result.cached_tokens[turns]
    assert set(missed.tolist()) <= {0, 2 * 512}, "prompts in one engine step cannot share what that step computes"
    assert len(receipts) == 10


def test_estimating_beats_taking_turns() -> None:
    assert mean_first_token_s("ttft") < mean_first_token_s("round_robin") / 2
    assert mean_first_token_s("e2e") < mean_first_token_s("round_robin") / 2


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, second, other = (played(Conditions(seed=seed), 60)[0].first_token_s for seed in (4, 4, 5))
    assert first.tolist() == second.tolist()
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize("policy", ["e2e", "least_request"])
def test_block_ids_and_plain_events_give_the_receipts_of_real_tokens_and_real_bytes(policy: str) -> None:
    """Same blocks of 512 tokens on both sides; only how they are named and carried differs."""
    fleets = with_blocks(demo_fleet(), router_tokens=512, engine_tokens=512)
    seen: list[list[Receipt]] = []
    for wire in (False, True):
        receipts: list[Receipt] = []
        Replay(fleets, Conditions(policy=PolicyConfig(name=policy), wire=wire), on_receipt=receipts.append).run(
            demo_rows(120)
        )
        seen.append(receipts)
    plain, encoded = seen
    assert any(r.choice is not None and r.choice.local_tokens for r in plain)
    assert any(r.choice is not None and r.choice.fetched_tokens for r in plain)
    assert numbered(plain) == numbered(encoded)


def numbered(receipts: list[Receipt]) -> list[Receipt]:
    """The same with marks numbered in order of appearance: hashes differ, but not which prompts share them."""
    numbers: dict[str, str] = {}
    return [
        msgspec.structs.replace(receipt, marks=[numbers.setdefault(mark, str(len(numbers))) for mark in receipt.marks])
        for receipt in receipts
    ]


def tiered_fleet() -> Fleets:
    """The demo's fleet with room for some 70,000 tokens beside the weights, and host memory and disk below."""
    text = (DEMO / "fleet.yaml").read_text().replace("memory_gib: 80", "memory_gib: 28")
    tiers = "tiers: {host: {capacity_gib: 6, link: pcie}, disk: {capacity_gib: 10, link: pcie}}"
    return of_text(f"{text}\n{tiers}\n", "test")


def test_copies_on_host_and_disk_reach_the_directory_alike_by_plain_events_and_by_real_bytes() -> None:
    fleets = with_blocks(tiered_fleet(), router_tokens=512, engine_tokens=512)
    receipts: list[list[Receipt]] = []
    runs = []
    for wire in (False, True):
        kept: list[Receipt] = []
        run = Replay(fleets, Conditions(policy=PolicyConfig(name="round_robin"), wire=wire), on_receipt=kept.append)
        run.run(demo_rows(120))
        runs.append(run)
        receipts.append(kept)
    assert numbered(receipts[0]) == numbered(receipts[1])
    believed = [run.core.directory.stats().blocks for run in runs]
    assert believed[0] == believed[1]
    assert believed[0][Tier.DISK] > 0
    fetchers = [engine.fetcher for engine in runs[0].world.engines if engine.fetcher is not None]
    there = {digest for fetcher in fetchers for digest in fetcher.tiers.tiers["host"]._blocks}
    assert believed[0][Tier.HOST] == len(there) > 100


def test_news_that_comes_late_makes_the_router_believe_in_fewer_hits() -> None:
    prompt, late = (played(Conditions(event_delay_s=delay_s))[0] for delay_s in (0.0, 60.0))
    assert late.answered.all()
    assert late.local_tokens.sum() + late.fetched_tokens.sum() < prompt.local_tokens.sum() + prompt.fetched_tokens.sum()


def test_load_reports_reach_the_router_with_their_period() -> None:
    silent = Replay(demo_fleet(), Conditions(load_period_s=None))
    silent.run(demo_rows(40))
    told = Replay(demo_fleet(), Conditions(load_period_s=2.0))
    told.run(demo_rows(40))
    assert np.isnan(silent.core.dispatcher.view.sampled_at_s).all()
    last_arrival_s = demo_rows(40)[-1].at_s
    assert (told.core.dispatcher.view.sampled_at_s == last_arrival_s // 2.0 * 2.0).all()


@pytest.mark.parametrize("period_s", [0.5, 30.0])
def test_reports_that_come_as_seldom_as_they_are_meant_to_are_no_silence(period_s: float) -> None:
    """Silence widens estimates; who expects two reports a second would hear it between two that come every 30 s."""
    run = Replay(demo_fleet(), Conditions(load_period_s=period_s))
    assert run.core.dispatcher.view.fresh_s > period_s


def test_own_requests_in_a_load_report_are_not_taken_for_those_of_others() -> None:
    run = Replay(demo_fleet(), Conditions(load_period_s=0.5))
    run.run(demo_rows(100))
    view = run.core.dispatcher.view
    assert (view.foreign_waiting + view.foreign_decoding).tolist() == [0.0] * 4


def test_a_request_no_engine_can_hold_is_refused_and_the_others_go_on() -> None:
    rows = demo_rows(20)
    blocks = list(range(10**6, 10**6 + 400))
    rows[3] = TrafficRow(at_s=rows[3].at_s, input_length=400 * 512, output_length=5, hash_ids=blocks)
    receipts: list[Receipt] = []
    result = Replay(demo_fleet(), Conditions(), on_receipt=receipts.append).run(rows)
    assert result.answered.tolist() == [index != 3 for index in range(20)]
    assert [r.outcome for r in receipts if r.request_id == "replay-3"] == ["client_error"]


def test_an_answer_is_as_long_as_in_the_trace_until_it_fills_what_a_replica_can_hold() -> None:
    """Prompt and answer together have room for 131,072 tokens, what is usual for this model."""
    rows = [
        TrafficRow(at_s=0.0, input_length=600, output_length=9000, hash_ids=[1, 2]),
        TrafficRow(at_s=0.0, input_length=131_000, output_length=500, hash_ids=list(range(10, 266))),
    ]
    result = Replay(demo_fleet(), Conditions()).run(rows)
    assert result.answered.all()
    assert result.output_tokens.tolist() == [9000, 72]
    assert result.cut.tolist() == [False, True]


def test_a_decision_does_not_depend_on_how_long_its_own_answer_will_be() -> None:
    rows = demo_rows(60)
    decided: list[list[Candidate]] = []
    for output in (1, 20_000):
        receipts: list[Receipt] = []
        last = msgspec.structs.replace(rows[-1], output_length=output)
        Replay(demo_fleet(), Conditions(), on_receipt=receipts.append).run([*rows[:-1], last])
        decided += [receipt.candidates for receipt in receipts if receipt.request_id == "replay-59"]
    assert len(decided[0]) > 1
    for candidate in decided[0] + decided[1]:
        candidate.evidence = None  # told as of the end, so by what came meanwhile
    assert decided[0] == decided[1]


def test_quantiles_in_a_receipt_reach_the_result_and_cover_what_they_claim() -> None:
    result, receipts = played(Conditions(), requests=400)
    choices = [receipt.choice for receipt in receipts]
    assert {choice.first_token_p90_s for choice in choices if choice is not None} == set(result.predicted_p90_s)
    later = slice(100, None)
    assert np.all(result.predicted_p90_s <= result.predicted_p99_s)
    within = result.first_token_s[later] <= result.predicted_p90_s[later]
    assert 0.85 < within.mean() < 0.95  # 300 requests: two standard errors are 0.035
    assert np.isnan(known(None))


def test_fetched_bytes_are_what_the_engines_took_from_the_store() -> None:
    result = replayed("round_robin")[0]
    assert result.fetched_bytes > 0
    assert result.fetched_bytes % (2 * 36 * 8 * 128 * 2) == 0, "whole tokens of this model's KV"


def test_directed_engines_fetch_only_where_the_choice_was_to_fetch() -> None:
    receipts: list[Receipt] = []
    run = Replay(demo_fleet(), Conditions(directed=True), on_receipt=receipts.append)
    result = run.run(demo_rows())
    remote = result.path == COLUMN[PathKind.REMOTE]
    assert result.answered.all()
    assert 0 < remote.sum() < len(remote)
    assert any(len({c.path for c in r.candidates if c.replica == r.candidates[0].replica}) > 1 for r in receipts)
    tokens = sum(engine.counters.external_hits for engine in run.world.engines)
    assert 0 < tokens <= result.cached_tokens[remote].sum()


@pytest.mark.parametrize("policy", ["round_robin", "e2e"])
def test_short_prompts_that_share_engine_steps_are_predicted_too(policy: str) -> None:
    """200-token chats at a rate at which several prefills share a step: no step may be charged to one alone."""
    chance = random.Random(3)
    rows = []
    at_s = 0.0
    for index in range(1500):
        at_s += chance.expovariate(120.0)
        rows.append(TrafficRow(at_s, chance.randrange(100, 300), chance.randrange(5, 40), [10_000 + index]))
    receipts: list[Receipt] = []
    conditions = Conditions(policy=PolicyConfig(name=policy))
    Replay(demo_fleet(), conditions, on_receipt=receipts.append).run(rows)
    errors = [
        (r.choice.expected_s - r.first_token_s) / r.first_token_s
        for r in receipts[300:]
        if r.choice is not None and r.first_token_s is not None
    ]
    assert abs(float(np.median(errors))) < 0.25
    assert float(np.median(np.abs(errors))) < 0.35
