from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from sim_backends import event_wire
from sim_backends.block_hash import BlockHasher
from sim_backends.cache_events import CacheEvent, Cleared, OffDevice, Removed, Said, Stored
from sim_backends.event_wire import VllmEncoder
from sim_backends.generations import GENERATIONS
from sim_backends.store import StoreChange
from tests.sim_backends.builders import vector, vector_bytes

TOKENS = list(range(1000, 1064))
CHAIN = BlockHasher(block_tokens=16, vocab=151936).chain(TOKENS)
RECORDED_S = 1767225600.125
TWO_BLOCKS = Stored(CHAIN[:2], None, TOKENS[:32])
VLLM = [name for name in GENERATIONS if name.startswith("vllm")]


def encoded(name: str, events: list[Said], **options: Any) -> bytes:
    payload = VllmEncoder(GENERATIONS[name].version, block_tokens=16, **options).encode(events, unix_s=RECORDED_S)
    assert payload is not None
    return payload


def decoded(name: str, events: list[Said], **options: Any) -> list[Any]:
    """Events by an untyped decoder, which knows nothing of the structs that wrote them."""
    stamp, read, rank = msgspec.msgpack.decode(encoded(name, events, **options))
    assert (stamp, rank) == (RECORDED_S, options.get("rank", 0))
    assert isinstance(read, list)
    return read


def test_a_batch_is_vllm_0_33s_map_form_byte_for_byte() -> None:
    events: list[CacheEvent] = [
        Stored(CHAIN[:2], None, TOKENS[:32]),
        Stored(CHAIN[2:], CHAIN[1], TOKENS[32:]),
        Removed(CHAIN[3]),
        Cleared(),
    ]
    payload = event_wire.encode_batch(events, unix_s=1767225600.125, block_tokens=16)
    assert payload == vector_bytes("kv_events_vllm_0.33.0_map.msgpack.hex")
    assert msgspec.msgpack.decode(payload) == vector("kv_events_vllm_0.33.0_map.json")


def test_a_salt_stands_untagged_on_the_first_block_only() -> None:
    payload = event_wire.encode_batch([Stored(CHAIN[:2], None, TOKENS[:32], "s")], unix_s=0.0, block_tokens=16)
    assert msgspec.msgpack.decode(payload)[1][0]["extra_keys"] == [["s"], None]


def test_vllm_0_9_sends_signed_hashes_and_no_medium_byte_for_byte() -> None:
    python_hashes = [-3721234567890123456, 4611686018427387904]
    digests = [bytes(24) + value.to_bytes(8, "big", signed=True) for value in python_hashes]
    events: list[Said] = [Stored(digests, None, TOKENS[:32]), Removed(digests[0]), Cleared()]
    assert encoded("vllm-0.9", events) == vector_bytes("kv_events_vllm_0.9.2_array.msgpack.hex")


def test_vllm_0_12_sends_arrays_with_unsigned_hashes_byte_for_byte() -> None:
    events: list[Said] = [TWO_BLOCKS, Stored(CHAIN[2:3], CHAIN[1], TOKENS[32:48]), Removed(CHAIN[2]), Cleared()]
    assert encoded("vllm-0.12", events) == vector_bytes("kv_events_vllm_0.12.0_array.msgpack.hex")


def test_whole_digests_are_sent_as_bytes_when_asked_byte_for_byte() -> None:
    events: list[Said] = [TWO_BLOCKS, Stored(CHAIN[2:3], CHAIN[1], TOKENS[32:48]), Removed(CHAIN[2])]
    payload = encoded("vllm-0.12", events, raw_hashes=True, rank=1)
    assert payload == vector_bytes("kv_events_vllm_0.12.0_array_bytes.msgpack.hex")


def test_vllm_0_17_adds_extra_keys_in_the_recorded_place() -> None:
    """The recorded event has an adapter, which simulated replicas have not: all else is the same, in its place."""
    recorded = vector("kv_events_vllm_0.17.1_array_extra_keys.json")[1][0]
    recorded[5], recorded[7], recorded[8] = None, None, [["tenant-a"], None]
    salted = Stored(CHAIN[:2], None, TOKENS[:32], "tenant-a")
    assert decoded("vllm-0.17", [salted, Removed(CHAIN[1])]) == [recorded, ["BlockRemoved", [recorded[1][1]], "GPU"]]


def test_vllm_0_23_sends_groups_and_trailing_nulls_byte_for_byte() -> None:
    recorded = vector("kv_events_vllm_0.23.0_array_groups.json")[1]
    ours = encoded("vllm-0.23", [TWO_BLOCKS])
    head = len(msgspec.msgpack.encode([RECORDED_S, []]))  # up to and with the byte that counts the events
    whole = vector_bytes("kv_events_vllm_0.23.0_array_groups.msgpack.hex")
    assert ours[head:-1] == whole[head : head + len(ours) - head - 1]
    # The recorded removal is of group 1, which a model with one kind of attention has not.
    assert decoded("vllm-0.23", [Removed(CHAIN[1])]) == [[*recorded[2][:3], 0]]


def test_vllm_0_24_sends_maps_sized_by_its_own_fields_byte_for_byte() -> None:
    events: list[Said] = [TWO_BLOCKS, Removed(CHAIN[1]), Cleared()]
    assert encoded("vllm-0.24", events) == vector_bytes("kv_events_vllm_0.24.0_map.msgpack.hex")


def test_vllm_0_33_is_the_default_form_byte_for_byte() -> None:
    events: list[Said] = [TWO_BLOCKS, Stored(CHAIN[2:], CHAIN[1], TOKENS[32:]), Removed(CHAIN[3]), Cleared()]
    assert encoded("vllm-0.33", events) == vector_bytes("kv_events_vllm_0.33.0_map.msgpack.hex")


def test_a_host_copy_is_the_recorded_hash_only_placeholder_byte_for_byte() -> None:
    payload = encoded("vllm-0.33", [OffDevice(CHAIN[3], "host", stored=True)])
    recorded = vector("kv_events_vllm_0.33.0_map_offload.json")[1][0]
    assert msgspec.msgpack.decode(payload)[1] == [recorded]
    head = len(msgspec.msgpack.encode([RECORDED_S, []]))
    whole = vector_bytes("kv_events_vllm_0.33.0_map_offload.msgpack.hex")
    assert payload[head:-1] == whole[head : head + len(payload) - head - 1]


@pytest.mark.parametrize(
    ("name", "told"),
    [("vllm-0.12", 16), ("vllm-0.17", 16), ("vllm-0.23", 0)],
)
def test_placeholders_tell_a_chunk_size_only_in_old_releases(name: str, told: int) -> None:
    (event,) = decoded(name, [OffDevice(CHAIN[0], "host", stored=True)])
    assert (event[3], event[4], event[6]) == ([], told, "CPU")


def test_disks_say_no_removals_and_vllm_0_9_cannot_name_a_tier() -> None:
    gone: list[Said] = [OffDevice(CHAIN[0], "host", stored=False), OffDevice(CHAIN[0], "disk", stored=False)]
    (event,) = decoded("vllm-0.33", gone)
    assert (event["type"], event["medium"]) == ("BlockRemoved", "CPU")
    assert VllmEncoder((0, 33, 0), block_tokens=16).encode(gone[1:], unix_s=0.0) is None
    assert VllmEncoder((0, 9, 2), block_tokens=16).encode(gone, unix_s=0.0) is None


@pytest.mark.parametrize("name", VLLM)
def test_every_generation_says_the_same_blocks_parents_and_tokens(name: str) -> None:
    stored, removed = decoded(name, [Stored(CHAIN[2:], CHAIN[1], TOKENS[32:]), Removed(CHAIN[3])])
    if isinstance(stored, list):
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
        stored, removed = dict(zip(names, stored, strict=False)), dict(zip(names, removed, strict=False))
    low = [int.from_bytes(digest[24:], "big") for digest in CHAIN]
    assert [value % 2**64 for value in stored["block_hashes"]] == low[2:]
    assert stored["parent_block_hash"] % 2**64 == low[1]
    assert (stored["token_ids"], stored["block_size"]) == (TOKENS[32:], 16)
    assert [value % 2**64 for value in removed["block_hashes"]] == low[3:]


def a_master(model: str = "m") -> event_wire.MasterEncoder:
    return event_wire.MasterEncoder(model=model, block_tokens=16, backend_id="pool-a")


def test_store_events_are_the_mooncake_masters_form_field_by_field() -> None:
    master = a_master("Qwen/Qwen2.5-7B-Instruct")
    changes = [StoreChange(0.0, CHAIN[0], True), StoreChange(0.0, CHAIN[0], False)]
    (payload,) = master.messages(changes, unix_offset_s=1767225600.125)
    cleared = master.cleared(unix_ms=1767225600125)
    recorded = vector("kv_events_mooncake_master.json")
    assert msgspec.msgpack.decode(payload) == [recorded[0], recorded[1][:2], 0]
    assert msgspec.msgpack.decode(cleared) == [recorded[0], recorded[1][2:], 0]
    # The recorded message holds all three events: the same bytes, event by event and in the same key order.
    whole = vector_bytes("kv_events_mooncake_master.msgpack.hex")
    head = len(msgspec.msgpack.encode([recorded[0], []])) - 1
    assert whole[head + 1 : -1] == payload[head + 1 : -1] + cleared[head + 1 : -1]


def test_at_most_64_store_events_go_into_one_message() -> None:
    changes = [StoreChange(0.0, CHAIN[0], True)] * 130
    messages = a_master().messages(changes, unix_offset_s=0.0)
    batches = [msgspec.msgpack.decode(payload)[1] for payload in messages]
    assert [len(batch) for batch in batches] == [64, 64, 2]
    assert [event["event_id"] for batch in batches for event in batch] == list(range(1, 131))


def test_the_store_numbers_the_events_of_all_models_in_one_row() -> None:
    numbers = count(1)
    masters = [
        event_wire.MasterEncoder(model=model, block_tokens=16, backend_id="pool", numbers=numbers) for model in "ab"
    ]
    ids = []
    for master in (masters[0], masters[1], masters[0]):
        (payload,) = master.messages([StoreChange(0.0, CHAIN[0], True)], unix_offset_s=0.0)
        ids += [event["event_id"] for event in msgspec.msgpack.decode(payload)[1]]
    assert ids == [1, 2, 3]
