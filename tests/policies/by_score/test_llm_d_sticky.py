from __future__ import annotations

from typing import Any

import pytest

from policies.base import Reason
from policies.by_score.llm_d_sticky import LlmDSticky
from tests.builders import a_fleet, a_request
from tests.policies.desk import Desk, blocks, rng, some_fleet

PROMPT = a_request(prompt_tokens=1600)


def test_four_fifths_of_the_prompt_are_enough_to_stay_and_a_block_less_is_not() -> None:
    for leading, row, reason in ((80, 0, Reason.LONGEST_PREFIX), (79, 1, Reason.LOWER_LOAD)):
        desk = Desk(LlmDSticky(rng()), some_fleet(2), blocks(leading, 0))
        desk.view.prefill_tokens[0] = 100
        choice = desk.ask(PROMPT)
        assert (choice.row, choice.reason) == (row, reason)


@pytest.mark.parametrize("card", ["A100", "H20"])
def test_it_stays_until_the_wait_there_is_18_s_longer_by_the_cards_own_rate(card: str) -> None:
    view = a_fleet(card, card)
    desk = Desk(LlmDSticky(rng()), view, blocks(100, 0))
    tokens_per_s = 1.0 / view.linear_s_per_token[0]
    for wait_s, row in ((17.9, 0), (18.1, 1)):
        view.prefill_tokens[:] = [(5.0 + wait_s) * tokens_per_s, 5.0 * tokens_per_s]
        assert desk.ask(PROMPT).row == row


def test_of_those_kept_the_fewest_tokens_in_flight() -> None:
    desk = Desk(LlmDSticky(rng()), some_fleet(4), blocks(100, 90, 80, 0))
    desk.view.prefill_tokens[:] = [500, 300, 400, 0]
    assert desk.ask(PROMPT).row == 1


def test_when_all_have_it_there_is_nobody_to_break_away_to() -> None:
    desk = Desk(LlmDSticky(rng()), some_fleet(2), blocks(100, 100))
    desk.view.prefill_tokens[:] = [1e9, 2e9]
    assert (desk.ask(PROMPT).row, desk.ask(PROMPT).reason) == (0, Reason.LONGEST_PREFIX)


def test_once_broken_away_a_holder_with_the_fewest_tokens_is_still_taken() -> None:
    """The gate opens by the wait in seconds; then tokens decide, and the slow card has fewer of them."""
    view = a_fleet("H20", "A100")
    desk = Desk(LlmDSticky(rng(), penalty_s=0.0), view, blocks(100, 0))
    view.prefill_tokens[:] = [9_000, 10_000]
    choice = desk.ask(PROMPT)
    assert (choice.row, choice.reason) == (0, Reason.LOWER_LOAD)


@pytest.mark.parametrize("bad", [{"affinity": 1.1}, {"penalty_s": -1.0}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LlmDSticky(rng(), **bad)
