"""How routers fail in the field, played through the dispatcher: stale samples, ties, and hot prefixes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimator
from estimators.hit_probability import HitProbability
from estimators.roofline import Rates
from estimators.routes import Held
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from estimators.spread import ResidualSpread
from estimators.view import FleetView
from policies.by_load.least_request import LeastRequest
from policies.objectives import EndToEnd, FirstToken
from policies.objectives.objective import Objective
from router.actions import Ended, Hold, Refuse, Send
from router.dispatch import Dispatcher
from router.placing import Replica
from tests.builders import MODEL, NoHoldings, a_request, held, quiet

NAMES = "ABCD"
TOKEN_S = 1e-4  # prefill of 10,000 tokens a second
P_TOKENS, P_BLOCKS = 4112, 256  # 4,096 of them are in blocks; uncached it takes 0.41 s, cached 2 ms

Rule = type[Objective]
BOTH = pytest.mark.parametrize("rule", [FirstToken, EndToEnd])


def a_view(replicas: int) -> FleetView:
    plain = Rates(
        linear_s_per_token=TOKEN_S,
        attention_s_per_pair=0.0,
        head_s=0.0,
        weights_s=0.005,
        experts_s=0.0,
        context_s_per_token=1e-8,
        decode_attention_s_per_pair=0.0,
    )
    view = FleetView(names=NAMES[:replicas], rates=[plain] * replicas)
    view.ready[:] = True
    return view


def a_dispatcher(rule: Rule, replicas: int, where: Held, **settings: Any) -> Dispatcher:
    view = a_view(replicas)
    names = view.names
    doubt = Doubt(HitProbability(names), ResidualSpread(names), Conformal(LEVELS))
    rng = np.random.default_rng(5)
    dispatcher = Dispatcher(
        replicas=[Replica(name, f"http://{name}:1") for name in names],
        view=view,
        holdings=NoHoldings(where),
        estimator=Estimator(costs=costs_of(QWEN3_8B), layers=36, rows=replicas, doubt=doubt),
        policy=rule(rng, **settings),
        policy_name="rule",
        by_load=LeastRequest(rng),
        on_receipt=lambda receipt: None,
    )
    for row in range(replicas):
        dispatcher.replica_up(row, frozenset({MODEL}), 0.0)
    return dispatcher


def report(dispatcher: Dispatcher, waiting: list[float]) -> None:
    """One poll of every replica, after which nothing is heard any more."""
    for row, requests in enumerate(waiting):
        dispatcher.load_reported(row, running=0.0, waiting=requests, sent_s=0.0, now_s=0.0)


def burst(dispatcher: Dispatcher, requests: int, prompt_tokens: int = P_TOKENS) -> Counter[str]:
    """Requests that arrive within a tenth of a second, none of which is answered meanwhile."""
    sent: Counter[str] = Counter()
    for number in range(requests):
        request = a_request(prompt_tokens, request_id=f"r-{number}", chain=[number])
        (action,) = dispatcher.arrived(request, number * 0.1 / requests)
        assert isinstance(action, Send)
        sent[action.replica] += 1
    return sent


def answer_some(dispatcher: Dispatcher) -> None:
    """Requests for the prefix, one after the other, so that it is known how short they are."""
    for number in range(12):
        at_s = number - 20.0
        (sent,) = dispatcher.arrived(a_request(P_TOKENS, request_id=f"before-{number}", chain=[number]), at_s)
        assert isinstance(sent, Send)
        dispatcher.first_token(sent, at_s + 0.008)
        dispatcher.finished(sent, Ended(200, output_tokens=1, cached_tokens=P_TOKENS - 16), at_s + 0.008)


# A stale sample, and ties


@BOTH
def test_a_frozen_sample_does_not_draw_a_burst_to_one_replica(rule: Rule) -> None:
    dispatcher = a_dispatcher(rule, 2, held([0, 0]))
    report(dispatcher, [0.0, 1.0])
    assert max(burst(dispatcher, 8).values()) <= 5


@BOTH
@pytest.mark.parametrize("blocks", [P_BLOCKS, 0])
def test_equal_replicas_share_a_burst(rule: Rule, blocks: int) -> None:
    dispatcher = a_dispatcher(rule, 4, held([blocks] * 4))
    report(dispatcher, [0.0] * 4)
    sent = burst(dispatcher, 100)
    assert len(sent) == 4
    assert all(15 <= count <= 35 for count in sent.values())


@BOTH
def test_a_replica_with_one_more_waiting_gets_less_than_the_mean_and_not_nothing(rule: Rule) -> None:
    dispatcher = a_dispatcher(rule, 4, held([P_BLOCKS] * 4))
    answer_some(dispatcher)
    report(dispatcher, [1.0, 0.0, 0.0, 0.0])
    sent = burst(dispatcher, 100)
    assert 0 < sent["A"] < 25


# A hot prefix


def chosen(rule: Rule, view: FleetView, where: Held, prompt_tokens: int = P_TOKENS) -> str:
    estimator = Estimator(costs=costs_of(QWEN3_8B), layers=36, rows=view.rows)
    request = a_request(prompt_tokens)
    estimates = estimator.estimate(request, where, view, quiet(), 0.0)
    return view.names[rule(np.random.default_rng(5)).choose(request, view, estimates).row]


def queue(view: FleetView, row: int, wait_s: float) -> None:
    view.head_ends_s[row] = view.head_compute_s[row] = wait_s


@BOTH
@pytest.mark.parametrize(("wait_s", "name"), [(0.1, "A"), (0.3, "A"), (0.5, "B"), (3.0, "B")])
def test_a_prefix_is_followed_as_long_as_its_queue_is_shorter_than_computing_it(
    rule: Rule, wait_s: float, name: str
) -> None:
    view = a_view(2)
    queue(view, 0, wait_s)
    assert chosen(rule, view, held([P_BLOCKS, 0])) == name


@BOTH
def test_a_burst_for_one_prefix_does_not_drown_its_holder(rule: Rule) -> None:
    """The prefix is a part of each prompt. All of a prompt costs so little where it is held that forty wait there for
    less time than one takes elsewhere, see the next test.
    """
    dispatcher = a_dispatcher(rule, 4, held([P_BLOCKS, 0, 0, 0]))
    sent = burst(dispatcher, 40, 14 * P_TOKENS)
    assert max(sent.values()) <= 24


@BOTH
def test_a_burst_for_one_whole_prompt_leaves_its_holder_once_its_queue_is_as_long_as_computing_it(rule: Rule) -> None:
    """0.41 s on an idle replica."""
    dispatcher = a_dispatcher(rule, 4, held([P_BLOCKS, 0, 0, 0]))
    view, number = dispatcher.view, 0
    while not view.booked[1:].any():
        assert view.head_ends_s[0] + view.waiting_linear_s[0] < P_TOKENS * TOKEN_S
        dispatcher.arrived(a_request(P_TOKENS, request_id=f"r-{number}", chain=[number]), 0.0)
        number += 1


@BOTH
@pytest.mark.parametrize(("wait_s", "name"), [(0.05, "A"), (30.0, "CD")])
def test_the_longest_copy_on_an_overloaded_replica_loses_to_a_shorter_one_elsewhere(
    rule: Rule, wait_s: float, name: str
) -> None:
    """A has all of it, B nothing, C and D three quarters."""
    view = a_view(4)
    queue(view, 0, wait_s)
    assert chosen(rule, view, held([P_BLOCKS, 0, P_BLOCKS * 3 // 4, P_BLOCKS * 3 // 4])) in name


@BOTH
def test_a_miss_goes_by_load_and_not_by_who_has_least(rule: Rule) -> None:
    view = a_view(2)
    view.decode_batch[0] = view.booked[0] = 50
    view.decode_context_tokens[0] = view.decode_read_tokens[0] = 50 * 4000.0
    view.remaining_tokens[0] = 50 * 200.0
    assert chosen(rule, view, held([0, 0])) == "B"


@pytest.mark.parametrize("rule", [FirstToken, EndToEnd])
@given(
    waits_s=st.lists(st.floats(0.0, 5.0), min_size=4, max_size=4),
    blocks=st.lists(st.integers(0, P_BLOCKS), min_size=4, max_size=4),
    more_s=st.floats(0.01, 10.0),
)
def test_a_longer_queue_never_draws_a_request(
    rule: Rule, waits_s: list[float], blocks: list[int], more_s: float
) -> None:
    before, after = a_view(4), a_view(4)
    for row, wait_s in enumerate(waits_s):
        queue(before, row, wait_s)
        queue(after, row, wait_s + more_s * (row == 0))
    if chosen(rule, before, held(blocks)) != "A":
        assert chosen(rule, after, held(blocks)) != "A"


# Deadlines, as the dispatcher keeps them


def test_a_request_that_nobody_serves_in_time_waits_until_somebody_can() -> None:
    """The only replica needs 2 s for the prompt before it; then there is time enough."""
    dispatcher = a_dispatcher(FirstToken, 1, held([0]), late="queue")
    (first,) = dispatcher.arrived(a_request(20_000, request_id="first"), 0.0)
    assert isinstance(first, Send)
    (hold,) = dispatcher.arrived(a_request(1000, request_id="second", deadline_s=1.0), 0.1)
    assert isinstance(hold, Hold)
    answered = dispatcher.first_token(first, 0.2)
    answered += dispatcher.finished(first, Ended(200, output_tokens=1, cached_tokens=0), 0.2)
    (sent,) = answered
    assert isinstance(sent, Send)
    assert sent.held is hold


def test_a_request_that_nobody_serves_in_time_is_refused_with_429_where_that_is_wished() -> None:
    dispatcher = a_dispatcher(FirstToken, 1, held([0]), late="refuse", slo_ttft_ms=500)
    (first,) = dispatcher.arrived(a_request(4000, request_id="first", deadline_s=10.0), 0.0)
    assert isinstance(first, Send)
    (refused,) = dispatcher.arrived(a_request(4000, request_id="second"), 0.01)
    assert isinstance(refused, Refuse)
    assert refused.status == 429
    assert "0.5 s" in refused.message
