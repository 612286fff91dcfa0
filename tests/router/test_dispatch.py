"""The whole decision without a socket: events with their times in, actions out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from policies.base import Choice
from policies.by_load.round_robin import RoundRobin
from router.actions import Cause
from router.health import HealthConfig, State
from router.plugins import build_policy
from tests.builders import MODEL, a_request, held
from tests.router.dispatch_bench import (
    Bench,
    nothing_is_left,
    only_refusal,
    only_send,
)

AVOID_S, TRIAL_S = HealthConfig().avoid_s, HealthConfig().trial_interval_s

# Choice and bookings


def test_a_request_goes_to_the_card_that_prefills_faster() -> None:
    assert Bench("H20", "A100").send().replica == "a100-1"


def test_bookings_push_the_next_request_elsewhere_before_any_signal_arrives() -> None:
    bench = Bench("A100", "A100")
    rows = [bench.send(request_id=f"r-{i}").row for i in range(6)]
    assert sorted(rows) == [0, 0, 0, 1, 1, 1]


def test_a_replica_that_holds_the_prefix_is_chosen_until_its_queue_costs_more_than_recomputing() -> None:
    bench = Bench("A100", "A100", where=held([512, 0]))
    rows = [bench.send(request_id=f"r-{i}").row for i in range(40)]
    assert rows[:10] == [0] * 10
    assert 1 in rows


def test_the_queue_estimate_is_the_booked_work_ahead() -> None:
    bench = Bench("A100")
    first, second = bench.send(0.0, request_id="a"), bench.send(0.0, request_id="b")
    bench.dispatcher.first_token(first, 0.887)
    bench.dispatcher.first_token(second, 1.774)
    for sent in (first, second):
        bench.finish(sent, 3.0)
    alone, behind = (receipt.choice for receipt in bench.receipts)
    assert alone is not None
    assert behind is not None
    assert alone.queue_s == 0.0
    assert behind.queue_s == pytest.approx(alone.compute_s)


@pytest.mark.parametrize("end", ["finished", "cancelled", "broken", "refused_by_all"])
def test_every_way_to_end_leaves_no_booking(end: str) -> None:
    bench = Bench("A100", "A100")
    for index in range(20):
        for row in range(2):  # reachable again, whatever happened
            bench.dispatcher.probed(row, float(index), alive=True)
        sent = bench.send(float(index), request_id=f"r-{index}", streams=index % 2 == 0)
        if index % 3:
            bench.dispatcher.first_token(sent, index + 0.5)
        if end == "finished":
            bench.finish(sent, index + 0.9)
        elif end == "cancelled":
            assert bench.dispatcher.cancelled(sent, index + 0.9) == []
        elif end == "broken":
            assert bench.dispatcher.failed(sent, Cause.BROKEN, index + 0.9) == []
        else:
            retried = only_send(bench.dispatcher.failed(sent, Cause.CONNECT, index + 0.6))
            only_refusal(bench.dispatcher.failed(retried, Cause.CONNECT, index + 0.7))
    assert nothing_is_left(bench)
    assert bench.dispatcher.in_flight == 0
    assert len(bench.receipts) == 20
    assert all(receipt.outcome is not None for receipt in bench.receipts)


def test_a_request_that_is_not_streamed_stops_blocking_the_queue_when_its_prefill_should_be_over() -> None:
    """Its first token is never seen; a long decode must not look like a long prefill."""
    bench = Bench("A100")
    silent = bench.send(0.0, request_id="silent", streams=False)
    bench.finish(bench.send(60.0, request_id="later"), 61.0)
    assert bench.receipts[0].choice is not None
    assert bench.receipts[0].choice.queue_s < 0.02
    assert bench.view.decode_batch[0] == 1
    bench.finish(silent, 62.0)
    assert nothing_is_left(bench)


def test_ending_twice_is_a_programming_error_and_says_which_request() -> None:
    bench = Bench("A100")
    sent = bench.send(request_id="twice")
    bench.finish(sent, 1.0)
    with pytest.raises(AssertionError, match="twice"):
        bench.finish(sent, 2.0)


# Models and availability


def test_an_unknown_model_is_a_404_that_names_the_known_ones() -> None:
    refusal = only_refusal(Bench("A100").dispatcher.arrived(a_request(model="gpt-x"), 0.0))
    assert (refusal.status, refusal.kind, refusal.param) == (404, "NotFoundError", "model")
    assert "gpt-x" in refusal.message
    assert MODEL in refusal.message


def test_a_request_without_a_model_goes_to_any_replica() -> None:
    assert Bench("A100").send(model="").row == 0


def test_with_no_replica_up_the_answer_is_503_with_retry_after() -> None:
    bench = Bench("A100", "A100")
    for row in range(2):
        bench.dispatcher.replica_down(row)
    refusal = only_refusal(bench.dispatcher.arrived(a_request(), 0.0))
    assert refusal.status == 503
    assert refusal.retry_after_s is not None
    assert bench.receipts[0].outcome == "refused"


def test_each_model_goes_only_to_replicas_that_serve_it() -> None:
    bench = Bench("A100", "A100")
    bench.dispatcher.replica_up(1, frozenset({"other"}), 0.0)
    assert {bench.send(request_id=f"r-{i}").row for i in range(8)} == {0}
    assert {bench.send(request_id=f"o-{i}", model="other").row for i in range(8)} == {1}
    assert bench.dispatcher.models == sorted([MODEL, "other"])


def test_a_replica_that_went_down_gets_nothing_until_it_is_up_again() -> None:
    bench = Bench("A100", "A100")
    bench.dispatcher.replica_down(0)
    assert {bench.send(request_id=f"r-{i}").row for i in range(4)} == {1}
    bench.dispatcher.replica_up(0, frozenset({MODEL}), 0.0)
    assert 0 in {bench.send(HealthConfig().slow_start_s, request_id=f"s-{i}").row for i in range(4)}


# Retry


@pytest.mark.parametrize("cause", [Cause.CONNECT, Cause.NO_ANSWER, Cause.BAD_ANSWER, Cause.OVERLOADED])
def test_a_failure_before_the_first_byte_is_tried_once_on_another_replica(cause: Cause) -> None:
    bench = Bench("A100", "A100")
    sent = bench.send(0.0)
    again = only_send(bench.dispatcher.failed(sent, cause, 0.1))
    assert again.row != sent.row
    assert again.attempt == 2
    bench.finish(again, 1.0)
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.attempts, receipt.tried) == ("ok", 2, [sent.replica])


def test_a_stream_that_broke_after_output_is_never_retried() -> None:
    bench = Bench("A100", "A100")
    sent = bench.send(0.0)
    bench.dispatcher.first_token(sent, 0.9)
    assert bench.dispatcher.failed(sent, Cause.BROKEN, 1.0) == []
    assert (bench.receipts[0].outcome, bench.receipts[0].cause) == ("failed", "broken")


@pytest.mark.parametrize(("cause", "status"), [(Cause.CONNECT, 503), (Cause.NO_ANSWER, 502), (Cause.BAD_ANSWER, 502)])
def test_when_everybody_failed_the_client_is_told_of_the_last_replica(cause: Cause, status: int) -> None:
    bench = Bench("A100", "A100")
    sent = bench.send(0.0)
    again = only_send(bench.dispatcher.failed(sent, cause, 0.1))
    refusal = only_refusal(bench.dispatcher.failed(again, cause, 0.2))
    assert refusal.status == status
    assert refusal.retry_after_s is not None
    assert again.replica in refusal.message


def test_no_more_attempts_are_made_than_configured() -> None:
    bench = Bench("A100", "A100", "A100", "A100", max_attempts=2)
    again = only_send(bench.dispatcher.failed(bench.send(0.0), Cause.CONNECT, 0.1))
    only_refusal(bench.dispatcher.failed(again, Cause.CONNECT, 0.2))


def test_the_only_replicas_own_overload_answer_is_left_to_be_relayed() -> None:
    bench = Bench("A100")
    sent = bench.send(0.0)
    assert bench.dispatcher.failed(sent, Cause.OVERLOADED, 0.1) == []
    bench.finish(sent, 0.2, status=503, output_tokens=None)
    assert bench.receipts[0].outcome == "server_error"
    assert nothing_is_left(bench)


def test_a_replica_that_answers_500_at_once_does_not_attract_the_traffic() -> None:
    bench = Bench("A100", "A100")
    broken = 0
    for index in range(100):
        now_s = 0.05 * index
        sent = bench.send(now_s, request_id=f"r-{index}")
        if sent.row == 0:
            broken += 1
            bench.finish(sent, now_s + 0.001, status=500, output_tokens=None)
    assert broken <= 4


def test_several_failures_in_a_row_leave_a_replica_one_trial_in_each_interval_and_a_success_ends_that() -> None:
    bench = Bench("A100", "A100")
    to_first = []
    for index in range(400):
        now_s = 0.1 * index
        sent = bench.send(now_s, request_id=f"r-{index}")
        if sent.row == 0:
            to_first.append(now_s)
        mended = now_s >= 22.0
        bench.finish(sent, now_s + 0.01, status=500 if sent.row == 0 and not mended else 200, output_tokens=1)
    trials = [at_s for at_s in to_first if 5.0 < at_s < 22.0]
    assert len(trials) in (3, 4)
    assert all(later - first >= TRIAL_S - 1e-9 for first, later in pairwise(trials))
    back = [at_s for at_s in to_first if at_s >= 22.0]
    assert back[0] <= 22.0 + TRIAL_S
    assert len(back) > 50


def test_thousands_of_failures_in_a_row_change_nothing_for_the_books() -> None:
    bench = Bench("A100")
    for index in range(1100):
        bench.finish(bench.send(float(index), request_id=f"r-{index}"), index + 0.5, status=500, output_tokens=None)
    assert nothing_is_left(bench)
    assert len(bench.receipts) == 1100


def test_an_incident_that_breaks_many_streams_costs_a_replica_one_interval_and_not_one_for_each() -> None:
    bench = Bench("A100", "A100")
    streams = [bench.send(0.0, request_id=f"r-{i}") for i in range(40)]
    broken = [sent for sent in streams if sent.row == 0]
    assert len(broken) == 20
    for sent in broken:
        bench.dispatcher.failed(sent, Cause.BROKEN, 5.0)
    for sent in streams:
        if sent.row == 1:
            bench.dispatcher.cancelled(sent, 5.0)
    assert {bench.send(5.5, request_id=f"s-{i}").row for i in range(4)} == {1}
    trial = bench.send(5.0 + TRIAL_S, request_id="trial")
    assert trial.row == 0
    bench.dispatcher.first_token(trial, 5.1 + TRIAL_S)
    assert bench.dispatcher.health(0).state() is State.CLOSED


def test_replicas_that_are_full_do_not_attract_the_traffic() -> None:
    bench = Bench("A100", "A100", "A100", "A100", max_attempts=2)
    relayed = 0
    for index in range(200):
        now_s = 0.01 * index
        sent = bench.send(now_s, request_id=f"r-{index}")
        while sent.row != 3:
            actions = bench.dispatcher.failed(sent, Cause.OVERLOADED, now_s)
            if not actions:
                bench.finish(sent, now_s, status=503, output_tokens=None)
                relayed += 1
                break
            sent = only_send(actions)
    assert relayed < 20


@pytest.mark.parametrize(
    "odd", [{"output_tokens": 0}, {"cached_tokens": 10**9}, {"prompt_tokens": 0, "cached_tokens": 0}]
)
@pytest.mark.parametrize("exact", [True, False])
def test_odd_usage_never_costs_the_booking(odd: dict[str, int], exact: bool) -> None:
    bench = Bench("A100")
    sent = bench.send(0.0, prompt_exact=exact)
    bench.dispatcher.first_token(sent, 0.5)
    bench.finish(sent, 1.0, **odd)
    assert nothing_is_left(bench)
    assert np.isfinite(bench.view.coefficients).all()


def test_the_only_replica_is_used_even_while_it_rests() -> None:
    bench = Bench("A100")
    only_refusal(bench.dispatcher.failed(bench.send(0.0), Cause.CONNECT, 0.0))
    assert bench.send(0.1, request_id="next").row == 0


def test_a_model_whose_only_replica_is_down_is_a_503_and_not_unknown() -> None:
    bench = Bench("A100", "A100")
    bench.dispatcher.replica_up(1, frozenset({"other"}), 0.0)
    bench.dispatcher.replica_down(1)
    assert only_refusal(bench.dispatcher.arrived(a_request(model="other"), 0.0)).status == 503


def test_before_every_replica_has_said_what_it_serves_no_model_is_unknown() -> None:
    bench = Bench("A100", "A100", say_models=1)
    refusal = bench.dispatcher.arrived(a_request(model="other"), 0.0)
    assert only_refusal(refusal).status == 503


def test_requests_without_a_prefill_go_by_load_whatever_the_policy() -> None:
    bench = Bench("A100", "H20", "A100", "H20", policy="e2e")
    rows = [bench.send(request_id=f"r-{i}", generates=False, prompt_tokens=0).row for i in range(40)]
    assert sorted(rows.count(row) for row in range(4)) == [10, 10, 10, 10]


def test_retries_never_go_back_to_a_replica_that_failed_before() -> None:
    bench = Bench("A100", "A100", "A100")
    first = bench.send(0.0)
    second = only_send(bench.dispatcher.failed(first, Cause.CONNECT, 0.1))
    third = only_send(bench.dispatcher.failed(second, Cause.CONNECT, 0.2))
    assert {first.row, second.row, third.row} == {0, 1, 2}
    assert first.row != third.row


def test_what_a_retry_expects_counts_from_its_own_placement() -> None:
    bench = Bench("A100", "A100")
    again = only_send(bench.dispatcher.failed(bench.send(0.0), Cause.NO_ANSWER, 600.0))
    bench.dispatcher.first_token(again, 600.9)
    bench.finish(again, 601.0)
    (receipt,) = bench.receipts
    assert receipt.placed_s == 600.0
    assert receipt.first_token_s == pytest.approx(600.9)


def test_a_policy_that_raises_leaves_a_receipt_and_no_booking() -> None:
    bench = Bench("A100", "A100")
    sent = bench.send(0.0)

    class Broken:
        def choose(self, *facts: object) -> Choice:
            raise RuntimeError("broken rule")

    bench.dispatcher._placer._policy = Broken()
    with pytest.raises(RuntimeError):
        bench.dispatcher.arrived(a_request(request_id="new"), 0.1)
    with pytest.raises(RuntimeError):
        bench.dispatcher.failed(sent, Cause.CONNECT, 0.2)
    assert [receipt.cause for receipt in bench.receipts] == ["internal", "internal"]
    assert nothing_is_left(bench)


def test_a_replica_that_refused_a_connection_rests_and_then_gets_requests_again() -> None:
    bench = Bench("A100", "A100")
    failed = bench.send(0.0)
    bench.finish(only_send(bench.dispatcher.failed(failed, Cause.CONNECT, 0.0)), 0.5)
    soon = {bench.send(0.6, request_id=f"r-{i}").row for i in range(4)}
    later = {bench.send(AVOID_S + 0.1, request_id=f"s-{i}").row for i in range(8)}
    assert failed.row not in soon
    assert failed.row in later


def test_an_answer_that_depends_on_the_request_is_neutral_for_the_replica() -> None:
    bench = Bench("A100")
    for index in range(50):
        bench.finish(bench.send(float(index), request_id=f"r-{index}"), index + 0.1, status=400, output_tokens=None)
    assert bench.send(60.0, request_id="valid").row == 0
    assert {receipt.outcome for receipt in bench.receipts} == {"client_error"}


# Receipts


def test_a_receipt_holds_every_candidate_the_choice_and_what_happened() -> None:
    bench = Bench("A100", "H20", where=held([256, 0]))
    sent = bench.send(7.0)
    bench.dispatcher.first_token(sent, 7.5)
    bench.finish(sent, 9.0, cached_tokens=4096)
    (receipt,) = bench.receipts
    assert [(c.replica, c.path, c.local_tokens) for c in receipt.candidates] == [
        ("a100-0", "local", 4096),
        ("h20-1", "recompute", 0),
    ]
    assert receipt.chosen == 0
    assert receipt.arrived_at == 1007.0
    assert receipt.first_token_s == pytest.approx(0.5)
    assert receipt.ended_s == pytest.approx(2.0)
    assert (receipt.output_tokens, receipt.cached_tokens, receipt.status) == (100, 4096, 200)


def test_parts_of_a_candidate_add_up_to_its_first_token() -> None:
    bench = Bench("A100", "H20")
    for index in range(9):
        bench.send(0.1 * index, request_id=f"r-{index}")
    bench.finish(bench.send(1.0, request_id="last"), 2.0)
    for candidate in bench.receipts[-1].candidates:
        assert candidate.first_token_s == pytest.approx(max(candidate.queue_s, candidate.fetch_s) + candidate.compute_s)


def test_the_summary_is_made_only_for_those_who_asked() -> None:
    bench = Bench("A100")
    assert bench.send(request_id="a").explain is None
    asked = bench.send(request_id="b", explain=True).explain
    assert asked is not None
    assert '"policy":"ttft"' in asked
    assert '"replica":"a100-0"' in asked


def test_two_dispatchers_with_the_same_seed_and_events_decide_alike() -> None:
    def rows() -> list[int]:
        bench = Bench("A100", "A100", "H20", "H20", policy="e2e")
        taken = []
        for index in range(80):
            sent = bench.send(0.05 * index, request_id=f"r-{index}", prompt_tokens=500 + 97 * (index % 31))
            taken.append(sent.row)
            if index % 2:
                bench.dispatcher.first_token(sent, 0.05 * index + 0.04)
                bench.finish(sent, 0.05 * index + 0.045)
        return taken

    assert rows() == rows()


def test_round_robin_is_fair_through_the_dispatcher() -> None:
    bench = Bench("A100", "A100", "H20", policy="round_robin")
    assert isinstance(build_policy("round_robin", {}, 0), RoundRobin)
    assert [bench.send(request_id=f"r-{i}").row for i in range(6)] == [0, 1, 2, 0, 1, 2]


# State that one replica keeps


def test_a_request_bound_to_a_replica_goes_there_and_nowhere_else() -> None:
    bench = Bench("A100", "A100", "A100")
    name = bench.view.names[1]
    sent = [bench.send(only=name, request_id=f"r-{number}") for number in range(9)]
    assert {one.replica for one in sent} == {name}
    refusal = only_refusal(bench.dispatcher.failed(sent[0], Cause.CONNECT, 0.1))
    assert refusal.status == 503
    assert bench.dispatcher.failed(sent[1], Cause.OVERLOADED, 0.1) == [], "its own answer is relayed"


def test_while_the_replica_that_keeps_the_state_is_down_the_answer_names_it() -> None:
    bench = Bench("A100", "A100")
    name = bench.view.names[1]
    bench.dispatcher.replica_down(1)
    refusal = only_refusal(bench.dispatcher.arrived(a_request(only=name), 0.0))
    assert (refusal.status, refusal.retry_after_s) == (503, 1)
    assert name in refusal.message
    gone = only_refusal(bench.dispatcher.arrived(a_request(only="gone"), 0.0))
    assert gone.status == 404
    assert "gone" in gone.message


def test_a_stored_response_is_asked_of_every_replica_once_and_none_is_blamed() -> None:
    bench = Bench("A100", "A100", "A100", "A100", max_attempts=2)
    sent = bench.send(0.0, generates=False)
    asked = [sent.row]
    while actions := bench.dispatcher.failed(sent, Cause.ELSEWHERE, 0.1):
        sent = only_send(actions)
        asked.append(sent.row)
    bench.finish(sent, 0.2, status=404, output_tokens=None)
    assert sorted(asked) == [0, 1, 2, 3]
    healths = [bench.dispatcher.health(row) for row in range(4)]
    assert all(health.failures == 0 and health.avoid_until_s == -np.inf for health in healths)
    assert bench.receipts[0].outcome == "client_error"
    assert nothing_is_left(bench)
