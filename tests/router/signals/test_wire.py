from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.tiers import Tier
from router.signals.wire import BadFrame, Batch, Cleared, Event, Removed, Stored, Unread, decode, frame
from tests.router.signals.events import GENERATIONS, UNREADABLE_REMOVALS, VECTORS, P, payload, stored_map, vector

TOKENS_16 = array("I", range(1, 17))


def only(batch: Batch, kind: type[Any]) -> Any:
    (event,) = (event for event in batch.events if isinstance(event, kind))
    return event


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_tells_of_the_same_block(generation: str) -> None:
    batch = decode(GENERATIONS[generation])
    event = only(batch, Stored)
    last_8_bytes = 0x191A1B1C1D1E1F20 if "32-byte" in generation else 0xF000000000000001
    assert (event.hashes, event.parent, event.tokens) == ([last_8_bytes], None, TOKENS_16)
    assert (event.block_tokens, event.tier, batch.ts_s, batch.bad) == (16, Tier.HBM, 1.5, 0)
    assert batch.rank == (None if "no rank" in generation or "rank nil" in generation else 0)


def test_unknown_events_and_fields_are_counted_and_passed_over() -> None:
    batch = decode(GENERATIONS["map, unknown event and key"])
    assert (batch.unknown, batch.extra_fields, len(batch.events)) == (1, 1, 1)
    assert decode(GENERATIONS["array, 12 items"]).extra_fields == 0
    longer = decode(payload(["BlockRemoved", [1], "GPU", 0, "new", "newer"]))
    assert (longer.extra_fields, len(longer.events)) == (2, 1)


@pytest.mark.parametrize("path", sorted(VECTORS.glob("kv_events_*.hex")), ids=lambda path: path.name)
def test_every_recorded_payload_is_understood_completely(path: Path) -> None:
    raw = bytes.fromhex(path.read_text().strip())
    batch = decode(raw)
    assert batch.read == len(msgspec.msgpack.decode(raw)[1])
    assert (batch.unknown, batch.bad, batch.extra_fields) == (0, 0, 0)
    assert batch.ts_s == 1767225600.125


@pytest.mark.parametrize("path", sorted(VECTORS.glob("kv_events_*.hex")), ids=lambda path: path.name)
def test_every_recorded_payload_means_what_its_plain_copy_says(path: Path) -> None:
    raw = bytes.fromhex(path.read_text().strip())
    plain = revived(json.loads(path.with_name(path.name.replace(".msgpack.hex", ".json")).read_text()))
    assert msgspec.msgpack.decode(raw) == plain, "the plain copy is of this payload"
    batch = decode(raw)
    assert batch.rank == plain[2]
    assert [facts for event in batch.events for facts in told(event)] == [
        facts for event in plain[1] for facts in meant(event)
    ]


STORED_NAMES = {
    "parent_block_hash": "parent",
    "token_ids": "tokens",
    "block_size": "block_tokens",
    "lora_id": "adapter_id",
    "medium": "tier",
    "lora_name": "adapter",
    "extra_keys": "extras",
    "group_idx": "group",
    "kv_cache_spec_kind": "kind",
    "cache_salt": "salt",
    "additional_salt": "salt",
    "model_name": "model",
}
POSITIONS = [*list(STORED_NAMES)[:9], "kv_cache_spec_sliding_window"]  # after type and hashes
TIERS = {"GPU": "hbm", "CPU": "host", "CPU_PINNED": "host", "STORAGE": "disk", "DISK": "disk"}


def revived(plain: Any) -> Any:
    """The JSON copy with its bytes."""
    if isinstance(plain, dict):
        return bytes.fromhex(plain["$hex"]) if plain.keys() == {"$hex"} else {k: revived(v) for k, v in plain.items()}
    return [revived(item) for item in plain] if isinstance(plain, list) else plain


def low_64(value: Any) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % 2**64


def meant(event: Any) -> list[dict[str, Any]]:
    """What one event says, field by field, worked out from its plain copy by another road than the decoder's."""
    if isinstance(event, list):
        names = ["block_hashes", "medium", "group_idx"] if event[0] == "BlockRemoved" else ["block_hashes", *POSITIONS]
        fields = dict(zip(names, event[1:], strict=False))
        if isinstance(fields.get("lora_name"), dict):
            fields |= fields.pop("lora_name")
        kind = event[0]
    else:
        fields, kind = event, event["type"]
    if kind == "AllBlocksCleared":
        return [{"cleared": True, "model": fields.get("model_name")}]
    facts = {STORED_NAMES[name]: value for name, value in fields.items() if name in STORED_NAMES and value is not None}
    facts |= {"tier": TIERS[(fields.get("medium") or "gpu").upper()], "group": fields.get("group_idx") or 0}
    if kind == "BlockRemoved":
        kept: dict[str, Any] = {name: facts[name] for name in ("tier", "group", "model") if name in facts}
        return [{"removed": low_64(value), **kept} for value in fields["block_hashes"]]
    if "parent" in facts:
        facts["parent"] = low_64(facts["parent"])
    if facts.get("tokens") and isinstance(facts["tokens"][0], list):
        facts["bigram"] = True
    if facts.get("bigram") or not facts.get("tokens"):
        facts.pop("tokens", None)
    return [{"stored": [low_64(value) for value in fields["block_hashes"]], **facts}]


def told(event: Event) -> list[dict[str, Any]]:
    """What the decoder made of it, in the same words."""
    if isinstance(event, Cleared):
        return [{"cleared": True, "model": event.model}]
    facts = {name: getattr(event, name) for name in event.__struct_fields__ if name != "hashes"}
    facts = {name: value for name, value in facts.items() if value is not None and value is not False}
    facts["tier"] = event.tier.value
    if isinstance(event, Removed):
        return [{"removed": value, **facts} for value in event.hashes]
    facts["tokens"] = list(event.tokens)
    return [{"stored": event.hashes, **{name: value for name, value in facts.items() if value != []}}]


def test_removals_that_follow_one_another_are_one_only_where_they_say_the_same() -> None:
    batch = decode(
        payload(
            ["BlockRemoved", [1], "GPU", 0],
            {"type": "BlockRemoved", "block_hashes": [2, 3], "medium": None},
            ["BlockRemoved", [4], "CPU", 0],
            ["BlockRemoved", [5], "CPU", 1],
            {"type": "BlockRemoved", "block_hashes": [6], "medium": "CPU", "group_idx": 1, "model_name": "m"},
            ["AllBlocksCleared"],
            ["BlockRemoved", [7], "GPU", 0],
            ["BlockRemoved", ["bad"], "GPU", 0],
            ["BlockRemoved", [8], "GPU", 0],
        )
    )
    removed = [(event.hashes, event.tier, event.group) for event in batch.events if isinstance(event, Removed)]
    hbm, host = Tier.HBM, Tier.HOST
    assert removed == [
        ([1, 2, 3], hbm, 0),
        ([4], host, 0),
        ([5], host, 1),
        ([6], host, 1),
        ([7], hbm, 0),
        ([8], hbm, 0),
    ]
    assert (batch.read, batch.bad) == (8, 1)


def test_signed_and_byte_hashes_become_the_unsigned_value() -> None:
    signed = decode(vector("kv_events_sglang_0.5.23_map")).events[0]
    as_bytes = decode(vector("kv_events_vllm_0.12.0_array_bytes")).events[0]
    as_ints = decode(vector("kv_events_vllm_0.12.0_array")).events[0]
    assert isinstance(signed, Stored)
    assert isinstance(as_bytes, Stored)
    assert isinstance(as_ints, Stored)
    assert signed.hashes[1] == 2**64 - 278502217879090434
    assert as_bytes.hashes == as_ints.hashes


def test_the_metadata_map_of_sglang_is_no_adapter_name() -> None:
    salted = decode(vector("kv_events_sglang_0.5.18_array_metadata")).events[1]
    assert isinstance(salted, Stored)
    assert (salted.adapter, salted.salt) == (None, "tenant-a")


def test_master_events_carry_hash_and_model_but_no_tokens() -> None:
    stored, gone, cleared = decode(vector("kv_events_mooncake_master")).events
    assert isinstance(stored, Stored)
    assert (stored.hashes, list(stored.tokens), stored.group) == ([3753563854825738204], [], 0)
    assert (isinstance(gone, Removed), isinstance(cleared, Cleared)) == (True, True)
    assert {event.model for event in (stored, gone, cleared)} == {"Qwen/Qwen2.5-7B-Instruct"}


def test_a_batch_may_be_a_map() -> None:
    raw = {"ts": 2.0, "events": [["AllBlocksCleared"]], "data_parallel_rank": 3}
    batch = decode(msgspec.msgpack.encode(raw))
    assert (batch.ts_s, batch.rank, batch.events) == (2.0, 3, [Cleared()])


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", Tier.HBM),
        (None, Tier.HBM),
        ("cpu", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("Storage", Tier.DISK),
        ("SHARED", Tier.REMOTE),
    ],
)
def test_media_map_to_tiers_whatever_their_case(medium: str | None, tier: Tier) -> None:
    assert only(decode(payload(["BlockRemoved", [1], medium])), Removed).tier is tier


def test_an_unknown_medium_is_counted_not_guessed() -> None:
    batch = decode(payload(["BlockRemoved", [1], "tape"], ["BlockRemoved", [2], "GPU"]))
    assert (batch.unknown, batch.bad, batch.events) == (1, 0, [Removed([2], Tier.HBM)])
    batch = decode(payload(stored_map(P[:16], 1, medium="tape")))
    assert (batch.unknown, batch.bad, batch.events) == (1, 0, [])


@pytest.mark.parametrize("event", UNREADABLE_REMOVALS, ids=str)
def test_a_removal_that_cannot_be_read_stands_in_its_place_as_a_clear(event: object) -> None:
    batch = decode(payload(["BlockRemoved", [1], "GPU"], event, ["BlockRemoved", [2], "GPU"]))
    assert batch.events == [Removed([1], Tier.HBM), Unread(), Removed([2], Tier.HBM)]


def test_rubbish_without_end_is_one_unread_removal_until_something_is_said_again() -> None:
    rubbish = [None, [], 17, ["BlockRemoved", 5]] * 1000
    batch = decode(payload(*rubbish, ["BlockRemoved", [1], "GPU"], *rubbish))
    assert batch.events == [Unread(), Removed([1], Tier.HBM), Unread()]
    assert (batch.bad, batch.read) == (8000, 1)


@pytest.mark.parametrize(
    "event",
    [
        ["BlockPinned", [1]],
        {"type": "BlockPinned"},
        {"event_type": "moved"},
        {**stored_map(P[:16], 1), "parent_block_hash": "x"},
    ],
    ids=str,
)
def test_what_takes_nothing_away_costs_nothing(event: object) -> None:
    assert decode(payload(event)).events == []


@pytest.mark.parametrize(
    "bad",
    [
        17,
        [],
        {},
        [None],
        {"type": ["BlockStored"]},
        ["BlockRemoved"],
        ["BlockRemoved", 5, "GPU"],
        ["BlockRemoved", ["text"], "GPU"],
        ["BlockRemoved", [True], "GPU"],
        ["BlockRemoved", [b""], "GPU"],
        ["BlockRemoved", [1], "GPU", -1],
        stored_map([-1] * 16, 1),
        stored_map([1.5] * 16, 1),  # type: ignore[list-item]
        stored_map([2**32] * 16, 1),
        {**stored_map([1] * 16, 1), "token_ids": b"\x00" * 64},
        {**stored_map([1] * 16, 1), "block_size": "16"},
        {**stored_map([1] * 16, 1), "parent_block_hash": "x"},
    ],
)
def test_one_bad_event_never_costs_its_batch(bad: object) -> None:
    batch = decode(payload(["BlockRemoved", [1], "GPU"], bad, ["BlockRemoved", [2], "CPU"]))
    assert [event.hashes for event in batch.events if isinstance(event, Removed)] == [[1], [2]]
    assert (batch.bad + batch.unknown, batch.read) == (1, 2)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"garbage", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode(5)])
def test_a_payload_that_is_no_batch_raises(raw: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(raw)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_decode_or_raise_bad_frame(raw: bytes) -> None:
    try:
        assert isinstance(decode(raw), Batch)
    except BadFrame as exc:
        assert exc.reason  # noqa: PT017 (both ends are allowed)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
)
THINGS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner), max_leaves=8
)
TAGS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.builds(lambda tag, rest: [tag, *rest], TAGS, st.lists(THINGS, max_size=12)), max_size=5), THINGS)
def test_every_well_packed_event_is_kept_or_counted(events: list[Any], ts: Any) -> None:
    batch = decode(msgspec.msgpack.encode([ts, events, ts]))
    assert batch.read + batch.bad + batch.unknown == len(events)
    unread = sum(isinstance(event, Unread) for event in batch.events)
    assert len(batch.events) <= batch.read + unread
    assert unread <= batch.bad + batch.unknown


def test_number_and_payload_are_the_last_two_frames() -> None:
    assert frame([b"topic", (7).to_bytes(8, "big"), b"x"]) == (7, b"x")
    assert frame([b"", (7).to_bytes(8, "big"), b"x"]) == (7, b"x")
    for frames in ([b"x"], [b"short", b"x"], []):
        with pytest.raises(BadFrame):
            frame(frames)
