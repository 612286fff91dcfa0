"""Cache events as engines and stores send them, turned into one form.

Model     `decode(payload)` reads a msgpack batch `[ts, events, rank]` (or the same as a map) and
          returns values with unsigned 64-bit hashes and a `Tier`, whatever release sent it
Valid     vLLM 0.9 to 0.33 (positional and map events), SGLang 0.5.6 to 0.5.23, Mooncake master
Blind to  `locality`, `ownership`, `session_id` and look-ahead tokens: read over, never needed here
Source    released event structs of those engines; recorded payloads in tests/vectors

One event that cannot be understood never costs its batch: it is counted (`bad` when malformed, `unknown`
when its type or medium is not known) and the events around it are kept. Where it may have taken something away, an
`Unread` stands in its place, since nothing from before it can be believed any more; several in a row lose no more than
one, and are one. A medium nobody knows holds nothing that counts, so a removal from it takes nothing away. vLLM sends
one event for each removed block; removals that follow one another are given as one value, which costs a third.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from estimators.tiers import Tier

MASK_64 = (1 << 64) - 1
_DECODER = msgspec.msgpack.Decoder()
_EARLIEST_MS = 1e11  # as seconds this is the year 5138, as milliseconds 1973: larger values are milliseconds

# Compared upper-case: the same engine has sent both "CPU" and "cpu". No medium at all means the device.
_TIERS: dict[str | None, Tier] = {
    None: Tier.HBM,
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
# Items of each positional event in its longest release; a shorter one lacks fields at its end.
_LENGTHS = {"BlockStored": len(_STORED_FIELDS), "BlockRemoved": 4, "AllBlocksCleared": 1}
_NOTHING = [None] * len(_STORED_FIELDS)
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


class Unread(Cleared, frozen=True, gc=False):
    """A removal or clear that cannot be read, so that all from before it may be gone; to be taken as a clear."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct):
    """What one message said.

    ts_s : publisher's Unix time, seconds; 0 when it gave none
    rank : data-parallel rank; None when it gave none
    events : those understood, in order; removals of one tier, group and model that follow one another are one
    read : events understood, each removal counted alone
    unknown : events of a type or medium this version does not know
    bad : events of a known type that are malformed
    pairs : stores of token pairs, which `meaning.well_formed` explains
    extra_fields : fields beyond those known, passed over
    """

    ts_s: float = 0.0
    rank: int | None = None
    events: list[Event] = []
    read: int = 0
    unknown: int = 0
    bad: int = 0
    extra_fields: int = 0
    pairs: int = 0


class _UnknownEventError(Exception):
    """Of a type we do not know."""


class _UnknownMediumError(Exception):
    """Well formed but of a medium we do not know."""


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
    return batch_of(raw)


def batch_of(raw: Any) -> Batch:
    """A batch that is already plain values, as `decode` reads it.

    Raises
    ------
    BadFrame : `raw` is not a batch
    """
    ts, events, rank = _parts(raw)
    batch = Batch(ts_s=_seconds(ts), rank=rank if type(rank) is int else None, events=[])
    for event in events:
        try:
            if type(event) is dict:
                _take_map(event, batch)
            else:
                _take_list(event, batch)
            batch.read += 1
        except _UnknownMediumError:
            batch.unknown += 1
        except _UnknownEventError:
            batch.unknown += 1
            _note_unread(event, batch)
        except (ValueError, TypeError, KeyError, OverflowError):
            batch.bad += 1
            _note_unread(event, batch)
    return batch


def joined(parts: Sequence[Batch]) -> Batch:
    """One batch of several that are its pieces, in order; there is at least one."""
    first, *others = parts
    for part in others:
        first.events += part.events
        first.read += part.read
        first.unknown += part.unknown
        first.bad += part.bad
        first.extra_fields += part.extra_fields
        first.pairs += part.pairs
    return first


def _note_unread(event: Any, batch: Batch) -> None:
    """What an event that could not be read may have done. Types with a name nobody knows are passed over."""
    kind = _kind(event)
    may_remove = kind == "BlockRemoved" or not isinstance(kind, str)
    if may_remove and not (batch.events and isinstance(batch.events[-1], Unread)):
        batch.events.append(Unread())


def _kind(event: Any) -> Any:
    """As far as it can be made out; a type that is no text is none."""
    if isinstance(event, dict):
        master = event.get("event_type")
        return event.get("type") or (_MASTER_TYPES.get(master, master) if isinstance(master, str) else None)
    return event[0] if isinstance(event, list) and event else None


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


def _take_map(event: dict[Any, Any], batch: Batch) -> None:
    kind = event.get("type") or _MASTER_TYPES.get(event.get("event_type", ""))
    field = event.get
    if kind == "BlockRemoved":
        _take_removed(event, batch)
        return
    read: Event
    if kind == "BlockStored":
        hashes = field("block_hashes")
        read = stored = _stored(
            event["seq_hashes"] if hashes is None else hashes,
            field("parent_block_hash"),
            field("token_ids"),
            field("block_size"),
            field("lora_id"),
            field("medium"),
            field("lora_name"),
            field("extra_keys"),
            _group_of(event),
            field("kv_cache_spec_kind"),
            salt=field("cache_salt") or field("additional_salt"),
            model=field("model_name"),
        )
        batch.pairs += stored.bigram
    elif kind == "AllBlocksCleared":
        read = Cleared(_text(field("model_name")))
    elif isinstance(kind, str) or kind is None:
        raise _UnknownEventError
    else:
        raise TypeError("an event's type is text")
    _count_extras(event, batch)
    batch.events.append(read)


def _take_removed(event: dict[Any, Any], batch: Batch) -> None:
    """The commonest event by far: an engine sends one for each block it evicts."""
    hashes = event.get("block_hashes")
    if len(event) == 4 and "medium" in event and "group_idx" in event and hashes is not None:  # type and hashes are two
        _remove(_hashes(hashes), _group(event["group_idx"]), _tier(event["medium"]), None, batch)
        return
    hashes = _hashes(event["seq_hashes"] if hashes is None else hashes)
    _remove(hashes, _group(_group_of(event)), _tier(event.get("medium")), _text(event.get("model_name")), batch)
    _count_extras(event, batch)


def _take_list(event: Any, batch: Batch) -> None:
    if type(event) is not list or not event or type(event[0]) is not str:
        raise ValueError("an event is a list that starts with its type, or a map")
    kind, known = event[0], _LENGTHS.get(event[0])
    if known is None:
        raise _UnknownEventError
    extra = len(event) - known
    if extra < 0:
        event = event + _NOTHING[extra:]
    if kind == "BlockRemoved":
        _remove(_hashes(event[1]), _group(event[3]), _tier(event[2]), None, batch)
    elif kind == "BlockStored":
        _, hashes, parent, tokens, size, lora_id, medium, adapter, extras, group, spec, _ = event[:known]
        salt = None
        if type(adapter) is dict:  # SGLang 0.5.18: metadata map where vLLM has the adapter
            salt, adapter = adapter.get("cache_salt"), None
        read = _stored(
            hashes, parent, tokens, size, lora_id, medium, adapter, extras, group, spec, salt=salt, model=None
        )
        batch.pairs += read.bigram
        batch.events.append(read)
    else:
        batch.events.append(Cleared())
    if extra > 0:
        batch.extra_fields += extra


def _remove(hashes: list[int], group: int, tier: Tier, model: str | None, batch: Batch) -> None:
    """Add a removal to the one before it where they say the same of other blocks.

    Callers read the tier last: only a removal that is well formed otherwise may be passed over for its medium.
    """
    last = batch.events[-1] if batch.events else None
    if type(last) is Removed and last.tier is tier and last.group == group and last.model == model:
        last.hashes.extend(hashes)  # the list is ours alone until the batch is returned
    else:
        batch.events.append(Removed(hashes, tier, group, model))


def _count_extras(event: dict[Any, Any], batch: Batch) -> None:
    if not event.keys() <= _KNOWN_FIELDS:
        batch.extra_fields += len(event.keys() - _KNOWN_FIELDS)


def _stored(  # positional in the order of the wire, which the recorded payloads hold
    hashes: Any,
    parent: Any,
    token_ids: Any,
    block_size: Any,
    lora_id: Any,
    medium: Any,
    lora_name: Any,
    extras: Any,
    group: Any,
    kind: Any,
    *,
    salt: Any,
    model: Any,
) -> Stored:
    tokens = token_ids or []
    if type(tokens) is not list:
        raise TypeError("token_ids is not a list")
    bigram = bool(tokens) and type(tokens[0]) is list
    block_tokens = block_size or 0
    if type(block_tokens) is not int or block_tokens < 0:
        raise ValueError("block_size is not a size")
    return Stored(
        _hashes(hashes),
        # llm-d's simulator sends 0 for "no parent"; as a real hash it is a 2**-64 chance.
        None if parent is None or parent == 0 else _hash(parent),
        array("I") if bigram else array("I", tokens),
        block_tokens,
        _tier(medium),
        _group(group),
        _text(kind),
        _text(lora_name),
        lora_id if type(lora_id) is int else None,
        _text(salt),
        extras if type(extras) is list else None,
        bigram,
        _text(model),
    )


def _hashes(values: Any) -> list[int]:
    if type(values) is not list:
        raise TypeError("block_hashes is not a list")
    return [value & MASK_64 if type(value) is int else _hash(value) for value in values]


def _hash(value: Any) -> int:
    """Signed integers by two's complement, byte strings by their last 8 bytes."""
    if type(value) is int:
        return value & MASK_64
    if type(value) is bytes and value:
        return int.from_bytes(value[-8:], "big")
    raise TypeError("a hash is an integer or bytes")


def _tier(medium: Any) -> Tier:
    tier = _TIERS.get(medium)
    if tier is None:
        if type(medium) is not str:
            raise TypeError("a medium is text")
        tier = _TIERS.get(medium.upper())
    if tier is None:
        raise _UnknownMediumError
    return tier


def _group_of(event: Mapping[str, Any]) -> Any:
    group = event.get("group_idx")
    return event.get("group_id") if group is None else group


def _group(group: Any) -> int:
    if group is None:
        return 0
    if type(group) is str:
        group = int(group)
    if type(group) is not int or not 0 <= group < 1 << 16:
        raise ValueError("a group is a small non-negative integer")
    return group


def _text(value: Any) -> str | None:
    return value if type(value) is str and value else None


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
