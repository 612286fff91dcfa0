"""The parts of the benchmark of receipts do what it says they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.replay import bench_receipts
from loadtest.replay.bench_receipts import a_decision, costs, fastest
from router.notes import Notes


def test_the_decision_is_noted_as_the_dispatcher_noted_it() -> None:
    decision = a_decision(2, 4)
    again = Notes(*decision.noted)
    assert again.candidates()[0][0].replica == decision.notes.candidates()[0][0].replica
    assert decision.receipt.outcome == "ok"
    assert decision.receipt.choice == decision.notes.chosen


def test_all_parts_are_timed_and_every_receipt_handed_over_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_receipts, "ROUNDS", 2)
    monkeypatch.setattr(bench_receipts, "fastest", lambda call, **more: fastest(call, **{**more, "calls": 3}))
    found = costs(2, 4, tmp_path)
    assert min(found.note_s, found.hand_over_s, found.whole_s, found.best_s) > 0.0
    assert found.loop_s == found.note_s + found.hand_over_s
    assert len((tmp_path / "receipts-2-4.jsonl").read_bytes().splitlines()) == 2 * 3
