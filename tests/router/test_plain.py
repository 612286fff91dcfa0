"""Rules that read no estimates are spared them; what clients, health and load see of a request stays the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from estimators.request import RequestFacts
from policies.by_cache.prefix_hash import PrefixHash
from policies.by_load.least_request import LeastRequest
from policies.by_load.round_robin import RoundRobin
from policies.objectives import EndToEnd, FirstToken
from router.actions import Cause, Ended, Refuse, Send
from router.admission import AdmissionConfig
from router.assemble import Core, assemble
from router.config import PolicyConfig, RouterConfig
from router.dispatch import Dispatcher
from router.fleet import fleet_of_urls
from router.metrics import Metrics
from router.plain import PlainDispatcher, nothing_estimated, reads_estimates
from router.receipts import Receipt

NAMES = ("round_robin", "least_request", "prefix_hash")


def a_core(
    policy: str,
    receipts: list[Receipt] | None = None,
    *,
    forecasts: bool = False,
    replicas: int = 3,
    admission: AdmissionConfig | None = None,
) -> Core:
    urls = [f"http://127.0.0.1:{port}" for port in range(1, replicas + 1)]
    kept: list[Receipt] = [] if receipts is None else receipts
    config = RouterConfig(worker_urls=urls, policy=PolicyConfig(name=policy), admission=admission or AdmissionConfig())
    core = assemble(config, fleet_of_urls(urls), on_receipt=kept.append, forecasts=forecasts)
    for row in range(replicas):
        core.dispatcher.replica_up(row, frozenset({"m"}), 0.0)
    return core


def a_request(number: int, **facts: object) -> RequestFacts:
    return RequestFacts(request_id=f"r{number}", model="m", prompt_tokens=100, chain=[number % 5, 7], **facts)  # type: ignore[arg-type]


def sent(dispatcher: Dispatcher, request: RequestFacts, now_s: float) -> Send:
    (action,) = dispatcher.arrived(request, now_s)
    assert isinstance(action, Send)
    return action


@pytest.mark.parametrize("policy", NAMES)
def test_only_rules_that_read_no_estimates_are_spared_them_and_only_when_nobody_else_reads(policy: str) -> None:
    assert isinstance(a_core(policy).dispatcher, PlainDispatcher)
    assert not isinstance(a_core(policy, forecasts=True).dispatcher, PlainDispatcher)
    assert not isinstance(a_core("e2e").dispatcher, PlainDispatcher)


@pytest.mark.parametrize("admission", [{"max_in_flight": 4}, {"max_prefills": 2}, {"late": "refuse"}])
def test_admission_that_compares_expectations_is_given_them(admission: dict[str, Any]) -> None:
    core = a_core("round_robin", admission=AdmissionConfig(**admission))
    assert not isinstance(core.dispatcher, PlainDispatcher)
    assert isinstance(a_core("round_robin", admission=AdmissionConfig(order="wspt")).dispatcher, PlainDispatcher)


def test_a_rule_that_does_not_say_is_taken_to_read_estimates() -> None:
    rng = np.random.default_rng(0)
    assert not any(reads_estimates(rule) for rule in (RoundRobin(rng), LeastRequest(rng), PrefixHash(rng)))
    assert all(reads_estimates(rule) for rule in (EndToEnd(rng), FirstToken(rng)))


@pytest.mark.parametrize("policy", NAMES)
def test_the_same_replicas_are_chosen_with_and_without_estimates(policy: str) -> None:
    plain, whole = a_core(policy).dispatcher, a_core(policy, forecasts=True).dispatcher
    chosen: list[list[str]] = []
    for dispatcher in (plain, whole):
        rng, open_, rows, now_s = np.random.default_rng(4), [], [], 1.0
        for number in range(300):
            now_s += float(rng.exponential(0.02))
            open_.append(sent(dispatcher, a_request(number, streams=bool(rng.random() < 0.5)), now_s))
            rows.append(open_[-1].replica)
            while len(open_) > 6:
                ended = open_.pop(int(rng.integers(len(open_))))
                if ended.request.streams:
                    dispatcher.first_token(ended, now_s)
                dispatcher.finished(ended, Ended(200, output_tokens=3, prompt_tokens=100), now_s)
        chosen.append(rows)
    assert chosen[0] == chosen[1]
    assert plain.in_flight == whole.in_flight == 6


def test_every_way_a_request_can_end_gives_back_its_place_and_one_receipt() -> None:
    receipts: list[Receipt] = []
    dispatcher = a_core("round_robin", receipts).dispatcher
    one, two, three, four, five = (sent(dispatcher, a_request(number), 1.0) for number in range(5))
    dispatcher.first_token(one, 1.5)
    dispatcher.finished(one, Ended(200, output_tokens=4), 2.0)
    dispatcher.finished(two, Ended(500), 2.0)
    dispatcher.cancelled(three, 2.0)
    dispatcher.failed(four, Cause.BROKEN, 2.0)
    (again,) = dispatcher.failed(five, Cause.CONNECT, 2.0)
    assert isinstance(again, Send)
    assert again.replica != five.replica
    dispatcher.finished(again, Ended(200), 3.0)
    assert dispatcher.in_flight == 0
    assert sorted(str(receipt.outcome) for receipt in receipts) == ["cancelled", "failed", "ok", "ok", "server_error"]
    assert receipts[0].first_token_s == 0.5


def test_a_replica_that_failed_rests_here_too() -> None:
    dispatcher = a_core("round_robin", replicas=2).dispatcher
    failing = sent(dispatcher, a_request(0), 1.0)
    dispatcher.failed(failing, Cause.CONNECT, 1.0)
    assert {sent(dispatcher, a_request(number), 1.1).replica for number in range(1, 5)} != {failing.replica}
    assert failing.replica not in {sent(dispatcher, a_request(number), 1.1).replica for number in range(5, 9)}


@pytest.mark.parametrize("policy", NAMES)
def test_failures_trials_and_slow_starts_are_those_of_the_whole_dispatcher(policy: str) -> None:
    said: list[list[str]] = []
    for forecasts in (False, True):
        dispatcher, rng, now_s = a_core(policy, forecasts=forecasts).dispatcher, np.random.default_rng(9), 0.0
        states: list[str] = []
        for number in range(600):
            now_s += float(rng.exponential(0.1))
            (action,) = dispatcher.arrived(a_request(number, streams=True), now_s)
            broken = 150 < number < 300  # the first replica breaks what it is sent, then works again
            while isinstance(action, Send) and broken and action.row == 0:
                (action,) = dispatcher.failed(action, Cause.NO_ANSWER, now_s)
            if isinstance(action, Send):
                dispatcher.first_token(action, now_s)
                dispatcher.finished(action, Ended(200, output_tokens=3, prompt_tokens=100), now_s)
            health = dispatcher.health(0)
            states.append(f"{action!r:.12} {health.state().value} {health.share(now_s):.3f}")
            states[-1] += f" {action.replica}" if isinstance(action, Send) else ""
        said.append(states)
    assert said[0] == said[1]
    assert {"closed", "open"} <= {state.split()[1] for state in said[0]}


def test_a_model_that_nobody_serves_is_refused() -> None:
    (action,) = a_core("round_robin").dispatcher.arrived(RequestFacts(request_id="r", model="other"), 1.0)
    assert isinstance(action, Refuse)
    assert action.status == 404


def test_work_that_nobody_estimated_is_shown_as_unknown_and_not_as_none() -> None:
    dispatcher, metrics = a_core("round_robin").dispatcher, Metrics()
    sent(dispatcher, a_request(0), 1.0)
    metrics.show_fleet(dispatcher.view, dispatcher.is_up, 2048, 2.0)
    text = metrics.text().decode()
    name = dispatcher.view.names[0]
    assert f'tfirst_booked_prefill_seconds{{replica="{name}"}} NaN' in text
    assert f'tfirst_booked_requests{{replica="{name}"}} 1.0' in text


def test_choices_without_estimates_are_counted_by_reason() -> None:
    metrics = Metrics()
    receipts: list[Receipt] = []
    dispatcher = a_core("round_robin", receipts).dispatcher
    dispatcher.finished(sent(dispatcher, a_request(0), 1.0), Ended(200), 2.0)
    metrics.count(receipts[0])
    text = metrics.text().decode()
    assert 'tfirst_choices_total{path="unknown",reason="next_in_turn"} 1.0' in text
    assert 'tfirst_prompt_tokens_total{source="recompute"} 0.0' in text


def test_who_may_be_chosen_follows_what_is_narrowed() -> None:
    nothing = nothing_estimated(a_core("round_robin").dispatcher.view)
    rows = list(range(nothing.usable_rows.size))
    assert nothing.ready_rows == []
    nothing.only(rows)
    last = nothing.narrowed(np.array([row == rows[-1] for row in rows]))
    assert (nothing.ready_rows, last.ready_rows) == (rows, rows[-1:])
    nothing.only(rows[:1])
    assert (nothing.ready_rows, nothing.usable_rows.tolist()[1:]) == (rows[:1], [False] * (len(rows) - 1))
