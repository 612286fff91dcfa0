"""What a chaos run concludes from what clients and router wrote down."""

from __future__ import annotations

from math import isnan

import pytest

from loadtest.chaos.account import (
    ReceiptLine,
    counts_of,
    disagreements,
    mean_first_s,
    read_receipts,
    recovery,
    unexpected,
)
from loadtest.chaos.load import Answer, Outcome


def answers_of(*first_s: float | Outcome | None, every_s: float = 1.0) -> list[Answer]:
    """One request each second: its first token's time, how it ended without one, or None while it runs."""
    made = []
    for number, what in enumerate(first_s):
        answer = Answer(f"r{number}", number * every_s)
        if isinstance(what, Outcome):
            answer.outcome = what
        elif what is not None:
            answer.outcome, answer.first_s = Outcome.OK, what
        made.append(answer)
    return made


def receipt(request_id: str, outcome: str) -> ReceiptLine:
    return ReceiptLine(request_id=request_id, outcome=outcome)


def test_recovered_is_the_first_stretch_as_long_as_the_pattern_that_is_as_fast_as_before() -> None:
    answers = answers_of(9.0, 9.0, 9.0, 1.1, 1.25, 1.0, 1.25)
    recovered_s, after_s = recovery(answers, before_s=1.0, well_at_s=0.0, window=2)
    assert recovered_s == 3.0
    assert after_s == pytest.approx(1.15)


def test_requests_from_before_the_end_of_the_failure_are_no_part_of_the_recovery() -> None:
    answers = answers_of(1.0, 1.0, 1.0, 5.0, 1.0, 1.0)
    assert recovery(answers, before_s=1.0, well_at_s=3.0, window=2)[0] == 1.0


def test_a_good_stretch_that_gets_worse_again_is_no_recovery() -> None:
    recovered_s, after_s = recovery(answers_of(1.0, 1.0, 9.0, 9.0), before_s=1.0, well_at_s=0.0, window=2)
    assert recovered_s is None
    assert after_s == 9.0


@pytest.mark.parametrize("end", [Outcome.CUT, Outcome.REFUSED, Outcome.FAILED])
def test_a_stretch_with_a_request_that_was_not_answered_is_no_recovery(end: Outcome) -> None:
    assert recovery(answers_of(1.0, end, 1.0, 1.0), before_s=1.0, well_at_s=0.0, window=2)[0] == 2.0
    assert recovery(answers_of(1.0, 1.0, end), before_s=1.0, well_at_s=0.0, window=2)[0] is None


def test_nothing_is_concluded_from_requests_behind_one_that_still_runs() -> None:
    assert recovery(answers_of(1.0, None, 1.0, 1.0), before_s=1.0, well_at_s=0.0, window=2)[0] is None


def test_without_any_answer_the_mean_is_unknown() -> None:
    assert isnan(mean_first_s([]))
    assert recovery([], before_s=1.0, well_at_s=0.0, window=2)[0] is None


def test_one_receipt_of_the_same_end_accounts_for_a_request() -> None:
    answers = answers_of(1.0, Outcome.CUT, Outcome.REFUSED, Outcome.FAILED)
    receipts = [receipt("r0", "ok"), receipt("r1", "failed"), receipt("r2", "refused"), receipt("r3", "failed")]
    assert disagreements(answers, receipts, killed=False) == []


@pytest.mark.parametrize(
    ("end", "said", "sentence"),
    [
        (Outcome.OK, [], "r0 (ok) has 0 receipts"),
        (Outcome.OK, ["ok", "ok"], "r0 (ok) has 2 receipts"),
        (Outcome.OK, ["failed"], "r0 was ok for its client and failed in its receipt"),
        (Outcome.CUT, ["ok"], "r0 was cut for its client and ok in its receipt"),
        (Outcome.SHORT, ["ok"], "r0 was short for its client and ok in its receipt"),
    ],
)
def test_ends_that_the_two_sides_do_not_agree_on_are_named(end: Outcome, said: list[str], sentence: str) -> None:
    receipts = [receipt("r0", outcome) for outcome in said]
    assert disagreements(answers_of(end), receipts, killed=False) == [sentence]


def test_a_receipt_of_nobodys_request_is_named() -> None:
    assert disagreements([], [receipt("x", "ok")], killed=True) == ["x has a receipt and was never sent"]


def test_a_killed_router_may_lack_receipts_and_still_not_have_two() -> None:
    assert disagreements(answers_of(Outcome.CUT), [], killed=True) == []
    assert disagreements(answers_of(1.0), [receipt("r0", "ok")] * 2, killed=True) == ["r0 (ok) has 2 receipts"]


def test_a_request_that_never_reached_the_router_needs_no_receipt() -> None:
    assert disagreements(answers_of(Outcome.FAILED), [], killed=False) == []


def test_ends_that_a_failure_may_not_cause_are_told_with_an_example() -> None:
    answers = answers_of(1.0, Outcome.CUT, Outcome.HUNG, Outcome.HUNG)
    answers[2].said = "no end"
    assert unexpected(answers, {Outcome.CUT}) == ["2 requests hung, first r2: no end"]
    assert unexpected(answers_of(1.0), set()) == []


def test_every_request_is_counted_once() -> None:
    counts = counts_of(answers_of(1.0, 1.0, Outcome.CUT, Outcome.FAILED))
    assert sum(counts.values()) == 4
    assert (counts["ok"], counts["cut"], counts["failed"], counts["hung"]) == (2, 1, 1, 0)


def test_receipts_are_read_from_lines_with_more_fields_than_are_used_and_half_lines_passed_over() -> None:
    lines = (
        b'{"request_id":"a","outcome":"ok","policy":"e2e"}',
        b'{"request_id":"c"',
        b'{"request_id":"b","outcome":"failed","attempts":2}',
    )
    text = b"\n".join(lines) + b"\n"
    assert [(line.request_id, line.outcome, line.attempts) for line in read_receipts(text)] == [
        ("a", "ok", 0),
        ("b", "failed", 2),
    ]
