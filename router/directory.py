"""Who holds which block in which tier, as the engines' own events say.

Model     a block is named by the router's chain (`router.identity`), computed from the tokens in events; the
          engine's own hashes only resolve parents and removals. The shared store is one more holder, of
          tier REMOTE; where it names only hashes, a block is what some engine gave the same hash.
Valid     sources whose engine hashes are chained (vLLM; SGLang from 0.5.6); hash-only stores whose engines
          share one hash seed (vLLM from 0.29 by default)
Blind to  blocks of a size that is neither a multiple nor a divisor of ours, token pairs, sliding-window and state
          groups: counted and ignored. Blocks with images are kept apart, so prompts given by tokens alone do not
          match them.
Errors    only towards fewer hits: an unknown parent, a reused hash or a full source drops blocks, never adds.
          Re-announced hits of vLLM (`kv_cache_report_mode: full`) are the exception, see signals/README.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from estimators.ranges import require
from estimators.tiers import Tier
from router.blocks.beliefs import Bools, Float64s, Int32s, Match, Stats
from router.blocks.config import DirectoryConfig
from router.blocks.doubts import Doubt, Doubts
from router.blocks.expected import Expected
from router.blocks.intake import Intake, settle
from router.blocks.ledger import Ledger
from router.blocks.routed import Routed
from router.blocks.store import SharedStore
from router.blocks.table import Positions, UInt64s
from router.signals.claims import Applied
from router.signals.wire import Batch

__all__ = ["Directory", "Match", "Stats"]

_SPARE = 4  # rows that may turn over a new leaf before the first of them is swept
_TOGETHER = 512  # keys put off at most, half a millisecond of work; twice as many are a tenth cheaper each
_MOST_DOUBTS = 4096
_USUAL = DirectoryConfig()


class Directory:
    """All beliefs about caches. Plain calls, one thread, no clock.

    Parameters
    ----------
    block_tokens : tokens per block of the router's chain, >= 1
    rows : replicas, rows 0..rows-1 of the fleet view, >= 1
    source_limit : engine hashes kept per source; beyond it the oldest go first (they only lose hits)
    memory_limit : hashes remembered to explain later events, over all sources, and unexplained ones per store name
    cap : engine hashes kept over all sources and the store (about 80 bytes each); the oldest go first
    penalty_s : how long a copy that was not there, or did not come, gets no credit, > 0
    expected_limit : blocks of all requests in flight together
    expected_s : how long a request in flight is expected to leave its blocks, > 0
    at_once : engine hashes forgotten in one stretch, >= 1: some milliseconds; more are left to `sweep`
    """

    def __init__(
        self,
        block_tokens: int,
        rows: int,
        *,
        source_limit: int = _USUAL.source_blocks,
        memory_limit: int = _USUAL.removed_blocks,
        cap: int = _USUAL.blocks,
        penalty_s: float = _USUAL.missed_s,
        expected_limit: int = _USUAL.expected_blocks,
        expected_s: float = _USUAL.expected_s,
        at_once: int = 1 << 12,
    ) -> None:
        if min(block_tokens, rows, source_limit, memory_limit, cap, expected_limit, at_once) < 1:
            raise ValueError("block_tokens, rows and the limits must be at least 1")
        require(0.0 < penalty_s < np.inf, "penalty_s", penalty_s)
        require(0.0 < expected_s < np.inf, "expected_s", expected_s)
        self.block_tokens = block_tokens
        self.rows = rows
        self._source_limit = source_limit
        self._memory_limit = memory_limit
        # Numbers of holders: of the rows at first, the store, and some for rows that turn over a new leaf.
        self._numbers = list(range(rows))
        self._moved: Positions | None = None  # the same as an array, once they are not just the rows
        spare = range(rows + 1, rows + 1 + _SPARE)
        self._ledger = Ledger(rows + 1 + _SPARE, cap=cap, spare=spare, at_once=at_once)
        self._sources: dict[int, Intake] = {}
        self._routed: dict[int, Routed] = {}
        self._approximate = np.zeros(rows, dtype=bool)
        self._none = np.zeros(rows, dtype=np.int32)
        self._coarse: set[int] = set()  # rows whose engine's blocks are several of ours
        self._unsettled: dict[int, Intake] = {}
        self._pending = 0  # keys put off, at most
        self._store = SharedStore(
            self._ledger,
            rows,
            self._sources,
            models=self._models,
            block_tokens=block_tokens,
            limit=source_limit,
            memory_limit=memory_limit,
        )
        self._expected = Expected(most=expected_limit, lapse_s=expected_s)
        self._doubts = Doubts(penalty_s=penalty_s, most=_MOST_DOUBTS)
        self._now_s = 0.0  # the latest time heard
        self._totals = Applied()

    # Sources

    def add_source(self, row: int, model: str, *, one_copy: bool = False) -> None:
        """Register the publisher of `row`, which serves `model`. Another model than before clears the row.

        one_copy : the engine keeps one logical copy per tier (SGLang), so a repeated store is not counted;
            else each store needs its own removal (vLLM)
        """
        self._check_row(row)
        known = self._sources.get(row)
        if known is not None and (known.claims.model, known.claims.one_copy) == (model, one_copy):
            return
        self.drop_source(row)
        self._sources[row] = Intake(
            self._ledger,
            self._ledger.open(self._numbers[row], model, one_copy=one_copy, limit=self._source_limit),
            block_tokens=self.block_tokens,
            memory_limit=max(1, self._memory_limit // self.rows),
            told=partial(self._told, row, model),
            gone=partial(self._gone, model),
        )

    def add_routed(self, row: int, model: str, capacity_blocks: int) -> None:
        """`row` sends no events: guess what it holds from what is sent there (`sent`). An event source ends that.

        capacity_blocks : blocks of ours the engine has room for, >= 1; may be given again when it is known better
        """
        self._check_row(row)
        require(capacity_blocks >= 1, "capacity_blocks", capacity_blocks)
        known = self._routed.get(row)
        if known is not None and known.claims.model == model:
            known.resize(capacity_blocks, self._totals)
            return
        self.drop_source(row)
        claims = self._ledger.open(self._numbers[row], model, one_copy=True, limit=self._source_limit)
        self._routed[row] = Routed(self._ledger, claims, capacity=min(capacity_blocks, claims.limit))
        self._note_approximate()

    def drop_source(self, row: int) -> None:
        """Forget the publisher of `row` and all it held; no effect when there is none."""
        self._settle()
        self._expected.clear(row)
        self._coarse.discard(row)
        for gone in (self._sources.pop(row, None), self._routed.pop(row, None)):
            if gone is not None:
                self._ledger.close(gone.claims)
                self._renumber(row, gone.claims.holder)
        self._note_approximate()

    def forget(self, row: int) -> None:
        """`row` is nobody's, or somebody else's, from now on: no source, no blocks, no doubts."""
        self.drop_source(row)
        self._doubts.forget(row)

    def clear(self, row: int) -> None:
        """Believe nothing of `row` any more: it restarted, slept, or was down. It stays registered."""
        self._settle()
        self._expected.clear(row)
        for source in (self._sources.get(row), self._routed.get(row)):
            if source is not None:
                source.clear()
                self._renumber(row, source.claims.holder)

    def sweep(self) -> bool:
        """Forget some more of what rows held that were cleared or left: to be called, now and then, while it says so.

        Until then it only takes room; nothing of it is believed.
        """
        self._settle()
        return self._ledger.sweep()

    def drop_adapter(self, row: int, adapter: str) -> None:
        """The adapter of this name was unloaded from `row`, or loaded anew, perhaps with other weights.

        Whose prompts are in flight, or were guessed to be there, is not known: of those nothing is believed any more.
        """
        self._settle()
        self._expected.clear(row)
        source, routed = self._sources.get(row), self._routed.get(row)
        if source is not None:
            source.drop_adapter(adapter)
        if routed is not None:
            routed.clear()
            self._renumber(row, routed.claims.holder)

    def clear_store(self) -> None:
        """Believe nothing of the shared store any more."""
        self._store.clear()

    def last_event_s(self, row: int) -> float | None:
        """Router's clock when `row` last sent a batch; None when it never has."""
        source = self._sources.get(row)
        return None if source is None else source.claims.last_event_s

    def unmatchable(self, row: int) -> bool:
        """Whether `row` sends stores of which none can be credited: another block size, token pairs, unknown groups."""
        source = self._sources.get(row)
        if source is None:
            return False
        self._settle()
        return not source.claims.held and source.refused > 0

    # Events in

    def apply(self, row: int, batch: Batch, now_s: float) -> Applied:
        """Take in one batch of the publisher of `row`.

        Raises
        ------
        ValueError : `row` has no source; call `add_source` first
        """
        source = self._source(row)
        self._settle()
        self._now_s = max(self._now_s, now_s)
        done = Applied(unknown=batch.unknown, bad=batch.bad)
        source.take(batch.events, now_s, done)
        self._renumber(row, source.claims.holder)  # it may have emptied its cache
        settle(self._ledger, [source], done)
        self._totals.add(done)
        return done

    def put(self, row: int, batch: Batch, now_s: float) -> None:
        """As `apply`, but the costly part waits for more of its kind, until the next question or enough of it.

        An event stream should call this: many small batches cost a half to a third.

        Raises
        ------
        ValueError : `row` has no source; call `add_source` first
        """
        source = self._source(row)
        self._now_s = max(self._now_s, now_s)
        self._totals.unknown += batch.unknown
        self._totals.bad += batch.bad
        before = source.pending
        source.take(batch.events, now_s, self._totals)
        self._renumber(row, source.claims.holder)
        self._unsettled[row] = source
        self._pending += max(0, source.pending - before)
        if self._pending >= _TOGETHER:
            self._settle()

    def apply_store(self, batch: Batch, now_s: float) -> Applied:
        """Take in one batch of the shared store. Its medium (memory or disk of the pool) does not matter."""
        self._settle()
        self._now_s = max(self._now_s, now_s)
        done = Applied(unknown=batch.unknown, bad=batch.bad)
        self._store.take(batch, now_s, done)
        self._totals.add(done)
        return done

    # What the router itself knows

    def sent(self, row: int, hashes: Sequence[int], now_s: float, *, each: int = 1) -> None:
        """A prompt was sent to `row`; matters only where the row's content is guessed (`add_routed`).

        each : blocks of `block_tokens` that one of these stands for, >= 1
        """
        routed = self._routed.get(row)
        if routed is not None and len(hashes):
            self._now_s = max(self._now_s, now_s)
            routed.sent(hashes, now_s, self._totals, each=each)

    def expect(self, row: int, hashes: Sequence[int], now_s: float) -> int:
        """A request in flight will leave these blocks on `row`. Returns its number, for `cancel`.

        Expected until the row announces the last block, `cancel`, a contradiction, or the limits given at the start.
        """
        self._check_row(row)
        return self._expected.place(row, hashes, now_s)

    def cancel(self, number: int) -> None:
        """That request will leave nothing more; no effect when it is no longer expected."""
        self._expected.cancel(number)

    def reused(
        self, row: int, hashes: Sequence[int], reused_blocks: int, now_s: float, *, since_s: float = np.inf
    ) -> None:
        """The engine of `row` said how many leading blocks of this chain it reused, of those it was believed to have.

        What it reused counts as used now. The first block it should have had and did not gets no credit in any of
        its tiers for the penalty time, unless it is announced again.

        hashes : the chain up to what was believed; a shorter reuse contradicts
        since_s : when that was believed: what was announced or used after it is not doubted
        """
        self._check_row(row)
        require(0 <= reused_blocks <= len(hashes), "reused_blocks", reused_blocks)
        self._settle()
        self._now_s = max(self._now_s, now_s)
        self._used(row, hashes[:reused_blocks], now_s)
        if reused_blocks < len(hashes):
            self._expected.contradict(row, hashes, reused_blocks)
            if since_s < np.inf and self._age_s(row, hashes[reused_blocks], now_s) < now_s - since_s:
                return
            for tier in (Tier.HBM, Tier.HOST, Tier.DISK):
                self._doubts.add(row, tier, hashes, reused_blocks, now_s)

    def fetched(self, hashes: Sequence[int], now_s: float) -> None:
        """An engine read these blocks from the shared store: they were used now."""
        self._settle()
        self._store.used(hashes, now_s)

    def fetch_failed(self, row: int, tier: Tier, hashes: Sequence[int], fetched_blocks: int, now_s: float) -> None:
        """A fetch of this chain failed, or took too long, after `fetched_blocks`.

        row : whose copies they were; `rows` (one past the last) for the shared store, with `Tier.REMOTE`
        """
        require(0 <= row <= self.rows, "row", row)
        require(0 <= fetched_blocks <= len(hashes), "fetched_blocks", fetched_blocks)
        self._now_s = max(self._now_s, now_s)
        if fetched_blocks < len(hashes):
            self._doubts.add(row, tier, hashes, fetched_blocks, now_s)

    # Questions

    def match(self, hashes: Sequence[int] | UInt64s, now_s: float | None = None) -> Match:
        """How far each holder could serve this chain. The caller cuts it to the tokens an engine may reuse.

        now_s : the router's clock; None is the latest time heard
        """
        self._settle()
        now_s = self._now_s if now_s is None else now_s
        index = self._ledger.books.index
        positions = index.positions(hashes)
        doubts = self._doubts.among(hashes, now_s) if self._doubts else []
        hbm = host_reach = self._leading((Tier.HBM,), positions, hashes, doubts)
        host = self._none  # fleets without tiers of their own are the rule and do not pay for them
        if index.has_any(Tier.HOST):
            host = self._leading((Tier.HOST,), positions, hashes, doubts)
            host_reach = self._leading((Tier.HBM, Tier.HOST), positions, hashes, doubts)
        disk_reach = host_reach
        if index.has_any(Tier.DISK):
            disk_reach = self._leading((Tier.HBM, Tier.HOST, Tier.DISK), positions, hashes, doubts)
        in_store = index.leading_any(Tier.REMOTE, positions)
        for doubt in doubts:
            if doubt.tier is Tier.REMOTE:
                in_store = min(in_store, doubt.depth)
        expected = hbm
        if self._expected:
            self._expected.lapse(now_s)
            chain = hashes.tolist() if isinstance(hashes, np.ndarray) else hashes
            expected = np.maximum(hbm, self._whole(self._expected.leading(chain, self.rows)))
        return Match(
            *(hbm, host, host_reach, disk_reach, in_store, expected, self._approximate),
            _ages=partial(self._ages, hashes, now_s),
            _store_age=partial(self._store_age, hashes, now_s),
        )

    @property
    def approximate(self) -> Bools:
        """Of which rows the content is a guess; lent."""
        return self._approximate

    def holders(self, block: int) -> dict[Tier, tuple[int, ...]]:
        """Rows holding one block, by tier; `rows` (one past the last) stands for the shared store."""
        self._settle()
        rows = {number: row for row, number in enumerate(self._numbers)} | {self.rows: self.rows}
        found = {
            tier: tuple(sorted(rows[number] for number in who if number in rows))
            for tier, who in self._ledger.books.index.holders(block).items()
        }
        return {tier: who for tier, who in found.items() if who}

    def blocks(self) -> list[int]:
        """All blocks somebody holds, in no order: for tests and inspection."""
        self._settle()
        return self._ledger.books.index.blocks_held()

    def stats(self) -> Stats:
        self._settle()
        totals = Applied()
        totals.add(self._totals)
        return Stats(
            blocks=dict(self._ledger.books.index.blocks),
            engine_hashes=len(self._ledger),
            waiting=self._store.waiting,
            remembered=sum(len(source.recent) for source in self._sources.values()),
            expected=len(self._expected),
            doubted=len(self._doubts),
            index_bytes=self._ledger.books.nbytes,
            totals=totals,
        )

    # Inside

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise ValueError(f"row {row} is outside 0..{self.rows - 1}")

    def _source(self, row: int) -> Intake:
        source = self._sources.get(row)
        if source is None:
            raise ValueError(f"row {row} has no event source")
        return source

    def _note_approximate(self) -> None:
        """A new array each time: those in matches given out stay as they were."""
        self._approximate = np.zeros(self.rows, dtype=bool)
        self._approximate[list(self._routed)] = True

    def _settle(self) -> None:
        """Apply everything put off."""
        if self._unsettled:
            sources, self._unsettled, self._pending = list(self._unsettled.values()), {}, 0
            settle(self._ledger, sources, self._totals)

    def _leading(
        self, tiers: tuple[Tier, ...], positions: Any, hashes: Sequence[int] | UInt64s, doubts: Sequence[Doubt]
    ) -> Int32s:
        """Leading blocks of each row in these tiers together; an engine reuses only whole blocks of its own."""
        index = self._ledger.books.index
        together = len(tiers) > 1
        every = index.leading_together(tiers, positions) if together else index.leading(tiers[0], positions)
        counts = every[: self.rows] if self._moved is None else every[self._moved]
        for doubt in doubts:
            row, depth = doubt.holder, doubt.depth
            if doubt.tier in tiers and depth < counts[row]:
                doubted = {other.tier for other in doubts if (other.holder, other.depth) == (row, depth)}
                if not together or not self._tiers_of(row, int(hashes[depth])).intersection(tiers) - doubted:
                    counts[row] = depth
        return self._whole(counts)

    def _whole(self, counts: Int32s) -> Int32s:
        """Those counts, changed to whole blocks of engines whose blocks are several of ours."""
        for row in self._coarse:
            counts[row] -= counts[row] % self._sources[row].parts
        return counts

    def _models(self) -> set[str]:
        claims = [source.claims for source in self._sources.values()]
        claims += [routed.claims for routed in self._routed.values()]
        return {one.model for one in claims}

    def _tiers_of(self, row: int, block: int) -> set[Tier]:
        number = self._numbers[row]
        return {tier for tier, who in self._ledger.books.index.holders(block).items() if number in who}

    def _renumber(self, row: int, number: int) -> None:
        """The holder of `row` has this number from now on."""
        if self._numbers[row] != number:
            self._numbers[row] = number
            self._moved = np.array(self._numbers)

    def _told(self, row: int, model: str, tier: Tier, blocks: Mapping[int, int]) -> None:
        """The publisher of `row` has just announced these keys and blocks."""
        self._store.explain(model, blocks)
        if self._sources[row].parts > 1:
            self._coarse.add(row)
        if len(self._expected) and tier is Tier.HBM:
            self._expected.stored(row, blocks.values())
        if len(self._doubts):
            self._doubts.lift(row, tier, blocks.values())

    def _gone(self, model: str, tier: Tier, blocks: Mapping[int, int]) -> None:
        del tier
        self._store.explain(model, blocks)

    def _used(self, row: int, hashes: Sequence[int], now_s: float) -> None:
        source = self._sources.get(row)
        if source is not None:
            source.claims.used(hashes, now_s)

    def _ages(self, hashes: Sequence[int] | UInt64s, now_s: float, counts: Int32s) -> Float64s:
        """Age of the last of `counts` leading blocks, per row."""
        self._settle()
        books, sources = self._ledger.books, self._sources
        ages = [np.nan] * self.rows
        keys: dict[int, int | None] = {}  # most rows end at the same block
        for row, blocks in enumerate(counts.tolist()):
            if not blocks:
                continue
            block = int(hashes[blocks - 1])
            source = sources.get(row)
            if source is None:
                ages[row] = self._age_s(row, block, now_s)
                continue
            if block not in keys:
                keys[block] = books.index.engine_hash(block)
            key = keys[block]
            if key is not None:
                ages[row] = books.age_s(source.claims, key, block, now_s)
        return np.array(ages)

    def _age_s(self, row: int, block: int, now_s: float) -> float:
        """Age of one block of `row`; NaN where the row does not have it, or under another hash than the last one."""
        source = self._sources.get(row)
        if source is not None:
            key = self._ledger.books.index.engine_hash(block)
            return np.nan if key is None else source.claims.age_s(key, block, now_s)
        routed = self._routed.get(row)
        return np.nan if routed is None else routed.claims.age_s(block, block, now_s)

    def _store_age(self, hashes: Sequence[int] | UInt64s, now_s: float, blocks: int) -> float:
        self._settle()
        key = self._ledger.books.index.engine_hash(int(hashes[blocks - 1])) if blocks else None
        return np.nan if key is None else self._store.age_s(key, int(hashes[blocks - 1]), now_s)
