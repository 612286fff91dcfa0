"""Arms of an experiment in the dispatcher: whose rule decides, and what receipts and metrics say of it."""

from __future__ import annotations

from typing import Any

import pytest

from estimators.request import RequestFacts
from router.actions import Cause, Hold, Send
from router.admission import AdmissionConfig
from router.config import ArmConfig, ExperimentConfig, PolicyConfig
from router.experiments import Experiments
from router.metrics import Metrics
from router.notes import Notes
from router.plugins import build_policy
from router.receipts import Receipt
from router.receipts.writer import Detail
from tests.builders import a_request, held
from tests.router.dispatch_bench import Bench, only_refusal, only_send

ARMS = {
    "near": ArmConfig(policy=PolicyConfig(name="kv_affinity")),
    "turns": ArmConfig(policy=PolicyConfig(name="round_robin")),
}


def experiments(**changes: Any) -> Experiments:
    config = ExperimentConfig(**{"arms": ARMS, "trusted": ["alice"], **changes})
    return Experiments(PolicyConfig(name="ttft"), config, lambda rule: build_policy(rule.name, rule.settings, seed=1))


def a_bench(**changes: Any) -> Bench:
    """Three replicas, of which only the last has anything of the prompt."""
    given = changes.pop("experiments", None) or experiments()
    return Bench("A100", "A100", "A100", where=held([0, 0, 400]), experiments=given, **changes)


def sessions(bench: Bench, count: int = 60, **changes: Any) -> list[Send]:
    return [bench.send(float(n), session=f"s{n}", request_id=f"r{n}", **changes) for n in range(count)]


def receipts_of(bench: Bench, sent: list[Send]) -> list[Receipt]:
    for one in sent:
        bench.finish(one, 200.0)
    return bench.receipts


def test_each_arms_own_rule_decides_and_receipts_say_whose_it_was() -> None:
    bench = a_bench()
    by_arm: dict[str, set[str]] = {"near": set(), "turns": set()}
    for receipt in receipts_of(bench, sessions(bench)):
        assert receipt.choice is not None
        assert receipt.arm is not None
        assert (receipt.arm_share, receipt.override) == (0.5, False)
        assert receipt.policy == ARMS[receipt.arm].policy.name
        by_arm[receipt.arm].add(receipt.choice.replica)
    assert by_arm == {"near": {"a100-2"}, "turns": {"a100-0", "a100-1", "a100-2"}}


def test_a_retry_stays_in_its_arm() -> None:
    bench = a_bench()
    sent = sessions(bench, 20)
    again = [only_send(bench.dispatcher.failed(one, Cause.CONNECT, 100.0)) for one in sent[:10]]
    receipts = {receipt.request_id: receipt for receipt in receipts_of(bench, [*again, *sent[10:]])}
    for one in sent:
        assigned = experiments().assigned(one.request)
        assert receipts[one.request.request_id].arm == assigned.arm.name


def test_a_shadow_is_written_down_and_changes_nothing() -> None:
    alone, watched = a_bench(), a_bench(experiments=experiments(shadows={"quiet": PolicyConfig(name="least_request")}))
    plain, shadowed = (receipts_of(bench, sessions(bench)) for bench in (alone, watched))
    assert [one.choice for one in plain] == [one.choice for one in shadowed]
    for receipt in shadowed:
        (shadow,) = receipt.shadows
        assert (shadow.arm, shadow.replica in alone.view.names) == ("quiet", True)
    assert any(one.choice is not None and one.shadows[0].replica != one.choice.replica for one in shadowed)


def test_nobody_is_asked_about_a_request_that_generates_nothing() -> None:
    bench = a_bench(experiments=experiments(shadows={"quiet": PolicyConfig(name="least_request")}))
    (receipt,) = receipts_of(bench, [bench.send(0.0, generates=False, streams=False)])
    assert (receipt.arm, receipt.shadows, receipt.policy) == (None, [], "ttft")


def test_a_trusted_client_gets_the_rule_it_asks_for_and_its_requests_are_in_no_arms_numbers() -> None:
    bench, metrics = a_bench(), Metrics()
    sent = bench.send(0.0, client="alice", policy="kv_affinity")
    (receipt,) = receipts_of(bench, [sent])
    assert (receipt.override, receipt.policy, receipt.arm_share) == (True, "kv_affinity", None)
    metrics.count(receipt)
    assert "tfirst_arm_requests_total{" not in metrics.text().decode()


@pytest.mark.parametrize(("client", "policy", "status"), [("bob", "ttft", 403), ("alice", "nonsense", 400)])
def test_a_rule_that_cannot_be_had_is_refused_and_counted_once(client: str, policy: str, status: int) -> None:
    bench = a_bench()
    refusal = only_refusal(bench.dispatcher.arrived(a_request(client=client, policy=policy), 0.0))
    assert refusal.status == status
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.cause, receipt.status) == ("client_error", "override", status)
    assert bench.dispatcher.in_flight == 0


def test_a_reload_moves_new_requests_and_leaves_what_was_learned() -> None:
    given = experiments()
    bench = a_bench(experiments=given)
    for sent in sessions(bench, 30):
        bench.dispatcher.first_token(sent, 100.0)
    learned = bench.dispatcher.learning.state(100.0)
    given.reload(ExperimentConfig(arms={"turns": ARMS["turns"]}, trusted=["alice"]))
    assert bench.dispatcher.learning.state(100.0) == learned
    later = bench.send(101.0, session="s-new", request_id="later")
    assert receipts_of(bench, [later])[-1].arm == "turns"


def test_a_request_that_waited_over_a_reload_is_in_the_arm_whose_rule_decided() -> None:
    given = experiments()
    bench = a_bench(experiments=given, admission=AdmissionConfig(max_in_flight=1))
    first = sessions(bench, 3)
    (waits,) = bench.dispatcher.arrived(a_request(session="s0", request_id="waits"), 50.0)
    assert isinstance(waits, Hold)
    given.reload(ExperimentConfig(arms={"least": ArmConfig(policy=PolicyConfig(name="least_request"))}))
    sent = only_send(bench.dispatcher.cancelled(first[0], 51.0))
    bench.dispatcher.cancelled(sent, 52.0)
    receipt = bench.receipts[-1]
    assert receipt.request_id == "waits"
    assert (receipt.arm, receipt.policy, receipt.arm_share) == ("least", "least_request", 1.0)


def test_a_trusted_clients_request_that_waited_until_it_was_trusted_no_more_is_the_usual_rules() -> None:
    given = experiments()
    bench = a_bench(experiments=given, admission=AdmissionConfig(max_in_flight=1))
    first = sessions(bench, 3)
    asks = a_request(client="alice", policy="turns", request_id="waits")
    (waits,) = bench.dispatcher.arrived(asks, 50.0)
    assert isinstance(waits, Hold)
    given.reload(ExperimentConfig(arms=ARMS))
    on_best = next(one for one in first if one.row == 2)
    sent = only_send(bench.dispatcher.cancelled(on_best, 51.0))
    bench.dispatcher.cancelled(sent, 52.0)
    receipt = bench.receipts[-1]
    assert (receipt.arm, receipt.policy, receipt.override) == (None, "ttft", False)


def test_metrics_count_each_arm() -> None:
    bench, metrics = a_bench(), Metrics()
    for receipt in receipts_of(bench, sessions(bench)):
        metrics.count(receipt)
    counts = [
        metrics.registry.get_sample_value("tfirst_arm_requests_total", {"arm": arm, "outcome": "ok"}) or 0.0
        for arm in ARMS
    ]
    assert sum(counts) == 60.0
    assert min(counts) > 10.0


def test_everything_that_ended_is_given_away_to_be_kept_once_with_its_decision_where_there_was_one() -> None:
    kept: list[tuple[Receipt, RequestFacts | None, Detail | None]] = []

    def keep(receipt: Receipt, request: RequestFacts | None, detail: Detail | None) -> None:
        assert receipt.outcome is not None
        kept.append((receipt, request, detail))

    bench = a_bench(keep=keep)
    sent = bench.send(0.0)
    bench.finish(sent, 1.0)
    bench.dispatcher.arrived(a_request(model="unknown", request_id="r-2"), 2.0)
    (placed, request, detail), (refused, nothing, none) = kept
    assert [placed, refused] == bench.receipts
    assert request is sent.request
    assert isinstance(detail, Notes)
    assert (nothing, none) == (None, None)
