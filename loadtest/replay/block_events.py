"""Cache events of the simulated engines, given to the router's directory in one of two ways.

Model     plain    each block of the prompt is one id on both sides; events become the values `router.signals.wire`
                   would decode, without being encoded. A block is one "token" to the directory
          wire     real tokens in the bytes engines send, decoded by the router: what production does
Valid     both give the same beliefs (a test holds that)
Blind to  losses, duplicates, sequence numbers: those belong to the subscriber
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from estimators.tiers import Tier
from router.signals import wire
from sim_backends import cache_events, event_wire
from sim_backends.block_hash import wire_hash
from sim_backends.cache_events import EventBatch
from sim_backends.store import StoreChange


def plain_batch(batches: Sequence[EventBatch]) -> wire.Batch:
    """What one replica said in some steps one after the other; the tokens of a block are its id.

    Removals that follow one another are one event, and so are stores that go on where the last one ended.
    """
    told: list[wire.Event] = []
    gone: list[int] = []
    last: wire.Stored | None = None
    for batch in batches:
        for event in batch.events:
            if isinstance(event, cache_events.Removed):
                gone.append(wire_hash(event.digest))
                last = None
                continue
            if gone:
                told.append(wire.Removed(hashes=gone, tier=Tier.HBM))
                gone = []
            if not isinstance(event, cache_events.Stored):
                told += [wire.Cleared()] if isinstance(event, cache_events.Cleared) else _off_device(event)
                last = None
                continue
            hashes = list(map(wire_hash, event.digests))
            parent = None if event.parent is None else wire_hash(event.parent)
            if last is not None and parent == last.hashes[-1]:
                last.hashes.extend(hashes)
                last.tokens.extend(event.tokens)
                continue
            tokens = array("I", event.tokens)
            last = wire.Stored(hashes=hashes, parent=parent, tokens=tokens, block_tokens=1, tier=Tier.HBM)
            told.append(last)
    if gone:
        told.append(wire.Removed(hashes=gone, tier=Tier.HBM))
    return wire.Batch(ts_s=batches[-1].at_s, events=told)


def _off_device(change: cache_events.OffDevice) -> list[wire.Event]:
    """A copy in the replica's host memory or on its disk, hash only, as connectors say it. Disks say no removals."""
    hashes = [wire_hash(change.digest)]
    tier = Tier.HOST if change.tier == "host" else Tier.DISK
    if change.stored:
        return [wire.Stored(hashes=hashes, parent=None, tokens=array("I"), block_tokens=0, tier=tier)]
    return [wire.Removed(hashes=hashes, tier=tier)] if tier is Tier.HOST else []


def plain_store_batch(changes: Sequence[StoreChange], model: str) -> wire.Batch:
    """The store's changes, hashes only. Where no block changes twice their order does not matter: what came, and what
    went, together; else neighbours of one kind."""
    runs: Iterable[tuple[bool, list[int]]] = _runs(changes)
    if len({change.digest for change in changes}) == len(changes):
        runs = [
            (stored, [wire_hash(change.digest) for change in changes if change.stored is stored])
            for stored in (True, False)
        ]
    return wire.Batch(events=[_store_event(stored, hashes, model) for stored, hashes in runs if hashes])


def _store_event(stored: bool, hashes: list[int], model: str) -> wire.Event:
    if stored:
        return wire.Stored(hashes=hashes, parent=None, tokens=array("I"), block_tokens=1, tier=Tier.REMOTE, model=model)
    return wire.Removed(hashes=hashes, tier=Tier.REMOTE, model=model)


def _runs(changes: Sequence[StoreChange]) -> Iterator[tuple[bool, list[int]]]:
    hashes: list[int] = []
    for index, change in enumerate(changes):
        if hashes and change.stored != changes[index - 1].stored:
            yield changes[index - 1].stored, hashes
            hashes = []
        hashes.append(wire_hash(change.digest))
    if hashes:
        yield changes[-1].stored, hashes


def wire_batch(batch: EventBatch, block_tokens: int) -> wire.Batch:
    """One step's events through the bytes vLLM sends."""
    return wire.decode(event_wire.encode_batch(batch.events, unix_s=batch.at_s, block_tokens=block_tokens))


def wire_store_batches(changes: Sequence[StoreChange], encoder: event_wire.MasterEncoder) -> list[wire.Batch]:
    """The store's changes through the bytes the Mooncake master sends."""
    return [wire.decode(payload) for payload in encoder.messages(changes, unix_offset_s=0.0)]
