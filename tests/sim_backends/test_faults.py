from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

import pytest

from sim_backends.faults import (
    NONE,
    BadFault,
    Break,
    Detour,
    FaultPlan,
    Faults,
    Kind,
    faults_of,
    faults_of_options,
    re_rate,
)
from sim_backends.links import FairLink


def a_plan(*, seed: int = 1, replica: str = "r", **values: Any) -> FaultPlan:
    return FaultPlan(Faults(**values), seed=seed, replica=replica)


def struck(plan: FaultPlan, requests: int) -> Counter[Kind | None]:
    strikes = (plan.strike_request() for _ in range(requests))
    return Counter(None if strike is None else strike.kind for strike in strikes)


def test_without_faults_nothing_is_asked_of_the_plan() -> None:
    plan = FaultPlan(NONE, seed=1, replica="r")
    assert not plan.breaks_requests
    assert not plan.disturbs_events


def test_shares_of_requests_come_out_in_the_long_run() -> None:
    counts = struck(a_plan(error_share=0.1, cut_share=0.2, hang_share=0.3), 20_000)
    expected = {Kind.ERROR: 0.1, Kind.CUT: 0.2, Kind.HANG: 0.3, None: 0.4}
    for kind, share in expected.items():  # four standard errors of a share are below 0.014
        assert counts[kind] / 20_000 == pytest.approx(share, abs=0.014)


def test_the_next_n_requests_are_struck_and_then_no_more() -> None:
    plan = a_plan(error_next=2, reset_next=1)
    assert [strike and strike.kind for strike in (plan.strike_request() for _ in range(4))] == [
        Kind.ERROR,
        Kind.ERROR,
        Kind.RESET,
        None,
    ]
    assert plan.struck == {"error": 2, "reset": 1}
    assert plan.now() == NONE


def test_the_same_seed_strikes_the_same_requests_and_another_replica_others() -> None:
    def pattern(**which: Any) -> list[Break | None]:
        plan = a_plan(error_share=0.5, **which)
        return [plan.strike_request() for _ in range(50)]

    assert pattern() == pattern()
    assert pattern() != pattern(seed=2)
    assert pattern() != pattern(replica="s")


def test_lost_events_do_not_change_which_requests_are_struck() -> None:
    calm, busy = a_plan(error_share=0.5), a_plan(error_share=0.5, event_loss_share=0.5)
    for _ in range(50):
        busy.loses_batch()
        assert calm.strike_request() == busy.strike_request()


def test_a_break_says_after_how_many_tokens_but_an_error_comes_before_the_head() -> None:
    assert a_plan(hang_next=1, hang_after_tokens=5).strike_request() == Break(Kind.HANG, 5)
    assert a_plan(cut_next=1).strike_request() == Break(Kind.CUT, None)
    assert a_plan(error_next=1, cut_after_tokens=5).strike_request() == Break(Kind.ERROR, None)


def test_thawing_forgets_the_frozen_page_and_freezing_again_keeps_it() -> None:
    plan = a_plan(metrics_frozen=True)
    plan.frozen_pages["/metrics"] = b"old"
    plan.set(faults_of({"clock_skew_s": 1.0}, base=plan.now()))
    assert plan.frozen_pages == {"/metrics": b"old"}
    plan.set(NONE)
    assert plan.frozen_pages == {}


def test_options_set_all_replicas_or_one_and_later_ones_win() -> None:
    options = ["error_share=0.1", "b:error_share=0.5", "b:retry_after_s=3", "usage_details=false"]
    assert faults_of_options(options, ["a", "b"]) == {
        "a": Faults(error_share=0.1, usage_details=False),
        "b": Faults(error_share=0.5, retry_after_s=3, usage_details=False),
    }


def test_a_restart_is_asked_for_as_the_other_faults_are() -> None:
    options = ["a:restart_after_s=60", "restart_down_s=5"]
    assert faults_of_options(options, ["a", "b"]) == {
        "a": Faults(restart_after_s=60.0, restart_down_s=5.0),
        "b": Faults(restart_down_s=5.0),
    }


def test_an_option_can_say_null_and_words() -> None:
    options = ["cut_after_tokens=3", "cut_after_tokens=null", "metrics_missing=page", "metrics_frozen=1"]
    assert faults_of_options(options, ["a"]) == {"a": Faults(metrics_missing="page", metrics_frozen=True)}


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("explode=1", "there is no fault 'explode'; there are event_delay_s, "),
        ("error_share", "fault 'error_share' is not NAME=VALUE or REPLICA:NAME=VALUE"),
        ("c:error_share=1", "fault 'c:error_share=1' names no replica; there are a, b"),
        ("error_share=2", "fault error_share is '2': Expected `float` <= 1.0"),
        ("error_share=much", "fault error_share is 'much': Expected `float`, got `str`"),
        ("error_status=418", "fault error_status is '418': Invalid enum value 418"),
        ("clock_skew_s=nan", "clock_skew_s must be a finite number"),
        ("hang_next=-1", "fault hang_next is '-1': Expected `int` >= 0"),
    ],
)
def test_a_bad_fault_is_one_clear_sentence(option: str, told: str) -> None:
    with pytest.raises(BadFault) as caught:
        faults_of_options([option], ["a", "b"])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shares_of_requests_that_add_up_above_one_are_refused() -> None:
    with pytest.raises(BadFault, match=r"the shares of requests that error, reset, cut and hang add up to 1.2"):
        faults_of({"error_share": 0.6, "hang_share": 0.6})


def test_texts_are_not_numbers_where_json_said_so() -> None:
    with pytest.raises(BadFault, match="Expected `float`, got `str`"):
        faults_of({"error_share": "0.5"})


def test_delayed_batches_keep_their_order_even_when_the_delay_shrinks() -> None:
    detour = Detour()
    detour.put(0, b"a", now_s=0.0, delay_s=1.0)
    detour.put(1, b"b", now_s=0.1, delay_s=0.0)
    assert (detour.due_s, detour.take_due(0.9)) == (1.0, [])
    assert detour.take_due(1.0) == [(0, b"a"), (1, b"b")]
    assert detour.due_s == inf


def test_a_batch_held_back_is_overtaken_and_still_comes() -> None:
    detour = Detour()
    detour.put(0, b"a", now_s=0.0, delay_s=0.0, held_s=0.5)
    detour.put(1, b"b", now_s=0.1, delay_s=0.0)
    assert detour.take_due(0.1) == [(1, b"b")]
    assert detour.take_due(0.5) == [(0, b"a")]


def test_what_a_dead_process_held_is_never_sent() -> None:
    detour = Detour()
    detour.put(0, b"a", now_s=0.0, delay_s=9.0)
    detour.drop()
    detour.put(0, b"b", now_s=1.0, delay_s=0.0)
    assert detour.take_due(20.0) == [(0, b"b")]


def test_a_slower_link_delays_only_the_bytes_still_to_come() -> None:
    link = FairLink(rate_bytes_per_s=10.0)
    ends: dict[str, float] = {}
    link.start(20.0, 0.0, lambda at_s: ends.update(first=at_s))
    link.start(20.0, 1.0, lambda at_s: ends.update(second=at_s))
    re_rate(link, 5.0, 2.0)  # by now the first has had 15 bytes and the second 5
    while link.due_s < inf:
        link.run_due()
    assert ends == {"first": 4.0, "second": 6.0}
    assert link.active_transfers == 0
