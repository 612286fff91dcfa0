from __future__ import annotations

from typing import Any

import pytest

from policies.base import Reason
from policies.by_cache.sglang_cache_aware import SglangCacheAware
from tests.builders import a_request
from tests.policies.desk import Desk, blocks, rng, some_fleet

PROMPT = a_request(prompt_tokens=161, chain=list(range(100, 110)))  # ten blocks of 16, and the token always computed


def test_a_prompt_is_remembered_for_its_replica_when_it_is_placed_not_when_it_is_computed() -> None:
    desk = Desk(SglangCacheAware(rng()), some_fleet(4))
    desk.place(2, PROMPT)
    choice = desk.ask(PROMPT)
    assert (choice.row, choice.reason) == (2, Reason.LONGEST_PREFIX)


def test_what_engines_say_they_hold_is_not_read() -> None:
    desk = Desk(SglangCacheAware(rng()), some_fleet(2), blocks(10, 0))
    desk.place(1, PROMPT)
    assert desk.ask(PROMPT).row == 1


def test_a_prefix_is_followed_only_when_it_is_more_than_the_threshold() -> None:
    """Five of ten blocks are 80 of 161 tokens."""
    half = a_request(prompt_tokens=161, chain=PROMPT.chain[:5] + list(range(200, 205)))
    for threshold, reason in ((80 / 161 - 1e-9, Reason.LONGEST_PREFIX), (80 / 161, Reason.NO_PREFIX)):
        desk = Desk(SglangCacheAware(rng(), threshold=threshold), some_fleet(2))
        desk.place(0, PROMPT)
        assert desk.ask(half).reason is reason


def test_a_prompt_nobody_has_goes_to_the_smallest_index_or_as_newer_ones_do_to_the_least_load() -> None:
    new = a_request(chain=[1, 2, 3])
    for fallback, row in (("smallest_index", 1), ("least_load", 0)):
        desk = Desk(SglangCacheAware(rng(), fallback=fallback), some_fleet(2))
        desk.place(0, PROMPT)
        desk.view.booked[:] = [0, 3]
        assert desk.ask(new).row == row


def test_both_bounds_must_be_passed_before_load_decides() -> None:
    desk = Desk(SglangCacheAware(rng(), balance_abs=32, balance_rel=1.1), some_fleet(2))
    desk.place(0, PROMPT)
    for booked, row in (([32, 0], 0), ([33, 0], 1), ([370, 337], 0), ([371, 337], 1)):
        desk.view.booked[:] = booked
        assert desk.ask(PROMPT).row == row


def test_what_does_not_fit_the_index_is_forgotten_ends_first() -> None:
    desk = Desk(SglangCacheAware(rng(), index_tokens=10 * 16), some_fleet(2))
    desk.place(0, PROMPT)
    desk.place(0, a_request(chain=list(range(300, 306))))
    desk.view.booked[:] = 0
    assert desk.ask(PROMPT).reason is Reason.LONGEST_PREFIX  # four of its ten blocks, 64 of 161 tokens
    desk.place(0, a_request(chain=list(range(400, 404))))
    assert desk.ask(PROMPT).reason is Reason.NO_PREFIX


@pytest.mark.parametrize(
    "bad", [{"threshold": 1.5}, {"balance_abs": -1}, {"balance_rel": 0.5}, {"fallback": "none"}, {"index_tokens": 0}]
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SglangCacheAware(rng(), **bad)
