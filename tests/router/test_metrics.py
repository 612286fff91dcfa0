"""What is counted of requests: each once, by how it ended, with what was expected of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from router.http.shared import Counts
from router.metrics import FORECASTS, REGRET_EVERY, Metrics, outcomes_at_the_edge
from router.receipts import Candidate, Receipt

ROOT = Path(__file__).parents[2]


def a_candidate(**changes: Any) -> Candidate:
    values: dict[str, Any] = {
        "replica": "a",
        "path": "remote",
        "queue_s": 0.0,
        "fetch_s": 0.1,
        "compute_s": 0.4,
        "first_token_s": 0.4,
        "expected_s": 0.5,
        "hit_probability": 0.9,
        "local_tokens": 100,
        "fetched_tokens": 200,
        "pace_s": 0.01,
        "queue_price_s": 0.0,
        "decode_price_s": 0.0,
        "first_token_p90_s": 1.0,
        "first_token_p99_s": 2.0,
    }
    return Candidate(**{**values, **changes})


def a_receipt(choice: Candidate | None = None, **changes: Any) -> Receipt:
    """A stream of eleven tokens that ended well, chosen 0.1 s after it arrived."""
    values: dict[str, Any] = {
        "request_id": "r",
        "arrived_at": 0.0,
        "endpoint": "/v1/completions",
        "model": "m",
        "prompt_tokens": 1000,
        "prompt_exact": True,
        "streamed": True,
        "policy": "e2e",
        "candidates": [choice or a_candidate()],
        "chosen": 0,
        "reason": "lowest_estimate",
        "placed_s": 0.1,
        "attempts": 1,
        "outcome": "ok",
        "status": 200,
        "first_token_s": 0.7,
        "ended_s": 1.7,
        "output_tokens": 11,
        "cached_tokens": 256,
        "fetched_bytes": 3e6,
    }
    return Receipt(**{**values, **changes})


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def counted(*receipts: Receipt) -> Metrics:
    metrics = Metrics()
    for receipt in receipts:
        metrics.count(receipt)
    return metrics


def test_one_answer_is_counted_once_in_every_place_it_belongs_to() -> None:
    metrics = counted(a_receipt())
    assert sample(metrics, "tfirst_requests_total", outcome="ok") == 1
    assert sample(metrics, "tfirst_attempts_total") == 1
    assert sample(metrics, "tfirst_good_requests_total") == 1
    assert sample(metrics, "tfirst_first_token_seconds_sum") == pytest.approx(0.7)
    assert sample(metrics, "tfirst_inter_token_seconds_sum") == pytest.approx(0.1)  # ten gaps in one second
    assert sample(metrics, "tfirst_end_to_end_seconds_sum") == pytest.approx(1.7)
    assert sample(metrics, "tfirst_queue_seconds_sum") == pytest.approx(0.1)
    assert sample(metrics, "tfirst_output_tokens_total") == 11
    errors = [sample(metrics, "tfirst_first_token_error_seconds_bucket", le=bound) for bound in ("-0.2", "-0.05")]
    assert errors == [0, 1]  # 0.5 s were predicted, 0.6 s came
    assert sample(metrics, "tfirst_first_token_ratio_sum") == pytest.approx(1.2)
    sources = {source: sample(metrics, "tfirst_prompt_tokens_total", source=source) for source in ("local", "remote")}
    assert sources == {"local": 100, "remote": 200}
    assert sample(metrics, "tfirst_prompt_tokens_total", source="recompute") == 700
    assert sample(metrics, "tfirst_fetched_bytes_total", path="remote") == 3e6
    assert sample(metrics, "tfirst_reported_cached_tokens_total") == 256
    assert sample(metrics, "tfirst_predicted_cached_tokens_total") == 300


def test_events_stand_for_tokens_where_no_usage_came() -> None:
    metrics = counted(a_receipt(output_tokens=None, events=6))
    assert sample(metrics, "tfirst_inter_token_seconds_sum") == pytest.approx(0.2)


def test_one_token_has_no_gap() -> None:
    assert sample(counted(a_receipt(output_tokens=1)), "tfirst_inter_token_seconds_count") == 0


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, ("covered", "covered")),  # 0.6 s after the choice
        ({"first_token_s": 1.2}, ("missed", "covered")),
        ({"first_token_s": 9.0, "ended_s": 9.5}, ("missed", "missed")),
        ({"first_token_s": None, "outcome": "cancelled", "ended_s": 1.5}, ("missed", None)),  # left after its p90
        ({"first_token_s": None, "outcome": "failed", "ended_s": 0.5}, (None, None)),
        ({"streamed": False, "first_token_s": None}, (None, None)),
    ],
)
def test_a_quantile_that_passes_without_a_first_token_is_missed(
    changes: dict[str, Any], held: tuple[str | None, ...]
) -> None:
    metrics = counted(a_receipt(**changes))
    for forecast, result in zip(FORECASTS, held, strict=True):
        for one in ("covered", "missed"):
            found = sample(metrics, "tfirst_forecasts_total", forecast=forecast, result=one)
            assert found == (one == result)


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"deadline_s": 0.7}, True),
        ({"deadline_s": 0.69}, False),
        ({"pace_deadline_s": 0.2}, True),
        ({"pace_deadline_s": 0.05}, False),
        ({"outcome": "failed"}, False),
        ({"streamed": False, "first_token_s": None, "deadline_s": 1.0}, False),  # the whole came after it
    ],
)
def test_an_answer_is_good_when_it_met_the_deadlines_it_had(changes: dict[str, Any], good: bool) -> None:
    assert sample(counted(a_receipt(**changes)), "tfirst_good_requests_total") == good


def test_what_no_replica_could_have_answered_is_the_clients_error_and_has_its_cause_all_the_same() -> None:
    nothing: dict[str, Any] = {"candidates": [], "chosen": None, "reason": None, "outcome": "refused", "attempts": 0}
    nobodys: dict[str, Any] = {**nothing, "outcome": "client_error"}
    unknown = a_receipt(**nobodys, cause="unknown_model", status=404, first_token_s=None)
    full = a_receipt(**nothing, cause="queue_full", status=429, first_token_s=None)
    metrics = counted(unknown, full)
    assert sample(metrics, "tfirst_requests_total", outcome="client_error") == 1
    assert sample(metrics, "tfirst_requests_total", outcome="refused") == 1
    assert sample(metrics, "tfirst_refusals_total", cause="unknown_model") == 1


def test_every_attempt_is_counted_and_those_that_failed_by_replica_while_it_is_there() -> None:
    metrics = counted(a_receipt(attempts=3, tried=["b", "c"]))
    assert sample(metrics, "tfirst_requests_total", outcome="ok") == 1
    assert sample(metrics, "tfirst_attempts_total") == 3
    assert sample(metrics, "tfirst_failed_attempts_total", replica="b") == 1
    metrics.forget_the_gone(["a", "c"])
    assert sample(metrics, "tfirst_failed_attempts_total", replica="b") is None
    assert sample(metrics, "tfirst_failed_attempts_total", replica="c") == 1


def test_what_ends_at_the_edge_has_outcomes_that_add_up_to_what_was_received() -> None:
    counts = Counts()
    for status in (400, 401, 413, 429, 503):
        counts.turn_away(status)
    counts.received += 2
    counts.left_early = counts.broken = 1
    outcomes = outcomes_at_the_edge(counts)
    assert sum(outcomes.values()) == counts.received
    assert outcomes[("client_error",)] == 3
    assert outcomes[("refused",)] == 2


def test_a_request_without_a_prompt_takes_no_path() -> None:
    relayed = {"prompt_tokens": 0, "streamed": False, "first_token_s": None}
    metrics = counted(a_receipt(a_candidate(path="recompute", local_tokens=0, fetched_tokens=0), **relayed))
    assert sample(metrics, "tfirst_choices_total", path="unknown", reason="lowest_estimate") == 1
    assert sample(metrics, "tfirst_choices_total", path="recompute", reason="lowest_estimate") is None
    assert sample(metrics, "tfirst_prompt_tokens_total", source="recompute") == 0


def test_regret_is_worked_out_for_one_request_in_so_many() -> None:
    class Noted:
        asked = 0

        def regret_s(self, waited_s: float) -> float:
            self.asked += 1
            return waited_s - 0.5

    metrics, noted = Metrics(), Noted()
    for _ in range(3 * REGRET_EVERY):
        metrics.count_regret(a_receipt(), noted)
        metrics.count_regret(a_receipt(first_token_s=None), noted)
    assert noted.asked == 3
    regrets = [sample(metrics, "tfirst_regret_seconds_bucket", le=bound) for bound in ("0.05", "0.2")]
    assert regrets == [0, 3]


def test_what_a_client_makes_up_becomes_no_label() -> None:
    metrics = counted(a_receipt())
    before = len(metrics.text().splitlines())
    for number in range(1000):
        metrics.count(
            a_receipt(request_id=f"r{number}", model=f"m{number}", endpoint=f"/v1/{number}", unit=f"u{number}")
        )
        metrics.show_queue({f"tenant{number}": 1}, ())
    assert len(metrics.text().splitlines()) <= before + 1  # those who wait without a known tenant


def test_the_page_lists_every_name_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|.*?\|$|^(`tfirst_build_info.*)$", page, flags=re.MULTILINE)
    listed = set(re.findall(r"`(tfirst_\w+)", "".join(map("".join, cells)) + _beside(page)))
    source = "".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    made = {name for name in re.findall(r'"(tfirst_\w+)"', source) if name != "tfirst_"}
    assert {name.removesuffix("_total") for name in listed} == made


def test_metrics_of_a_router_are_named_as_the_page_names_them() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    kinds = {family.name: family.type for family in Metrics().registry.collect() if family.name.startswith("tfirst_")}
    for name, kind in kinds.items():
        assert f"`{name}_total" in page if kind == "counter" else f"`{name}" in page, name


def _beside(page: str) -> str:
    """What rows name in their second cell: gauges that belong to a counter."""
    return "".join(re.findall(r"^\| `.*?\| (.*`tfirst_.*) \|$", page, flags=re.MULTILINE))
