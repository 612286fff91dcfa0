"""What another rule would have done: the parts that can be checked by hand, and the whole on a made-up fleet.

Whether its intervals hold what the simulated engines give is `loadtest/replay/bench_whatif.py`.
"""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cli.main import main
from router.config import PolicyConfig
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec
from router.receipts import Receipt
from router.receipts.writer import marks_of
from router.study.whatif.answer import usable, what_if
from router.study.whatif.played import Decodes, Replicas, Sending, by_rule, placed, timed
from router.study.whatif.prompts import chains_of, renumbered
from router.study.whatif.service import Service, fitted
from tests.router.receipts.builders import a_candidate, a_receipt

BLOCK = 16
LINEAR_S, FIXED_S = 1e-4, 0.01
NAMES = ("fast", "slow")
FLEET = Fleet(replicas=[ReplicaSpec(name=name) for name in NAMES])


def prefill_s(row: int, new: int, cached: int = 0) -> float:
    """What these tests' replicas take: the second three times as long as the first."""
    return (LINEAR_S * new + FIXED_S) * (1.0, 3.0)[row]


def a_service(rates: tuple[float, float] = (10.0, 50.0)) -> Service:
    prefill = np.array([[LINEAR_S, 0.0, FIXED_S], [3 * LINEAR_S, 0.0, 3 * FIXED_S]])
    return Service(NAMES, prefill, np.array([[0.01, 1e-5]] * 2), np.array([rates] * 2))


def receipts_of_turns(
    requests: int = 200, every_s: float = 0.5, seed: int = 1, probability: float = 0.5, choose: str = "chance"
) -> list[Receipt]:
    """Conversations of four turns, placed by chance on one replica of two, served in order of arrival."""
    rng = np.random.default_rng(seed)
    receipts: list[Receipt] = []
    free_s = [0.0, 0.0]
    cached: list[set[int]] = [set(), set()]
    at_s = 0.0
    chain: list[int] = []
    for index in range(requests):
        at_s += float(rng.exponential(every_s))
        chain = [*(chain if index % 4 else []), *rng.integers(1, 2**60, size=60).tolist()]
        prompt = len(chain) * BLOCK + 5
        row = int(rng.integers(0, 2)) if choose == "chance" else NAMES.index(choose)
        local = [next((n for n, b in enumerate(chain) if b not in some), len(chain)) * BLOCK for some in cached]
        waits = [max(0.0, free - at_s) for free in free_s]
        candidates = [
            a_candidate(
                replica=name,
                queue_s=waits[r],
                compute_s=prefill_s(r, prompt - local[r]),
                first_token_s=waits[r] + prefill_s(r, prompt - local[r]),
                expected_s=waits[r] + prefill_s(r, prompt - local[r]),
                local_tokens=local[r],
            )
            for r, name in enumerate(NAMES)
        ]
        first_s = candidates[row].first_token_s
        free_s[row] = at_s + first_s
        cached[row].update(chain)
        receipts.append(
            a_receipt(
                index,
                arrived_at=1000.0 + at_s,
                prompt_tokens=prompt,
                candidates=candidates,
                chosen=row,
                probability=probability,
                first_token_s=first_s,
                ended_s=first_s + 1.0,
                output_tokens=51,
                marks=[f"{mark:x}" for mark in marks_of(chain)],
                blocks=len(chain),
                block_tokens=BLOCK,
            )
        )
    return receipts


# Which prompts share what


def test_chains_share_what_the_prompts_shared_to_the_block_where_it_was_believed_somewhere() -> None:
    receipts = receipts_of_turns(40)
    chains = chains_of(receipts)
    for index, (receipt, chain) in enumerate(zip(receipts, chains, strict=True)):
        assert len(chain) == receipt.blocks
        before = chains[index - 1]
        shared = next((n for n, (a, b) in enumerate(zip(chain, before, strict=False)) if a != b), len(before))
        assert shared == (len(before) if index % 4 else 0)


def test_without_a_belief_prompts_share_what_their_marks_prove() -> None:
    receipts = receipts_of_turns(2)
    for receipt in receipts:
        receipt.candidates = []
    first, second = chains_of(receipts)
    assert second[:48] == first[:48]  # marks at 32, 48, 60 of the first and 32, 48, 64 of the second
    assert second[48] != first[48]


def test_a_receipt_without_marks_shares_nothing() -> None:
    assert chains_of([a_receipt(0), a_receipt(1, blocks=7, marks=["a"])]) == [[], []]


@given(st.lists(st.integers(1, 10**6), unique=True, max_size=50), st.integers(0, 20))
def test_other_numbers_are_different_for_different_blocks(chain: list[int], seed: int) -> None:
    numbers = renumbered(chain, seed)
    assert len(set(numbers)) == len(chain)
    assert all(0 <= number < 2**63 for number in numbers)


# How long it takes


def test_the_fit_finds_the_coefficients_the_receipts_were_made_with() -> None:
    service = fitted(receipts_of_turns(60))
    for row in (0, 1):
        for new in (500, 4000):
            assert service.prefill_s(row, new, 100.0) == pytest.approx(prefill_s(row, new), rel=1e-6)


def test_coefficients_are_never_below_zero() -> None:
    rng = np.random.default_rng(2)
    candidates = [
        a_candidate(compute_s=float(rng.exponential()), local_tokens=int(rng.integers(0, 99))) for _ in range(30)
    ]
    service = fitted([a_receipt(index, candidates=[one]) for index, one in enumerate(candidates)])
    assert (service.prefill >= 0.0).all()


def test_replicas_serve_in_order_and_reuse_what_was_computed_there() -> None:
    one, two = usable(receipts_of_turns(2))
    replicas = Replicas(a_service(), store=False, minimum_fetch_tokens=1)
    first_s, none = replicas.serve(one, 0)
    assert first_s == pytest.approx(prefill_s(0, one.receipt.prompt_tokens))
    assert none == 0
    again_s, reused = replicas.serve(two, 0)
    assert reused == 60 * BLOCK
    assert again_s == pytest.approx(max(first_s, two.arrived_s) + prefill_s(0, two.receipt.prompt_tokens - reused))


def test_with_a_store_the_other_replica_fetches_what_was_computed_elsewhere() -> None:
    one, two = usable(receipts_of_turns(2))
    replicas = Replicas(a_service(), store=True, minimum_fetch_tokens=1)
    replicas.serve(one, 0)
    at_s, reused = replicas.serve(two, 1)
    assert reused == 60 * BLOCK
    fetch_s = 0.01 + 1e-5 * reused
    assert at_s == pytest.approx(two.arrived_s + fetch_s + prefill_s(1, two.receipt.prompt_tokens - reused))


def sending(name: str) -> Any:
    return Sending(name, 1, 0)  # type: ignore[arg-type]


def test_answers_come_slower_while_a_prefill_runs() -> None:
    decodes = Decodes(busy_rate=2.0, idle_rate=10.0)
    decodes.begin(sending("a"), 20.0, 0.0, 0)
    assert decodes.next_end_s == 2.0
    decodes.busy_until(3.0, 1.0)  # ten tokens were out; two seconds give four more
    assert decodes.next_end_s == pytest.approx(3.6)
    decodes.begin(sending("b"), 1.0, 2.0, 1)
    assert decodes.next_end_s == 2.5
    assert [str(decodes.end(decodes.next_end_s).sent) for _ in range(2)] == ["b", "a"]
    assert decodes.next_end_s == inf


# The whole


def test_placements_as_they_were_give_the_first_tokens_as_they_were() -> None:
    requests = usable(receipts_of_turns(100))
    played, _ = timed(placed(requests, a_service(), FLEET), a_service())
    assert played.first_token_s == pytest.approx([asked.receipt.first_token_s for asked in requests])


def test_a_rule_is_asked_as_in_production_and_every_request_is_played_once() -> None:
    requests = usable(receipts_of_turns(60))
    played = by_rule(requests, a_service(), FLEET, PolicyConfig(name="round_robin"), seed=0)
    assert np.bincount(played.row).tolist() == [30, 30]
    assert (played.first_token_s > 0).all()


def test_a_rule_that_knows_the_queues_would_have_been_sooner_than_chance_and_its_interval_says_so() -> None:
    """Everything went to the slow one of two replicas: whoever looks is better."""
    receipts = receipts_of_turns(120, every_s=0.25, choose="slow", probability=1.0)
    answer = what_if(receipts, PolicyConfig(name="e2e"), draws=4)
    assert answer.high_s < answer.observed_s
    assert answer.low_s < answer.mean_s < answer.high_s
    assert answer.placed["fast"] > 0.5
    assert "shorter mean first token" in answer.sentence
    assert answer.method == "model"
    assert answer.factor == pytest.approx(1.0, rel=0.01)


def test_where_every_choice_was_left_to_chance_explored_requests_correct_the_model() -> None:
    """The fast replica takes half as long again as the model of the receipts has it; only the observed times say so."""
    receipts = receipts_of_turns(160, every_s=2.0)
    for receipt in receipts:
        assert receipt.first_token_s is not None
        receipt.first_token_s *= 1.5 if receipt.chosen == 0 else 0.9
    answer = what_if(receipts, PolicyConfig(name="e2e"), draws=4)
    assert answer.method == "doubly robust"
    trusting = [msgspec.structs.replace(receipt, probability=1.0) for receipt in receipts]
    model = what_if(trusting, PolicyConfig(name="e2e"), draws=4)
    played = by_rule(usable(receipts), a_service(), FLEET, PolicyConfig(name="e2e"), seed=0)
    truth_s = float(np.mean(played.first_token_s * np.where(played.row == 0, 1.5, 0.9)))
    assert abs(answer.mean_s - truth_s) < abs(model.mean_s - truth_s)


def test_too_few_receipts_are_one_clear_sentence() -> None:
    with pytest.raises(ConfigError, match="10 of 12 receipts can be played again"):
        what_if(
            [*receipts_of_turns(10), a_receipt(10, outcome="failed"), a_receipt(11, first_token_s=None)],
            PolicyConfig(name="e2e"),
        )


def test_receipts_that_leave_requests_out_cannot_be_played_again() -> None:
    receipts = receipts_of_turns(60)
    receipts[3].sampled = False
    with pytest.raises(ConfigError, match="leave requests out"):
        what_if(receipts, PolicyConfig(name="e2e"))


def test_the_command_prints_an_answer_for_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(receipt) for receipt in receipts_of_turns(80)))
    command = ["whatif", str(path), "--policy", "e2e", "--policy", "least_request", "--draws", "2"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "80 requests" in text
    assert text.count("would have given") == 2
    assert main([*command, "--json"]) == 0
    assert [one["policy"] for one in json.loads(capsys.readouterr().out)] == ["e2e", "least_request"]
    for rule, says in (
        ("nonsense", "there is no policy 'nonsense'"),
        ("e2e:own_pase=1", "e2e has no setting 'own_pase'; it has "),
        ("e2e:own_pace=fast", "own_pace must be a number, not 'fast'"),
    ):
        assert main(["whatif", str(path), "--policy", rule]) == 2
        assert says in capsys.readouterr().err
    for draws in ("1", "1001"):
        assert main(["whatif", str(path), "--policy", "e2e", "--draws", draws]) == 2
        assert "--draws must be from 2 to 1000" in capsys.readouterr().err


def test_requests_of_several_models_stay_on_the_replicas_that_serve_them() -> None:
    """Two models, each on a pair of replicas of its own, in one file of receipts."""
    receipts = []
    for model in "ab":
        for one in receipts_of_turns(60, seed=ord(model)):
            one.model, one.request_id = model, f"{model}-{one.request_id}"
            for candidate in one.candidates:
                candidate.replica = f"{candidate.replica}-{model}"
            receipts.append(one)
    played: list[None] = []
    found = what_if(receipts, PolicyConfig(name="round_robin"), draws=2, on_drawn=lambda: played.append(None))
    assert len(played) == 2
    assert found.refused == 0
    assert found.placed == {f"{name}-{model}": 0.25 for name in NAMES for model in "ab"}


def test_a_rule_can_be_asked_about_with_settings_and_answers_differently_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(one) for one in receipts_of_turns(60)))
    rules = "e2e,e2e:own_pace=0,queue_behind=0,running_decodes=0"
    assert main(["whatif", str(path), "--policy", rules, "--draws", "2", "--json"]) == 0
    plain, selfish = json.loads(capsys.readouterr().out)
    assert (plain["policy"], selfish["policy"]) == ("e2e", "e2e:own_pace=0,queue_behind=0,running_decodes=0")
    assert plain["mean_s"] != selfish["mean_s"]


def test_a_fleet_file_needs_no_urls_here_and_what_is_wrong_with_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, fleet = tmp_path / "r.jsonl", tmp_path / "fleet.yaml"
    path.write_bytes(b"\n".join(msgspec.json.encode(receipt) for receipt in receipts_of_turns(60)))
    command = ["whatif", str(path), "--policy", "least_request", "--draws", "2", "--fleet", str(fleet)]
    fleet.write_text("{replicas: [{name: fast, card: A100}, {name: slow, card: H20}]}")
    assert main(command) == 0
    fleet.write_text("{replicas: [{name: fast, card: abacus}]}")
    assert main(command) == 2
    assert "card 'abacus'" in capsys.readouterr().err
    fleet.unlink()
    assert main(command) == 2
