from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from estimators.links import LinkTable
from estimators.routes import Held, Routes
from policies.base import Reason
from policies.by_score.dynamo import Dynamo, softmax_chances
from tests.builders import a_request, an_estimator
from tests.policies.desk import Desk, blocks, rng, some_fleet

PROMPT = a_request(prompt_tokens=1601, chain=list(range(100, 200)))  # 100 blocks, and the token always computed


def test_a_cached_block_is_worth_a_block_of_prefill_elsewhere() -> None:
    """30 blocks cached here, 29 blocks placed there and not yet prefilled."""
    desk = Desk(Dynamo(rng()), some_fleet(2), blocks(30, 0))
    for waiting, row in ((29 * 16, 0), (31 * 16, 1)):
        desk.view.prefill_tokens[0] = waiting
        assert desk.ask(PROMPT).row == row


def test_more_credit_than_work_is_worth_nothing_more() -> None:
    desk = Desk(Dynamo(rng(), hbm=3.0), some_fleet(2), blocks(60, 100))
    assert desk.ask(PROMPT).probability == 0.5


def test_blocks_in_use_count_and_shared_ones_once() -> None:
    """The sharer's replica has 100 blocks in use, and would have no more; the other gets 100 new ones on top of 90."""
    desk = Desk(Dynamo(rng(), overlap=0.0), some_fleet(2))
    desk.first_token(desk.place(0, PROMPT), 1.0)
    desk.first_token(desk.place(1, a_request(prompt_tokens=90 * 16, chain=list(range(500, 589)))), 1.0)
    assert desk.ask(PROMPT).row == 0
    stranger = a_request(prompt_tokens=1601, chain=list(range(700, 800)))
    assert desk.ask(stranger).row == 1


def test_blocks_are_in_use_until_the_request_ends() -> None:
    desk = Desk(Dynamo(rng(), overlap=0.0), some_fleet(2))
    sent = desk.place(0, PROMPT)
    stranger = a_request(prompt_tokens=1601, chain=list(range(700, 800)))
    assert desk.ask(stranger).row == 1
    desk.first_token(sent, 1.0)
    assert desk.ask(stranger).row == 1
    desk.end(sent, 2.0)
    assert desk.ask(stranger).probability == 0.5


def with_tiers(desk: Desk, *, hbm: list[int], host: list[int], disk: list[int], store: int) -> Desk:
    desk.held = Held(
        local_blocks=np.array(hbm, dtype=np.int32),
        store_blocks=store,
        host_blocks=np.array(host, dtype=np.int32),
        disk_blocks=np.array(disk, dtype=np.int32),
    )
    return desk


def test_each_tier_has_its_credit_for_what_it_adds() -> None:
    rows = 4
    table = LinkTable(bytes_per_s=[12.5e9] + [25e9] * rows + [5e9] * rows)
    routes = Routes(
        table=table,
        store=[[0, 1 + row] for row in range(rows)],
        host=[[1 + row] for row in range(rows)],
        disk=[[5 + row, 1 + row] for row in range(rows)],
    )
    estimator = an_estimator(rows=rows)
    estimator = type(estimator)(costs=estimator.costs, layers=estimator.layers, rows=rows, routes=routes)
    policy = Dynamo(rng())
    desk = with_tiers(
        Desk(policy, some_fleet(rows), estimator=estimator),
        hbm=[40, 0, 0, 0],
        host=[40, 40, 0, 10],
        disk=[40, 40, 40, 20],
        store=60,
    )
    credit = policy._credit(PROMPT, desk.estimates(PROMPT)) / 16
    assert credit.tolist() == pytest.approx([40 + 10, 30 + 10, 10 + 10, 7.5 + 2.5 + 20])


def test_a_store_the_fleet_has_not_gives_no_credit() -> None:
    policy = Dynamo(rng())
    desk = Desk(policy, some_fleet(2), blocks(10, 0, store=60))
    assert (policy._credit(PROMPT, desk.estimates(PROMPT)) / 16).tolist() == [10, 0]


def test_a_temperature_draws_by_softmax_of_normalised_costs() -> None:
    desk = Desk(Dynamo(rng(), temperature=0.5), some_fleet(3), blocks(100, 50, 0))
    chances = softmax_chances(np.array([0.0, 0.5, 1.0]), 0.5)
    drawn = Counter(desk.ask(PROMPT).row for _ in range(3000))
    assert [drawn[row] / 3000 for row in range(3)] == pytest.approx(chances.tolist(), abs=0.03)
    choice = desk.ask(PROMPT)
    assert choice.reason is Reason.BEST_SCORE
    assert choice.probability == pytest.approx(chances[choice.row], rel=1e-3)


def test_chances_of_equal_costs_are_equal_and_all_sum_to_one() -> None:
    assert softmax_chances(np.full(4, 7.0), 0.1).tolist() == [0.25] * 4
    assert softmax_chances(np.array([1.0, 900.0, 30.0]), 0.01).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [{"overlap": -1.0}, {"temperature": float("inf")}, {"host": float("nan")}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Dynamo(rng(), **bad)
