"""What is remembered of requests that ended: enough to look back, and never more than that."""

from __future__ import annotations

import pytest

from router.actions import Cause
from router.page import shown
from router.page.live import KEPT, LINES, OPEN, PER_SECOND, STEP_S, STEPS, Decision, Live
from tests.router.dispatch_bench import Bench, only_send
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
    assert [(one.number, one.late) for one in live.decisions() if one.notable] == [(5, False), (6, True)]


def test_what_is_kept_is_bounded_however_many_requests_end() -> None:
    live = Live()
    for index in range(LINES + 500):
        end(live, index, at=1000.0 + index)
        end(live, index, at=1000.0 + index, outcome="upstream_error")
    assert len(live.lines) == LINES
    assert len(live.decisions()) == 2 * KEPT
    assert len(live.steps) == STEPS
    assert live.changes == 2 * (LINES + 500)


def test_only_what_ended_since_is_given_to_who_saw_the_rest() -> None:
    live = Live()
    for index in range(6):
        end(live, index, at=1000.0 + index)
    assert numbers(live, after=4) == [5, 6]
    assert numbers(live, most=2) == [5, 6]
    assert [line.change for line in live.lines_after(3)] == [4, 5, 6]
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


def watched() -> tuple[Live, Bench]:
    """A dispatcher whose placements and ends are remembered."""
    live = Live()
    return live, Bench("A100", "H20", keep=lambda receipt, request, detail: live.ended(receipt, detail))


def only(live: Live, after: int = 0) -> Decision:
    (one,) = live.decisions(after=after)
    return one


def test_a_request_is_seen_from_the_moment_of_its_choice_until_it_has_ended() -> None:
    live, bench = watched()
    live.placed(sent := bench.send(0.0))
    one = only(live)
    assert one.choice is not None
    assert (one.choice.replica, one.receipt.outcome) == (sent.replica, None)
    assert shown.opened(one)["what_came"] == "It waits for its first token."
    assert len(shown.opened(one)["candidates"]) == 2
    seen = live.changes
    bench.dispatcher.first_token(sent, 2.0)
    live.look()
    assert only(live, after=seen) is one
    assert shown.opened(one)["what_came"].startswith("It is being answered; the first token came 2 s")
    seen = live.changes
    live.look()
    assert live.decisions(after=seen) == []
    bench.finish(sent, 5.0)
    assert only(live, after=seen) is one
    assert (one.receipt.outcome, len(live.lines)) == ("ok", 1)
    assert "ended well" in shown.opened(one)["what_came"]


def test_a_second_attempt_is_the_same_decision_with_another_choice() -> None:
    live, bench = watched()
    live.placed(first := bench.send(0.0))
    second = only_send(bench.dispatcher.failed(first, Cause.CONNECT, 0.1))
    live.placed(second)
    one = only(live)
    assert one.choice is not None
    assert one.choice.replica == second.replica != first.replica
    assert shown.decision(one)["attempts"] == 2


def test_of_requests_under_way_only_so_many_are_kept_and_all_are_counted_when_they_end() -> None:
    live, bench = watched()
    sent = [bench.send(float(at), request_id=f"r-{at}") for at in range(OPEN + 20)]
    for one in sent:
        live.placed(one)
    assert len(live.decisions()) == OPEN
    for at, one in enumerate(sent):
        bench.finish(one, 1000.0 + at)
    assert len(live.lines) == OPEN + 20
    assert not any(one.receipt.outcome is None for one in live.decisions())
    assert not live._open


@pytest.mark.parametrize("number", [0, 2, 10**15])
def test_a_number_that_is_not_kept_is_not_found(number: int) -> None:
    live = Live()
    end(live)
    assert live.find(number) is None
    assert live.find(1) is live.decisions()[0]
