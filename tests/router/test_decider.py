from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.request import RequestFacts
from router.actions import Cause, Ended
from router.decider import RANK_HEADER, TimedDecider, ranks_of
from router.signals.orca import REQUEST_HEADER
from tests.builders import a_request
from tests.router.dispatch_bench import Bench, nothing_is_left, only_send


def a_decider(bench: Bench, **changes: Any) -> TimedDecider:
    parts: dict[str, Any] = {"took": lambda s: None, "answered": lambda *told: None, "ranks": [None, None]}
    return TimedDecider(bench.dispatcher, **{**parts, **changes})


def test_a_request_for_a_rank_says_so_also_when_it_is_the_second_attempt() -> None:
    decider = a_decider(Bench("A100", "A100"), ranks=[0, 1])
    first = only_send(decider.arrived(a_request(), 0.0))
    second = only_send(decider.failed(first, Cause.CONNECT, 0.1))
    assert {first.row, second.row} == {0, 1}
    for sent in (first, second):
        assert sent.extra_headers == [(RANK_HEADER, b"%d" % sent.row)]


def test_a_replica_that_is_alone_behind_its_url_gets_the_request_as_it_came() -> None:
    sent = only_send(a_decider(Bench("A100", "A100")).arrived(a_request(), 0.0))
    assert sent.extra_headers == []


@pytest.mark.parametrize(
    ("request_", "asked"),
    [({"streams": False}, True), ({"streams": True}, False), ({"streams": False, "generates": False}, False)],
)
def test_load_is_asked_for_where_engines_tell_it_in_whole_generations(request_: dict[str, Any], asked: bool) -> None:
    sent = only_send(a_decider(Bench("A100"), asks_load=True).arrived(a_request(**request_), 0.0))
    assert (REQUEST_HEADER in sent.extra_headers) == asked


def test_whoever_wants_to_know_is_told_of_every_attempt() -> None:
    told: list[object] = []
    decider = a_decider(Bench("A100", "A100"), placed=told.append)
    first = only_send(decider.arrived(a_request(), 0.0))
    decider.first_token(first, 0.5)
    second = only_send(decider.failed(first, Cause.CONNECT, 0.6))
    assert told == [first, second]


def test_every_decision_is_timed_and_a_refusal_is_one() -> None:
    took: list[float] = []
    decider = a_decider(Bench("A100", say_models=0), took=took.append)
    decider.arrived(a_request(), 0.0)
    assert len(took) == 1
    assert took[0] > 0.0


def test_answers_to_prompts_that_the_router_tokenised_are_compared() -> None:
    answered: list[tuple[RequestFacts, Ended, float]] = []
    decider = a_decider(Bench("A100"), answered=lambda *told: answered.append(told))
    for tokenised in ("", "chat"):
        sent = only_send(decider.arrived(a_request(tokenised=tokenised), 0.0))
        decider.finished(sent, Ended(200, cached_tokens=0), 1.0)
    assert [told[0].tokenised for told in answered] == ["chat"]


@given(st.lists(st.sampled_from(["http://a", "http://a/", "http://b", "http://c", None]), max_size=8))
def test_ranks_count_the_rows_of_one_url_from_zero_and_a_row_alone_has_none(urls: list[str | None]) -> None:
    ranks = ranks_of(urls)
    assert len(ranks) == len(urls)
    for row, url in enumerate(urls):
        same = [other for other in range(len(urls)) if url and (urls[other] or "").rstrip("/") == url.rstrip("/")]
        assert ranks[row] == (same.index(row) if len(same) > 1 else None)


def test_what_goes_wrong_beside_a_decision_costs_nobody_the_decision() -> None:
    bench = Bench("A100")

    def fails(*told: object) -> None:
        raise RuntimeError("somebody who is told")

    decider = a_decider(bench, placed=fails, answered=fails, ranks=[1])
    sent = only_send(decider.arrived(a_request(tokenised=True), 0.0))
    assert sent.extra_headers == [(RANK_HEADER, b"1")]
    assert decider.finished(sent, Ended(200), 1.0) == []
    assert [receipt.outcome for receipt in bench.receipts] == ["ok"]
    assert nothing_is_left(bench)
