"""Cache events as they go over ZMQ: every form vLLM has sent, and the Mooncake master's for the store.

All fields a release declares are declared here too, also those a simulated replica never sets: the encoder sizes
a map's header by the number of declared fields, and recorded payloads are matched byte for byte.

Model     one set of fields in one order. Releases before 0.24 send the first few of them as an array, the tag in
          front and trailing nulls kept; 0.24 and newer a map that leaves out fields at their default
Blind to  the hash inputs of older releases: under every generation a salted block has the hash of 0.31 and newer,
          and those of 0.9 (Python's own `hash` there) are the same digests read as signed numbers
Source    vLLM 0.9.2 to 0.33, vllm/distributed/kv_events.py; Mooncake master KV event publisher, by its documentation
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Protocol

import msgspec

from sim_backends.block_hash import wire_hash
from sim_backends.cache_events import OffDevice, Removed, Said, Stored
from sim_backends.generations import DEFAULT
from sim_backends.store import StoreChange

MEDIUM_GPU = "GPU"
FULL_ATTENTION = "full_attention"
MASTER_EVENTS_PER_MESSAGE = 64

Hash = int | bytes
Version = tuple[int, int, int]


class EventEncoder(Protocol):
    """One replica's events in one generation's form. May remember what it has said: one for each publisher."""

    def encode(self, events: Sequence[Said], *, unix_s: float) -> bytes | None:
        """One step's events, built at `unix_s`; None when this generation has nothing to say about them."""
        ...


class BlockStored24(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockStored"):
    """Fields up to 0.24, in the order in which the array forms grew."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockStored(BlockStored24, frozen=True, omit_defaults=True, tag="BlockStored"):
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved24(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: Sequence[Hash]
    medium: str | None
    group_idx: int | None = None


class BlockRemoved(BlockRemoved24, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    pass


WireEvent = BlockStored24 | BlockRemoved24 | AllBlocksCleared

# Array forms: since which release, and how many fields of BlockStored and of BlockRemoved. Newest first.
_POSITIONS: tuple[tuple[Version, int, int], ...] = (
    ((0, 20, 2), 11, 3),
    ((0, 17, 1), 8, 2),
    ((0, 14, 1), 7, 2),
    ((0, 10, 2), 6, 2),
    ((0, 0, 0), 5, 1),
)
_FIRST_MAP: Version = (0, 24, 0)
_FIRST_LOCALITY: Version = (0, 26, 0)
_FIRST_UNSIGNED: Version = (0, 10, 2)
_FIRST_EMPTY_PLACEHOLDER: Version = (0, 18, 0)  # the next checked release after 0.17.1 with block size 0
_ENCODER = msgspec.msgpack.Encoder()


def batch_bytes(events: Iterable[Any], *, unix_s: float, rank: int) -> bytes | None:
    """The envelope all engines share, a positional array; None for no events, which nobody sends."""
    listed = list(events)
    return _ENCODER.encode([unix_s, listed, rank]) if listed else None


def signed_hash(digest: bytes) -> int:
    """The low 64 bits as a signed number."""
    return int.from_bytes(digest[-8:], "big", signed=True)


class VllmEncoder:
    """Events as vLLM `version` sends them; remembers nothing.

    raw_hashes : whole digests as bytes (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0); 0.10.2 and newer
    rank : data-parallel rank of the publisher, >= 0
    """

    def __init__(self, version: Version, *, block_tokens: int, raw_hashes: bool = False, rank: int = 0) -> None:
        assert not raw_hashes or version >= _FIRST_UNSIGNED, "raw hashes came with the sha256 chain"
        self._version = version
        self._block_tokens = block_tokens
        self._rank = rank
        numbers = wire_hash if version >= _FIRST_UNSIGNED else signed_hash
        self._hash: Callable[[bytes], Hash] = bytes if raw_hashes else numbers
        newest = version >= _FIRST_LOCALITY
        self._stored_type: type[BlockStored24] = BlockStored if newest else BlockStored24
        self._removed_type: type[BlockRemoved24] = BlockRemoved if newest else BlockRemoved24
        _since, self._stored_fields, self._removed_fields = next(row for row in _POSITIONS if version >= row[0])

    def encode(self, events: Sequence[Said], *, unix_s: float) -> bytes | None:
        said = [made for event in events if (made := self._wire(event)) is not None]
        if self._version >= _FIRST_MAP:
            return batch_bytes(said, unix_s=unix_s, rank=self._rank)
        return batch_bytes(map(self._array, said), unix_s=unix_s, rank=self._rank)

    def _array(self, event: WireEvent) -> list[Any]:
        values = list(msgspec.structs.astuple(event))
        if isinstance(event, BlockStored24):
            return ["BlockStored", *values[: self._stored_fields]]
        if isinstance(event, BlockRemoved24):
            return ["BlockRemoved", *values[: self._removed_fields]]
        return ["AllBlocksCleared"]

    def _wire(self, said: Said) -> WireEvent | None:
        if isinstance(said, Stored):
            return self._stored(said)
        if isinstance(said, Removed):
            return self._removed_type([self._hash(said.digest)], MEDIUM_GPU, 0)
        if isinstance(said, OffDevice):
            return self._off_device(said)
        return AllBlocksCleared()

    def _stored(self, event: Stored) -> BlockStored24:
        extra: list[list[Any] | None] = [None] * len(event.digests)
        if event.salt is not None:
            extra[0] = [event.salt]
        return self._stored_type(
            block_hashes=[self._hash(digest) for digest in event.digests],
            parent_block_hash=None if event.parent is None else self._hash(event.parent),
            token_ids=event.tokens,
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIUM_GPU,
            lora_name=None,
            extra_keys=extra,
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
        )

    def _off_device(self, said: OffDevice) -> WireEvent | None:
        """A connector's events as they are by default: hash only, to be joined to the device's by the hash.

        Disks say no removals. Nothing at all before 0.10.2, whose events cannot name a tier.
        """
        if self._version < _FIRST_UNSIGNED:
            return None
        hashes = [self._hash(said.digest)]
        medium = "CPU" if said.tier == "host" else "STORAGE"
        if not said.stored:
            return self._removed_type(hashes, medium, 0) if said.tier == "host" else None
        size = 0 if self._version >= _FIRST_EMPTY_PLACEHOLDER else self._block_tokens
        return self._stored_type(hashes, None, [], size, None, medium, None, group_idx=0)


@lru_cache(maxsize=8)
def _newest(block_tokens: int) -> VllmEncoder:
    return VllmEncoder(DEFAULT.version, block_tokens=block_tokens)


def encode_batch(events: Sequence[Said], *, unix_s: float, block_tokens: int) -> bytes:
    """One step's events, at least one of a block in memory, in the newest form; `unix_s` is when it was built."""
    payload = _newest(block_tokens).encode(events, unix_s=unix_s)
    assert payload is not None, "a batch has events"
    return payload


class MasterEncoder:
    """Messages of the store's publisher about one model: hash only, at most 64 events each.

    `numbers` gives the events' ids, shared by the encoders of one publisher; None counts from 1.
    """

    def __init__(self, *, model: str, block_tokens: int, backend_id: str, numbers: Iterator[int] | None = None) -> None:
        self._model = model
        self._block_tokens = block_tokens
        self._backend_id = backend_id
        self._key = f"{model}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"  # vLLM's store key, before the hash
        self._numbers = count(1) if numbers is None else numbers

    def messages(self, changes: Sequence[StoreChange], *, unix_offset_s: float) -> list[bytes]:
        """Payloads in order; `unix_offset_s` turns virtual time into Unix time."""
        payloads = []
        for start in range(0, len(changes), MASTER_EVENTS_PER_MESSAGE):
            part = changes[start : start + MASTER_EVENTS_PER_MESSAGE]
            times = [int((change.at_s + unix_offset_s) * 1e3) for change in part]
            events = [self._event(change, at_ms) for change, at_ms in zip(part, times, strict=True)]
            payloads.append(_ENCODER.encode([times[-1], events, 0]))
        return payloads

    def cleared(self, *, unix_ms: int) -> bytes:
        """The message that all blocks are gone."""
        event = {**self._common("cleared", unix_ms, medium=None), "type": "AllBlocksCleared"}
        return _ENCODER.encode([unix_ms, [event], 0])

    def _common(self, kind: str, unix_ms: int, *, medium: str | None) -> dict[str, Any]:
        event_id = next(self._numbers)
        return {
            "event_id": event_id,
            "timestamp": unix_ms,
            "event_type": kind,
            "model_name": self._model,
            "block_size": self._block_tokens,
            "additional_salt": None,
            "lora_name": None,
            "tenant_id": "default",
            "backend_id": self._backend_id,
            "medium": medium,
            "dp_rank": 0,
        }

    def _event(self, change: StoreChange, unix_ms: int) -> dict[str, Any]:
        event = self._common("stored" if change.stored else "removed", unix_ms, medium="cpu")
        hashes = [wire_hash(change.digest)]
        full = change.digest.hex()
        event["type"] = "BlockStored" if change.stored else "BlockRemoved"
        event["group_id"] = "0"
        event["seq_hashes"] = hashes
        event["block_hashes"] = hashes
        event["base_block_idx"] = None
        if change.stored:
            event["parent_hash"] = event["parent_block_hash"] = event["token_ids"] = None
        event["object_key"] = self._key + full
        event["connector_block_hash"] = full
        event["tp_rank"] = event["pcp_rank"] = event["dcp_rank"] = event["pp_rank"] = 0
        return event
