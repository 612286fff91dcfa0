from __future__ import annotations

import numpy as np
import pytest

from estimators.routes import Held
from estimators.tiers import Tier
from router.holdings import Holdings
from router.other_tiers import Knowledge, OtherTiers
from router.signals.lmcache import Holding
from router.signals.looked_up import Answers
from router.signals.written_store import WrittenStore

CHAIN = list(range(100, 164))


class Events(Holdings):
    """A directory of two replicas whose store events name some blocks."""

    def __init__(self, store_blocks: int, *, has_tiers: bool = False) -> None:
        below = np.zeros(2, np.int32) if has_tiers else None
        hbm = np.zeros(2, np.int32) if has_tiers else np.array([7, 0], np.int32)
        self._held = Held(hbm, store_blocks, host_blocks=below, disk_blocks=below)

    def held(self, chain: list[int], now_s: float) -> Held:
        return self._held


def tiers(*, events: int = 0, looked_up: int = 0, written: int = 0) -> OtherTiers:
    answers = Answers(2, {}, block_tokens=16, chunk_tokens=16)
    answers.answered(CHAIN, [Holding(None, Tier.REMOTE, 16 * looked_up)] if looked_up else [], 0.0)
    store = WrittenStore(capacity_blocks=1000, keep_s=60.0)
    store.written(CHAIN[:written], 0.0)
    return OtherTiers(Events(events), answers=answers, written=store)


@pytest.mark.parametrize(
    ("known", "blocks", "source"),
    [
        ({"events": 9, "looked_up": 4, "written": 5}, 9, Knowledge.EVENTS),
        ({"events": 1, "looked_up": 8, "written": 5}, 8, Knowledge.LOOK_UP),
        ({"events": 1, "looked_up": 4, "written": 30}, 30, Knowledge.WRITTEN),
        ({"events": 8, "looked_up": 8, "written": 8}, 8, Knowledge.EVENTS),
        ({"looked_up": 8, "written": 8}, 8, Knowledge.LOOK_UP),
        ({}, 0, Knowledge.EVENTS),
    ],
)
def test_the_longest_prefix_counts_and_of_equal_ones_the_surest(
    known: dict[str, int], blocks: int, source: Knowledge
) -> None:
    both = tiers(**known)
    belief = both.store(CHAIN, known.get("events", 0), 1.0)
    assert (belief.blocks, belief.source) == (blocks, source)
    held = both.held(CHAIN, 1.0)
    assert held.store_blocks == blocks
    assert held.local_blocks.tolist() == [7, 0]


def test_only_what_was_written_is_approximate() -> None:
    assert tiers(written=3).store(CHAIN, 0, 1.0).approximate
    assert not tiers(looked_up=3).store(CHAIN, 0, 1.0).approximate
    assert not tiers(events=3).store(CHAIN, 3, 1.0).approximate


def test_beliefs_age_with_the_time_of_the_question() -> None:
    assert tiers(looked_up=8, written=4).held(CHAIN, 11.0).store_blocks == 4
    assert tiers(looked_up=8, written=4).held(CHAIN, 61.0).store_blocks == 0


def test_without_other_sources_the_directory_alone_speaks() -> None:
    events = Events(5)
    assert OtherTiers(events).held(CHAIN, 0.0) is events.held(CHAIN, 0.0)


# Contradictions of look-ups

CHUNK_BLOCKS = 4
PENALTY_S = 30.0


class LookUps:
    """Look-ups that go on saying the same about one prompt."""

    def __init__(self, told: list[Holding]) -> None:
        self.answers = Answers(2, {"a": 0, "b": 1}, block_tokens=16, chunk_tokens=16 * CHUNK_BLOCKS)
        self.tiers = OtherTiers(Events(0, has_tiers=True), answers=self.answers, penalty_s=PENALTY_S)
        self._told = told

    def believed(self, now_s: float, chain: list[int] = CHAIN) -> tuple[list[int], list[int], int]:
        """Blocks on the hosts of replicas 0 and 1, on their disks, in the store."""
        self.answers.answered(CHAIN, self._told, now_s)
        held = self.tiers.held(chain, now_s)
        assert held.host_blocks is not None
        assert held.disk_blocks is not None
        return held.host_blocks.tolist(), held.disk_blocks.tolist(), held.store_blocks


def of(instance: str | None, tier: Tier, blocks: int = len(CHAIN)) -> Holding:
    return Holding(instance, tier, 16 * blocks)


# Hosts have less than disks: what a disk has counts together with its host's, and would else not be seen.
ON_HOSTS = [of("a", Tier.HOST, 32), of("b", Tier.HOST, 32)]
EVERYWHERE = [*ON_HOSTS, of("a", Tier.DISK), of("b", Tier.DISK), of(None, Tier.REMOTE)]
ALL_OF_IT = ([32, 32], [64, 64], 64)


def test_what_an_engine_did_not_reuse_is_not_believed_of_it_again_before_the_penalty_is_over() -> None:
    found = LookUps(EVERYWHERE)
    assert found.believed(0.0) == ALL_OF_IT
    found.tiers.reused(0, CHAIN, 10, 1.0, since_s=0.0)
    assert found.believed(2.0) == ([8, 32], [8, 64], 64), "whole chunks before the block that was missing"
    assert found.believed(PENALTY_S) == ([8, 32], [8, 64], 64)
    assert found.believed(1.0 + PENALTY_S) == ALL_OF_IT


@pytest.mark.parametrize(
    ("row", "tier", "left"),
    [
        (0, Tier.HOST, ([8, 32], [64, 64], 64)),
        (0, Tier.DISK, ([32, 32], [32, 64], 64)),
        (1, Tier.HOST, ([32, 8], [64, 64], 64)),
        (1, Tier.DISK, ([32, 32], [64, 32], 64)),
        (1, Tier.REMOTE, ([32, 32], [64, 64], 8)),
        (0, Tier.HBM, ALL_OF_IT),
        (1, Tier.HBM, ALL_OF_IT),
    ],
)
def test_a_fetch_that_failed_is_held_against_that_tier_of_that_holder_alone(
    row: int, tier: Tier, left: tuple[list[int], list[int], int]
) -> None:
    found = LookUps(EVERYWHERE)
    found.tiers.fetch_failed(row, tier, CHAIN, 10, 1.0)
    assert found.believed(2.0) == left
    assert found.believed(1.0 + PENALTY_S) == ALL_OF_IT


def test_a_copy_in_hbm_that_a_peer_did_not_get_says_nothing_of_that_replica_s_disk() -> None:
    found = LookUps([of("a", Tier.DISK)])
    assert found.believed(0.0) == ([0, 0], [64, 0], 0)
    found.tiers.fetch_failed(0, Tier.HBM, CHAIN, 10, 1.0)
    assert found.believed(2.0) == ([0, 0], [64, 0], 0)


def test_a_prompt_that_parted_before_the_missing_block_keeps_its_credit() -> None:
    found = LookUps(EVERYWHERE)
    found.tiers.fetch_failed(0, Tier.REMOTE, CHAIN, 10, 1.0)
    assert found.believed(2.0, [*CHAIN[:8], *range(9000, 9056)])[2] == 8


def test_whole_reuse_and_a_fetch_that_brought_everything_leave_no_doubt() -> None:
    found = LookUps(EVERYWHERE)
    found.tiers.reused(0, CHAIN, len(CHAIN), 1.0, since_s=0.0)
    found.tiers.fetch_failed(0, Tier.REMOTE, CHAIN, len(CHAIN), 1.0)
    assert found.believed(2.0) == ALL_OF_IT
