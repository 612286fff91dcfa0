from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.metrics import Metrics
from router.receipts import Candidate, Receipt, ReceiptWriter


def a_receipt(index: int = 0, **changes: Any) -> Receipt:
    candidate = Candidate(
        replica="a",
        path="local",
        queue_s=0.2,
        fetch_s=0.0,
        compute_s=0.1,
        first_token_s=0.3,
        expected_s=0.34,
        hit_probability=0.9,
        local_tokens=64,
        fetched_tokens=0,
        pace_s=0.01,
        queue_price_s=0.4,
        decode_price_s=0.1,
    )
    values: dict[str, Any] = {
        "request_id": f"r-{index}",
        "arrived_at": 1.0,
        "endpoint": "/v1/completions",
        "model": "m",
        "prompt_tokens": 100,
        "prompt_exact": True,
        "streamed": True,
        "policy": "e2e",
        "candidates": [candidate],
        "chosen": 0,
        "reason": "lowest_estimate",
        "outcome": "ok",
        "first_token_s": 0.35,
        "placed_s": 0.0,
        "ended_s": 1.0,
    }
    return Receipt(**{**values, **changes})


def test_receipts_become_json_lines_in_order_and_name_their_schema(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    writer = ReceiptWriter(path)
    for index in range(500):
        writer.write(a_receipt(index))
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == [f"r-{index}" for index in range(500)]
    assert msgspec.json.decode(path.read_bytes().splitlines()[3], type=Receipt) == a_receipt(3)
    assert writer.dropped == 0


def test_every_line_says_its_schema_version(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    writer = ReceiptWriter(path)
    writer.write(a_receipt())
    writer.close()
    assert json.loads(path.read_text())["schema"] == 1


def test_what_was_worked_out_for_the_chosen_candidate_survives_the_file_and_the_rest_is_null(tmp_path: Path) -> None:
    receipt = a_receipt()
    other, chosen = receipt.candidates[0], msgspec.structs.replace(receipt.candidates[0], replica="b")
    chosen.first_token_p90_s, chosen.first_token_p99_s = 0.5, 0.9
    chosen.evidence, chosen.discipline, chosen.calibration = "reported", "serial", "calibrated"
    receipt.candidates, receipt.chosen = [other, chosen], 1
    path = tmp_path / "receipts.jsonl"
    writer = ReceiptWriter(path)
    writer.write(receipt)
    writer.close()
    assert msgspec.json.decode(path.read_bytes(), type=Receipt).choice == chosen
    line = json.loads(path.read_text())["candidates"][0]
    assert [line[name] for name in ("first_token_p90_s", "first_token_p99_s", "evidence", "discipline")] == [None] * 4
    assert line["calibration"] == "uncalibrated"


def test_a_second_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    for index in range(2):
        writer = ReceiptWriter(path)
        writer.write(a_receipt(index))
        writer.close()
    assert len(path.read_text().splitlines()) == 2


def test_a_place_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ReceiptWriter(tmp_path / "absent" / "receipts.jsonl")


def test_more_than_the_disk_can_take_is_dropped_and_counted_and_never_waits(tmp_path: Path) -> None:
    """The writer's file is a stuck disk until the test lets it go."""
    stuck = threading.Event()
    writer = ReceiptWriter(tmp_path / "r.jsonl", capacity=10)

    class StuckFile:
        def write(self, data: bytes) -> None:
            stuck.wait(10)

        def flush(self) -> None: ...
        def close(self) -> None: ...

    real, writer._file = writer._file, StuckFile()  # type: ignore[assignment]
    real.close()
    for index in range(50):
        writer.write(a_receipt(index))
    stuck.set()
    writer.close()
    assert 38 <= writer.dropped <= 40


def test_a_full_disk_is_counted_and_the_writer_lives_on(tmp_path: Path) -> None:
    writer = ReceiptWriter(tmp_path / "r.jsonl")

    class FullDisk:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...
        def close(self) -> None: ...

    real, writer._file = writer._file, FullDisk()  # type: ignore[assignment]
    real.close()
    for index in range(5):
        writer.write(a_receipt(index))
    writer.close()
    assert writer.dropped == 5


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
    assert metrics.registry.get_sample_value(name, {"le": "0.05"}) == 0
    assert metrics.registry.get_sample_value(name, {"le": "0.2"}) == 1


def test_totals_counted_elsewhere_are_read_when_somebody_scrapes() -> None:
    metrics = Metrics()
    totals = {"400": 1.0}
    metrics.count_elsewhere("tfirst_things", "things", "status", lambda: totals)
    totals["413"] = 2.0
    text = metrics.text().decode()
    assert 'tfirst_things_total{status="400"} 1.0' in text
    assert 'tfirst_things_total{status="413"} 2.0' in text
