"""What is remembered of requests that ended: enough to look back, and never more than that."""

from __future__ import annotations

import pytest

from router.page.live import KEPT, LINES, PER_SECOND, STEP_S, STEPS, Live
from tests.router.page.builders import Noted, a_candidate, end, placed_nowhere


def numbers(live: Live, **wanted: int) -> list[int]:
    return [one.number for one in live.decisions(**wanted)]


def test_a_busy_second_does_not_push_out_the_quiet_ones_before_it() -> None:
    live = Live()
    for second in range(5):
        end(live, second, at=1000.0 + second)
    for index in range(10_000):
        end(live, index, at=1005.0)
    assert numbers(live) == list(range(1, 6 + PER_SECOND))


def test_those_worth_a_look_have_a_place_of_their_own() -> None:
    live = Live()
    for index in range(100):
        end(live, index)
    end(live, 100, outcome="upstream_error")
    end(live, 101, candidates=[a_candidate(first_token_p90_s=0.2, first_token_p99_s=0.3)])  # it came after 0.35 s
    assert [(one.number, one.late) for one in live.decisions() if one.notable] == [(101, False), (102, True)]


def test_what_is_kept_is_bounded_however_many_requests_end() -> None:
    live = Live()
    for index in range(LINES + 500):
        end(live, index, at=1000.0 + index)
        end(live, index, at=1000.0 + index, outcome="upstream_error")
    assert len(live.lines) == LINES
    assert len(live.decisions()) == 2 * KEPT
    assert len(live.steps) == STEPS
    assert live.ended_total == 2 * (LINES + 500)


def test_only_what_ended_since_is_given_to_who_saw_the_rest() -> None:
    live = Live()
    for index in range(6):
        end(live, index, at=1000.0 + index)
    assert numbers(live, after=4) == [5, 6]
    assert numbers(live, most=2) == [5, 6]
    assert [line.number for line in live.lines_after(3)] == [4, 5, 6]
    assert live.lines_after(6) == []


def test_requests_are_counted_by_path_in_the_step_they_ended_in() -> None:
    live = Live()
    end(live, at=1000.0)
    end(live, at=1009.0, candidates=[a_candidate(path="remote")])
    end(live, at=1009.0, ended_s=3.0)
    placed_nowhere(live, at=1013.0)
    end(live, at=1014.0, candidates=[], chosen=None, first_token_s=None)  # by a rule that reads no estimates
    assert [(step.start, step.paths) for step in live.steps] == [
        (1000, {"local": 1, "remote": 1}),
        (1000 + STEP_S, {"local": 1, "refused": 1, "unknown": 1}),
    ]


def test_a_request_nobody_could_read_is_no_decision() -> None:
    live = Live()
    placed_nowhere(live, outcome="client_error", status=400, cause=None)
    assert (live.decisions(), list(live.lines), list(live.steps)) == ([], [], [])


def test_a_policy_that_a_client_asked_for_does_not_count_for_an_arm() -> None:
    live = Live()
    end(live, arm="bold", override=True)
    assert not live.lines
    assert numbers(live) == [1]


def test_all_candidates_are_worked_out_when_asked_for_and_the_receipt_is_left_alone() -> None:
    live = Live()
    receipt = end(live, 0, a_candidate(replica="b"), a_candidate(replica="c"))
    before = receipt.candidates
    (one,) = live.decisions()
    for _ in range(2):  # two may look at the same
        whole = one.whole()
        assert [each.replica for each in whole.candidates] == ["b", "c", "a"]
        assert whole.choice is not None
        assert whole.choice.replica == "a"
    assert receipt.candidates is before
    assert len(before) == 1


def test_what_the_writer_makes_of_a_receipt_meanwhile_changes_nothing() -> None:
    live = Live()
    receipt = end(live, 0, a_candidate(replica="b"))
    Noted(a_candidate(replica="x"), a_candidate(replica="y")).complete(receipt, best=None)
    (one,) = live.decisions()
    assert one.choice is not None
    assert one.choice.replica == "a"
    assert [each.replica for each in one.whole().candidates] == ["b", "a"]


@pytest.mark.parametrize("number", [0, 2, 10**15])
def test_a_number_that_is_not_kept_is_not_found(number: int) -> None:
    live = Live()
    end(live)
    assert live.find(number) is None
    assert live.find(1) is live.decisions()[0]
