from __future__ import annotations

from policies.base import Reason
from policies.by_score.lmetric import LMetric
from tests.builders import a_request
from tests.policies.desk import Desk, blocks, rng, some_fleet

PROMPT = a_request(prompt_tokens=1600)


def test_the_product_of_tokens_to_compute_and_requests_decides() -> None:
    """1600 x 2 here; there 800 cached, so 800 x (b + 1): 2400 with two requests, equal with three, 4000 with four."""
    desk = Desk(LMetric(rng()), some_fleet(2), blocks(0, 50))
    desk.view.booked[0] = 1
    for booked, row in ((2, 1), (4, 0)):
        desk.view.booked[1] = booked
        assert desk.ask(PROMPT).row == row
    desk.view.booked[1] = 3
    assert desk.ask(PROMPT).probability == 0.5


def test_tokens_placed_and_not_yet_prefilled_count_until_the_first_token() -> None:
    desk = Desk(LMetric(rng()), some_fleet(2))
    sent = desk.place(0, a_request(prompt_tokens=5000))
    desk.view.booked[1] = 2  # 6600 x 2 against 1600 x 3
    choice = desk.ask(PROMPT)
    assert (choice.row, choice.reason) == (1, Reason.BEST_SCORE)
    desk.first_token(sent, 1.0)  # 1600 x 2 against 1600 x 3
    assert desk.ask(PROMPT).row == 0


def test_an_idle_replica_with_nothing_cached_can_lose_to_none() -> None:
    """Nothing is multiplied away: with b = 0 the tokens alone decide."""
    desk = Desk(LMetric(rng()), some_fleet(2), blocks(0, 20))
    assert desk.ask(PROMPT).row == 1
