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
from policies.by_load.least_request import LeastRequest
from policies.objectives import EndToEnd, FirstToken
from policies.by_cache.prefix_hash import PrefixHash
from policies.by_load.round_robin import RoundRobin
from tests.builders import a_fleet, a_request, an_estimator, estimate, held, quiet


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def choose(
    policy: Policy, view: FleetView, request: RequestFacts | None = None, local: list[int] | None = None
) -> Choice:
    request = request or a_request()
    where = held(local or [0] * view.rows)
    estimates = an_estimator(rows=view.rows).estimate(request, where, view, quiet(), 0.0)
    return policy.choose(request, view, estimates)


ALL: list[type[Any]] = [RoundRobin, LeastRequest, PrefixHash, FirstToken, EndToEnd]


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_takes_the_only_ready_replica_and_says_so(rule: type[Any]) -> None:
    view = a_fleet("A100", "A100", "A100")
    view.ready[:] = [False, True, False]
    view.booked[1] = 99
    choice = choose(rule(rng()), view, a_request(chain=[5, 6, 7]))
    assert (choice.row, choice.reason) == (1, Reason.ONLY_READY)


@pytest.mark.parametrize("rule", ALL)
def test_no_rule_ever_takes_a_replica_that_is_not_ready(rule: type[Any]) -> None:
    view = a_fleet(*["A100"] * 6)
    view.ready[[1, 4]] = False
    policy = rule(rng())
    taken = {choose(policy, view, a_request(chain=[i * 2**58, i * 2**57])).row for i in range(60)}
    assert taken
    assert not taken & {1, 4}


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_names_the_path_the_engine_will_take(rule: type[Any]) -> None:
    view = a_fleet("A100")
    assert choose(rule(rng()), view, local=[100]).path is Path.LOCAL
    assert choose(rule(rng()), view, local=[0]).path is Path.RECOMPUTE


def test_round_robin_takes_turns_and_skips_who_is_not_ready() -> None:
    view, policy = a_fleet(*["A100"] * 4), RoundRobin(rng())
    assert [choose(policy, view).row for _ in range(5)] == [0, 1, 2, 3, 0]
    view.ready[1] = False
    assert [choose(policy, view).row for _ in range(4)] == [2, 3, 0, 2]


def test_least_request_takes_the_fewest_and_breaks_ties_evenly() -> None:
    view, policy = a_fleet(*["A100"] * 4), LeastRequest(rng())
    view.booked[:] = [3, 1, 2, 1]
    drawn = Counter(choose(policy, view).row for _ in range(2000))
    assert set(drawn) == {1, 3}
    assert abs(drawn[1] - 1000) < 5 * np.sqrt(500)
    assert choose(policy, view).probability == 0.5


def test_prefix_hash_sends_equal_beginnings_to_one_replica_whatever_follows() -> None:
    view, policy = a_fleet(*["A100"] * 5), PrefixHash(rng(), prefix_tokens=32)
    rows = {choose(policy, view, a_request(chain=[11, 22, tail])).row for tail in range(30)}
    assert len(rows) == 1


def test_prefix_hash_spreads_different_beginnings() -> None:
    view, policy = a_fleet(*["A100"] * 4), PrefixHash(rng())
    chance = np.random.default_rng(3)
    chains = chance.integers(0, 2**63, size=2000).tolist()
    drawn = Counter(choose(policy, view, a_request(chain=[key])).row for key in chains)
    assert min(drawn.values()) > 2000 / 4 / 2


def test_prefix_hash_never_goes_over_its_bound() -> None:
    view, policy = a_fleet(*["A100"] * 4), PrefixHash(rng())
    hot = a_request(chain=[42, 43])
    reasons: Counter[Reason] = Counter()
    for _ in range(40):
        choice = choose(policy, view, hot)
        reasons[choice.reason] += 1
        view.booked[choice.row] += 1
        assert view.booked.max() <= np.ceil(1.25 * view.booked.sum() / 4)
    assert reasons[Reason.OVERFLOW] > 0


def test_prefix_hash_moves_few_prefixes_when_a_replica_leaves() -> None:
    view, policy = a_fleet(*["A100"] * 8), PrefixHash(rng())
    keys = np.random.default_rng(4).integers(0, 2**63, size=800).tolist()
    before = [choose(policy, view, a_request(chain=[key])).row for key in keys]
    view.ready[3] = False
    after = [choose(policy, view, a_request(chain=[key])).row for key in keys]
    moved = sum(a != b for a, b in zip(before, after, strict=True))
    assert moved == before.count(3)


def test_prefix_hash_without_known_tokens_goes_to_the_least_loaded() -> None:
    view = a_fleet("A100", "A100")
    view.booked[:] = [4, 1]
    assert choose(PrefixHash(rng()), view, a_request(chain=[])).row == 1


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
    selfish = EndToEnd(rng(), own_pace=0.0, queue_behind=0.0, running_decodes=0.0)
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
    for rule in ALL:
        rule(rng()).choose(a_request(chain=[1]), view, estimates)
    assert np.array_equal(before[0], estimates.first_token_s)
    assert np.array_equal(before[1], estimates.possible)
