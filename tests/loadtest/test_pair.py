"""The pair of tasks on one link: the textbook's order and times, and the mechanism behind them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest

from loadtest.replay.pair import BUSY, FLEET, IDLE, Outcome, Pair, Task, main, play
from sim_backends import fleet as fleet_file
from sim_backends.fleet import Fleet

TARGET_BYTES = 3072 * 147_456  # the target's history: 36 layers x 2 x 8 heads x 128 values x 2 bytes a token
LINK_BYTES_PER_S = 3.125e9


@cache
def outcome(target_row: int) -> Outcome:
    return play(Pair(), target_row=target_row)


def with_link(gb_s: float) -> Fleet:
    fleet = fleet_file.parse(FLEET, source="test")
    links = fleet.links | {"store": msgspec.structs.replace(fleet.links["store"], gb_s=gb_s)}
    return msgspec.structs.replace(fleet, links=links)


def test_cache_first_ends_target_and_all_at_about_1_38_s() -> None:
    assert outcome(BUSY).target_s == pytest.approx(1.38, rel=0.05)
    assert outcome(BUSY).all_s == pytest.approx(1.38, rel=0.05)


def test_idle_first_ends_the_target_at_about_0_33_s_and_all_at_about_1_54_s() -> None:
    assert outcome(IDLE).target_s == pytest.approx(0.33, rel=0.05)
    assert outcome(IDLE).all_s == pytest.approx(1.54, rel=0.05)


def test_idle_first_is_sooner_for_the_target_and_later_for_all() -> None:
    assert outcome(IDLE).target_s < outcome(BUSY).target_s - 0.9
    assert outcome(IDLE).all_s > outcome(BUSY).all_s + 0.1


def test_the_other_task_is_delayed_by_the_time_the_link_takes_for_the_targets_bytes() -> None:
    """A target with too little history to fetch leaves the link alone: the only difference is its bytes."""
    no_fetch = replace(Pair(), target=Task(history_tokens=16, new_tokens=64, first_token_id=1_000))
    alone = play(no_fetch, target_row=IDLE)
    assert outcome(IDLE).other_s - alone.other_s == pytest.approx(TARGET_BYTES / LINK_BYTES_PER_S, rel=0.01)


def test_the_targets_fetch_takes_twice_its_time_alone_because_two_share_the_link() -> None:
    """Look-up 10 ms; what comes after the bytes (PCIe, the last token's step) is some 30 ms at most."""
    shared_s = 0.010 + 2 * TARGET_BYTES / LINK_BYTES_PER_S
    assert shared_s < outcome(IDLE).target_s < shared_s + 0.030


def test_on_a_fast_link_nobody_is_delayed_by_going_to_the_idle_replica() -> None:
    fast = with_link(31.25)
    cache_first, idle_first = (play(Pair(), target_row=row, fleet=fast) for row in (BUSY, IDLE))
    assert idle_first.target_s < cache_first.target_s
    assert idle_first.all_s <= cache_first.all_s


def test_both_placements_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out
    for row, name in ((BUSY, "cache first"), (IDLE, "idle first")):
        line = next(line for line in printed.splitlines() if name in line)
        assert f"{outcome(row).target_s:.3f}" in line
        assert f"{outcome(row).all_s:.3f}" in line
