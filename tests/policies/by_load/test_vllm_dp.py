from __future__ import annotations

import pytest

from policies.by_load.vllm_dp import VllmDataParallel
from tests.policies.desk import Desk, rng, some_fleet


def test_one_queued_request_weighs_as_much_as_four_that_run() -> None:
    desk = Desk(VllmDataParallel(rng(), period_s=0.0), some_fleet(2))
    for _ in range(5):
        desk.first_token(desk.place(0), 0.0)  # five decode
    desk.place(1)
    desk.place(1)  # one runs, one is queued: 4 + 1
    assert desk.ask().probability == 0.5
    desk.first_token(desk.place(0), 0.0)
    assert desk.ask().row == 1


def test_counters_are_those_of_the_last_report() -> None:
    desk = Desk(VllmDataParallel(rng()), some_fleet(2))
    for _ in range(9):
        desk.first_token(desk.place(0, now_s=0.02), 0.03)
    desk.ask(now_s=0.15)
    ends = [desk.place(1, now_s=0.16) for _ in range(2)]
    assert desk.ask(now_s=0.19).row == 1  # 9 running there; 2 x 4 of its own here
    for one in ends:
        desk.end(one, 0.17)
    ends = [desk.place(1, now_s=0.18)]
    assert desk.ask(now_s=0.199).row == 0  # ends are heard of with the next report, own choices at once
    desk.end(ends[0], 0.1995)
    assert desk.ask(now_s=0.2).row == 1


def test_own_choices_count_as_queued_until_the_next_report_so_a_burst_is_spread() -> None:
    desk = Desk(VllmDataParallel(rng()), some_fleet(4))
    rows = [desk.send(now_s=0.01).row for _ in range(8)]
    assert sorted(rows) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="waiting_weight"):
        VllmDataParallel(rng(), waiting_weight=-1.0)
