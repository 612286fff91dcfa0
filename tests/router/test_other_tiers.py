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

    def __init__(self, store_blocks: int) -> None:
        self._held = Held(local_blocks=np.array([7, 0], np.int32), store_blocks=store_blocks)

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
