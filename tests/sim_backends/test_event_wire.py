from __future__ import annotations

import msgspec

from sim_backends import event_wire
from sim_backends.block_hash import BlockHasher
from sim_backends.cache_events import CacheEvent, Cleared, Removed, Stored
from sim_backends.store import StoreChange
from tests.sim_backends.builders import vector, vector_bytes

TOKENS = list(range(1000, 1064))
CHAIN = BlockHasher(block_tokens=16, vocab=151936).chain(TOKENS)


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
