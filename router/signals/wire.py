"""Cache events as engines and stores send them, turned into one form.

Model     `decode(payload)` reads a msgpack batch `[ts, events, rank]` (or the same as a map) and
          returns values with unsigned 64-bit hashes and a `Tier`, whatever release sent it
Valid     vLLM 0.9 to 0.33 (positional and map events), SGLang 0.5.6 to 0.5.23, Mooncake master
Blind to  `locality`, `ownership`, `session_id` and look-ahead tokens: read over, never needed here
Source    released event structs of those engines; recorded payloads in tests/vectors

One event that cannot be understood never costs its batch: it is counted (`bad` when malformed, `unknown`
when its type or medium is not known) and the events around it are kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from estimators.tiers import Tier

MASK_64 = (1 << 64) - 1
_DECODER = msgspec.msgpack.Decoder()
_EARLIEST_MS = 1e11  # as seconds this is the year 5138, as milliseconds 1973: larger values are milliseconds

# Compared upper-case: the same engine has sent both "CPU" and "cpu". No medium at all means the device.
_TIERS: dict[str, Tier] = {
    "": Tier.HBM,
    "GPU": Tier.HBM,
    "DEVICE": Tier.HBM,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
    "OBJ": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
    "NETWORK": Tier.REMOTE,
    "REMOTE": Tier.REMOTE,
    "SHARED": Tier.REMOTE,
}

_STORED_FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS = ("type", "block_hashes", "medium", "group_idx")
_CLEARED_FIELDS = ("type",)
_POSITIONS = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS, "AllBlocksCleared": _CLEARED_FIELDS}
_MASTER_TYPES = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
_MASTER_FIELDS = {
    "event_id",
    "timestamp",
    "event_type",
    "model_name",
    "additional_salt",
    "tenant_id",
    "backend_id",
    "dp_rank",
    "group_id",
    "seq_hashes",
    "base_block_idx",
    "parent_hash",
    "object_key",
    "connector_block_hash",
    "tp_rank",
    "pcp_rank",
    "dcp_rank",
    "pp_rank",
}
_KNOWN_FIELDS = (
    frozenset(_STORED_FIELDS)
    | _MASTER_FIELDS
    | {"locality", "ownership", "session_id", "lookahead_token_ids", "cache_salt"}
)


class BadFrame(ValueError):
    """A payload that is not a batch at all; `reason` says what it is instead."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a batch of cache events: {reason}")
        self.reason = reason


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks now held in `tier`. A Struct for speed: one is made per event.

    hashes : the engine's own values, uint64, in prefix order
    parent : engine hash of the block before the first; None at the start of a sequence
    tokens : uint32 ids of the covered range; empty when the event names only hashes
    block_tokens : tokens per block in this event; 0 when the event does not say
    group : KV-cache group, 0 when absent
    kind : attention kind of the group; None when absent
    adapter, adapter_id : adapter by name, and the engine's private number for it
    salt : named salt of the sequence; vLLM hides it in `extras` instead
    extras : per block the hash inputs besides tokens, or None
    bigram : the event covers token pairs, whose blocks overlap by one token
    model : model named by the event itself (stores do), else None
    """

    hashes: list[int]
    parent: int | None
    tokens: array[int]
    block_tokens: int
    tier: Tier
    group: int = 0
    kind: str | None = None
    adapter: str | None = None
    adapter_id: int | None = None
    salt: str | None = None
    extras: list[Any] | None = None
    bigram: bool = False
    model: str | None = None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One copy of each of these blocks is gone from `tier`. Fields as in `Stored`."""

    hashes: list[int]
    tier: Tier
    group: int = 0
    model: str | None = None


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Everything the publisher held is gone, in every tier."""

    model: str | None = None


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct):
    """What one message said.

    ts_s : publisher's Unix time, seconds; 0 when it gave none
    rank : data-parallel rank; None when it gave none
    events : those understood, in order
    unknown : events of a type or medium this version does not know
    bad : events of a known type that are malformed
    extra_fields : fields beyond those known, passed over
    """

    ts_s: float = 0.0
    rank: int | None = None
    events: list[Event] = []
    unknown: int = 0
    bad: int = 0
    extra_fields: int = 0


class _UnknownEventError(Exception):
    """Well formed but of a type or medium we do not know."""


def decode(payload: bytes) -> Batch:
    """Read one batch.

    Raises
    ------
    BadFrame : the payload is not msgpack, or is not a batch
    """
    try:
        raw = _DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise BadFrame(str(exc)) from exc
    ts, events, rank = _parts(raw)
    batch = Batch(ts_s=_seconds(ts), rank=rank if type(rank) is int else None, events=[])
    for event in events:
        try:
            fields = _named(event, batch)
            batch.events.append(_PARSERS[fields["type"]](fields))
        except _UnknownEventError:
            batch.unknown += 1
        except (ValueError, TypeError, KeyError, OverflowError):
            batch.bad += 1
    return batch


def _parts(raw: Any) -> tuple[Any, list[Any], Any]:
    if isinstance(raw, dict):
        raw = [raw.get("ts"), raw.get("events"), raw.get("data_parallel_rank")]
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise BadFrame(f"{type(raw).__name__} without a list of events")
    return raw[0], raw[1], raw[2] if len(raw) > 2 else None


def _seconds(ts: Any) -> float:
    if not isinstance(ts, int | float) or ts != ts or abs(ts) == float("inf"):
        return 0.0
    return ts / 1000.0 if ts > _EARLIEST_MS else float(ts)


def _named(event: Any, batch: Batch) -> Mapping[str, Any]:
    """The event as a map with a known `type`, whichever way it was written."""
    if isinstance(event, dict):
        kind = event.get("type") or _MASTER_TYPES.get(event.get("event_type", ""))
        if kind not in _PARSERS:
            raise _UnknownEventError
        if not event.keys() <= _KNOWN_FIELDS:
            batch.extra_fields += len(event.keys() - _KNOWN_FIELDS)
        return event if event.get("type") == kind else {**event, "type": kind}
    if not isinstance(event, list) or not event or not isinstance(event[0], str):
        raise ValueError("an event is a list that starts with its type, or a map")
    names = _POSITIONS.get(event[0])
    if names is None:
        raise _UnknownEventError
    fields = dict(zip(names, event, strict=False))
    if isinstance(fields.get("lora_name"), dict):  # SGLang 0.5.18: metadata map where vLLM has the adapter
        fields["cache_salt"] = fields.pop("lora_name").get("cache_salt")
    batch.extra_fields += max(0, len(event) - len(names))
    return fields


def _stored(fields: Mapping[str, Any]) -> Stored:
    tokens = fields.get("token_ids") or []
    if not isinstance(tokens, list):
        raise TypeError("token_ids is not a list")
    bigram = bool(tokens) and isinstance(tokens[0], list)
    block_tokens = fields.get("block_size") or 0
    if type(block_tokens) is not int or block_tokens < 0:
        raise ValueError("block_size is not a size")
    extras = fields.get("extra_keys")
    return Stored(
        hashes=_hashes(fields),
        parent=_parent(fields.get("parent_block_hash")),
        tokens=array("I") if bigram else array("I", tokens),
        block_tokens=block_tokens,
        tier=_tier(fields.get("medium")),
        group=_group(fields),
        kind=_text(fields.get("kv_cache_spec_kind")),
        adapter=_text(fields.get("lora_name")),
        adapter_id=fields.get("lora_id") if type(fields.get("lora_id")) is int else None,
        salt=_text(fields.get("cache_salt")) or _text(fields.get("additional_salt")),
        extras=extras if isinstance(extras, list) else None,
        bigram=bigram,
        model=_text(fields.get("model_name")),
    )


def _removed(fields: Mapping[str, Any]) -> Removed:
    return Removed(
        hashes=_hashes(fields),
        tier=_tier(fields.get("medium")),
        group=_group(fields),
        model=_text(fields.get("model_name")),
    )


def _cleared(fields: Mapping[str, Any]) -> Cleared:
    return Cleared(model=_text(fields.get("model_name")))


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Event]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}


def _hashes(fields: Mapping[str, Any]) -> list[int]:
    values = fields.get("block_hashes")
    if values is None:
        values = fields["seq_hashes"]
    if not isinstance(values, list):
        raise TypeError("block_hashes is not a list")
    return [_hash(value) for value in values]


def _hash(value: Any) -> int:
    """Signed integers by two's complement, byte strings by their last 8 bytes."""
    if type(value) is int:
        return value & MASK_64
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise TypeError("a hash is an integer or bytes")


def _parent(value: Any) -> int | None:
    # llm-d's simulator sends 0 for "no parent"; as a real hash it is a 2**-64 chance.
    return None if value is None or value == 0 else _hash(value)


def _tier(medium: Any) -> Tier:
    tier = _TIERS.get(medium.upper() if isinstance(medium, str) else "" if medium is None else "?")
    if tier is None:
        raise _UnknownEventError
    return tier


def _group(fields: Mapping[str, Any]) -> int:
    group = fields.get("group_idx")
    if group is None:
        group = fields.get("group_id")
    if isinstance(group, str):
        group = int(group)
    if group is None:
        return 0
    if type(group) is not int or not 0 <= group < 1 << 16:
        raise ValueError("a group is a small non-negative integer")
    return group


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def frame(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Sequence number and payload of one message; replay replies with or without a topic alike.

    Raises
    ------
    BadFrame : fewer than two frames, or a sequence number that is not eight bytes
    """
    if len(frames) < 2:
        raise BadFrame(f"{len(frames)} frame")
    if len(frames[-2]) != 8:
        raise BadFrame(f"sequence number of {len(frames[-2])} bytes")
    return int.from_bytes(frames[-2], "big"), frames[-1]
