"""The rest of a stream that broke is placed like a request, by the same rules, and ends in one receipt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from estimators.request import RequestFacts
from router.actions import Cause, Hold, Refuse, Send
from router.admission import AdmissionConfig
from router.health import State
from router.metrics import Metrics
from router.receipts import Receipt, Resume
from router.receipts.writer import was_late
from router.resume.continuation import Rest
from router.resume.placement import rest_as_request
from router.resume.reasons import WhyNot
from router.retries import RetryConfig
from tests.builders import a_request, held
from tests.router.dispatch_bench import Bench, nothing_is_left, only_refusal, only_send

CARDS = ("A100", "A100", "H20")


def rest_of(sent: Send, *, sent_tokens: int = 40, **read: Any) -> RequestFacts:
    tokens = sent.request.prompt_tokens + sent_tokens
    return rest_as_request(sent.request, a_request(tokens, **read), Rest.TEXT, sent_tokens=sent_tokens)


def begun(bench: Bench, now_s: float = 0.0, **changes: Any) -> Send:
    sent = bench.send(now_s, streams=True, **changes)
    bench.dispatcher.first_token(sent, now_s + 0.5)
    return sent


def test_the_rest_goes_to_another_replica_and_one_receipt_tells_of_both() -> None:
    bench = Bench(*CARDS)
    first = begun(bench)
    second = only_send(bench.dispatcher.broke(first, rest_of(first), 3.0))
    assert second.row != first.row
    bench.dispatcher.first_token(second, 3.4)
    bench.finish(second, 5.0, output_tokens=60)
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.cause, receipt.not_resumed) == ("ok", None, None)
    assert receipt.resumes == [Resume(first.replica, 3.0, 40, went_on_s=3.4)]
    assert (receipt.tried, receipt.attempts, receipt.output_tokens) == ([first.replica], 2, 100)
    assert receipt.prompt_tokens == first.request.prompt_tokens
    assert nothing_is_left(bench)


def test_the_first_token_is_the_clients_and_the_forecast_is_compared_with_the_last_ones() -> None:
    bench = Bench(*CARDS)
    first = begun(bench)
    second = only_send(bench.dispatcher.broke(first, rest_of(first), 3.0))
    bench.dispatcher.first_token(second, 3.4)
    bench.finish(second, 5.0)
    (receipt,) = bench.receipts
    assert receipt.first_token_s == 0.5
    assert receipt.placed_s == 3.0
    assert receipt.waited_s == pytest.approx(0.4)
    assert was_late(msgspec.structs.replace(receipt, deadline_s=0.4)) is True, "the client's first token counts"
    assert was_late(msgspec.structs.replace(receipt, deadline_s=1.0)) is False


def test_a_replica_that_holds_prompt_and_sent_text_is_worth_more_for_the_rest() -> None:
    bench = Bench("A100", "A100", "A100", where=held([0, 512, 512]))
    first = begun(bench)
    second = only_send(bench.dispatcher.broke(first, rest_of(first), 3.0))
    assert {first.row, second.row} == {1, 2}
    bench.finish(second, 4.0)
    choice = bench.receipts[0].choice
    assert choice is not None
    assert choice.local_tokens == 8192


def test_nobody_is_asked_twice_for_one_stream() -> None:
    bench = Bench(*CARDS)
    sent = begun(bench)
    rows = [sent.row]
    for now_s in (1.0, 2.0):
        sent = only_send(bench.dispatcher.broke(sent, rest_of(sent), now_s))
        rows.append(sent.row)
    assert sorted(rows) == [0, 1, 2]
    assert bench.dispatcher.broke(sent, rest_of(sent), 3.0) == []
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.cause, receipt.not_resumed) == ("failed", "broken", "no_replica")
    assert len(receipt.resumes) == 2
    assert nothing_is_left(bench)


def test_it_takes_from_the_budget_of_second_attempts() -> None:
    bench = Bench(*CARDS, retries=RetryConfig(share=0.0, per_s=0.0, burst=1.0))
    for went_on in (True, False):
        sent = begun(bench)
        again = bench.dispatcher.broke(sent, rest_of(sent), 1.0)
        assert bool(again) is went_on
        for action in again:
            assert isinstance(action, Send)
            bench.dispatcher.cancelled(action, 2.0)
    assert [receipt.not_resumed for receipt in bench.receipts] == [None, "no_budget"]
    assert (bench.dispatcher.retries.made, bench.dispatcher.retries.denied) == (1, 1)


def test_what_cannot_go_on_costs_no_budget_and_says_why() -> None:
    bench = Bench(*CARDS)
    sent = begun(bench)
    assert bench.dispatcher.broke(sent, WhyNot.TOOLS, 1.0) == []
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.cause, receipt.not_resumed) == ("failed", "broken", "tools")
    assert (receipt.resumes, bench.dispatcher.retries.made) == ([], 0)


def test_a_break_is_a_failure_of_the_replica_whether_or_not_the_stream_goes_on() -> None:
    bench = Bench(*CARDS)
    for broken in (rest_of, lambda sent: WhyNot.TOOLS):
        sent = begun(bench)
        before = bench.dispatcher.health(sent.row).failures
        for action in bench.dispatcher.broke(sent, broken(sent), 1.0):
            assert isinstance(action, Send)
            bench.dispatcher.cancelled(action, 2.0)
        assert bench.dispatcher.health(sent.row).failures == before + 1


def test_a_replica_that_would_not_go_on_with_it_has_not_failed() -> None:
    bench = Bench(*CARDS)
    first = begun(bench)
    second = only_send(bench.dispatcher.broke(first, rest_of(first), 1.0))
    assert bench.dispatcher.broke(second, WhyNot.REFUSED, 2.0) == []
    assert bench.dispatcher.health(second.row).failures == 0
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.cause, receipt.not_resumed) == ("failed", "rest_refused", "refused")
    assert nothing_is_left(bench)


def test_an_attempt_at_the_rest_that_brings_nothing_is_retried_like_any_other() -> None:
    bench = Bench(*CARDS)
    first = begun(bench)
    second = only_send(bench.dispatcher.broke(first, rest_of(first), 1.0))
    third = only_send(bench.dispatcher.failed(second, Cause.CONNECT, 1.5))
    assert third.request is second.request
    assert len({first.row, second.row, third.row}) == 3
    refusal = only_refusal(bench.dispatcher.failed(third, Cause.CONNECT, 2.0))
    assert "no more attempts" in refusal.message
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.not_resumed, receipt.status) == ("failed", "too_often", None)
    assert receipt.resumes == [Resume(first.replica, 1.0, 40)]


def test_an_overloaded_answer_to_the_rest_is_not_relayed_when_nobody_can_stand_in() -> None:
    bench = Bench("A100", "A100")
    first = begun(bench)
    second = only_send(bench.dispatcher.broke(first, rest_of(first), 1.0))
    only_refusal(bench.dispatcher.failed(second, Cause.OVERLOADED, 2.0, 7.0))
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.cause, receipt.not_resumed) == ("failed", "overloaded", "no_replica")
    assert bench.dispatcher.health(second.row).state() is State.CLOSED
    assert nothing_is_left(bench)


FULL = AdmissionConfig(max_in_flight=1, queue_timeout_s=5.0)


def test_where_all_others_are_full_the_rest_waits_from_its_break_on() -> None:
    """However long its stream has been running."""
    bench = Bench("A100", "A100", admission=FULL)
    first, other = begun(bench), bench.send(0.1)
    (hold,) = bench.dispatcher.broke(first, rest_of(first), 60.0)
    assert isinstance(hold, Hold)
    assert bench.dispatcher.due(64.9) == []
    (granted,) = bench.dispatcher.cancelled(other, 64.9)
    assert isinstance(granted, Send)
    assert granted.held is hold
    bench.finish(granted, 66.0)
    assert [receipt.outcome for receipt in bench.receipts] == ["cancelled", "ok"]


def test_a_rest_that_waited_in_vain_is_a_failed_stream_and_no_refusal() -> None:
    bench = Bench("A100", "A100", admission=FULL)
    first, other = begun(bench), bench.send(0.1)
    (hold,) = bench.dispatcher.broke(first, rest_of(first), 60.0)
    (refused,) = bench.dispatcher.due(65.1)
    assert isinstance(refused, Refuse)
    assert refused.held is hold
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.cause, receipt.not_resumed) == ("failed", "broken", "no_replica")
    assert receipt.status is None
    bench.finish(other, 66.0)


def test_a_deadline_of_the_first_token_does_not_keep_the_rest_out() -> None:
    late = AdmissionConfig(late="refuse", deadline_s=20.0)
    bench = Bench("A100", "A100", admission=late)
    first = begun(bench)
    second = only_send(bench.dispatcher.broke(first, rest_of(first), 600.0))
    bench.finish(second, 601.0)


def test_the_length_of_a_rest_is_not_learned_as_one_of_answers() -> None:
    """Short rests leave what is expected of the next whole answer alone; whole short answers would not."""
    expected = []
    for is_rest in (True, False):
        bench = Bench("A100", "A100")
        for turn in range(30):
            first = bench.send(float(turn), streams=True)
            if is_rest:
                first = only_send(bench.dispatcher.broke(first, rest_of(first), turn + 0.1))
            bench.finish(first, turn + 0.5, output_tokens=2)
        last = bench.send(40.0)
        bench.dispatcher.cancelled(last, 41.0)
        expected.append(bench.receipts[-1].expected_output_tokens)
    untouched = Bench("A100", "A100")
    last = untouched.send(40.0)
    untouched.dispatcher.cancelled(last, 41.0)
    assert expected[0] == untouched.receipts[-1].expected_output_tokens
    assert expected[1] is not None
    assert expected[0] is not None
    assert expected[1] < expected[0]


def test_breaks_are_counted_by_what_became_of_them() -> None:
    bench, metrics = Bench(*CARDS), Metrics()
    sent = begun(bench)
    second = only_send(bench.dispatcher.broke(sent, rest_of(sent), 1.0))
    bench.dispatcher.first_token(second, 1.2)
    assert bench.dispatcher.broke(second, WhyNot.STOP_AT_CUT, 2.0) == []
    whole = bench.send(3.0, streams=True)
    bench.finish(whole, 4.0)
    for receipt in bench.receipts:
        metrics.count(receipt)
    counted = {
        line.partition(" ")[0]: float(line.partition(" ")[2])
        for line in metrics.text().decode().splitlines()
        if line.startswith("tfirst_resumes_total")
    }
    assert counted == {
        'tfirst_resumes_total{outcome="resumed"}': 1.0,
        'tfirst_resumes_total{outcome="stop_at_cut"}': 1.0,
    }


def test_a_receipt_of_a_resumed_stream_comes_back_from_its_line() -> None:
    bench = Bench(*CARDS)
    first = begun(bench)
    bench.finish(only_send(bench.dispatcher.broke(first, rest_of(first), 1.0)), 2.0)
    (receipt,) = bench.receipts
    assert msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt) == receipt
