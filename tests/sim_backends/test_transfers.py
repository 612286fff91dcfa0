from __future__ import annotations

from math import inf

import pytest

from sim_backends.links import FairLink
from sim_backends.transfers import Lane


def run(*links: FairLink, until_s: float = inf) -> None:
    """Move the links up to `until_s`, the earlier first."""
    while (link := min(links, key=lambda link: link.due_s)).due_s < until_s:
        link.run_due()


def lane_ends(route: list[FairLink], parts: list[float], start_s: float = 0.0) -> list[float]:
    """When each part arrives."""
    at: list[float] = [0.0] * len(parts)
    Lane(route, parts, at.__setitem__).start(start_s)
    run(*route)
    return at


def test_one_part_passes_its_links_one_after_the_other() -> None:
    """By hand: 0.5 look-up and 1 s on the first, 0.2 and 2 s on the second."""
    route = [FairLink(rate_bytes_per_s=100.0, start_s=0.5), FairLink(rate_bytes_per_s=50.0, start_s=0.2)]
    assert lane_ends(route, [100.0], start_s=7.0) == pytest.approx([10.7])


def test_parts_follow_one_another_and_only_the_first_pays_the_look_up() -> None:
    """By hand: parts leave the first link at 1.5, 2.5 and 3; the second takes half a second for 100 bytes."""
    route = [FairLink(rate_bytes_per_s=100.0, start_s=0.5), FairLink(rate_bytes_per_s=200.0)]
    assert lane_ends(route, [100.0, 100.0, 50.0]) == pytest.approx([2.0, 3.0, 3.25])


def test_two_lanes_share_a_link_fairly() -> None:
    """By hand: both halves of the rate until 2, when the short one ends; the long one's last 100 bytes alone."""
    link = FairLink(rate_bytes_per_s=100.0)
    ends: dict[str, float] = {}
    Lane([link], [100.0], lambda _part, at_s: ends.update(short=at_s)).start(0.0)
    Lane([link], [200.0], lambda _part, at_s: ends.update(long=at_s)).start(0.0)
    run(link)
    assert ends == pytest.approx({"short": 2.0, "long": 3.0})


@pytest.mark.parametrize("cancel_s", [0.2, 1.0, 1.6, 2.2])
def test_a_cancelled_lane_leaves_its_links_idle_and_nothing_more_arrives(cancel_s: float) -> None:
    route = [FairLink(rate_bytes_per_s=100.0, start_s=0.5), FairLink(rate_bytes_per_s=200.0)]
    arrived: list[float] = []
    lane = Lane(route, [100.0, 100.0], lambda _part, at_s: arrived.append(at_s))
    lane.start(0.0)
    run(*route, until_s=cancel_s)
    lane.cancel(cancel_s)
    run(*route)
    assert arrived == ([2.0] if cancel_s > 2.0 else [])
    assert [link.active_transfers for link in route] == [0, 0]


def test_a_lane_cancelled_when_a_part_arrives_sends_no_other() -> None:
    link = FairLink(rate_bytes_per_s=100.0)
    arrived: list[float] = []

    def stop(_part: int, at_s: float) -> None:
        arrived.append(at_s)
        lane.cancel(at_s)

    lane = Lane([link], [100.0, 100.0, 100.0], stop)
    lane.start(0.0)
    run(link)
    assert (arrived, link.active_transfers) == ([1.0], 0)
