from __future__ import annotations

import pytest

from estimators.tiers import Tier
from loadtest.replay.bench_removal import SHARED, TOGETHER, filled, took_s


def test_replicas_hold_what_they_are_said_to_and_share_a_quarter() -> None:
    blocks = 8 * TOGETHER
    held = filled(blocks).stats().blocks[Tier.HBM]
    assert held == 2 * blocks - blocks // SHARED


def test_forgetting_is_timed_and_checked_to_have_forgotten() -> None:
    assert min(took_s(4 * TOGETHER, lambda directory: directory.clear(0))) >= 0.0
    assert min(took_s(80 * TOGETHER, lambda directory: directory.drop_source(0))) >= 0.0  # more than goes at once
    with pytest.raises(AssertionError, match="is gone"):
        took_s(8 * TOGETHER, lambda directory: None)
