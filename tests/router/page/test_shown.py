"""What the page is told, as plain values."""

from __future__ import annotations

from math import inf, nan

import msgspec
import pytest

from router.page import shown
from router.page.live import Live
from tests.router.page.builders import a_candidate, a_fleet_view, a_replica, a_source, end, placed_nowhere


def test_each_replica_comes_with_its_own_event_source_and_the_rest_are_stores() -> None:
    view = a_fleet_view(a_replica("a"), a_replica("b"), event_sources=[a_source("store"), a_source("b", "silent")])
    told = shown.fleet(view)
    assert [(one["name"], one["events"] and one["events"]["state"]) for one in told["replicas"]] == [
        ("a", None),
        ("b", "silent"),
    ]
    assert [store["name"] for store in told["stores"]] == ["store"]
    assert told["queued"] == 3
    assert "coefficients" not in told["replicas"][0]


def test_the_spans_of_a_bar_are_queue_beside_fetch_and_compute_after_the_later_of_the_two() -> None:
    overlapped = a_candidate(queue_s=0.2, fetch_s=0.3, ready_s=0.3, compute_s=0.1, first_token_s=0.4)
    serial = a_candidate(queue_s=0.2, fetch_s=0.3, ready_s=0.5, compute_s=0.1, first_token_s=0.6)
    assert shown.candidate(overlapped)["spans"] == pytest.approx([0.2, 0.0, 0.3, 0.3, 0.4])
    assert shown.candidate(serial)["spans"] == pytest.approx([0.2, 0.2, 0.5, 0.5, 0.6])


def test_an_opened_decision_has_the_chosen_candidate_first_and_says_why() -> None:
    live = Live()
    end(live, 0, a_candidate(replica="slow", expected_s=9.0), a_candidate(replica="fast", expected_s=0.1))
    told = shown.opened(live.decisions()[0])
    assert [one["replica"] for one in told["candidates"]] == ["a", "fast", "slow"]
    assert "fast" in told["why"]
    assert told["why"].startswith("e2e took a by")
    assert "ended well" in told["what_came"]


def test_a_request_that_was_placed_nowhere_can_be_opened_too() -> None:
    live = Live()
    placed_nowhere(live)
    told = shown.opened(live.decisions()[0])
    assert (told["candidates"], told["chosen"], told["outcome"]) == ([], None, "refused")
    assert "placed nowhere" in told["why"]


def test_unknown_numbers_reach_the_page_as_null() -> None:
    live = Live()
    end(live, candidates=[a_candidate(queue_s=nan, ready_s=nan, expected_s=inf)])
    told = msgspec.json.decode(msgspec.json.encode(shown.decision(live.decisions()[0])))
    assert told["chosen"]["spans"][0] is None
    assert told["chosen"]["expected_s"] is None


def test_arms_are_told_apart_and_say_what_their_requests_saw() -> None:
    live = Live()
    candidates = [a_candidate(expected_s=1.0, first_token_p90_s=1.5, first_token_p99_s=3.0)]
    for index in range(10):
        end(live, index, arm="bold", policy="ttft", candidates=candidates, first_token_s=1.0 + 0.1 * index, ended_s=5.0)
    end(live, 10, arm="steady", outcome="upstream_error", first_token_s=None)
    bold, steady = shown.arms(live.lines)
    assert (bold["name"], bold["policy"], bold["requests"], bold["failed"]) == ("bold", "ttft", 10, 0)
    assert bold["first_token_s"] == pytest.approx([1.45, 1.81, 1.891])
    assert bold["end_to_end_s"] == pytest.approx([5.0] * 3)
    assert (bold["within_p90"], bold["within_p99"]) == (pytest.approx(0.6), pytest.approx(1.0))
    assert bold["error_share"] == pytest.approx(0.45)
    assert (steady["failed"], steady["first_token_s"], steady["within_p90"]) == (1, None, None)


def test_points_are_of_requests_with_both_an_expected_and_an_observed_first_token() -> None:
    live = Live()
    end(live, 0)
    end(live, 1, first_token_s=None)
    end(live, 2, candidates=[], chosen=None)
    assert shown.points(live.lines) == [[pytest.approx(0.34), pytest.approx(0.35), "local"]]


def test_of_the_steps_all_or_only_the_last_are_told() -> None:
    live = Live()
    for start in (1000.0, 1010.0, 1020.0):
        end(live, at=start)
    assert [step["start"] for step in shown.steps(live)] == [1000, 1010, 1020]
    assert [step["start"] for step in shown.steps(live, 2)] == [1010, 1020]
