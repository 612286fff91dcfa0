from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.base import Reason
from policies.by_cache.preble_e2 import PrebleE2
from policies.by_cache.sglang_cache_aware import SglangCacheAware
from policies.by_load.peak_ewma import PeakEwma
from policies.by_load.prequal import Prequal
from policies.by_score.llm_d import LlmD
from policies.newcomers import Newcomers
from tests.builders import a_request
from tests.policies.desk import Desk, rng, some_fleet

PROMPT = a_request(prompt_tokens=161, chain=list(range(100, 110)))


def another(desk: Desk, row: int) -> None:
    """The replica of `row` has left, and one that nothing is known of has its row."""
    names = list(desk.view.names)
    names[row] = f"new-{row}"
    desk.view.names = tuple(names)


def worked(policy: Any) -> Desk:
    """Replica 0 was slow, was sent PROMPT, was given a miss and much work; nothing of it is left."""
    desk = Desk(policy, some_fleet(2))
    sent = desk.place(0, replace(PROMPT, prompt_tokens=160_000), now_s=1.0)
    desk.ask(now_s=1.0)
    desk.first_token(sent, 9.0)
    desk.end(sent, 9.0)
    return desk


def test_at_first_all_rows_are_new_and_then_those_whose_name_changes() -> None:
    desk, newcomers = Desk(PeakEwma(rng()), some_fleet(3)), Newcomers()
    assert newcomers.rows(desk.view) == [0, 1, 2]
    assert newcomers.rows(desk.view) == []
    another(desk, 1)
    assert newcomers.rows(desk.view) == [1]
    assert newcomers.rows(desk.view) == []


def test_a_newcomer_is_no_slower_than_any_other() -> None:
    desk = worked(PeakEwma(rng()))
    assert desk.ask(now_s=9.0).row == 1
    another(desk, 0)
    desk.view.booked[1] = 2  # 1 s that has faded for 8 s, three times
    assert desk.ask(now_s=9.0).row == 0


def test_what_another_replica_answered_is_not_asked_about_again() -> None:
    policy = Prequal(rng())
    desk = worked(policy)
    assert policy._latencies.keys() == {0}
    desk.place(1, now_s=9.5)
    assert 0 in policy._pool
    another(desk, 0)
    desk.ask(now_s=9.6)
    assert 0 not in policy._pool
    assert not policy._latencies


def test_a_newcomer_was_sent_nothing() -> None:
    desk = worked(SglangCacheAware(rng()))
    assert desk.ask(PROMPT).reason is Reason.LONGEST_PREFIX
    another(desk, 0)
    assert desk.ask(PROMPT).reason is Reason.NO_PREFIX


def test_a_newcomer_has_done_no_work_of_late() -> None:
    policy = PrebleE2(rng())
    desk = worked(policy)
    assert desk.ask(now_s=9.0).row == 1
    another(desk, 0)
    assert desk.ask(now_s=9.0).probability == 0.5
    assert (len(policy._latest), len(policy._sent[0])) == (0, 0)


def test_a_newcomer_was_given_no_miss() -> None:
    desk = worked(LlmD(rng()))
    desk.place(1, now_s=10.0)
    assert desk.ask(now_s=11.0).row == 0
    another(desk, 1)
    assert desk.ask(now_s=11.0).row == 1


@pytest.mark.parametrize("policy", [PeakEwma, Prequal, SglangCacheAware, PrebleE2, LlmD])
def test_requests_of_a_replica_that_has_left_can_still_end(policy: Any) -> None:
    desk = Desk(policy(rng()), some_fleet(2))
    sent = desk.place(0, PROMPT, now_s=1.0)
    another(desk, 0)
    desk.first_token(sent, 2.0)
    desk.end(sent, 3.0)
    desk.send(PROMPT, now_s=400.0)
    assert desk.view.booked.sum() == 1
