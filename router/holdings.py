"""What the dispatcher asks about caches, and what it tells: the directory seen from one decision.

Model     a request in flight will have left its blocks in its replica's HBM by the time that one that comes after it
          has its turn there, since engines serve in order of arrival. Where no events come, a prompt's blocks are
          taken to be there from its first token on
Valid     first-come engines; the directory's blocks are those of the chains asked about
Blind to  what follows the expected blocks in a tier below; peers that could be read from once a prefill there is over
Errors    those of the directory
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from estimators.hit_probability import TIER_ROW
from estimators.routes import Held
from estimators.tiers import Tier
from router.blocks.beliefs import Match
from router.directory import Directory


class Holdings(Protocol):
    """The directory, as far as decisions read it and requests change it. Only `held` has to be there."""

    def held(self, chain: list[int], now_s: float) -> Held:
        """Where the leading blocks of `chain` are."""
        ...

    def expect(self, row: int, chain: list[int], now_s: float) -> int:
        """A request was sent to `row` that will leave `chain` there. Returns a number for `cancel`."""
        del row, chain, now_s
        return 0

    def cancel(self, number: int) -> None:
        """That request will leave nothing more; no effect when that is known already."""
        return

    def computed(self, row: int, chain: list[int], now_s: float, *, block_tokens: int) -> None:
        """The prefill of `chain` on `row` is over; it has blocks of `block_tokens`."""
        return

    def blocks_in(self, block_tokens: int) -> int:
        """Blocks of the pool that one of `block_tokens` stands for, >= 1."""
        del block_tokens
        return 1

    def reused(self, row: int, chain: list[int], blocks: int, now_s: float, *, since_s: float) -> None:
        """`row` reused `blocks` of `chain`, all of which it was believed at `since_s` to have by itself."""
        return

    def forget(self, row: int) -> None:
        """`row` is nobody's, or somebody else's, from now on."""
        return

    def fetched(self, chain: list[int], now_s: float) -> None:
        """A replica read the shared store and found `chain` there."""
        return

    def fetch_failed(self, row: int, tier: Tier, chain: list[int], blocks: int, now_s: float) -> None:
        """Of `chain`, which was to come from `tier` of `row`, only `blocks` came. row : of no meaning for REMOTE"""
        return


class DirectoryHoldings(Holdings):
    """The directory as the dispatcher asks it.

    has_tiers : replicas read from tiers of their own
    ages : whether anybody reads how old copies are
    expects : requests in flight count as if they were over, for what is sent to the same replica
    """

    def __init__(
        self, directory: Directory, *, has_tiers: bool = False, ages: bool = False, expects: bool = True
    ) -> None:
        self._directory = directory
        self._has_tiers = has_tiers
        self._ages = ages
        self._expects = expects
        self._nothing = np.zeros(directory.rows, dtype=np.int32)
        self._unknown = np.full((len(TIER_ROW), directory.rows), np.nan)

    def held(self, chain: list[int], now_s: float) -> Held:
        if not chain:  # short prompts, and those nobody reads
            return self._nothing_held()
        match = self._directory.match(chain, now_s)
        hbm = match.expected_blocks
        reach = np.maximum
        return Held(
            local_blocks=hbm,
            store_blocks=match.store_blocks,
            host_blocks=reach(match.host_reach, hbm) if self._has_tiers else None,
            disk_blocks=reach(match.disk_reach, hbm) if self._has_tiers else None,
            age_s=self._ages_of(match) if self._ages else None,
            confirmed_blocks=None if hbm is match.hbm_blocks else match.hbm_blocks,
            approximate=match.approximate,
        )

    def _nothing_held(self) -> Held:
        none = self._nothing if self._has_tiers else None
        return Held(
            local_blocks=self._nothing,
            store_blocks=0,
            host_blocks=none,
            disk_blocks=none,
            age_s=self._unknown if self._ages else None,
            approximate=self._directory.approximate,
        )

    def expect(self, row: int, chain: list[int], now_s: float) -> int:
        return self._directory.expect(row, chain, now_s) if self._expects else 0

    def cancel(self, number: int) -> None:
        self._directory.cancel(number)

    def computed(self, row: int, chain: list[int], now_s: float, *, block_tokens: int) -> None:
        self._directory.sent(row, chain, now_s, each=self.blocks_in(block_tokens))

    def blocks_in(self, block_tokens: int) -> int:
        """Blocks of the pool that one of `block_tokens` stands for, >= 1."""
        return max(1, block_tokens // self._directory.block_tokens)

    def reused(self, row: int, chain: list[int], blocks: int, now_s: float, *, since_s: float) -> None:
        self._directory.reused(row, chain, blocks, now_s, since_s=since_s)

    def forget(self, row: int) -> None:
        self._directory.forget(row)

    def fetched(self, chain: list[int], now_s: float) -> None:
        self._directory.fetched(chain, now_s)

    def fetch_failed(self, row: int, tier: Tier, chain: list[int], blocks: int, now_s: float) -> None:
        directory = self._directory
        directory.fetch_failed(directory.rows if tier is Tier.REMOTE else row, tier, chain, blocks, now_s)

    def _ages_of(self, match: Match) -> npt.NDArray[np.float64]:
        """By tier; what a request in flight will have left there is new."""
        ages = self._unknown.copy()
        ages[TIER_ROW[Tier.HBM]] = match.hbm_age_s
        if match.expected_blocks is not match.hbm_blocks:
            ages[TIER_ROW[Tier.HBM]][match.expected_blocks > match.hbm_blocks] = 0.0
        if self._has_tiers:
            ages[TIER_ROW[Tier.HOST]] = match.age_s(match.host_reach)
            ages[TIER_ROW[Tier.DISK]] = match.age_s(match.disk_reach)
        ages[TIER_ROW[Tier.REMOTE]] = match.store_age_s
        return ages
