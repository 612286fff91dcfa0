"""What the directory answers: how far each holder has a chain, and how much of everything it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier
from router.signals.claims import Applied

Int32s = npt.NDArray[np.int32]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)  # not frozen: checked assignments would be a tenth of a short question
class Match:
    """Leading blocks of one chain, from block 0 and without a gap. Arrays are int32 with one entry per row, lent.

    hbm_blocks, host_blocks : of that tier alone
    host_reach : of HBM and host memory together, one block here and the next there: a host that is written when HBM
        gives up a block has the tail of a prefix whose head never left
    disk_reach : of HBM, host memory and disk together
    store_blocks : of the shared store, alone
    expected_blocks : >= hbm_blocks, with what requests in flight will leave in HBM
    approximate : whether this is a guess from what was sent there, for want of events
    """

    hbm_blocks: Int32s
    host_blocks: Int32s
    host_reach: Int32s
    disk_reach: Int32s
    store_blocks: int
    expected_blocks: Int32s
    approximate: Bools
    _ages: Callable[[Int32s], Float64s] = field(repr=False, compare=False)
    _store_age: Callable[[int], float] = field(repr=False, compare=False)

    def age_s(self, blocks: Int32s) -> Float64s:
        """Seconds since the last of so many leading blocks was stored or used, per row, whatever the tier.

        NaN where it is none, or nothing is known. Costs a look-up; good until the directory next changes.
        """
        return self._ages(blocks)

    @property
    def hbm_age_s(self) -> Float64s:
        """Age of the last of `hbm_blocks`."""
        return self._ages(self.hbm_blocks)

    @property
    def host_age_s(self) -> Float64s:
        """As `hbm_age_s`, of the last of `host_blocks`. A block in both tiers has one age, the younger."""
        return self._ages(self.host_blocks)

    @property
    def store_age_s(self) -> float:
        """Seconds since the last of `store_blocks` was written to the store or read from it; NaN as above."""
        return self._store_age(self.store_blocks)


@dataclass(frozen=True, slots=True)
class Stats:
    """Sizes now and counters since the start.

    blocks : distinct blocks by tier, whoever holds them
    engine_hashes : engine hashes kept over all sources and the store, at most the cap
    waiting : store hashes no event has explained yet
    remembered : explanations kept after the last replica dropped the block
    expected : requests in flight whose blocks are expected
    doubted : copies whose credit is withheld
    index_bytes : memory of the tables
    totals : everything applied so far
    """

    blocks: dict[Tier, int]
    engine_hashes: int
    waiting: int
    remembered: int
    expected: int
    doubted: int
    index_bytes: int
    totals: Applied
