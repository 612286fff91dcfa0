"""Shares of a replica's busy time: they add up to it, whoever comes and goes when."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.actions import Cause, Ended
from router.busy_time import BusyTime
from router.receipts import Receipt
from tests.builders import a_request as a_request_of
from tests.router.dispatch_bench import Bench, only_refusal, only_send
from tests.router.test_metrics import a_receipt, counted, sample
from tests.router.test_plain import a_core, a_request, sent


def test_one_alone_takes_all_the_time_it_is_there() -> None:
    busy = BusyTime(1)
    began = busy.begins(0, 100.0)
    assert busy.ends(0, began, 103.0) == 3.0


def test_two_divide_the_time_they_are_there_together() -> None:
    busy = BusyTime(1)
    first = busy.begins(0, 0.0)
    second = busy.begins(0, 1.0)
    assert busy.ends(0, first, 5.0) == 3.0  # one second alone, half of four
    assert busy.ends(0, second, 6.0) == 3.0  # half of four, and one alone


def test_replicas_know_nothing_of_each_other_and_idle_time_is_nobodys() -> None:
    busy = BusyTime(2)
    first, other = busy.begins(0, 0.0), busy.begins(1, 0.0)
    assert busy.ends(0, first, 2.0) == 2.0
    late = busy.begins(0, 10.0)
    assert busy.ends(0, late, 11.0) == 1.0
    assert busy.ends(1, other, 11.0) == 11.0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 20.0)), min_size=1, max_size=30))
def test_the_shares_of_all_add_up_to_the_seconds_in_which_there_was_any(stays: list[tuple[float, float]]) -> None:
    """A second route to the sum: the length of the union of all stays."""
    spans = [(begin, begin + length) for begin, length in stays]
    busy, began, shares = BusyTime(1), dict[int, float](), dict[int, float]()
    for at_s, ends, number in sorted(
        [(begin, False, number) for number, (begin, _) in enumerate(spans)]
        + [(end, True, number) for number, (_, end) in enumerate(spans)]
    ):
        if ends:
            shares[number] = busy.ends(0, began[number], at_s)
        else:
            began[number] = busy.begins(0, at_s)
    union, reached = 0.0, 0.0
    for begin, end in sorted(spans):
        union += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    assert sum(shares.values()) == pytest.approx(union, abs=1e-9)
    for (begin, end), share in zip(spans, (shares[number] for number in range(len(spans))), strict=True):
        assert -1e-12 <= share <= end - begin + 1e-9


# What requests cost


def a_bench(*usd_per_hour: float) -> Bench:
    bench = Bench(*["A100"] * len(usd_per_hour), policy="round_robin")
    bench.view.usd_per_hour[:] = usd_per_hour
    return bench


def test_what_requests_cost_adds_up_to_the_price_of_the_busy_time_whatever_became_of_them() -> None:
    bench = a_bench(3600.0)
    done, left, broken = bench.send(0.0), bench.send(1.0), bench.send(2.0)
    bench.dispatcher.cancelled(left, 3.0)
    bench.finish(done, 5.0)
    bench.dispatcher.failed(broken, Cause.BROKEN, 8.0)
    later = bench.send(20.0)
    bench.finish(later, 21.0)
    costs = [receipt.usd for receipt in bench.receipts]
    assert None not in costs
    assert sum(cost for cost in costs if cost is not None) == pytest.approx(8.0 + 1.0)  # a USD a second
    assert costs[-1] == pytest.approx(1.0)


def test_an_attempt_that_failed_is_paid_too() -> None:
    bench = a_bench(3600.0, 7200.0)
    first = bench.send(0.0)
    second = only_send(bench.dispatcher.failed(first, Cause.NO_ANSWER, 2.0))
    bench.finish(second, 3.0)
    usd_per_s = [1.0, 2.0]
    (receipt,) = bench.receipts
    assert receipt.usd == pytest.approx(2.0 * usd_per_s[first.row] + 1.0 * usd_per_s[second.row])


@pytest.mark.parametrize("prices", [(nan, 3600.0), (3600.0, nan), (nan, nan)])
def test_without_a_price_of_every_replica_it_was_at_the_cost_of_a_request_is_unknown(
    prices: tuple[float, float],
) -> None:
    bench = a_bench(*prices)
    again = only_send(bench.dispatcher.failed(bench.send(0.0), Cause.NO_ANSWER, 2.0))
    bench.finish(again, 3.0)
    (receipt,) = bench.receipts
    assert receipt.usd is None


def test_a_rule_that_estimates_nothing_has_costs_all_the_same() -> None:
    receipts: list[Receipt] = []
    dispatcher = a_core("least_request", receipts, replicas=1).dispatcher
    dispatcher.view.usd_per_hour[:] = 3600.0
    one, other = sent(dispatcher, a_request(1), 0.0), sent(dispatcher, a_request(2), 0.0)
    dispatcher.finished(one, Ended(200), 2.0)
    dispatcher.finished(other, Ended(200), 3.0)
    assert [receipt.usd for receipt in receipts] == [1.0, 2.0]


def test_what_was_placed_nowhere_costs_nothing_that_is_known() -> None:
    bench = a_bench(3600.0)
    only_refusal(bench.dispatcher.arrived(a_request_of(model="nobody-has-it"), 0.0))
    assert bench.receipts[0].usd is None


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, "good"),
        ({"deadline_s": 0.1}, "late"),
        ({"outcome": "failed"}, "lost"),
        ({"outcome": "cancelled"}, "lost"),
        ({"outcome": "client_error", "status": 400}, "lost"),
    ],
)
def test_costs_are_counted_by_what_came_of_them(changes: dict[str, Any], result: str) -> None:
    metrics = counted(a_receipt(usd=0.25, **changes), a_receipt(usd=None, **changes))
    for each in ("good", "late", "lost"):
        assert sample(metrics, "tfirst_request_usd_sum", result=each) == (0.25 if each == result else 0.0)
        assert sample(metrics, "tfirst_request_usd_count", result=each) == (each == result)
