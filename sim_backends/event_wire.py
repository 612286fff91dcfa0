"""Cache events as they go over ZMQ: vLLM 0.33's map form, and the Mooncake master's for the store.

All fields a release declares are declared here too, also those a simulated replica never sets: the encoder sizes
a map's header by the number of declared fields, and recorded payloads are matched byte for byte.

Source    vLLM 0.33, vllm/distributed/kv_events.py; Mooncake master KV event publisher, by its documentation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sim_backends.block_hash import wire_hash
from sim_backends.cache_events import CacheEvent, Removed, Stored
from sim_backends.store import StoreChange

MEDIUM_GPU = "GPU"
FULL_ATTENTION = "full_attention"
MASTER_EVENTS_PER_MESSAGE = 64


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    pass


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = 0


_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(events: Sequence[CacheEvent], *, unix_s: float, block_tokens: int) -> bytes:
    """One step's events as vLLM sends them; `unix_s` is when the batch was built."""
    return _ENCODER.encode(Batch(unix_s, [_wire(event, block_tokens) for event in events]))


def _wire(event: CacheEvent, block_tokens: int) -> WireEvent:
    if isinstance(event, Stored):
        extra: list[list[Any] | None] = [None] * len(event.digests)
        if event.salt is not None:
            extra[0] = [event.salt]
        return BlockStored(
            block_hashes=[wire_hash(digest) for digest in event.digests],
            parent_block_hash=None if event.parent is None else wire_hash(event.parent),
            token_ids=event.tokens,
            block_size=block_tokens,
            lora_id=None,
            medium=MEDIUM_GPU,
            lora_name=None,
            extra_keys=extra,
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
        )
    if isinstance(event, Removed):
        return BlockRemoved(block_hashes=[wire_hash(event.digest)], medium=MEDIUM_GPU, group_idx=0)
    return AllBlocksCleared()


class MasterEncoder:
    """Messages of the store's publisher: hash only, at most 64 events each. Numbers events from 1."""

    def __init__(self, *, model: str, block_tokens: int, backend_id: str) -> None:
        self._model = model
        self._block_tokens = block_tokens
        self._backend_id = backend_id
        self._key = f"{model}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"  # vLLM's store key, before the hash
        self._next_id = 1

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
        event_id = self._next_id
        self._next_id += 1
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
