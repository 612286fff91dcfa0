from __future__ import annotations

import json

from router.metrics import Metrics
from tests.router.receipts.builders import a_receipt


def test_the_summary_names_policy_reason_and_choice() -> None:
    summary = json.loads(a_receipt().summary())
    assert (summary["policy"], summary["reason"], summary["candidates"]) == ("e2e", "lowest_estimate", 1)
    assert summary["chosen"]["replica"] == "a"
    assert (summary["chosen"]["hit_probability"], summary["chosen"]["expected_s"]) == (0.9, 0.34)


def test_the_summary_of_a_request_that_was_refused_has_no_choice() -> None:
    summary = json.loads(a_receipt(candidates=[], chosen=None, reason=None).summary())
    assert (summary["candidates"], summary["chosen"]) == (0, None)


def test_metrics_count_each_receipt_once_by_outcome_path_and_source() -> None:
    metrics = Metrics()
    for index in range(3):
        metrics.count(a_receipt(index))
    metrics.count(a_receipt(9, outcome="cancelled", first_token_s=None))
    text = metrics.text().decode()
    assert 'tfirst_requests_total{outcome="ok"} 3.0' in text
    assert 'tfirst_requests_total{outcome="cancelled"} 1.0' in text
    assert 'tfirst_choices_total{path="local",reason="lowest_estimate"} 4.0' in text
    assert 'tfirst_prompt_tokens_total{source="local"} 256.0' in text
    assert 'tfirst_prompt_tokens_total{source="recompute"} 144.0' in text
    assert "tfirst_first_token_seconds_count 3.0" in text
    assert "tfirst_end_to_end_seconds_count 3.0" in text


def test_the_error_of_an_estimate_counts_from_the_choice_it_belongs_to() -> None:
    """A request retried after 600 s was expected 0.3 s after its second placement, not after its arrival."""
    metrics = Metrics()
    metrics.count(a_receipt(first_token_s=600.4, placed_s=600.0))
    name = "tfirst_first_token_error_seconds_bucket"
    assert metrics.registry.get_sample_value(name, {"le": "-0.2"}) == 0
    assert metrics.registry.get_sample_value(name, {"le": "-0.05"}) == 1


def test_totals_counted_elsewhere_are_read_when_somebody_scrapes() -> None:
    metrics = Metrics()
    totals = {"400": 1.0}
    metrics.count_elsewhere("tfirst_things", "things", "status", lambda: totals)
    totals["413"] = 2.0
    text = metrics.text().decode()
    assert 'tfirst_things_total{status="400"} 1.0' in text
    assert 'tfirst_things_total{status="413"} 2.0' in text
