"""Takes the cache events of publishers into the ledger.

Model     an event's tokens, chained after its parent, name the router's blocks; its engine hashes are the keys under
          which the publisher will remove them. Neighbouring events that touch different keys are applied together
Valid     engine blocks that are a multiple of the router's (only whole engine blocks are credited, see
          `Directory.match`) or a divisor of it (credited once enough of them make up a block)
Blind to  other sizes, token pairs, sliding-window and state groups: counted and ignored
Errors    only towards fewer hits: an unknown parent, a reused hash or a full source drops blocks, never adds
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter

import msgspec

from estimators.tiers import Tier
from router.blocks.ledger import Ledger
from router.blocks.pages import Pages
from router.signals.claims import Applied, Claims
from router.signals.meaning import blocks_of, kind_counts, root_of, well_formed
from router.signals.wire import MASK_64, Cleared, Event, Removed, Stored

Told = Callable[[Tier, Mapping[int, int]], None]  # called with a tier, keys and their blocks

_MAX_GROUPS = 64  # group numbers remembered per publisher; real engines have a handful
_MAX_ADAPTERS = 255  # numbers of adapter names per publisher
_TOGETHER = 4096  # keys applied together at most
_BLOCK_BITS = 64
_GROUP_SALT = 0x9FB21C651E98DF25  # two groups of one engine can use the same hash
_PART_SALT = 0xD6E8FEB86659FD93  # the parts of an engine block that is several of ours


class Intake:
    """One publisher. What `take` reads is pending until `settle`.

    Parameters
    ----------
    block_tokens : tokens in a block of the router's chain
    memory_limit : hashes remembered after their last copy went, since other tiers announce later
    told : called after blocks were taken in
    gone : called after the last copies of blocks went
    """

    def __init__(
        self, ledger: Ledger, claims: Claims, *, block_tokens: int, memory_limit: int, told: Told, gone: Told
    ) -> None:
        self.claims = claims
        self.told = told
        self._tell_gone = gone
        # Keys that lost their last copy, with their blocks and, above a block's 64 bits, their adapter.
        self.recent: dict[int, int] = {}
        self.refused = 0  # events of a size or kind that can never be credited
        self.parts = 1  # blocks of ours in an engine's block, as the last store said
        self._block_tokens = block_tokens
        self._memory_limit = memory_limit
        self._ledger = ledger
        self._adapters: dict[str, int] = {}  # numbers of names, from 1
        self._kept_groups: dict[int, bool] = {}
        self._pages: Pages | None = None
        # Pending stores, all of one tier and adapter; and removals, all of one tier and of other keys than the stores.
        self.fresh: dict[int, int] = {}
        self.fresh_tier = Tier.HBM
        self.fresh_adapter = 0
        self.gone: dict[int, None] = {}
        self.gone_tier = Tier.HBM

    @property
    def pending(self) -> int:
        """Keys put off."""
        return len(self.fresh) + len(self.gone)

    def take(self, events: Sequence[Event], now_s: float, done: Applied) -> None:
        """Read events in order; `done` counts what they did, as far as it is known before `settle`."""
        self.claims.last_event_s = now_s
        before = done.mismatched + done.ignored
        for event in events:
            if isinstance(event, Stored):
                self._stored(event, event.tier, done)
            elif isinstance(event, Removed):
                self._removed(event, done)
            else:
                assert isinstance(event, Cleared)
                self._settle(done)
                self.clear()
                done.cleared += 1
        self.refused += done.mismatched + done.ignored - before

    def take_stored(self, event: Stored, tier: Tier, done: Applied) -> None:
        """As `take` for one store, as if it had named `tier`."""
        self._stored(event, tier, done)

    def drop_adapter(self, adapter: str) -> None:
        """The adapter behind this name was unloaded, or loaded anew: its blocks are of no use."""
        number = self._number_of(adapter)
        self.claims.drop_adapter(number)
        self.recent.clear()
        if self._pages is not None:
            self._pages.drop_adapter(number)

    def clear(self) -> None:
        """Believe nothing of this publisher any more. What its hashes meant stays known."""
        self._ledger.empty(self.claims)
        self._pages = None

    def block_of(self, key: int) -> int | None:
        """The block behind a key, held now or lately."""
        block = self.claims.block_of(key)
        return self._recent_block(key) if block is None else block

    def blocks_of(self, keys: Sequence[int]) -> dict[int, int]:
        """The blocks behind those keys that are known, now or lately."""
        known = self.claims.blocks_of(keys)
        if self.recent and len(known) < len(keys):
            recent = self.recent
            known.update({key: recent[key] & MASK_64 for key in keys if key not in known and key in recent})
        return known

    def adapters_of(self, keys: Iterable[int]) -> dict[int, int]:
        """Adapter numbers of those keys that are held under one; to be asked before a release forgets them."""
        return self.claims.adapters_of(keys) if self._adapters else {}

    def remember(self, tier: Tier, released: dict[int, int], adapters: Mapping[int, int]) -> None:
        """These keys lost their last copy. What they meant is kept for a while."""
        if released:
            self.recent.update(released)
            for key in adapters.keys() & released.keys():
                self.recent[key] |= adapters[key] << _BLOCK_BITS
            shorten(self.recent, self._memory_limit)
            self._tell_gone(tier, released)

    def _settle(self, done: Applied) -> None:
        settle(self._ledger, [self], done)

    # Stores

    def _stored(self, event: Stored, tier: Tier, done: Applied) -> None:
        if not (self._group_counts(event) and well_formed(event)):
            done.ignored += 1
        elif not event.tokens:
            self._named(event, tier, done)
        elif len(event.tokens) != len(event.hashes) * event.block_tokens:
            done.ignored += 1  # a masked group: skipped blocks are in the tokens but not in the hashes
        elif event.block_tokens == self._block_tokens:
            self._whole(event, tier, 1, done)
        elif event.block_tokens % self._block_tokens == 0:
            self._whole(event, tier, event.block_tokens // self._block_tokens, done)
        elif self._block_tokens % event.block_tokens == 0:
            self._page(event, tier, done)
        else:
            done.mismatched += 1

    def _group_counts(self, event: Stored) -> bool:
        """Removals name no kind, so what a store says of its group is remembered; what cannot be does not count."""
        counts = kind_counts(event.kind, event.group)
        if event.group not in self._kept_groups and len(self._kept_groups) >= _MAX_GROUPS:
            return counts and event.group == 0  # the one that removals are taken to be of
        self._kept_groups[event.group] = counts
        return counts

    def _named(self, event: Stored, tier: Tier, done: Applied) -> None:
        """Only hashes: one more copy of those blocks whose hash has been explained."""
        known = {}
        for key in self._keys_of(event, self.parts):
            block = self._lately(key)
            if block is not None:
                known[key] = block
        if known:
            self._hold_known(tier, known, event, done)
        else:
            done.ignored += 1

    def _hold_known(self, tier: Tier, known: dict[int, int], event: Stored, done: Applied) -> None:
        """One more copy of blocks that were explained before, each under the adapter it had then."""
        if event.adapter or not self._adapters:
            self._hold(tier, known, self._adapter_in(event), done)
            return
        if self._touches(self.fresh, known) or self._touches(self.gone, known):
            self._settle(done)  # the adapters of what is pending are known only then
        by_adapter: dict[int, dict[int, int]] = {}
        held = self.claims.adapters_of(known)
        for key, block in known.items():
            number = held.get(key) or self.recent.get(key, 0) >> _BLOCK_BITS
            by_adapter.setdefault(number, {})[key] = block
        for number, blocks in by_adapter.items():
            self._hold(tier, blocks, number, done)

    def _whole(self, event: Stored, tier: Tier, parts: int, done: Applied) -> None:
        """Engine blocks that are one or several of ours."""
        if parts != self.parts:
            self._settle(done)
            self.parts = parts
        keys = self._keys_of(event, parts)
        if tier is not Tier.HBM:
            # Copies outside HBM are announced without their salt: what HBM said of the hash is believed.
            said = [self._lately(key) for key in keys]
            known = [block for block in said if block is not None]
            if len(known) == len(keys):
                self._hold_known(tier, dict(zip(keys, known, strict=True)), event, done)
                return
        previous = self._previous(event, tier, done)
        if previous is None:
            done.orphans += 1
            return
        adapter = self._adapter_in(event)
        if not adapter and event.parent is not None and tier is not Tier.HBM and self._adapters:
            adapter = self._adapter_behind(self.key(event.parent, event.group))
        if parts > 1:
            event = _in_parts(event, keys, parts)
        blocks = blocks_of(event, previous, self._block_tokens)
        self._hold(tier, dict(zip(keys, blocks, strict=True)), adapter, done)

    def _page(self, event: Stored, tier: Tier, done: Applied) -> None:
        """Engine blocks that are a part of ours: the last one that completes a block stands for it."""
        if self._pages is None or self._pages.page_tokens != event.block_tokens:
            self._pages = Pages(event.block_tokens, self._block_tokens, one_copy=self.claims.one_copy)
        self.parts = 1
        key = None if event.parent is None else self.key(event.parent, event.group)
        root = root_of(event, self.claims.model, self._block_tokens) if key is None else None
        adapter = self._adapter_in(event) or (0 if key is None else self._pages.adapter_of(key))
        blocks = self._pages.stored(self._keys_of(event, 1), key, root, event, adapter=adapter)
        if blocks is None:
            done.orphans += 1
        elif blocks:
            self._hold(tier, blocks, adapter, done)

    def _previous(self, event: Stored, tier: Tier, done: Applied) -> int | None:
        """The block before the event's first, or the root; None when the parent is not known."""
        if event.parent is None:
            return root_of(event, self.claims.model, self._block_tokens)
        parent = self.key(event.parent, event.group)
        block = self.fresh.get(parent)
        if block is None:
            if parent in self.gone:
                self._settle(done)
            block = self.claims.block_of(parent)
            if block is None and tier is not Tier.HBM:
                block = self._recent_block(parent)
        return block

    def _recent_block(self, key: int) -> int | None:
        block = self.recent.get(key)
        return None if block is None else block & MASK_64

    def _adapter_in(self, event: Stored) -> int:
        return self._number_of(event.adapter) if event.adapter else 0

    def _adapter_behind(self, key: int) -> int:
        """Adapter number of a key that is pending, held, or was lately; 0 for none."""
        if key in self.fresh:
            return self.fresh_adapter
        return self.claims.adapters_of([key]).get(key) or self.recent.get(key, 0) >> _BLOCK_BITS

    def _lately(self, key: int) -> int | None:
        block = self.fresh.get(key)
        return self.block_of(key) if block is None else block

    def _hold(self, tier: Tier, blocks: dict[int, int], adapter: int, done: Applied) -> None:
        fresh = self.fresh
        other_kind = bool(fresh) and (tier is not self.fresh_tier or adapter != self.fresh_adapter)
        if other_kind or len(fresh) > _TOGETHER or self._touches(fresh, blocks) or self._touches(self.gone, blocks):
            self._settle(done)
        self.fresh_tier, self.fresh_adapter = tier, adapter
        if self.fresh:
            self.fresh.update(blocks)
        else:
            self.fresh = blocks

    # Removals

    def _removed(self, event: Removed, done: Applied) -> None:
        if not self._kept_groups.get(event.group, event.group == 0):
            done.ignored += 1
            return
        keys = self._keys_of(event, self.parts)
        if self._pages is not None:
            keys = self._pages.removed(keys)
        other_tier = bool(self.gone) and event.tier is not self.gone_tier
        if other_tier or self._touches(self.fresh, keys) or self._touches(self.gone, keys):
            self._settle(done)
        if len(keys) > 1 and len(set(keys)) != len(keys):  # one removal for each copy, in one event
            self._settle(done)
            adapters = self.adapters_of(keys)
            for key in keys:
                (released,) = self._ledger.release(event.tier, [(self.claims, [key])], done)
                self.remember(event.tier, released, adapters)
            return
        self.gone_tier = event.tier
        self.gone.update(dict.fromkeys(keys))

    def _number_of(self, adapter: str) -> int:
        """A number for each name; names beyond the last number share it, and are dropped together."""
        if len(self._adapters) < _MAX_ADAPTERS - 1:
            return self._adapters.setdefault(adapter, len(self._adapters) + 1)
        return self._adapters.get(adapter, _MAX_ADAPTERS)

    @staticmethod
    def _touches(pending: Mapping[int, int | None], keys: Iterable[int]) -> bool:
        return bool(pending) and not pending.keys().isdisjoint(keys)

    # Keys

    @staticmethod
    def key(value: int, group: int) -> int:
        return value ^ group * _GROUP_SALT & MASK_64 if group else value

    def _keys_of(self, event: Stored | Removed, parts: int) -> list[int]:
        """One key for each of our blocks; the last part of an engine block has the engine's own hash."""
        keys = event.hashes
        if event.group:
            keys = [self.key(value, event.group) for value in keys]
        if parts > 1:
            salts = [part * _PART_SALT & MASK_64 for part in range(parts - 1, -1, -1)]
            keys = [key ^ salt for key in keys for salt in salts]
        return keys


def settle(ledger: Ledger, intakes: Sequence[Intake], done: Applied) -> None:
    """Apply what these publishers have pending, all in one go. Removals first: they make room."""
    gone = [intake for intake in intakes if intake.gone]
    for tier, those in _by_tier(gone, attrgetter("gone_tier")) if gone else ():
        adapters = [intake.adapters_of(intake.gone) for intake in those]
        released = ledger.release(tier, [(intake.claims, list(intake.gone)) for intake in those], done)
        for intake, of_one, of_its in zip(those, released, adapters, strict=True):
            intake.gone = {}
            intake.remember(tier, of_one, of_its)
    fresh = [intake for intake in intakes if intake.fresh]
    for tier, those in _by_tier(fresh, attrgetter("fresh_tier")) if fresh else ():
        ledger.hold(tier, [(intake.claims, intake.fresh, intake.fresh_adapter) for intake in those], done)
        for intake in those:
            blocks, intake.fresh = intake.fresh, {}
            intake.told(tier, blocks)


def _by_tier(intakes: list[Intake], tier_of: Callable[[Intake], Tier]) -> list[tuple[Tier, list[Intake]]]:
    if len(intakes) == 1:
        return [(tier_of(intakes[0]), intakes)]
    tiers = set(map(tier_of, intakes))
    return [(tier, [intake for intake in intakes if tier_of(intake) is tier]) for tier in tiers]


def shorten(entries: dict[int, int] | dict[int, None], limit: int) -> None:
    """Drop the oldest entries beyond `limit`, and a sixty-fourth more so that sweeps are rare."""
    excess = len(entries) - limit
    if excess > 0:
        for key in list(islice(entries, excess + limit // 64)):
            del entries[key]


def _in_parts(event: Stored, keys: list[int], parts: int) -> Stored:
    """The event as if it had named blocks of our size; what else a hash covers counts before its first part."""
    extras = None
    if event.extras:
        extras = [extra for whole in event.extras for extra in (whole, *[None] * (parts - 1))]
    return msgspec.structs.replace(event, hashes=keys, extras=extras)
