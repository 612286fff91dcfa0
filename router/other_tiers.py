"""The shared store beyond its events: the directory, recent look-ups and what was written through, as one belief.

Model     of what the sources say of a prompt the longest prefix counts, since events and look-ups rather miss blocks
          than invent them; of equally long ones the surest: events, then a look-up, then what was written. What
          look-ups know of replicas' host memory and disks counts beside what events say of them. What an engine did not
          find where a look-up had it gets no credit there for a while, whatever further look-ups say
Valid     one shared store; `written` for a store without events, as it cannot hear of evictions
Errors    as those of the source that was believed; `Belief` names it, so that a receipt can
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from estimators.hit_probability import TIER_ROW
from estimators.routes import Blocks, Held
from estimators.tiers import Tier
from router.blocks.doubts import Doubt, Doubts
from router.holdings import Holdings
from router.signals.looked_up import Answers, LookedUp
from router.signals.written_store import WrittenStore

_STORE = -1  # its row where doubts are kept
_MOST_DOUBTS = 4096


class Knowledge(Enum):
    """Who says what the store holds, the surest first. A closed set: it can become a metric label."""

    EVENTS = "events"
    LOOK_UP = "look_up"
    WRITTEN = "written"  # approximate


@dataclass(frozen=True, slots=True)
class Belief:
    """Leading blocks of a chain in the store. age_s : of the knowledge; NaN for events, which are followed live."""

    blocks: int
    source: Knowledge
    age_s: float = float("nan")

    @property
    def approximate(self) -> bool:
        return self.source is Knowledge.WRITTEN


class OtherTiers(Holdings):
    """The directory as the dispatcher asks it, and the store with it.

    Parameters
    ----------
    directory : what events say
    answers : of a look-up service, if there is one
    written : what was written through to a store without events, if there is one
    penalty_s : how long a copy that was looked up and was not there, or did not come, gets no credit, > 0
    """

    def __init__(
        self,
        directory: Holdings,
        *,
        answers: Answers | None = None,
        written: WrittenStore | None = None,
        penalty_s: float = 30.0,
    ) -> None:
        self._directory = directory
        self._doubts = Doubts(penalty_s=penalty_s, most=_MOST_DOUBTS)
        self._answers = answers
        self._written = written

    def held(self, chain: list[int], now_s: float) -> Held:
        """What the directory says, with the store as far as anybody knows."""
        held = self._directory.held(chain, now_s)
        found = self._looked_up(chain, now_s)
        if found is not None and held.host_blocks is not None:
            held = with_tiers(held, held.host_blocks, found)
        believed = self._believed(chain, held.store_blocks, found, now_s)
        if believed.source is Knowledge.EVENTS:
            return held
        return replace(
            held,
            store_blocks=believed.blocks,
            store_approximate=believed.approximate,
            age_s=_with_store_age(held.age_s, believed.age_s),
        )

    def store(self, chain: list[int], by_events: int, now_s: float) -> Belief:
        """What is believed of the store. by_events : blocks its events name, >= 0"""
        return self._believed(chain, by_events, self._looked_up(chain, now_s), now_s)

    def _looked_up(self, chain: list[int], now_s: float) -> LookedUp | None:
        if self._answers is None:
            return None
        found = self._answers.held(chain, now_s)
        doubts = self._doubts.among(chain, now_s) if self._doubts else ()
        return without(found, doubts, stride=self._answers.stride) if doubts else found

    def _believed(self, chain: list[int], by_events: int, found: LookedUp | None, now_s: float) -> Belief:
        best = Belief(by_events, Knowledge.EVENTS)
        if found is not None and found.store_blocks > best.blocks:
            best = Belief(found.store_blocks, Knowledge.LOOK_UP, found.age_s)
        if self._written is not None:
            wrote = self._written.held(chain, now_s)
            if wrote.blocks > best.blocks:
                best = Belief(wrote.blocks, Knowledge.WRITTEN, wrote.age_s)
        return best

    def expect(self, row: int, chain: list[int], now_s: float) -> int:
        return self._directory.expect(row, chain, now_s)

    def cancel(self, number: int) -> None:
        self._directory.cancel(number)

    def computed(self, row: int, chain: list[int], now_s: float, *, block_tokens: int) -> None:
        self._directory.computed(row, chain, now_s, block_tokens=block_tokens)
        if self._written is not None:
            self._written.written(chain, now_s, each=self._directory.blocks_in(block_tokens))

    def reused(self, row: int, chain: list[int], blocks: int, now_s: float, *, since_s: float) -> None:
        self._directory.reused(row, chain, blocks, now_s, since_s=since_s)
        for tier in (Tier.HOST, Tier.DISK):
            self._doubt(row, tier, chain, blocks, now_s)

    def forget(self, row: int) -> None:
        self._directory.forget(row)
        self._doubts.forget(row)

    def fetched(self, chain: list[int], now_s: float) -> None:
        self._directory.fetched(chain, now_s)
        if self._written is not None:
            self._written.read(chain, len(chain), now_s)

    def fetch_failed(self, row: int, tier: Tier, chain: list[int], blocks: int, now_s: float) -> None:
        self._directory.fetch_failed(row, tier, chain, blocks, now_s)
        self._doubt(_STORE if tier is Tier.REMOTE else row, tier, chain, blocks, now_s)
        if tier is Tier.REMOTE and self._written is not None:
            self._written.missed(chain, blocks)

    def _doubt(self, row: int, tier: Tier, chain: list[int], blocks: int, now_s: float) -> None:
        """Of `chain` only `blocks` were there. A look-up tells nothing of HBM, so doubts of it are the directory's."""
        if self._answers is not None and tier is not Tier.HBM and blocks < len(chain):
            self._doubts.add(row, tier, chain, blocks, now_s)


def without(found: LookedUp, doubts: Sequence[Doubt], *, stride: int) -> LookedUp:
    """`found` up to the blocks that are in doubt. stride : blocks of a chunk, which comes whole or not at all"""
    host, disk, store = found.host_blocks.copy(), found.disk_blocks.copy(), found.store_blocks
    for doubt in doubts:
        most = doubt.depth // stride * stride
        if doubt.tier is Tier.REMOTE:
            store = min(store, most)
        else:
            blocks = host if doubt.tier is Tier.HOST else disk
            blocks[doubt.holder] = min(blocks[doubt.holder], most)
    return replace(found, host_blocks=host, disk_blocks=disk, store_blocks=store)


def with_tiers(held: Held, host_blocks: Blocks, found: LookedUp) -> Held:
    """`held`, and what a look-up found on replicas' hosts and disks. host_blocks : of `held`"""
    host = np.maximum(host_blocks, found.host_blocks)
    disk = host if held.disk_blocks is None else np.maximum(held.disk_blocks, host)
    return replace(held, host_blocks=host, disk_blocks=np.maximum(disk, found.disk_blocks))


def _with_store_age(ages_s: npt.NDArray[np.float64] | None, age_s: float) -> npt.NDArray[np.float64] | None:
    if ages_s is None:
        return None
    ages_s = ages_s.copy()
    ages_s[TIER_ROW[Tier.REMOTE]] = age_s
    return ages_s
