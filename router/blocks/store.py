"""The shared store: which blocks it holds, though it mostly says only engine hashes.

Model     a hash is joined to what some engine of the same model said of it, now, before or later; what nobody has
          explained yet waits. Each model name the store uses is kept apart
Valid     engines that share one hash seed (vLLM from 0.29 by default), or stores that send tokens
Errors    only towards fewer hits: what waits too long is dropped, and a name that could mean two models means none
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan

from estimators.tiers import Tier
from router.blocks.intake import Intake, settle, shorten
from router.blocks.ledger import Ledger
from router.signals.claims import Applied
from router.signals.meaning import kind_counts
from router.signals.wire import Batch, Cleared, Removed, Stored

_MAX_NAMES = 64  # model names a store may use


class _Named:
    """What the store holds under one model name, and the hashes nobody has explained yet."""

    def __init__(self, intake: Intake, name: str | None) -> None:
        self.intake = intake
        self.name = name
        self.waiting: dict[int, None] = {}
        self.stored: dict[int, None] = {}  # pending


class SharedStore:
    """All names of one store. Until it has said something, nothing is kept for it.

    Parameters
    ----------
    holder : the store's number in the index
    sources : publishers by row, lent: they explain hashes
    models : gives the models of all replicas, those without a publisher too
    limit : blocks kept for each name
    memory_limit : hashes that may wait for an explanation, for each name; and explanations kept, for each model
    """

    def __init__(
        self,
        ledger: Ledger,
        holder: int,
        sources: Mapping[int, Intake],
        *,
        models: Callable[[], set[str]],
        block_tokens: int,
        limit: int,
        memory_limit: int,
    ) -> None:
        self._models = models
        self._ledger = ledger
        self._holder = holder
        self._sources = sources
        self._block_tokens = block_tokens
        self._limit = limit
        self._memory_limit = memory_limit
        self._names: dict[str | None, _Named] = {}
        self._lately: dict[str, dict[int, int]] = {}  # by model: what its replicas stored or dropped last
        self._explained_last = -1  # row; stores write in runs, so the same one explains the next

    @property
    def engine_hashes(self) -> int:
        return sum(named.intake.claims.held for named in self._names.values())

    @property
    def waiting(self) -> int:
        return sum(len(named.waiting) for named in self._names.values())

    def take(self, batch: Batch, now_s: float, done: Applied) -> None:
        """Apply one batch. Its medium (memory or disk of the pool) does not matter."""
        for event in batch.events:
            if isinstance(event, Cleared):
                self._settle(done)
                self._cleared(event)
                done.cleared += 1
                continue
            named = self._named(event.model)
            if named is None:
                done.ignored += 1
                continue
            named.intake.claims.last_event_s = now_s
            if isinstance(event, Stored):
                self._stored(named, event, done)
            else:
                self._removed(named, event, done)
        self._settle(done)

    def age_s(self, key: int, block: int, now_s: float) -> float:
        """Seconds since the store last had this block put or read under this hash; NaN when it has not."""
        ages = (named.intake.claims.age_s(key, block, now_s) for named in self._names.values())
        return next((age_s for age_s in ages if not isnan(age_s)), nan)

    def used(self, hashes: Sequence[int], now_s: float) -> None:
        """These leading blocks of a chain were read from the store."""
        for named in self._names.values():
            named.intake.claims.used(hashes, now_s)

    def clear(self) -> None:
        """Believe nothing of the store any more."""
        for named in self._names.values():
            self._ledger.close(named.intake.claims)
        self._names.clear()
        self._lately.clear()

    def explain(self, model: str, blocks: Mapping[int, int]) -> None:
        """A replica has just stored or dropped these hashes, so the store will soon name them, or waits for them."""
        if not self._names:
            return  # nobody listens to a store: nothing to prepare for
        lately = self._lately.setdefault(model, {})
        lately.update(blocks)
        shorten(lately, self._memory_limit)
        for named in self._names.values():
            if not named.waiting or named.waiting.keys().isdisjoint(blocks):
                continue
            if model in self._models_behind(named.name):
                known = {key: block for key, block in blocks.items() if key in named.waiting}
                for key in known:
                    del named.waiting[key]
                self._hold(named, known, Applied())

    def _hold(self, named: _Named, known: dict[int, int], done: Applied) -> None:
        self._ledger.hold(Tier.REMOTE, [(named.intake.claims, known, 0)], done)

    def _named(self, name: str | None) -> _Named | None:
        named = self._names.get(name)
        if named is None and len(self._names) < _MAX_NAMES:
            claims = self._ledger.open(self._holder, name or "", one_copy=True, limit=self._limit)
            intake = Intake(
                self._ledger,
                claims,
                block_tokens=self._block_tokens,
                memory_limit=self._memory_limit,
                told=_tell_nobody,
                gone=_tell_nobody,
            )
            named = self._names[name] = _Named(intake, name)
        return named

    def _cleared(self, event: Cleared) -> None:
        if event.model is None:
            self.clear()
        else:
            gone = self._names.pop(event.model, None)
            if gone is not None:
                self._ledger.close(gone.intake.claims)

    def _settle(self, done: Applied) -> None:
        """Apply what is pending under each name."""
        for named in self._names.values():
            if named.stored:
                stored, named.stored = list(named.stored), {}
                self._join(named, stored, done)
            if named.intake.pending:
                settle(self._ledger, [named.intake], done)

    def _stored(self, named: _Named, event: Stored, done: Applied) -> None:
        if event.block_tokens not in (0, self._block_tokens):
            done.mismatched += 1
            return
        if event.tokens and len(models := self._models_behind(named.name)) == 1:
            named.intake.claims.model = models[0]
            named.intake.take_stored(event, Tier.REMOTE, done)
        elif kind_counts(event.kind, event.group) and not event.bigram:
            keys = dict.fromkeys(_keys(event))
            if not named.intake.gone.keys().isdisjoint(keys):
                self._settle(done)
            named.stored.update(keys)
        else:
            done.ignored += 1

    def _join(self, named: _Named, keys: list[int], done: Applied) -> None:
        """Only hashes: each block is what some engine said of its hash, now, before or later."""
        models = self._models_behind(named.name)
        known: dict[int, int] = {}
        for model in models:
            lately = self._lately.get(model, {})
            known.update({key: lately[key] for key in keys if key in lately})
        if len(known) < len(keys):
            left = [key for key in keys if key not in known]
            known.update(named.intake.claims.blocks_of(left))
            known.update(self._explanations(models, [key for key in left if key not in known]))
            waiting = [key for key in left if key not in known]
            named.waiting.update(dict.fromkeys(waiting))
            done.ignored += len(waiting)
            shorten(named.waiting, self._memory_limit)
        if known:
            self._hold(named, known, done)

    def _explanations(self, models: Sequence[str], keys: list[int]) -> dict[int, int]:
        """What sources say of these hashes; the one that explained the last is asked first."""
        known: dict[int, int] = {}
        rows = sorted(self._sources, key=lambda row: row != self._explained_last)
        for row in rows:
            if not keys:
                break
            source = self._sources[row]
            if source.claims.model in models:
                found = source.blocks_of(keys)
                if found:
                    self._explained_last = row
                    known.update(found)
                    keys = [key for key in keys if key not in found]
        return known

    def _models_behind(self, name: str | None) -> Sequence[str]:
        """Models of our replicas a store's name can mean. Engine hashes do not say the model, so doubt means none.

        A single model is meant by any name: stores use the repository's name, engines an alias.
        """
        models = self._models()
        if name in models:
            return (name,)
        return tuple(models) if len(models) == 1 else ()

    def _removed(self, named: _Named, event: Removed, done: Applied) -> None:
        intake, keys = named.intake, _keys(event)
        if not named.stored.keys().isdisjoint(keys) or not intake.fresh.keys().isdisjoint(keys):
            self._settle(done)
        for key in keys:
            if key in named.waiting:
                del named.waiting[key]
            else:
                intake.gone[key] = None
        intake.gone_tier = Tier.REMOTE


def _keys(event: Stored | Removed) -> list[int]:
    """The same keys as an intake has for these hashes."""
    return [Intake.key(value, event.group) for value in event.hashes] if event.group else event.hashes


def _tell_nobody(tier: Tier, blocks: Mapping[int, int]) -> None:
    del tier, blocks
