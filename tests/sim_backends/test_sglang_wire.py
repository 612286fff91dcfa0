from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from sim_backends.block_hash import BlockHasher
from sim_backends.cache_events import Cleared, OffDevice, Removed, Said, Stored
from sim_backends.generations import GENERATIONS
from sim_backends.sglang_wire import SglangEncoder, page_digest, page_hash
from tests.sim_backends.builders import a_request, an_engine, run_out, vector, vector_bytes

TOKENS = list(range(1000, 1064))
HASHER = BlockHasher(block_tokens=16, vocab=151936)
CHAIN = HASHER.chain(TOKENS)
RECORDED = vector("block_hash_vectors.json")["sglang_page_sha256"]
RECORDED_S = 1767225600.125
SGLANG = [name for name in GENERATIONS if name.startswith("sglang")]


def an_encoder(name: str) -> SglangEncoder:
    return SglangEncoder(GENERATIONS[name].version, block_tokens=16)


def encoded(encoder: SglangEncoder, events: list[Said]) -> bytes:
    payload = encoder.encode(events, unix_s=RECORDED_S)
    assert payload is not None
    return payload


def decoded(encoder: SglangEncoder, events: list[Said]) -> list[Any]:
    read = msgspec.msgpack.decode(encoded(encoder, events))[1]
    assert isinstance(read, list)
    return read


def test_page_hashes_are_sglangs_own_chain() -> None:
    parent, digests = b"", []
    for start in range(0, 64, 16):
        parent = page_digest(parent, TOKENS[start : start + 16])
        digests.append(parent)
    assert [digest.hex() for digest in digests] == RECORDED["digests"]
    assert [page_hash(digest) for digest in digests] == RECORDED["wire_int64"]


def test_sglang_0_5_6_sends_one_array_a_page_without_medium_byte_for_byte() -> None:
    events: list[Said] = [Stored(CHAIN[:2], None, TOKENS[:32]), Removed(CHAIN[1]), Cleared()]
    assert encoded(an_encoder("sglang-0.5.6"), events) == vector_bytes("kv_events_sglang_0.5.6_array.msgpack.hex")


def test_sglang_0_5_9_adds_the_medium_byte_for_byte() -> None:
    events: list[Said] = [Stored(CHAIN[:1], None, TOKENS[:16]), Removed(CHAIN[0])]
    payload = encoded(an_encoder("sglang-0.5.9"), events)
    assert payload == vector_bytes("kv_events_sglang_0.5.9_array_medium.msgpack.hex")


def test_sglang_0_5_18_puts_a_map_with_the_salt_where_vllm_has_an_adapter() -> None:
    """The recorded salted page goes on an unsalted one, which no request does: same fields, other hashes."""
    plain, salted, host = vector("kv_events_sglang_0.5.18_array_metadata.json")[1]
    chain = HASHER.chain(TOKENS[:32], salt="tenant-a")
    encoder = an_encoder("sglang-0.5.18")
    said = decoded(
        encoder,
        [
            Stored(CHAIN[:1], None, TOKENS[:16]),
            Stored(chain, None, TOKENS[:32], "tenant-a"),
            OffDevice(CHAIN[0], "host", stored=True),
        ],
    )
    assert (said[0], said[2]) == (plain, host)
    whole = vector_bytes("kv_events_sglang_0.5.18_array_metadata.msgpack.hex")
    for event in (said[0], said[2]):
        assert msgspec.msgpack.encode(event) in whole
    assert (said[1][0], said[1][2], said[1][3:]) == (salted[0], None, [TOKENS[:32], *salted[4:]])
    assert not {*said[1][1]} & {*RECORDED["wire_int64"]}
    (later,) = decoded(encoder, [Stored(HASHER.chain(TOKENS[:48], salt="tenant-a")[2:], chain[1], TOKENS[32:48])])
    assert (later[2], later[7]) == (said[1][1][-1], {"cache_salt": "tenant-a"})


def test_sglang_0_5_23_merges_neighbours_and_keeps_the_host_copy_byte_for_byte() -> None:
    events: list[Said] = [
        Stored(CHAIN[:1], None, TOKENS[:16]),
        Stored(CHAIN[1:], CHAIN[0], TOKENS[16:]),
        *(OffDevice(digest, "host", stored=True) for digest in CHAIN[:2]),
        *(Removed(digest) for digest in CHAIN),
        Cleared(),
    ]
    assert encoded(an_encoder("sglang-0.5.23"), events) == vector_bytes("kv_events_sglang_0.5.23_map.msgpack.hex")


def test_pages_that_do_not_follow_one_another_stay_apart() -> None:
    other = HASHER.chain(range(5000, 5016))
    events: list[Said] = [Stored(CHAIN[:2], None, TOKENS[:32]), Stored(other, None, list(range(5000, 5016)))]
    assert [len(event["block_hashes"]) for event in decoded(an_encoder("sglang-0.5.23"), events)] == [2, 1]


@pytest.mark.parametrize("name", SGLANG)
def test_a_second_copy_is_not_told_and_only_the_last_one_leaves(name: str) -> None:
    encoder = an_encoder(name)
    twice: list[Said] = [Stored(CHAIN[:1], None, TOKENS[:16])]
    assert encoder.encode(twice, unix_s=0.0) is not None
    assert encoder.encode(twice, unix_s=0.0) is None
    assert encoder.encode([Removed(CHAIN[0])], unix_s=0.0) is None
    assert encoder.encode([Removed(CHAIN[0])], unix_s=0.0) is not None
    assert encoder.encode(twice, unix_s=0.0) is not None


def test_a_page_that_went_down_to_the_host_comes_back_under_its_hash() -> None:
    encoder = an_encoder("sglang-0.5.23")
    decoded(encoder, [Stored(CHAIN[:1], None, TOKENS[:16])])
    down = decoded(encoder, [Removed(CHAIN[0]), OffDevice(CHAIN[0], "host", stored=True)])
    assert [(event["type"], event["medium"]) for event in down] == [
        ("BlockRemoved", "GPU"),
        ("BlockStored", "CPU_PINNED"),
    ]
    (up,) = decoded(encoder, [Stored(CHAIN[:1], None, TOKENS[:16])])
    assert up["block_hashes"] == down[1]["block_hashes"] == RECORDED["wire_int64"][:1]


def test_releases_without_a_host_medium_and_the_disk_say_nothing() -> None:
    for name, tier in (("sglang-0.5.6", "host"), ("sglang-0.5.9", "host"), ("sglang-0.5.23", "disk")):
        encoder = an_encoder(name)
        decoded(encoder, [Stored(CHAIN[:1], None, TOKENS[:16])])
        copy = OffDevice(CHAIN[0], "host" if tier == "host" else "disk", stored=True)
        assert encoder.encode([copy], unix_s=0.0) is None


@pytest.mark.parametrize("name", SGLANG)
def test_what_an_engine_says_under_pressure_adds_up_to_what_it_holds(name: str) -> None:
    """Stores minus removals, as a reader keeps them in a plain set, are the pages of the blocks in the cache."""
    engine = an_engine(kv_blocks=40, record_events=True)
    encoder, rng = an_encoder(name), random.Random(5)
    held: set[int] = set()
    copies: Counter[bytes] = Counter()
    for turn in range(30):
        start = rng.choice([0, 0, 3000, 7000])
        engine.submit(a_request(list(range(start, start + rng.randrange(20, 300))), output=20), float(turn * 100))
        run_out(engine)
        for batch in engine.take_event_batches():
            for said in batch.events:
                if isinstance(said, Stored):
                    copies.update(said.digests)
                elif isinstance(said, Removed):
                    copies[said.digest] -= 1
            payload = encoder.encode(batch.events, unix_s=0.0)
            for event in msgspec.msgpack.decode(payload)[1] if payload else ():
                kind, hashes = event[:2] if isinstance(event, list) else (event["type"], event["block_hashes"])
                assert held.isdisjoint(hashes) == (kind == "BlockStored")
                held = held | {*hashes} if kind == "BlockStored" else held - {*hashes}
    here = [digest for digest, count in copies.items() if count]
    assert held == {page_hash(encoder._pages[digest].digest) for digest in here}
    assert 20 < len(here) == len(encoder._pages) <= 40


def test_copies_below_the_device_that_outlived_a_restart_are_not_told() -> None:
    encoder = an_encoder("sglang-0.5.23")
    outlived: list[Said] = [OffDevice(CHAIN[0], "host", stored=False), OffDevice(CHAIN[1], "host", stored=True)]
    assert encoder.encode(outlived, unix_s=0.0) is None
