from __future__ import annotations

import math

import pytest

from estimators.links import Link, fetch_s
from tests.builders import GIB


def test_1_125_gib_cross_200_gbe_in_48_3_ms() -> None:
    assert fetch_s(1.125 * GIB, Link(25e9)) * 1000 == pytest.approx(48.31838208, rel=1e-9)


def test_stages_follow_one_another() -> None:
    network, pcie = Link(25e9, start_s=0.010), Link(25e9)
    parts_s = fetch_s(1e9, network) + fetch_s(1e9, pcie)
    assert fetch_s(1e9, network, pcie) == pytest.approx(parts_s)


def test_nothing_to_fetch_takes_no_time_not_even_a_look_up() -> None:
    assert fetch_s(0.0, Link(25e9, start_s=0.010)) == 0.0


def test_sixteen_fetches_promised_at_once_wait_for_each_other() -> None:
    link = Link(25e9)
    ends_s = []
    for _ in range(16):
        ends_s.append(fetch_s(1.125 * GIB, link, now_s=0.0))
        link.promise(1.125 * GIB, 0.0)
    one_s = 1.125 * GIB / 25e9
    assert ends_s == pytest.approx([one_s * (i + 1) for i in range(16)])


def test_promised_bytes_drain_while_time_passes() -> None:
    link = Link(1e9)
    link.promise(2e9, now_s=10.0)
    assert link.wait_s(10.0) == pytest.approx(2.0)
    assert link.wait_s(11.5) == pytest.approx(0.5)
    assert link.wait_s(99.0) == 0.0


def test_the_start_overlaps_the_wait_for_bytes_promised_before() -> None:
    """Looking up does not need the link: 10 ms of look-up pass while an earlier fetch still crosses."""
    link = Link(1e9, start_s=0.010)
    link.promise(0.5e9, now_s=0.0)
    assert fetch_s(1e9, link, now_s=0.0) == pytest.approx(1.5)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_link_without_a_usable_rate_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s"):
        Link(bad)


def test_a_promise_taken_back_leaves_the_link_as_it_was() -> None:
    link = Link(1e9)
    link.promise(1e9, now_s=0.0)
    before = link.free_at_s
    link.promise(3e9, now_s=0.0)
    link.take_back(3e9)
    assert link.free_at_s == pytest.approx(before)
