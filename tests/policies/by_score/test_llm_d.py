from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.base import Reason
from policies.by_score.llm_d import LlmD, queue_score
from tests.builders import a_request
from tests.policies.desk import Desk, blocks, rng, some_fleet

PROMPT = a_request(prompt_tokens=1600)


def test_scores_are_weighted_three_two_two() -> None:
    """Half of the prompt, 1.5, against an eighth more free memory each step: 2 x 0.7 loses, 2 x 0.8 wins."""
    desk = Desk(LlmD(rng(), period_s=0.0), some_fleet(2), blocks(50, 0))
    for used, row in ((0.7, 0), (0.8, 1)):
        desk.view.kv_used_share[:] = [used, 0.0]
        choice = desk.ask(PROMPT)
        assert (choice.row, choice.reason) == (row, Reason.BEST_SCORE)


def test_the_shortest_queue_scores_one_the_longest_nothing_and_equal_ones_all_one() -> None:
    usable = np.array([True, True, True, False])
    assert queue_score(np.array([0.0, 3.0, 6.0, 99.0]), usable)[:3].tolist() == [1.0, 0.5, 0.0]
    assert queue_score(np.array([4.0, 4.0, 4.0, 0.0]), usable).tolist() == [1.0] * 4


def test_a_queue_can_outweigh_a_prefix_of_two_thirds_and_no_more() -> None:
    for leading, row in ((66, 1), (68, 0)):
        desk = Desk(LlmD(rng(), period_s=0.0), some_fleet(2), blocks(leading, 0))
        for _ in range(5):
            desk.place(0)
        assert desk.ask(PROMPT).row == row


def test_where_nobody_has_any_of_it_the_replica_least_recently_given_such_a_prompt_is_taken() -> None:
    desk = Desk(LlmD(rng()), some_fleet(3))
    rows = [desk.send(now_s=float(number)).row for number in range(9)]
    assert sorted(rows[:3]) == [0, 1, 2]
    assert rows[3:6] == rows[:3]
    assert rows[6:] == rows[:3]
    assert desk.ask(now_s=9.0).reason is Reason.NO_PREFIX


def test_a_prompt_that_somebody_has_is_no_miss() -> None:
    desk = Desk(LlmD(rng()), some_fleet(2))
    desk.place(0, now_s=1.0)
    desk.held = blocks(20, 0)
    desk.place(1, now_s=2.0)
    desk.held = blocks(0, 0)
    assert desk.ask(now_s=3.0).row == 1


def test_load_is_that_of_the_last_report() -> None:
    desk = Desk(LlmD(rng()), some_fleet(2), blocks(10, 10))
    desk.view.kv_used_share[:] = 0.0
    for number in range(6):
        desk.place(0, now_s=0.051 + number / 1000)
    assert desk.ask(PROMPT, now_s=0.099).probability == 0.5
    assert desk.ask(PROMPT, now_s=0.1).row == 1


def test_a_replica_that_reports_no_memory_counts_as_the_mean_of_the_others() -> None:
    desk = Desk(LlmD(rng(), period_s=0.0), some_fleet(3), blocks(10, 10, 10))
    desk.view.kv_used_share[:] = [0.2, np.nan, 0.8]
    assert desk.ask(PROMPT).row == 0
    desk.view.ready[0] = False
    assert desk.ask(PROMPT).probability == 0.5


@pytest.mark.parametrize("bad", [{"prefix": -1.0}, {"queue": float("nan")}, {"kv": float("inf")}, {"period_s": -1.0}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LlmD(rng(), **bad)
