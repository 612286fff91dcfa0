"""Requests that find every replica full: held, let go, timed out, given up, refused."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import Choice
from router.actions import Action, Cause, Ended, Hold, Refuse, Send
from router.admission import AdmissionConfig
from router.retries import RetryConfig
from tests.builders import MODEL, a_request, held
from tests.router.dispatch_bench import Bench, nothing_is_left, only_refusal, only_send


def a_bench(*cards: str, retries: RetryConfig | None = None, where: Any = None, **config: Any) -> Bench:
    settings = {"max_prefills": 1, **config}
    return Bench(*(cards or ("A100",)), admission=AdmissionConfig(**settings), retries=retries, where=where)


def hold(bench: Bench, now_s: float = 0.0, **changes: Any) -> Hold:
    (action,) = bench.dispatcher.arrived(a_request(**changes), now_s)
    assert isinstance(action, Hold)
    return action


def names(actions: list[Action]) -> list[str]:
    return [action.request.request_id for action in actions if isinstance(action, Send)]


def test_a_request_waits_while_every_replica_is_full_and_goes_when_one_is_not() -> None:
    bench = a_bench()
    first = bench.send(request_id="first")
    second = hold(bench, 0.1, request_id="second")
    assert bench.dispatcher.queued == {"": 1}
    sent = only_send(bench.dispatcher.first_token(first, 0.9))
    assert sent.held is second
    assert sent.request is second.request
    assert bench.dispatcher.queued == {}
    bench.finish(first, 2.0)
    bench.finish(sent, 3.0)
    assert bench.receipts[1].placed_s == pytest.approx(0.8)
    assert nothing_is_left(bench)


@pytest.mark.parametrize("end", ["finished", "cancelled", "broken", "failed"])
def test_every_way_to_end_makes_room(end: str) -> None:
    bench = a_bench(max_prefills=None, max_in_flight=1)
    first, waits = bench.send(request_id="first"), hold(bench, 0.1, request_id="second")
    if end == "finished":
        actions = bench.dispatcher.finished(first, Ended(200), 1.0)
    elif end == "cancelled":
        actions = bench.dispatcher.cancelled(first, 1.0)
    else:
        actions = bench.dispatcher.failed(first, Cause.BROKEN if end == "broken" else Cause.NO_ANSWER, 1.0)
    if end == "failed":  # its own answer comes first
        own, *actions = actions
        assert isinstance(own, Refuse)
        assert own.held is None
    assert only_send(actions).held is waits


def test_without_limits_nobody_waits() -> None:
    bench = Bench("A100")
    for number in range(200):
        bench.send(0.0, request_id=f"r-{number}")
    assert bench.dispatcher.queued == {}


def test_only_requests_that_generate_wait() -> None:
    bench = a_bench()
    bench.send(request_id="first")
    assert bench.send(0.1, request_id="tokenize", generates=False, prompt_tokens=0).row == 0


def test_a_client_that_leaves_the_queue_is_forgotten_at_once() -> None:
    """One replica with one place; 1 holds it for 3 s, 2 and 3 leave, 5 has waited too long, 6 loses its model."""
    bench = a_bench(max_prefills=None, max_in_flight=1, queue_timeout_s=3.1)
    first = bench.send(0.0, request_id="1")
    two, three, four = (hold(bench, 0.1, request_id=name) for name in "234")
    for one in (two, three):
        assert bench.dispatcher.left(one, 0.5) == []
    assert bench.dispatcher.queued == {"": 1}
    sent = only_send(bench.dispatcher.finished(first, Ended(200), 3.0))
    assert sent.held is four
    five = hold(bench, 3.0, request_id="5")
    hold(bench, 3.2, request_id="6")
    assert bench.dispatcher.next_due_s == pytest.approx(6.1)
    timed_out = only_refusal(bench.dispatcher.due(6.1))
    assert (timed_out.status, timed_out.held) == (503, five)
    assert timed_out.retry_after_s is not None
    bench.dispatcher.replica_down(0)
    gone = only_refusal(bench.dispatcher.due(6.2))
    assert (gone.status, gone.message) == (503, "no replica is up; try again shortly")
    outcomes = {receipt.request_id: receipt.outcome for receipt in bench.receipts}
    assert outcomes == {"1": "ok", "2": "cancelled", "3": "cancelled", "5": "refused", "6": "refused"}


def test_leaving_twice_is_a_programming_error_and_says_which_request() -> None:
    bench = a_bench()
    bench.send(request_id="first")
    waits = hold(bench, request_id="waits")
    bench.dispatcher.left(waits, 0.1)
    with pytest.raises(AssertionError, match="waits"):
        bench.dispatcher.left(waits, 0.2)


def test_a_full_queue_refuses_the_last_and_says_when_to_come_back() -> None:
    bench = a_bench(max_queued=2)
    bench.send(request_id="first")
    for name in ("a", "b"):
        hold(bench, request_id=name)
    refusal = only_refusal(bench.dispatcher.arrived(a_request(request_id="c"), 0.0))
    assert refusal.status == 429
    assert refusal.retry_after_s == 2  # two prefills of 0.9 s wait


def test_a_flood_of_one_tenant_takes_neither_places_nor_turns_of_another() -> None:
    bench = a_bench(max_queued=4)
    now = bench.send(request_id="now", tenant="flood")
    for number in range(4):
        hold(bench, request_id=f"f{number}", tenant="flood")
    mine, pushed_out = bench.dispatcher.arrived(a_request(request_id="mine", tenant="small"), 0.1)
    assert isinstance(mine, Hold)
    assert isinstance(pushed_out, Refuse)
    assert pushed_out.held is not None
    assert (pushed_out.status, pushed_out.held.request.request_id) == (429, "f3")
    order = []
    for number in range(4):
        now = only_send(bench.dispatcher.first_token(now, 1.0 + number))
        order.append(now.request.request_id)
    assert order.index("mine") <= 1


def test_shorter_work_goes_first_when_asked_for_and_in_turn_otherwise() -> None:
    for order, expected in (("fcfs", "long"), ("wspt", "short")):
        bench = a_bench(order=order)
        first = bench.send(request_id="first")
        hold(bench, 0.1, request_id="long", prompt_tokens=16000)
        hold(bench, 0.2, request_id="short", prompt_tokens=500)
        assert names(bench.dispatcher.first_token(first, 1.0)) == [expected]


def test_a_higher_priority_goes_first() -> None:
    bench = a_bench()
    first = bench.send(request_id="first")
    hold(bench, 0.1, request_id="plain")
    hold(bench, 0.2, request_id="urgent", priority=1)
    assert names(bench.dispatcher.first_token(first, 1.0)) == ["urgent"]


def test_a_request_whose_deadline_would_pass_is_refused_at_once_and_not_after_waiting() -> None:
    bench = a_bench(late="refuse")
    assert only_refusal(bench.dispatcher.arrived(a_request(request_id="x", deadline_s=0.1), 0.0)).status == 429
    bench.send(request_id="first", deadline_s=2.0)
    hold(bench, 0.0, request_id="second", deadline_s=2.5)
    refusal = only_refusal(bench.dispatcher.arrived(a_request(request_id="third", deadline_s=1.5), 0.0))
    assert refusal.status == 429
    assert "1.5 s" in refusal.message
    assert refusal.retry_after_s is not None
    late = only_refusal(bench.dispatcher.due(2.4))  # nobody made room in time: 0.9 s of work are left to do
    assert late.held is not None
    assert late.held.request.request_id == "second"


def test_without_that_option_a_deadline_refuses_nobody() -> None:
    bench = a_bench()
    bench.send(request_id="first", deadline_s=0.001)
    hold(bench, request_id="second", deadline_s=0.001)


def test_a_retry_waits_for_room_like_everybody_and_keeps_its_age() -> None:
    bench = a_bench("A100", "A100")
    first, second = bench.send(request_id="first"), bench.send(request_id="second")
    hold(bench, 0.1, request_id="later")
    again, freed = bench.dispatcher.failed(first, Cause.OVERLOADED, 0.2, retry_after_s=60.0), []
    assert isinstance(again[0], Hold)
    assert again[0].request is first.request
    freed = bench.dispatcher.first_token(second, 1.0)
    assert names(freed) == ["first"]
    assert only_send(freed).row == second.row


def test_a_replica_that_is_full_but_holds_the_prompt_is_waited_for_while_that_is_sooner() -> None:
    bench = a_bench("A100", "A100", where=held([512, 0]))
    first = bench.send(0.0, request_id="first")
    assert first.row == 0
    waits = hold(bench, 0.0, request_id="second")
    later = only_send(bench.dispatcher.first_token(first, 0.05))
    assert (later.row, later.held) == (0, waits)


def test_a_hot_prompt_overflows_its_holder_once_the_queue_there_costs_more_than_computing_it_again() -> None:
    """Cached it takes 0.03 s, else 0.9 s: a hundred of them are 3 s of work for the holder alone."""
    bench = a_bench("A100", "A100", "A100", "A100", where=held([512, 0, 0, 0]))
    rows: Counter[int] = Counter()
    ends: list[tuple[float, int, Send]] = []

    def take_in(actions: list[Action], now_s: float) -> None:
        for sent in actions:
            if isinstance(sent, Send):
                heappush(ends, (now_s + (0.03 if sent.row == 0 else 0.9), rows.total(), sent))
                rows[sent.row] += 1

    now_s = 0.0
    for number in range(100):
        take_in(bench.dispatcher.arrived(a_request(request_id=f"r-{number}"), now_s), now_s)
    while ends:
        now_s, _, sent = heappop(ends)
        take_in(bench.dispatcher.first_token(sent, now_s), now_s)
    assert rows.total() == 100
    assert len(rows) == 4
    assert now_s < 0.03 * 100


def test_models_do_not_wait_for_each_others_replicas() -> None:
    bench = a_bench("A100", "A100")
    bench.dispatcher.replica_up(1, frozenset({"other"}), 0.0)
    bench.send(request_id="first")
    hold(bench, request_id="second")
    assert bench.send(request_id="elsewhere", model="other").row == 1


def test_a_replica_that_comes_up_takes_those_that_wait() -> None:
    bench = a_bench("A100", "A100")
    bench.dispatcher.replica_down(1)
    bench.send(request_id="first")
    waits = hold(bench, 0.1, request_id="second")
    bench.dispatcher.replica_up(1, frozenset({MODEL}), 0.2)
    due_s = bench.dispatcher.next_due_s
    assert due_s is not None
    assert due_s <= 0.2
    assert only_send(bench.dispatcher.due(0.2)).held is waits


def test_a_request_that_cannot_be_placed_after_waiting_is_answered_and_hurts_nobody_else() -> None:
    bench = a_bench()
    first, waits = bench.send(request_id="first"), hold(bench, request_id="second")

    bench.dispatcher._placer._policy = Broken()
    refusal = only_refusal(bench.dispatcher.first_token(first, 1.0))
    assert (refusal.status, refusal.held) == (500, waits)
    assert bench.dispatcher.queued == {}


def test_a_newcomer_that_cannot_be_placed_takes_nothing_from_those_whose_time_is_over_at_that_moment() -> None:
    bench = a_bench(queue_timeout_s=5.0)
    first, waits = bench.send(request_id="first"), hold(bench, request_id="second")
    bench.dispatcher._placer._by_load = Broken()
    own, other = bench.dispatcher.arrived(a_request(request_id="third", generates=False), 5.1)
    assert isinstance(own, Refuse)
    assert isinstance(other, Refuse)
    assert (own.status, own.held) == (500, None)
    assert (other.status, other.held) == (503, waits)
    bench.finish(first, 6.0)
    outcomes = {receipt.request_id: receipt.outcome for receipt in bench.receipts}
    assert outcomes == {"first": "ok", "second": "refused", "third": "failed"}
    assert nothing_is_left(bench)


def test_who_waits_goes_at_once_also_when_learning_from_the_answer_before_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = a_bench()
    first, waits = bench.send(request_id="first"), hold(bench, request_id="second")

    def answered(*facts: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bench.dispatcher._placer, "answered", answered)
    with pytest.raises(ZeroDivisionError):
        bench.dispatcher.finished(first, Ended(200), 1.0)
    assert bench.dispatcher.next_due_s == -inf
    assert only_send(bench.dispatcher.due(1.0)).held is waits


def test_a_replica_that_is_given_nothing_new_makes_nobody_come_back_sooner() -> None:
    bench = a_bench("A100", "A100")
    for name in ("first", "second"):
        bench.send(request_id=name)
    for number in range(40):
        hold(bench, request_id=f"waits-{number}", prompt_tokens=32_768)
    before_s = bench.dispatcher._entrance.retry_after_s(0.0)
    bench.dispatcher.drain(1, drained=True)
    assert bench.dispatcher._entrance.retry_after_s(0.0) == pytest.approx(2 * before_s, abs=1)


class Broken:
    """A rule of somebody's."""

    def choose(self, *facts: object) -> Choice:
        raise RuntimeError("broken rule")


STEP = st.tuples(
    st.sampled_from(["arrive", "arrive", "token", "end", "fail", "leave", "due", "down", "up"]),
    st.floats(0, 2),
    st.integers(0, 99),
)


@given(steps=st.lists(STEP, max_size=60), order=st.sampled_from(["fcfs", "wspt"]), late=st.booleans())
def test_every_request_ends_once_and_nothing_is_left(
    steps: list[tuple[str, float, int]], order: str, late: bool
) -> None:
    bench = a_bench(
        "A100",
        "A100",
        max_in_flight=2,
        max_queued=3,
        order=order,
        queue_timeout_s=4.0,
        late="refuse" if late else "best_effort",
        deadline_s=3.0,
        retries=RetryConfig(share=1.0, burst=99.0),
    )
    dispatcher, now_s = bench.dispatcher, 0.0
    sent: list[Send] = []
    holds: list[Hold] = []
    arrived = 0

    def take_in(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Hold):
                holds.append(action)
                continue
            if action.held is not None:
                holds.remove(action.held)  # each is answered once
            if isinstance(action, Send):
                sent.append(action)

    for what, gap_s, number in steps:
        now_s += gap_s
        take_in(dispatcher.due(now_s))
        if what == "arrive":
            tenant = "ab"[number % 2]
            tokens = 500 * (1 + number % 7)
            take_in(dispatcher.arrived(a_request(tokens, request_id=f"r-{arrived}", tenant=tenant), now_s))
            arrived += 1
        elif what == "token" and sent:
            take_in(dispatcher.first_token(sent[number % len(sent)], now_s))
        elif what == "end" and sent:
            take_in(dispatcher.finished(sent.pop(number % len(sent)), Ended(200), now_s))
        elif what == "fail" and sent:
            take_in(dispatcher.failed(sent.pop(number % len(sent)), Cause.CONNECT, now_s))
        elif what == "leave" and holds:
            take_in(dispatcher.left(holds.pop(number % len(holds)), now_s))
        elif what == "down":
            dispatcher.replica_down(number % 2)
        elif what == "up":
            dispatcher.replica_up(number % 2, frozenset({MODEL}), now_s)
        assert sum(dispatcher.queued.values()) == len(holds) <= 3
        assert (bench.view.booked <= 2).all()
    while sent:
        take_in(dispatcher.finished(sent.pop(), Ended(200), now_s))
    take_in(dispatcher.due(now_s + 10.0))
    while sent:
        take_in(dispatcher.cancelled(sent.pop(), now_s + 10.0))
    assert holds == []
    assert len(bench.receipts) == arrived
    assert all(receipt.outcome is not None for receipt in bench.receipts)
    assert nothing_is_left(bench)
    assert dispatcher.next_due_s is None
    assert bench.dispatcher._entrance._claims_s == {}
