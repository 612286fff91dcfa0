import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.scenarios.goodput import (
    ROWS,
    Deadlines,
    Run,
    Sample,
    by_kind,
    by_tenths,
    cells,
    comparison,
    figures,
    passes,
    quantile,
    report,
)


def a_sample(**fields: Any) -> Sample:
    usual: dict[str, Any] = {"name": "chat", "at_s": 5.0, "first_token_s": 0.2, "end_s": 1.0}
    return Sample(**usual | fields)


def a_run(*samples: Sample, **fields: Any) -> Run:
    usual: dict[str, Any] = {"scenario": "chat", "url": "http://a", "seed": 7, "warm_up_s": 2.0, "length_s": 12.0}
    return Run(samples=list(samples), pass_good_share=0.9, **usual | fields)


LIMITS = Deadlines(first_token_s=0.5, per_token_s=0.1, end_s=2.0)


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({}, True),
        ({"first_token_s": 0.5}, True),
        ({"first_token_s": 0.51}, False),
        ({"per_token_s": 0.2}, False),
        ({"per_token_s": None}, True),
        ({"end_s": 2.1}, False),
        ({"error": "503"}, False),
    ],
)
def test_a_request_is_good_within_every_deadline(fields: dict[str, Any], good: bool) -> None:
    assert a_sample(deadlines=LIMITS, **fields).good is good


def test_without_deadlines_every_answer_is_good() -> None:
    assert a_sample(first_token_s=1e6, end_s=1e7).good


def test_the_warm_up_is_in_no_figure() -> None:
    run = a_run(a_sample(at_s=1.9, error="x"), a_sample(at_s=2.0), a_sample(at_s=9.0))
    told = figures(run.measured(), span_s=run.span_s())
    assert (told.requests, told.errors, told.goodput_rps) == (2, 0, 0.2)


def test_failed_requests_count_as_sent_and_not_in_times() -> None:
    samples = [a_sample(first_token_s=0.2), a_sample(first_token_s=9.0, error="cut")]
    told = figures(samples, span_s=10.0)
    assert (told.errors, told.good_share) == (1, 0.5)
    assert told.first_token_s == pytest.approx((0.2, 0.2, 0.2))


def test_cached_tokens_are_weighed_by_tokens_and_only_where_they_are_told() -> None:
    samples = [
        a_sample(prompt_tokens=100, cached_tokens=100),
        a_sample(prompt_tokens=300, cached_tokens=0),
        a_sample(prompt_tokens=600, cached_tokens=None),
    ]
    assert figures(samples, span_s=1.0).cached_share == 0.25


def test_nothing_measured_is_unknown_and_does_not_pass() -> None:
    run = a_run(length_s=1.0)
    told = figures(run.measured(), span_s=run.span_s())
    assert math.isnan(told.good_share)
    assert not passes(run)
    assert "nothing was measured" in report(run)
    assert "FAILS" in report(run)
    assert "nan" not in report(run)
    assert all(cell in ("0", "-") for cell in cells(told))


def test_a_run_passes_at_its_mark_and_not_below() -> None:
    good, bad = a_sample(), a_sample(error="x")
    assert passes(a_run(*[good] * 9, bad))
    assert not passes(a_run(*[good] * 8, bad))


@given(st.lists(st.floats(0.0, 100.0), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_value_that_share_does_not_exceed(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert sum(value <= found for value in values) / len(values) >= share - 1e-9
    assert sum(value < found for value in values) / len(values) < share


def test_kinds_are_told_apart_by_tenant_and_summed_last() -> None:
    samples = [a_sample(tenant="a"), a_sample(tenant="b"), a_sample(tenant="a")]
    assert {kind: len(found) for kind, found in by_kind(samples).items()} == {"chat a": 2, "chat b": 1, "all": 3}
    assert list(by_kind([a_sample()])) == ["chat"]


def test_tenths_hold_every_measured_request_once() -> None:
    run = a_run(*(a_sample(at_s=at / 10) for at in range(121)))
    tenths = by_tenths(run)
    assert sum(rate for rate, _ in tenths) * run.span_s() / 10 == pytest.approx(len(run.measured()))


def test_a_report_names_deadlines_the_first_error_and_the_verdict() -> None:
    told = report(a_run(a_sample(deadlines=LIMITS), a_sample(deadlines=LIMITS, error="503: busy")))
    assert "first token 0.5 s, per token 0.1 s, end 2 s" in told
    assert "first error: 503: busy" in told
    assert "FAILS: 90% within deadlines are wanted" in told
    assert all(row in told for row in ROWS)


def test_a_comparison_of_two_shows_the_change() -> None:
    told = comparison({"old": a_run(a_sample(first_token_s=0.2)), "new": a_run(a_sample(first_token_s=0.3))})
    line = next(line for line in told.splitlines() if line.startswith("first token, mean"))
    assert line.split()[-5:] == ["200.0", "ms", "300.0", "ms", "+50%"]


@pytest.mark.parametrize("other", [{"seed": 8}, {"scenario": "rag"}, {"warm_up_s": 3.0}])
def test_runs_of_different_things_are_not_compared(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        comparison({"a": a_run(a_sample()), "b": a_run(a_sample(), **other)})


def test_a_run_comes_back_from_its_file_as_it_was() -> None:
    run = a_run(a_sample(deadlines=LIMITS, tenant="t"))
    assert msgspec.json.decode(msgspec.json.encode(run), type=Run) == run
