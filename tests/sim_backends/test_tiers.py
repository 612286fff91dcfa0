from __future__ import annotations

from sim_backends.cache_events import OffDevice
from sim_backends.tiers import LruTier, TierStack

A, B, C, D = (letter.encode() for letter in "ABCD")


def told(stack: TierStack) -> TierStack:
    """With somebody who listens."""
    stack.events = []
    return stack


def test_a_tier_forgets_its_least_recently_used_block() -> None:
    tier = LruTier(2)
    assert (tier.put(A), tier.put(B)) == (None, None)
    tier.refresh([A, D])
    assert tier.put(C) == B
    assert (A in tier, B in tier, C in tier, len(tier)) == (True, False, True, 2)


def test_writing_a_block_again_refreshes_it() -> None:
    tier = LruTier(2)
    for digest in (A, B, A):
        assert tier.put(digest) is None
    assert tier.put(C) == B


def test_a_match_ends_at_the_first_gap_and_at_the_limit() -> None:
    tier = LruTier(9)
    for digest in (A, B, D):
        tier.put(digest)
    assert tier.match([A, B, C, D], 0, 4) == 2
    assert tier.match([A, B, C, D], 3, 4) == 4
    assert tier.match([A, B, C, D], 0, 1) == 1
    assert tier.match([A], 2, 4) == 2


def test_what_the_host_displaces_goes_to_the_disk_and_from_there_away() -> None:
    """One block fits each tier: A goes down twice, then it is gone."""
    stack = told(TierStack(host_blocks=1, disk_blocks=1))
    for digest in (A, B, C):
        stack.write_back(digest)
    assert [A in stack.tiers["host"], B in stack.tiers["host"], C in stack.tiers["host"]] == [False, False, True]
    assert [A in stack.tiers["disk"], B in stack.tiers["disk"], C in stack.tiers["disk"]] == [False, True, False]
    assert stack.events == [
        OffDevice(A, "host", True),
        OffDevice(B, "host", True),
        OffDevice(A, "disk", True),  # it is there before it is gone from above
        OffDevice(A, "host", False),
        OffDevice(C, "host", True),
        OffDevice(B, "disk", True),
        OffDevice(A, "disk", False),
        OffDevice(B, "host", False),
    ]


def test_a_block_that_is_there_is_not_announced_again() -> None:
    stack = told(TierStack(host_blocks=2))
    stack.write_back(A)
    stack.write_back(A)
    assert stack.events == [OffDevice(A, "host", True)]


def test_without_tiers_a_written_back_block_is_gone() -> None:
    stack = told(TierStack())
    stack.write_back(A)
    assert (stack.tiers, stack.events) == ({}, [])


def test_nothing_is_recorded_when_nobody_listens() -> None:
    stack = TierStack(host_blocks=2)
    stack.write_back(A)
    assert (len(stack.tiers["host"]), stack.events) == (1, None)


def test_clearing_forgets_everything_in_silence() -> None:
    stack = told(TierStack(host_blocks=2, disk_blocks=2))
    stack.write_back(A)
    stack.clear()
    assert (len(stack.tiers["host"]), stack.events) == (0, [OffDevice(A, "host", True)])
