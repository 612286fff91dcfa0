from __future__ import annotations

import random
from functools import partial
from math import inf

import pytest

from sim_backends.links import FairLink


def ends(link: FairLink, plan: list[tuple[float, float]]) -> list[float]:
    """End of each (start, bytes), in the order given."""
    at: list[float] = [inf] * len(plan)
    for index, (start_s, size) in sorted(enumerate(plan), key=lambda item: item[1][0]):
        while link.due_s < start_s:
            link.run_due()
        link.start(size, start_s, partial(at.__setitem__, index))
    while link.due_s < inf:
        link.run_due()
    return at


def test_one_transfer_takes_start_plus_bytes_over_rate() -> None:
    assert ends(FairLink(rate_bytes_per_s=100.0, start_s=0.5), [(1.0, 200.0)]) == [3.5]


def test_a_shared_link_gives_each_its_fair_part() -> None:
    """By hand: alone until 1 (100 bytes), half each until B has its 50 at 2 (A has 150), then A's last 150 alone."""
    assert ends(FairLink(rate_bytes_per_s=100.0), [(0.0, 300.0), (1.0, 50.0)]) == pytest.approx([3.5, 2.0])


def test_three_transfers_against_a_hand_computed_case() -> None:
    """Rate 90. A 90 from 0, B 90 from 0, C 30 from 1. To 1: 45 each. From 1: 30 a second each; C ends at 2 with
    A and B at 75, who share 45 a second for their last 15: both end at 2 + 1/3."""
    got = ends(FairLink(rate_bytes_per_s=90.0), [(0.0, 90.0), (0.0, 90.0), (1.0, 30.0)])
    assert got == pytest.approx([2 + 1 / 3, 2 + 1 / 3, 2.0])


def test_the_look_up_shares_no_rate() -> None:
    """B looks up from 1 to 2 while A, started at 1, has the link alone; both halves from 2 on."""
    got = ends(FairLink(rate_bytes_per_s=100.0, start_s=1.0), [(0.0, 200.0), (1.0, 50.0)])
    assert got == pytest.approx([3.5, 3.0])


def test_a_cancelled_transfer_gives_its_part_back_and_never_ends() -> None:
    link = FairLink(rate_bytes_per_s=100.0)
    kept: list[float] = []
    cancelled: list[float] = []
    link.start(200.0, 0.0, kept.append)
    other = link.start(200.0, 0.0, cancelled.append)
    link.cancel(other, 2.0)  # each has had 100
    while link.due_s < inf:
        link.run_due()
    assert kept == pytest.approx([3.0])
    assert cancelled == []


def test_cancelling_during_the_look_up_leaves_an_idle_link() -> None:
    link = FairLink(rate_bytes_per_s=100.0, start_s=1.0)
    link.cancel(link.start(100.0, 0.0, lambda at_s: None), 0.5)
    assert (link.due_s, link.active_transfers) == (inf, 0)


def test_a_busy_link_moves_exactly_its_rate() -> None:
    """Whatever the order, work that never lets the link idle ends at total bytes over rate."""
    rng = random.Random(2)
    plan = [(rng.uniform(0.0, 0.5), rng.uniform(50.0, 400.0)) for _ in range(60)]
    plan[0] = (0.0, 400.0)
    total = sum(size for _, size in plan)
    assert max(ends(FairLink(rate_bytes_per_s=1000.0), plan)) == pytest.approx(total / 1000.0, rel=1e-9)
