from __future__ import annotations

from typing import Any

import pytest

from policies.base import Reason
from policies.by_cache.preble_e2 import PrebleE2
from tests.builders import a_request
from tests.policies.desk import Desk, blocks, rng, some_fleet

HALF = 8448 // 16 // 2  # blocks of the standard prompt


def test_a_prefix_of_more_than_half_is_followed_and_of_half_is_not() -> None:
    desk = Desk(PrebleE2(rng()), some_fleet(2))
    desk.place(0)  # work there
    for leading, row, reason in ((HALF + 1, 0, Reason.LONGEST_PREFIX), (HALF, 1, Reason.NO_PREFIX)):
        desk.held = blocks(leading, 0)
        choice = desk.ask()
        assert (choice.row, choice.reason) == (row, reason)


def test_of_equally_long_prefixes_the_least_work_decides() -> None:
    desk = Desk(PrebleE2(rng()), some_fleet(3))
    desk.place(0)
    desk.held = blocks(400, 400, 0)
    assert desk.ask().row == 1


def test_work_counts_for_three_minutes_whether_it_is_done_or_not() -> None:
    desk = Desk(PrebleE2(rng()), some_fleet(2))
    sent = desk.place(0, now_s=10.0)
    desk.first_token(sent, 11.0)
    desk.end(sent, 12.0)
    desk.place(1, a_request(prompt_tokens=64), now_s=100.0)
    assert desk.ask(now_s=190.0).row == 1
    assert desk.ask(now_s=190.1).row == 0


def test_work_is_prefill_of_what_was_not_cached_and_the_expected_decode() -> None:
    policy = PrebleE2(rng())
    desk = Desk(policy, some_fleet(2))
    desk.held = blocks(400, 0)
    estimates = desk.estimates(a_request())
    expected = [
        estimates.prefill_s[0, 0] + 256 * estimates.pace_s[0],
        estimates.prefill_s[1, 1] + 256 * estimates.pace_s[1],
    ]
    desk.place(0)
    desk.place(1)
    assert policy._work_s.tolist() == pytest.approx(expected)
    assert expected[0] < expected[1]


def test_blocks_that_would_go_cost_their_prefill_by_their_share_of_all_uses_there() -> None:
    """Both replicas are full, each of blocks that were all used alike; then the head of one is used once more."""
    desk = Desk(PrebleE2(rng(), window_s=1000.0), some_fleet(2))
    for row in (0, 1):
        desk.view.has_capacity(row, 1600)
    often, once = a_request(prompt_tokens=1601, chain=list(range(100))), a_request(chain=list(range(500, 600)))
    for number in range(3):
        desk.end(desk.place(0, often, now_s=float(number)), 5.0)
    for number in range(3):
        changed = a_request(prompt_tokens=1601, chain=[1000 * number + block for block in once.chain])
        desk.end(desk.place(1, changed, now_s=float(number)), 5.0)
    policy = desk.policy
    assert isinstance(policy, PrebleE2)
    assert [len(sent) for sent in policy._sent] == [100, 100]
    new = a_request(prompt_tokens=801, chain=list(range(9000, 9050)))
    value_s = policy._evicted_s(new, desk.view, 0.0 * desk.view.capacity_tokens)
    # 51 blocks of a hundred go: alike in share, since all blocks of a replica were used alike.
    assert value_s.tolist() == pytest.approx([0.51 * 16 * desk.view.linear_s_per_token[0]] * 2)
    desk.place(0, a_request(prompt_tokens=160, chain=list(range(10))), now_s=6.0)  # the head of it once more
    value_s = policy._evicted_s(new, desk.view, 0.0 * desk.view.capacity_tokens)
    assert value_s[0] < value_s[1]  # what goes there is a smaller part of all uses now


def test_memory_that_is_free_or_unknown_costs_nothing() -> None:
    policy = PrebleE2(rng())
    desk = Desk(policy, some_fleet(2))
    desk.view.has_capacity(0, 1e6)
    desk.place(0, a_request(chain=[1, 2]))
    desk.place(1, a_request(chain=[1, 2]))
    assert policy._evicted_s(a_request(), desk.view, 0.0 * desk.view.head_s).tolist() == [0, 0]


@pytest.mark.parametrize("bad", [{"window_s": 0.0}, {"exploit_share": 1.5}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PrebleE2(rng(), **bad)
