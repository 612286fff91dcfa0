"""From the loop to the file: what is written, how much of it, and what happens when it cannot be."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.receipts import Receipt, ReceiptWriter
from router.receipts.writer import mark_ends, was_late
from tests.router.receipts.builders import a_candidate, a_receipt


class Noted:
    """What a decision noted: eight candidates, of which all or some are named."""

    def complete(self, receipt: Receipt, *, best: int | None) -> None:
        count = 8 if best is None else 1 + best
        receipt.candidates = [a_candidate(replica=f"r{index}") for index in range(count)]
        receipt.chosen, receipt.possible = 0, 8


class Broken:
    def complete(self, receipt: Receipt, *, best: int | None) -> None:
        raise ArithmeticError("cannot be worked out")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, *receipts: Receipt, noted: bool = False, **settings: Any) -> list[dict[str, Any]]:
    writer = ReceiptWriter(path, **settings)
    for receipt in receipts:
        writer.write(receipt, Noted() if noted else None)
    writer.close()
    return lines_of(path)


def test_receipts_become_json_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    writer = ReceiptWriter(path)
    for index in range(500):
        writer.write(a_receipt(index))
    writer.close()
    assert [line["request_id"] for line in lines_of(path)] == [f"r-{index}" for index in range(500)]
    assert msgspec.json.decode(path.read_bytes().splitlines()[3], type=Receipt) == a_receipt(3, late=False)
    assert (writer.written, writer.dropped) == (500, 0)


def test_every_line_says_its_schema_version(tmp_path: Path) -> None:
    assert written(tmp_path / "r.jsonl", a_receipt())[0]["schema"] == 1


def test_what_was_worked_out_for_the_chosen_candidate_survives_the_file_and_the_rest_is_null(tmp_path: Path) -> None:
    receipt = a_receipt()
    other, chosen = receipt.candidates[0], msgspec.structs.replace(receipt.candidates[0], replica="b")
    chosen.first_token_p90_s, chosen.first_token_p99_s = 0.5, 0.9
    chosen.evidence, chosen.discipline, chosen.calibration = "reported", "serial", "calibrated"
    receipt.candidates, receipt.chosen = [other, chosen], 1
    path = tmp_path / "receipts.jsonl"
    line = written(path, receipt)[0]["candidates"][0]
    assert msgspec.json.decode(path.read_bytes(), type=Receipt).choice == chosen
    assert [line[name] for name in ("first_token_p90_s", "first_token_p99_s", "evidence", "discipline")] == [None] * 4
    assert line["calibration"] == "uncalibrated"


def test_a_second_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    written(path, a_receipt(0))
    assert len(written(path, a_receipt(1))) == 2


def test_a_place_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ReceiptWriter(tmp_path / "absent" / "receipts.jsonl")


def test_a_sampled_share_names_all_candidates_and_the_rest_the_chosen_and_the_best_four(tmp_path: Path) -> None:
    lines = written(tmp_path / "r.jsonl", *map(a_receipt, range(2000)), noted=True, share=0.25)
    counts = [len(line["candidates"]) for line in lines]
    assert set(counts) == {5, 8}
    assert counts.count(8) == pytest.approx(500, abs=100)  # five standard deviations of 2000 draws
    assert all(line["possible"] == 8 for line in lines)


def test_which_requests_are_sampled_is_the_same_for_every_router(tmp_path: Path) -> None:
    names = [
        [line["request_id"] for line in written(tmp_path / name, *map(a_receipt, range(300)), share=0.1, others="none")]
        for name in ("one", "other")
    ]
    assert names[0] == names[1]
    assert 5 < len(names[0]) < 80


def test_a_line_says_whether_it_stands_for_all_requests_or_is_there_for_what_became_of_it(tmp_path: Path) -> None:
    receipts = [a_receipt(index, outcome="failed" if index % 2 else "ok") for index in range(400)]
    lines = written(tmp_path / "r.jsonl", *receipts, share=0.2, others="none")
    assert all(line["sampled"] for line in lines if line["outcome"] == "ok")
    failed = [line["sampled"] for line in lines if line["outcome"] == "failed"]
    assert len(failed) == 200
    assert 15 < sum(failed) < 65
    assert all(line["sampled"] for line in written(tmp_path / "s.jsonl", *map(a_receipt, range(9)), share=0.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "failed"},
        {"outcome": "server_error"},
        {"outcome": "refused"},
        {"override": True},
        {"explained": True},
        {"first_token_s": 3.0, "deadline_s": 2.0},
    ],
)
def test_what_failed_was_late_overridden_or_asked_about_is_always_written_whole(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    (line,) = written(tmp_path / "r.jsonl", a_receipt(0), a_receipt(1, **changes), noted=True, share=0.0, others="none")
    assert (line["request_id"], len(line["candidates"])) == ("r-1", 8)


@pytest.mark.parametrize(
    ("changes", "late"),
    [
        ({"first_token_s": 0.35}, False),
        ({"first_token_s": 0.95}, True),
        ({"first_token_s": 5.4, "placed_s": 5.0}, False),  # the second attempt kept its promise
        ({"first_token_s": 0.35, "deadline_s": 0.3}, True),
        ({"first_token_s": None}, None),
    ],
)
def test_late_is_beyond_the_deadline_or_beyond_the_p99_of_the_last_choice(
    changes: dict[str, Any], late: bool | None
) -> None:
    assert was_late(a_receipt(candidates=[a_candidate(first_token_p99_s=0.9)], **changes)) is late


def test_more_than_the_disk_can_take_is_dropped_and_counted_and_never_waits(tmp_path: Path) -> None:
    """The writer's disk is stuck until the test lets it go."""
    stuck = threading.Event()
    writer = ReceiptWriter(tmp_path / "r.jsonl", capacity=10)
    real = writer._file.append

    def held_up(lines: bytes) -> None:
        stuck.wait(10)
        real(lines)

    writer._file.append = held_up  # type: ignore[method-assign]
    for index in range(50):
        writer.write(a_receipt(index))
    stuck.set()
    writer.close()
    assert 50 - 10 >= writer.dropped >= 50 - 3 * 10  # the ring, and what the thread had taken out of it
    assert writer.written + writer.dropped == 50


def test_a_full_disk_is_counted_and_said_and_the_writer_goes_on_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    writer = ReceiptWriter(path)
    real, told = writer._file.append, threading.Event()

    def full(lines: bytes) -> None:
        told.set()
        raise OSError(28, "No space left on device")

    writer._file.append = full  # type: ignore[method-assign]
    writer.write(a_receipt(0))
    assert told.wait(10)
    while writer.trouble is None:
        told.wait(0.001)
    assert "No space left" in writer.trouble
    writer._file.append = real  # type: ignore[method-assign]
    writer.write(a_receipt(1))
    writer.close()
    assert [line["request_id"] for line in lines_of(path)] == ["r-1"]
    assert [writer.dropped, writer.trouble] == [1, None]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_a_receipt_that_cannot_be_made_is_counted_and_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    writer = ReceiptWriter(path)
    writer.write(a_receipt(0), Broken())
    writer.write(a_receipt(1), Noted())
    writer.close()
    assert [line["request_id"] for line in lines_of(path)] == ["r-1"]
    assert writer.dropped == 1


def test_marks_and_units_can_be_compared_within_a_file_but_not_guessed_from_outside(tmp_path: Path) -> None:
    files = []
    for name in ("one", "other"):
        writer = ReceiptWriter(tmp_path / name)
        for index, chain in enumerate(([11, 12, 13, 14, 15], [11, 12, 13, 99, 100])):
            writer.write(a_receipt(index), chain=chain, unit="alice")
        writer.close()
        files.append(lines_of(tmp_path / name))
    (first, second), (elsewhere, _) = files
    common = [a == b for a, b in zip(first["marks"], second["marks"], strict=True)]
    assert common == [True, True, True, False, False]
    assert first["unit"] == second["unit"] != "alice"
    assert not set(first["marks"]) & set(elsewhere["marks"])
    assert first["unit"] != elsewhere["unit"]


@given(st.integers(0, 5000))
def test_marks_end_with_the_whole_prompt_and_are_never_more_than_half_as_far_apart_again(blocks: int) -> None:
    ends = mark_ends(blocks)
    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == blocks
    assert all(later <= max(1.5 * sooner, sooner + 1) for sooner, later in pairwise(ends))
    assert len(ends) <= 26
