"""Who holds which block in which tier, as the engines' own events say.

Model     a block is named by the router's chain (`router.identity`), computed from the tokens in events; the
          engine's own hashes only resolve parents and removals. The shared store is one more holder, of
          tier REMOTE; where it names only hashes, a block is what some engine gave the same hash.
Valid     sources whose engine hashes are chained (vLLM; SGLang from 0.5.6); hash-only stores whose engines
          share one hash seed (vLLM from 0.29 by default)
Blind to  blocks of another size than ours, token pairs, sliding-window and state groups: counted and ignored.
          Blocks with images are kept apart, so prompts given by tokens alone do not match them.
Errors    only towards fewer hits: an unknown parent, a reused hash or a full source drops blocks, never adds.
          Re-announced hits of vLLM (`kv_cache_report_mode: full`) are the exception, see signals/README.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from estimators.tiers import Tier
from router.signals.claims import Applied, Claims, Index, oldest
from router.signals.meaning import blocks_of, engine_keys, kind_counts, parent_key, root_of, well_formed
from router.signals.wire import Batch, Cleared, Removed, Stored

Int32s = npt.NDArray[np.int32]
_FEW_ROWS = 8  # up to here a loop over set bits beats unpacking the whole mask
_MAX_GROUPS = 64  # group numbers remembered per source; real engines have a handful
_MAX_STORE_NAMES = 64  # model names a store may use


@dataclass(frozen=True, slots=True)
class Match:
    """Leading blocks of one chain. Each tier is counted alone, from block 0 and without a gap.

    hbm_blocks, host_blocks : int32, one entry per row
    store_blocks : of the shared store
    """

    hbm_blocks: Int32s
    host_blocks: Int32s
    store_blocks: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Sizes now and counters since the start.

    blocks : distinct blocks by tier, whoever holds them
    engine_hashes : engine hashes kept over all sources and the store
    waiting : store hashes no event has explained yet
    remembered : explanations kept after the last replica dropped the block
    totals : everything applied so far
    """

    blocks: dict[Tier, int]
    engine_hashes: int
    waiting: int
    remembered: int
    totals: Applied


class _Store:
    """The shared store under one model name: its claims, and the hashes nobody has explained yet."""

    def __init__(self, claims: Claims, name: str | None) -> None:
        self.claims = claims
        self.name = name
        self.waiting: dict[int, None] = {}


class Directory:
    """All beliefs about caches. Plain calls, one thread, no clock.

    Parameters
    ----------
    block_tokens : tokens per block of the router's chain, >= 1
    rows : replicas, rows 0..rows-1 of the fleet view, >= 1
    source_limit : blocks kept per source; beyond it the oldest go first (they only lose hits)
    memory_limit : hashes remembered to explain store events, per model, and unexplained ones per store name
    """

    def __init__(
        self, block_tokens: int, rows: int, *, source_limit: int = 1 << 20, memory_limit: int = 1 << 17
    ) -> None:
        if min(block_tokens, rows, source_limit, memory_limit) < 1:
            raise ValueError("block_tokens, rows and the limits must be at least 1")
        self.block_tokens = block_tokens
        self.rows = rows
        self._source_limit = source_limit
        self._memory_limit = memory_limit
        self._index = Index()
        self._sources: dict[int, Claims] = {}
        self._stores: dict[str | None, _Store] = {}
        self._remembered: dict[str, dict[int, int]] = {}  # by model; its keys are the registered models
        self._totals = Applied()

    # Sources

    def add_source(self, row: int, model: str, *, one_copy: bool = False) -> None:
        """Register the publisher of `row`, which serves `model`. Another model than before clears the row.

        one_copy : the engine keeps one logical copy per tier (SGLang), so a repeated store is not counted;
            else each store needs its own removal (vLLM)
        """
        if not 0 <= row < self.rows:
            raise ValueError(f"row {row} is outside 0..{self.rows - 1}")
        known = self._sources.get(row)
        if known is not None and (known.model, known.one_copy) == (model, one_copy):
            return
        self.drop_source(row)
        self._sources[row] = Claims(self._index, 1 << row, model, one_copy=one_copy)
        self._remembered.setdefault(model, {})

    def drop_source(self, row: int) -> None:
        """Forget the publisher of `row` and all it held; no effect when there is none."""
        self.clear(row)
        gone = self._sources.pop(row, None)
        if gone is not None and all(source.model != gone.model for source in self._sources.values()):
            self._remembered.pop(gone.model, None)

    def clear(self, row: int) -> None:
        """Believe nothing of `row` any more: it restarted, slept, or was down. It stays registered."""
        source = self._sources.get(row)
        if source is not None:
            source.clear()

    def clear_store(self) -> None:
        """Believe nothing of the shared store any more."""
        for store in self._stores.values():
            store.claims.clear()
        self._stores.clear()

    def last_event_s(self, row: int) -> float | None:
        """Router's clock when `row` last sent a batch; None when it never has."""
        source = self._sources.get(row)
        return None if source is None else source.last_event_s

    # Events in

    def apply(self, row: int, batch: Batch, now_s: float) -> Applied:
        """Take in one batch of the publisher of `row`.

        Raises
        ------
        ValueError : `row` has no source; call `add_source` first
        """
        source = self._sources.get(row)
        if source is None:
            raise ValueError(f"row {row} has no event source")
        source.last_event_s = now_s
        done = Applied(unknown=batch.unknown, bad=batch.bad)
        for event in batch.events:
            if isinstance(event, Stored):
                self._stored(source, event, event.tier, done)
            elif isinstance(event, Removed):
                self._removed(source, event, done)
            else:
                source.clear()
                done.cleared += 1
        self._totals.add(done)
        return done

    def apply_store(self, batch: Batch, now_s: float) -> Applied:
        """Take in one batch of the shared store. Its medium (memory or disk of the pool) does not matter."""
        done = Applied(unknown=batch.unknown, bad=batch.bad)
        for event in batch.events:
            if isinstance(event, Cleared):
                self._store_cleared(event)
                done.cleared += 1
                continue
            store = self._store_named(event.model)
            if store is None:
                done.ignored += 1
                continue
            store.claims.last_event_s = now_s
            if isinstance(event, Stored):
                self._store_stored(store, event, done)
            else:
                self._store_removed(store, event, done)
        self._totals.add(done)
        return done

    # Questions

    def match(self, hashes: Sequence[int]) -> Match:
        """How far each holder could serve this chain. The caller cuts it to the tokens an engine may reuse."""
        in_store = self._index.masks[Tier.REMOTE]
        held = 0
        if in_store:
            for block in hashes:
                if block not in in_store:
                    break
                held += 1
        return Match(self._leading(Tier.HBM, hashes), self._leading(Tier.HOST, hashes), held)

    def holders(self, block: int) -> dict[Tier, tuple[int, ...]]:
        """Rows holding one block, by tier; `rows` (one past the last) stands for the shared store."""
        found = {tier: masks.get(block, 0) for tier, masks in self._index.masks.items()}
        return {tier: tuple(_rows_of(mask)) for tier, mask in found.items() if mask}

    def stats(self) -> Stats:
        books = [*self._sources.values(), *(store.claims for store in self._stores.values())]
        totals = Applied()
        totals.add(self._totals)
        return Stats(
            blocks={tier: len(masks) for tier, masks in self._index.masks.items()},
            engine_hashes=sum(len(claims.local_of) for claims in books),
            waiting=sum(len(store.waiting) for store in self._stores.values()),
            remembered=sum(len(memory) for memory in self._remembered.values()),
            totals=totals,
        )

    def _leading(self, tier: Tier, hashes: Sequence[int]) -> Int32s:
        """Walk until nobody is left; most blocks have the same holders as the one before."""
        counts = np.zeros(self.rows, dtype=np.int32)
        masks = self._index.masks[tier]
        alive = last = masks.get(hashes[0], 0) if hashes else 0
        if not alive:
            return counts
        for depth, mask in enumerate(map(masks.get, hashes)):
            if mask == last:
                continue
            last = mask or 0
            left = alive & last
            if left != alive:
                _write(counts, alive ^ left, depth)
                alive = left
                if not alive:
                    return counts
        _write(counts, alive, len(hashes))
        return counts

    # Stores and removals of a replica

    def _stored(self, source: Claims, event: Stored, tier: Tier, done: Applied) -> None:
        if not (self._group_counts(source, event) and well_formed(event)):
            done.ignored += 1
        elif not event.tokens:
            source.hold_known(tier, engine_keys(event), done)
        elif event.block_tokens != self.block_tokens:
            done.mismatched += 1
        elif len(event.tokens) != len(event.hashes) * self.block_tokens:
            done.ignored += 1  # a masked group: skipped blocks are in the tokens but not in the hashes
        else:
            self._stored_tokens(source, event, tier, done)

    def _group_counts(self, source: Claims, event: Stored) -> bool:
        """Removals name no kind, so what a store says of its group is remembered."""
        counts = kind_counts(event.kind, event.group)
        if event.group in source.kept_groups or len(source.kept_groups) < _MAX_GROUPS:
            source.kept_groups[event.group] = counts
        return counts

    def _stored_tokens(self, source: Claims, event: Stored, tier: Tier, done: Applied) -> None:
        keys = engine_keys(event)
        if tier is not Tier.HBM and all(key in source.local_of for key in keys):
            # Copies outside HBM are announced without their salt: what HBM said of the hash is believed.
            source.hold_known(tier, keys, done)
            return
        parent = parent_key(event)
        previous = root_of(event, source.model, self.block_tokens) if parent is None else source.local_of.get(parent)
        if previous is None:
            done.orphans += 1
            return
        blocks = blocks_of(event, previous, self.block_tokens)
        source.hold(tier, keys, blocks, done)
        self._explain(source.model, keys, blocks)
        source.trim(self._source_limit, done)

    def _removed(self, source: Claims, event: Removed, done: Applied) -> None:
        if not source.kept_groups.get(event.group, event.group == 0):
            done.ignored += 1
            return
        memory = self._remembered[source.model]
        for key in engine_keys(event):
            block = source.release(event.tier, key, done)
            if block is not None:  # stores often announce a block only after the replica evicted it
                memory[key] = block
        _shorten(memory, self._memory_limit)

    # The shared store

    def _store_named(self, name: str | None) -> _Store | None:
        store = self._stores.get(name)
        if store is None and len(self._stores) < _MAX_STORE_NAMES:
            claims = Claims(self._index, 1 << self.rows, name or "", one_copy=True)
            store = self._stores[name] = _Store(claims, name)
        return store

    def _store_cleared(self, event: Cleared) -> None:
        if event.model is None:
            self.clear_store()
        else:
            gone = self._stores.pop(event.model, None)
            if gone is not None:
                gone.claims.clear()

    def _store_stored(self, store: _Store, event: Stored, done: Applied) -> None:
        if event.block_tokens not in (0, self.block_tokens):
            done.mismatched += 1
            return
        models = self._models_behind(store.name)
        if event.tokens and len(models) == 1:
            store.claims.model = models[0]
            self._stored(store.claims, event, Tier.REMOTE, done)
        elif kind_counts(event.kind, event.group) and not event.bigram:
            self._join(store, engine_keys(event), models, done)
        else:
            done.ignored += 1

    def _join(self, store: _Store, keys: list[int], models: Sequence[str], done: Applied) -> None:
        """Only hashes: each block is what some engine said of its hash, now, before or later."""
        for key in keys:
            block = store.claims.local_of.get(key)
            if block is None:
                block = self._explanation(models, key)
            if block is None:
                store.waiting[key] = None
                done.ignored += 1
            else:
                store.claims.hold(Tier.REMOTE, [key], [block], done)
        _shorten(store.waiting, self._memory_limit)
        store.claims.trim(self._source_limit, done)

    def _explanation(self, models: Sequence[str], key: int) -> int | None:
        for model in models:
            block = self._remembered[model].get(key)
            if block is not None:
                return block
        for source in self._sources.values():
            block = source.local_of.get(key)
            if block is not None and source.model in models:
                return block
        return None

    def _explain(self, model: str, keys: list[int], blocks: list[int]) -> None:
        """A replica has just said what these hashes are; the store may have been waiting for it."""
        for store in self._stores.values():
            if store.waiting and model in self._models_behind(store.name):
                for key, block in zip(keys, blocks, strict=True):
                    if key in store.waiting:
                        del store.waiting[key]
                        store.claims.hold(Tier.REMOTE, [key], [block], Applied())

    def _models_behind(self, name: str | None) -> Sequence[str]:
        """Registered models a store's name can mean. Engine hashes do not say the model, so doubt means none.

        A single registered model is meant by any name: stores use the repository's name, engines an alias.
        """
        if name in self._remembered:
            return (name,)
        return tuple(self._remembered) if len(self._remembered) == 1 else ()

    def _store_removed(self, store: _Store, event: Removed, done: Applied) -> None:
        for key in engine_keys(event):
            if key in store.waiting:
                del store.waiting[key]
            else:
                store.claims.release(Tier.REMOTE, key, done)


def _shorten(entries: dict[int, int] | dict[int, None], limit: int) -> None:
    for key in oldest(entries, limit):
        del entries[key]


def _rows_of(mask: int) -> list[int]:
    rows = []
    while mask:
        low = mask & -mask
        rows.append(low.bit_length() - 1)
        mask ^= low
    return rows


def _write(counts: Int32s, mask: int, value: int) -> None:
    if mask.bit_count() <= _FEW_ROWS:
        for row in _rows_of(mask):
            counts[row] = value
        return
    bits = np.frombuffer(mask.to_bytes((len(counts) + 7) // 8, "little"), dtype=np.uint8)
    counts[np.unpackbits(bits, count=len(counts), bitorder="little").view(bool)] = value
