from __future__ import annotations

import time

import pytest

from sim_backends.block_hash import NONE_HASH, BlockHasher, wire_hash
from tests.sim_backends.builders import vector

RECORDED = vector("block_hash_vectors.json")
HASHER = BlockHasher(block_tokens=16, vocab=151936)


def test_the_chain_is_vllms_byte_for_byte() -> None:
    recorded = RECORDED["vllm_sha256_cbor_default_seed"]
    digests = HASHER.chain(RECORDED["tokens"])
    assert NONE_HASH.hex() == recorded["none_hash"]
    assert [digest.hex() for digest in digests] == recorded["digests"]
    assert [wire_hash(digest) for digest in digests] == recorded["wire_uint64"]


def test_a_salted_chain_is_vllms_byte_for_byte() -> None:
    digests = HASHER.chain(RECORDED["tokens"], salt="tenant-a")
    recorded = RECORDED["vllm_sha256_cbor_default_seed_salt_tagged"]["wire_uint64"]
    assert [wire_hash(digest) for digest in digests] == recorded


def test_a_chain_continued_block_by_block_is_the_same_chain() -> None:
    tokens = RECORDED["tokens"]
    whole = HASHER.chain(tokens)
    assert HASHER.next(whole[1], tokens[32:48]) == whole[2]


def test_token_ids_of_every_encoded_width_change_the_hash() -> None:
    """CBOR widths change at 24, 256 and 65536; a table off by one there would make two ids equal."""
    ids = [0, 1, 23, 24, 25, 255, 256, 257, 65535, 65536, 65537, 151935]
    assert len({HASHER.chain([token] * 16)[0] for token in ids}) == len(ids)


def test_the_unfinished_tail_has_no_hash() -> None:
    assert len(HASHER.chain(RECORDED["tokens"][:31])) == 1
    assert HASHER.chain([1] * 15) == []


def test_an_id_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        HASHER.chain([151936] * 16)


def test_750_blocks_cost_a_few_milliseconds_of_cpu() -> None:
    """About 1 ms on one 2020s core; the bound leaves room for a loaded machine and still fails on a slow path."""
    tokens = [7 * number % 151936 for number in range(12_000)]
    spent_s = []
    for _ in range(5):
        before_s = time.process_time()
        HASHER.chain(tokens)
        spent_s.append(time.process_time() - before_s)
    assert min(spent_s) < 5e-3
