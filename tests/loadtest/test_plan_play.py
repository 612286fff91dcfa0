"""Planned deployments on simulated engines: conservation, limits, and the laws that formula and play share."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan

import msgspec
import numpy as np
import pytest

from estimators.planning.deployments import CardKind, Deployment, Facts, Organisation, RequestKind, deployment
from estimators.planning.known import DEEPSEEK_V3, PLANNED_CARDS
from estimators.planning.plan import Question, Targets, assess
from estimators.shape_parts import Shards
from estimators.shapes import QWEN3_8B
from loadtest.replay.plan_check import check, check_table, unplayable
from loadtest.replay.plan_play import Asked, Play, Played, engines_of
from router.errors import ConfigError
from sim_backends.service_times import Constants

KIND = RequestKind(input_tokens=2048, output_tokens=65)


def facts(*kinds: RequestKind, **changes: object) -> Facts:
    cards = tuple(CardKind(name, PLANNED_CARDS[name], 2) for name in ("A100", "H20"))
    found = Facts(shape=QWEN3_8B, kinds=kinds or (KIND,), cards=cards, batch=8, network_bytes_per_s=25e9)
    return replace(found, **changes)  # type: ignore[arg-type]


def as_(organisation: Organisation, asked: Facts, prefill: tuple[int, int] | None = None) -> Deployment:
    found = deployment(asked, organisation, prefill=prefill)
    assert found is not None
    return found


def every(many: int, gap_s: float, kind: RequestKind = KIND) -> list[Asked]:
    return [Asked(number, number * gap_s, kind) for number in range(many)]


def played(organisation: Organisation, rows: list[Asked], *, ready_s: float = 0.0, **changes: object) -> Played:
    asked = facts(*{row.kind: None for row in rows}, **changes)
    prefill = (2, 0) if organisation.splits else None
    return Play(asked, as_(organisation, asked, prefill), seed=1, ready_s=ready_s).run(rows)


@pytest.mark.parametrize("organisation", [Organisation.REPLICAS, Organisation.SPLIT])
def test_every_request_is_answered_once_and_in_order_of_its_own_times(organisation: Organisation) -> None:
    found = played(organisation, every(60, 0.1))
    assert not np.isnan(found.ended_s).any()
    assert np.all(found.first_token_s > 0)
    assert np.all(found.ended_s > found.arrived_s + found.first_token_s)


def test_nothing_is_served_before_the_service_is_ready() -> None:
    found = played(Organisation.SPLIT, every(20, 0.2), ready_s=5.0)
    assert float(np.min(found.arrived_s + found.first_token_s)) > 5.0
    before = played(Organisation.SPLIT, every(20, 0.2))
    assert np.all(found.first_token_s[:5] > before.first_token_s[:5] + 3.0)


def test_a_handoff_costs_the_link_what_the_state_takes() -> None:
    """One request alone: the slower link adds exactly the difference of the two transfers."""
    state = 2048 * QWEN3_8B.kv_bytes_per_token
    fast, slow = (
        float(played(Organisation.SPLIT, every(1, 0.0), network_bytes_per_s=rate).first_token_s[0])
        for rate in (25e9, 2.5e9)
    )
    assert slow - fast == pytest.approx(state / 2.5e9 - state / 25e9, rel=0.01)


def test_one_network_is_shared_where_links_of_their_own_are_not() -> None:
    rows = [Asked(number, 0.0, KIND) for number in range(2)]
    own = played(Organisation.SPLIT, rows, network_bytes_per_s=None, peer_bytes_per_s=1e9)
    shared = played(Organisation.SPLIT, rows, network_bytes_per_s=1e9)
    state_s = 2048 * QWEN3_8B.kv_bytes_per_token / 1e9
    assert float(np.max(shared.first_token_s) - np.max(own.first_token_s)) == pytest.approx(state_s, rel=0.1)


def test_what_is_cached_is_not_computed() -> None:
    cached = replace(KIND, cached_tokens=1920)
    whole, rest = (float(played(Organisation.SPLIT, every(1, 0.0, kind)).first_token_s[0]) for kind in (KIND, cached))
    assert rest < 0.5 * whole


def test_an_answer_of_one_token_is_not_handed_over() -> None:
    short = replace(KIND, output_tokens=1)
    found = played(Organisation.SPLIT, every(5, 0.5, short))
    assert np.all(found.ended_s == found.arrived_s + found.first_token_s)
    assert found.pace_s(0) == 0.0


def test_the_same_seed_plays_the_same_and_another_does_not() -> None:
    def ends(seed: int) -> list[float]:
        asked = facts()
        run = Play(asked, as_(Organisation.REPLICAS, asked), seed=seed, ready_s=0.0).run(every(30, 0.05))
        return [float(one) for one in run.ended_s]

    assert ends(3) == ends(3)
    assert ends(3) != ends(4)


def test_engines_reach_the_shares_that_the_plan_assumes() -> None:
    asked = facts()
    engines, own = engines_of(asked, as_(Organisation.SPLIT, asked)), Constants()
    card, planned = engines.cards["A100"], PLANNED_CARDS["A100"]
    assert card.peak_tflops * own.linear_efficiency == pytest.approx(planned.peak_tflops * planned.compute_share)
    assert card.memory_gb_s * own.memory_efficiency == pytest.approx(planned.memory_gb_s * planned.memory_share)


def test_an_unloaded_split_takes_what_the_formula_says_and_up_to_a_third_more() -> None:
    """More: attention slower than matrices, element-wise work, overhead of each step; nothing waits at this load."""
    question = Question(facts=facts(), arrival_rps=0.5, ready_s=2.0, targets=Targets(first_token_s=5.0))
    one = assess(question, as_(Organisation.SPLIT, question.facts, (2, 0)))
    found = check(question, one, seconds=60.0, seed=2)
    for name in ("idle_first_token_s", "pace_s"):
        assert 1.0 <= found.played[name] / found.formula[name] <= 1.33
    assert found.played["good_share"] == 1.0


def test_what_parts_is_said_and_nothing_else() -> None:
    question = Question(facts=facts(), arrival_rps=4.0, targets=Targets(first_token_s=2.0))
    one = assess(question, as_(Organisation.REPLICAS, question.facts))
    found = check(question, one, seconds=40.0, seed=0)
    apart = [
        name
        for name, formula in found.formula.items()
        if not isnan(formula) and abs(found.played[name] - formula) > 0.1 * abs(formula)
    ]
    said = [sentence for sentence in found.parts if sentence.startswith("They part")]
    assert len(said) == len(apart)


def test_a_deployment_that_falls_behind_never_clears_its_start() -> None:
    question = Question(facts=facts(), arrival_rps=200.0, ready_s=1.0)
    one = assess(question, as_(Organisation.REPLICAS, question.facts))
    assert check(question, one, seconds=2.0, seed=0).played["drained_at_s"] == inf


def test_a_play_too_short_to_judge_says_how_long_it_must_be() -> None:
    question = Question(facts=facts(), arrival_rps=0.5)
    one = assess(question, as_(Organisation.REPLICAS, question.facts))
    with pytest.raises(ConfigError, match="20 requests come in 40 s"):
        check(question, one, seconds=10.0, seed=0)


def test_a_play_too_long_to_wait_for_says_how_long_it_may_be() -> None:
    question = Question(facts=facts(), arrival_rps=0.5)
    one = assess(question, as_(Organisation.REPLICAS, question.facts))
    with pytest.raises(ConfigError, match=r"500,000,000 requests; 200,000 are played at most, and come in 400,000 s"):
        check(question, one, seconds=1e9, seed=0)
    many = Question(facts=replace(facts(), batch=8192), arrival_rps=0.5)
    places = replace(many.facts, kinds=(RequestKind(input_tokens=1, output_tokens=1),))
    many = replace(many, facts=replace(places, cards=tuple(replace(card, count=40) for card in places.cards)))
    with pytest.raises(ConfigError, match=r"to fill [0-9,]+ places in batches takes [0-9,]+ requests"):
        check(many, assess(many, as_(Organisation.REPLICAS, many.facts)), seconds=60.0, seed=0)


def test_a_start_whose_backlog_outlives_the_play_is_not_called_one_that_never_ends() -> None:
    question = Question(facts=facts(), arrival_rps=8.0, ready_s=6.0)
    one = assess(question, as_(Organisation.REPLICAS, question.facts))
    short, long = (check(question, one, seconds=seconds, seed=0) for seconds in (7.0, 60.0))
    assert long.played["drained_at_s"] > 7.0
    assert isnan(short.played["drained_at_s"])
    assert any("not gone within the 7 s that were played" in sentence for sentence in short.parts)
    assert not any("never" in sentence for sentence in short.parts)
    assert "not in 7 s" in check_table(question.facts, short).columns[2]._cells


def test_progress_counts_every_request_of_every_play_once() -> None:
    question = Question(facts=facts(), arrival_rps=2.0, ready_s=3.0)
    one = assess(question, as_(Organisation.SPLIT, question.facts, (2, 0)))
    seen: dict[str, list[tuple[int, int]]] = {}
    found = check(question, one, seconds=20.0, seed=0, watch=lambda play, *told: seen.setdefault(play, []).append(told))
    assert {play: told[-1][1] for play, told in seen.items() if play != "all at once"} == {
        "as they arrive": found.requests,
        "with the start before": found.requests,
    }
    for told in seen.values():
        assert [ended for ended, _of in told] == list(range(told[-1][1] + 1))


def test_prompts_longer_than_engines_take_by_default_are_played() -> None:
    long = RequestKind(input_tokens=140_000, output_tokens=2)
    found = played(Organisation.REPLICAS, every(1, 0.0, long))
    assert float(found.first_token_s[0]) > 10.0


def test_stores_and_shards_are_not_played_and_other_models_are_refused() -> None:
    asked = facts(store=True)
    assert unplayable(asked, as_(Organisation.SPLIT, asked)) is None
    assert "store" in str(unplayable(asked, as_(Organisation.SPLIT_STORE, asked)))
    sharded = replace(asked, shape=msgspec.structs.replace(QWEN3_8B, shards=Shards(tensor=2)))
    assert "one card" in str(unplayable(sharded, as_(Organisation.SPLIT, sharded)))
    with pytest.raises(ConfigError, match="experts"):
        engines_of(replace(asked, shape=DEEPSEEK_V3), as_(Organisation.SPLIT, asked))
    windows = msgspec.structs.replace(QWEN3_8B, pattern=("window",), window=4096)
    with pytest.raises(ConfigError, match="windowed"):
        engines_of(replace(asked, shape=windows), as_(Organisation.SPLIT, asked))
