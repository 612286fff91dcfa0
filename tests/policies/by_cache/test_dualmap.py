from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.base import Reason
from policies.by_cache.dualmap import DualMap
from tests.builders import a_request
from tests.policies.desk import Desk, blocks, rng, some_fleet

PROMPT = a_request(chain=[2**60 + number for number in range(100)])


def the_pair(desk: Desk, policy: DualMap) -> tuple[int, int]:
    return policy._candidates(list(policy._beginnings(PROMPT))[-1], desk.view, desk.estimates(PROMPT))


def a_desk(policy: DualMap, rows: int = 6) -> tuple[Desk, int, int]:
    """A desk, and the two replicas of PROMPT."""
    desk = Desk(policy, some_fleet(rows))
    one, other = the_pair(desk, policy)
    assert one != other
    return desk, one, other


def having(rows: int, **leading: int) -> Any:
    counts = [0] * rows
    for row, count in leading.items():
        counts[int(row.removeprefix("r"))] = count
    return blocks(*counts)


def test_nobody_but_the_two_is_ever_taken() -> None:
    desk, one, other = a_desk(DualMap(rng()))
    third = next(row for row in range(6) if row not in (one, other))
    desk.held = having(6, **{f"r{third}": 90})
    assert desk.ask(PROMPT).row in (one, other)


def test_of_the_two_the_larger_hit_is_taken_while_it_answers_in_time() -> None:
    desk, one, other = a_desk(DualMap(rng()))
    for row in (one, other):
        desk.held = having(6, **{f"r{row}": 50})
        desk.view.head_ends_s[:] = -np.inf
        desk.view.head_ends_s[row] = desk.view.head_compute_s[row] = 3.0  # slower than the other, but in time
        choice = desk.ask(PROMPT)
        assert (choice.row, choice.reason) == (row, Reason.PREFIX_HASH)


def test_when_the_larger_hit_would_miss_the_deadline_the_smaller_estimate_is_taken() -> None:
    desk, one, other = a_desk(DualMap(rng()))
    desk.held = having(6, **{f"r{one}": 50})
    desk.view.head_ends_s[one] = desk.view.head_compute_s[one] = 6.0
    choice = desk.ask(PROMPT)
    assert (choice.row, choice.reason) == (other, Reason.LOWEST_ESTIMATE)
    desk.view.head_ends_s[other] = desk.view.head_compute_s[other] = 60.0  # both miss it
    assert desk.ask(PROMPT).row == one


def test_equal_hits_go_to_the_smaller_estimate() -> None:
    desk, one, other = a_desk(DualMap(rng()))
    desk.view.head_ends_s[one] = desk.view.head_compute_s[one] = 1.0
    assert desk.ask(PROMPT).row == other


def test_a_pair_of_one_is_that_one() -> None:
    desk = Desk(DualMap(rng()), some_fleet(3))
    desk.view.ready[:] = [False, True, False]
    assert desk.ask(PROMPT).row == 1


def test_a_beginning_grows_when_it_is_more_than_its_share_of_the_window_and_shrinks_below_the_other() -> None:
    """13 of 200 are more than 6.12 %, 12 are not; 4 are not less than 2 %, 3 are."""
    policy = DualMap(rng(), step_tokens=32)
    desk = Desk(policy, some_fleet(4))

    def length() -> int:
        return len(list(policy._beginnings(PROMPT)))

    def others(count: int, start: int) -> None:
        for number in range(start, start + count):
            desk.end(desk.place(0, a_request(chain=[number])), 0.0)

    for count in range(13):
        assert length() == 1, count
        desk.end(desk.place(0, PROMPT), 0.0)
    assert length() == 2
    others(187, 0)
    assert length() == 2  # 13 of 200 still
    others(9, 1000)
    assert length() == 2  # 4 are left
    others(1, 2000)
    assert length() == 1


def test_prompts_that_share_a_hot_beginning_are_told_apart_by_what_follows() -> None:
    policy = DualMap(rng(), step_tokens=32)
    desk = Desk(policy, some_fleet(8))
    tails = np.random.default_rng(1).integers(0, 2**63, size=30).tolist()
    prompts = [a_request(chain=[1, 2**62, tail, tail + 1]) for tail in tails]
    assert len({next(iter(policy._beginnings(prompt))) for prompt in prompts}) == 1
    for _ in range(13):
        desk.end(desk.place(0, prompts[0]), 0.0)
    assert len({desk.ask(prompt).row for prompt in prompts}) > 4


def test_without_known_tokens_it_goes_to_the_least_loaded() -> None:
    desk = Desk(DualMap(rng()), some_fleet(2))
    desk.view.booked[:] = [3, 2]
    assert desk.ask(a_request(chain=[])).row == 1
    desk.place(0, a_request(chain=[]))


@pytest.mark.parametrize("bad", [{"deadline_s": 0.0}, {"step_tokens": 0}, {"window": 0}, {"shrink_share": 0.5}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        DualMap(rng(), **bad)
