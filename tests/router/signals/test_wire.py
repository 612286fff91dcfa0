from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.tiers import Tier
from router.signals.wire import BadFrame, Batch, Cleared, Removed, Stored, decode, frame
from tests.router.signals.events import GENERATIONS, VECTORS, payload, stored_map, vector

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
    assert len(batch.events) == len(msgspec.msgpack.decode(raw)[1])
    assert (batch.unknown, batch.bad, batch.extra_fields) == (0, 0, 0)
    assert batch.ts_s == 1767225600.125


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
    batch = decode(payload(["BlockRemoved", [1], "TAPE"], ["BlockRemoved", [2], "GPU"]))
    assert (batch.unknown, len(batch.events)) == (1, 1)


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
    batch = decode(payload(["BlockRemoved", [1], "GPU"], bad, ["BlockRemoved", [2], "GPU"]))
    assert [event.hashes for event in batch.events if isinstance(event, Removed)] == [[1], [2]]
    assert batch.bad + batch.unknown == 1


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


@settings(max_examples=150, deadline=None)
@given(st.lists(st.builds(lambda tag, rest: [tag, *rest], TAGS, st.lists(THINGS, max_size=12)), max_size=5), THINGS)
def test_every_well_packed_event_is_kept_or_counted(events: list[Any], ts: Any) -> None:
    batch = decode(msgspec.msgpack.encode([ts, events, ts]))
    assert len(batch.events) + batch.bad + batch.unknown == len(events)


def test_number_and_payload_are_the_last_two_frames() -> None:
    assert frame([b"topic", (7).to_bytes(8, "big"), b"x"]) == (7, b"x")
    assert frame([b"", (7).to_bytes(8, "big"), b"x"]) == (7, b"x")
    for frames in ([b"x"], [b"short", b"x"], []):
        with pytest.raises(BadFrame):
            frame(frames)
