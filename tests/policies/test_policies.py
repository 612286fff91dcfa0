from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from estimators.estimates import Estimates
from estimators.paths import Path
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Policy, Reason, pick_smallest
from policies.objectives import EndToEnd, FirstToken
from router.plugins import POLICIES, found, policy_factory
from tests.builders import a_fleet, a_request, an_estimator, estimate, held, quiet
from tests.policies.desk import Desk, rng, some_fleet


def choose(
    policy: Policy, view: FleetView, request: RequestFacts | None = None, local: list[int] | None = None
) -> Choice:
    request = request or a_request()
    where = held(local or [0] * view.rows)
    estimates = an_estimator(rows=view.rows).estimate(request, where, view, quiet(), 0.0)
    return policy.choose(request, view, estimates)


PUBLISHED = {
    "random", "round_robin", "least_request", "kv_affinity", "vllm_dp", "two_choices", "peak_ewma", "prequal",
    "prefix_hash", "sglang_cache_aware", "dynamo", "llm_d", "llm_d_sticky", "preble_e2", "conductor", "lmetric",
    "llumnix", "dualmap", "fetch_threshold", "greedy_ttft",
}  # fmt: skip
OWN = {"ttft", "e2e", "makespan", "p99", "cost"}
ALL = [pytest.param(policy_factory(name), id=name) for name in sorted(PUBLISHED | OWN)]


def test_every_published_rule_and_every_objective_is_found_by_its_name() -> None:
    assert found(POLICIES).keys() >= PUBLISHED | OWN


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_takes_the_only_ready_replica_and_says_so(rule: Any) -> None:
    view = a_fleet("A100", "A100", "A100")
    view.ready[:] = [False, True, False]
    view.booked[1] = 99
    choice = choose(rule(rng()), view, a_request(chain=[5, 6, 7]))
    assert (choice.row, choice.reason) == (1, Reason.ONLY_READY)


@pytest.mark.parametrize("rule", ALL)
def test_no_rule_ever_takes_a_replica_that_is_not_ready(rule: Any) -> None:
    view = a_fleet(*["A100"] * 6)
    view.ready[[1, 4]] = False
    policy = rule(rng())
    taken = {choose(policy, view, a_request(chain=[i * 2**58, i * 2**57])).row for i in range(60)}
    assert taken
    assert not taken & {1, 4}


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_names_the_path_the_engine_will_take(rule: Any) -> None:
    view = a_fleet("A100")
    assert choose(rule(rng()), view, local=[100]).path is Path.LOCAL
    assert choose(rule(rng()), view, local=[0]).path is Path.RECOMPUTE


@pytest.mark.parametrize("rule", ALL)
def test_no_rule_stumbles_over_replicas_of_which_little_is_known(rule: Any) -> None:
    """No load report, no capacity, no tokens, a prompt of nothing, and signals of one replica alone."""
    view = a_fleet("A100", "H20", "A100")
    policy = rule(rng())
    assert choose(policy, view, a_request(prompt_tokens=0, chain=[])).row in range(3)
    view.kv_used_share[1], view.foreign_waiting[1], view.foreign_decoding[1] = 1.0, 3.0, 2.0
    view.has_capacity(1, 5_000.0)
    for prompt in (a_request(prompt_tokens=1), a_request(prompt_tokens=10**6, chain=[2**64 - 1, 0])):
        choice = choose(policy, view, prompt)
        assert choice.row in range(3)
        assert 0 < choice.probability <= 1
        assert (type(choice.row), type(choice.probability)) == (int, float)  # as receipts are written


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_says_what_it_takes_and_reads_and_where_it_comes_from(rule: Any) -> None:
    for said in (rule.summary, rule.reads, rule.source):
        assert 5 < len(said) < 120
        assert not said.endswith(".")


@pytest.mark.parametrize("rule", ALL)
def test_the_same_seed_makes_the_same_choices(rule: Any) -> None:
    """And being told of requests, whoever placed them, ends in the same state for both."""
    rows: list[list[int]] = [[], []]
    for one in rows:
        desk = Desk(rule(rng(5)), some_fleet(5))
        open_ones = []
        for number in range(40):
            chain = [2**60 * (number % 4), number]
            booking = desk.send(a_request(prompt_tokens=33, chain=chain), now_s=number / 10)
            one.append(booking.row)
            open_ones.append(booking)
            if number % 3 == 2:
                done = open_ones.pop(0)
                desk.first_token(done, number / 10 + 0.01)
                desk.end(done, number / 10 + 0.02)
        assert desk.view.booked.sum() == len(open_ones)
    assert rows[0] == rows[1]
    assert len(set(rows[0])) > 1


def test_ttft_takes_the_earliest_first_token_over_replicas_and_paths() -> None:
    view = a_fleet("A100", "A100")
    view.head_ends_s[0], view.head_compute_s[0] = 0.25, 0.25
    choice = choose(FirstToken(rng()), view, local=[512, 0])
    assert (choice.row, choice.path, choice.reason) == (0, Path.LOCAL, Reason.LOWEST_ESTIMATE)
    view.head_ends_s[0] = view.head_compute_s[0] = 2.0
    assert choose(FirstToken(rng()), view, local=[512, 0]).row == 1


def test_ttft_sees_only_itself_where_e2e_sees_whom_it_delays() -> None:
    """An A100 full of decodes still gives the earliest first token; the sum of delays is smaller on the idle H20."""
    view = a_fleet("A100", "H20")
    view.decode_batch[0], view.decode_context_tokens[0] = 60, 600_000
    assert choose(FirstToken(rng()), view).row == 0
    assert choose(EndToEnd(rng()), view).row == 1


def test_e2e_with_all_weights_zero_is_ttft() -> None:
    selfish = EndToEnd(
        rng(), own_pace=0.0, queue_behind=0.0, running_decodes=0.0, fetch=0.0, joining=0.0, levelling=0.0
    )
    chance = np.random.default_rng(9)
    for _ in range(50):
        view = a_fleet("A100", "H20", "A100", "H20")
        view.head_ends_s[:] = view.head_compute_s[:] = chance.uniform(0, 3, 4)
        view.decode_batch[:] = chance.integers(0, 30, 4)
        view.decode_context_tokens[:] = view.decode_batch * 8000
        local = chance.integers(0, 500, 4).tolist()
        assert choose(selfish, view, local=local) == choose(FirstToken(rng()), view, local=local)


def test_e2e_prefers_the_faster_decoder_when_first_tokens_are_alike() -> None:
    view = a_fleet("A100", "H20")
    assert choose(EndToEnd(rng()), view, a_request(prompt_tokens=16)).row == 1


@pytest.mark.parametrize("bad", [{"own_pace": -1.0}, {"queue_behind": float("nan")}, {"running_decodes": float("inf")}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EndToEnd(rng(), **bad)


def test_ties_are_drawn_with_their_probability() -> None:
    values = np.array([2.0, 1.0, 1.0, 5.0, 1.0])
    generator = rng()
    drawn = Counter(pick_smallest(values, generator)[0] for _ in range(3000))
    assert set(drawn) == {1, 2, 4}
    assert all(abs(count - 1000) < 130 for count in drawn.values())
    assert pick_smallest(values, generator)[1] == pytest.approx(1 / 3)


def test_estimates_are_not_changed_by_being_read() -> None:
    view = a_fleet("A100", "H20")
    estimates: Estimates = estimate(view, held([3, 4]))
    before = estimates.first_token_s.copy(), estimates.possible.copy()
    for name in sorted(PUBLISHED | OWN):
        policy_factory(name)(rng()).choose(a_request(chain=[1]), view, estimates)
    assert np.array_equal(before[0], estimates.first_token_s)
    assert np.array_equal(before[1], estimates.possible)
