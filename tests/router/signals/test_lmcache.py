from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from estimators.tiers import Tier
from router.directory import Directory
from router.identity import Identity, chain
from router.signals.lmcache import (
    BadAnswer,
    Controller,
    Coordinator,
    Holding,
    controller_answer,
    controller_question,
    coordinator_answer,
    coordinator_question,
)
from router.signals.wire import Batch, Stored, decode
from tests.router.signals.events import BLOCK, VECTORS, vector

CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"


def recorded(name: str) -> dict[str, Any]:
    exchange: dict[str, Any] = json.loads((VECTORS / f"lmcache_{name}.json").read_text())
    return exchange


# Controller


def layout(instances: dict[str, tuple[str, int]]) -> list[Holding]:
    """What an answer about 1024 tokens says."""
    body = json.dumps({"event_id": "Lookup1", "layout_info": instances}).encode()
    return controller_answer(body, tokens=1024)


def test_the_recorded_question_of_the_controller_is_ours_byte_for_byte() -> None:
    question = recorded("controller_lookup")["request"]
    assert json.loads(controller_question(question["tokens"])) == question


def test_of_the_recorded_answer_only_the_holder_of_the_first_chunk_is_sure() -> None:
    """Two instances: what ends at 512 was written for the second chunk, and says nothing of the first."""
    body = json.dumps(recorded("controller_lookup")["response"]).encode()
    assert controller_answer(body, tokens=600) == [Holding("lmcache_instance_1", Tier.DISK, 256)]


def test_an_instance_that_is_alone_in_the_answer_holds_all_of_it() -> None:
    assert layout({"one": (CPU, 768)}) == [Holding("one", Tier.HOST, 768)]
    assert layout({"one": (DISK, 12)}) == [Holding("one", Tier.DISK, 12)]
    assert layout({}) == []


def walked(chunks: list[list[str]]) -> dict[str, tuple[str, int]]:
    """The controller's own walk: for each chunk the first instance that has it."""
    found: dict[str, tuple[str, int]] = {}
    for number, holders in enumerate(chunks, 1):
        if not holders:
            break
        found[holders[0]] = (CPU, 256 * number)
    return found


@pytest.mark.parametrize(
    "chunks",
    [
        [["a"], ["a"], ["a"]],
        [["a", "b"], ["b"], ["b"]],
        [["a"], ["b"], ["a"]],
        [["b", "a"], ["a", "b"], ["c"], []],
        [["a", "b"], ["a"], [], ["a"]],
        [[], ["a"]],
    ],
)
def test_whatever_the_walk_hides_no_instance_is_credited_with_more_than_it_holds(chunks: list[list[str]]) -> None:
    for holding in layout(walked(chunks)):
        assert all(holding.instance in chunk for chunk in chunks[: holding.tokens // 256])


def test_a_backend_nobody_knows_counts_for_nothing() -> None:
    assert layout({"one": ("SomeOtherBackend", 512)}) == []


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"layout_info":{"a":["x"]}}', b'{"layout_info":{"a":["x","y"]}}', b"<html>", b"\xff"]
)
def test_what_is_no_answer_of_the_controller_is_refused(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        controller_answer(body, tokens=512)


@pytest.mark.parametrize("end", [0, -256, 1280])
def test_an_answer_about_other_tokens_than_the_questions_is_refused(end: int) -> None:
    with pytest.raises(BadAnswer, match="of 1024 tokens"):
        layout({"one": (CPU, end)})


def test_a_salted_prompt_is_not_asked_of_a_controller_that_knows_no_salts() -> None:
    assert Controller().question([1, 2], salt="s") is None
    assert Controller().question([1, 2], salt="") == controller_question([1, 2])


# Coordinator


def placement(instance: str = "mp-0", tier: str = "l1", **changes: Any) -> dict[str, Any]:
    base = {"instance_id": instance, "incarnation": 1, "tier": tier, "backend": "x", "size_bytes": 1, "shared": False}
    return {**base, **changes}


def answer(*chunks: list[list[dict[str, Any]]], count: int | None = None) -> bytes:
    """Each chunk: its placements by rank."""
    results = [
        {
            "key": {"chunk_hash_hex": f"{number:02x}", "model_name": "m", "kv_rank": rank, "object_group_id": 0},
            "placements": placements,
            "token_ids": [],
            "access_count": 0,
        }
        for number, ranks in enumerate(chunks)
        for rank, placements in enumerate(ranks)
    ]
    return json.dumps({"chunks": len(chunks) if count is None else count, "results": results}).encode()


def test_the_recorded_exchange_of_the_coordinator_is_understood() -> None:
    exchange = recorded("directory_lookup")
    question = exchange["request"]
    ours = coordinator_question(question["token_ids"], model=question["model_name"])
    assert json.loads(ours) == question
    body = json.dumps(exchange["response"]).encode()
    assert coordinator_answer(body, tokens=300) == [Holding("mp-0", Tier.HOST, 256)]


def test_a_prefix_ends_at_the_first_chunk_a_holder_lacks() -> None:
    body = answer([[placement("a"), placement("b", "l2")]], [[placement("b", "l2")]], [[placement("a")]])
    assert set(map(repr, coordinator_answer(body, tokens=768))) == {
        repr(Holding("a", Tier.HOST, 256)),
        repr(Holding("b", Tier.DISK, 512)),
    }


def test_a_chunk_counts_when_every_rank_has_it() -> None:
    body = answer([[placement("a")], [placement("a"), placement("b")]], [[placement("a")], []])
    assert coordinator_answer(body, tokens=512, ranks=2) == [Holding("a", Tier.HOST, 256)]


def test_a_shared_placement_is_the_pools_whoever_wrote_it() -> None:
    body = answer([[placement("a", "l2", shared=True)]], [[placement("b", "l2", shared=True)]])
    assert coordinator_answer(body, tokens=512) == [Holding(None, Tier.REMOTE, 512)]


def test_a_newer_incarnation_empties_the_older_one_also_in_later_answers() -> None:
    seen: dict[str, int] = {}
    new = answer([[placement("a", incarnation=2)]], [[placement("a", incarnation=1)]])
    assert coordinator_answer(new, tokens=512, incarnations=seen) == [Holding("a", Tier.HOST, 256)]
    old = answer([[placement("a", incarnation=1)]])
    assert coordinator_answer(old, tokens=256, incarnations=seen) == []


@pytest.mark.parametrize(
    "body",
    [
        answer([[placement()]], count=2),  # a chunk left out would pull the later ones forward
        answer([[placement()], [placement()]], [[placement()]]),  # a rank missing of one chunk
        b"{}",
        b'{"chunks":1,"results":[{}]}',
    ],
)
def test_an_answer_with_holes_is_refused(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        coordinator_answer(body, tokens=512)


def test_another_number_of_ranks_than_asked_about_is_refused() -> None:
    with pytest.raises(BadAnswer, match="whole chunks"):
        coordinator_answer(answer([[placement()]]), tokens=256, ranks=2)


def test_another_chunk_size_is_refused_in_one_sentence() -> None:
    with pytest.raises(BadAnswer, match="not of 256 tokens"):
        coordinator_answer(answer([[placement()]]), tokens=2048)


def test_a_prompt_shorter_than_a_chunk_has_no_holder() -> None:
    assert Coordinator("m").answer(answer(), tokens=100) == []


# Mooncake's master speaks by events: the wire's own tests read its recorded payload, this one follows it to the store.


def test_the_recorded_events_of_mooncakes_master_fill_and_empty_the_store() -> None:
    """Its hash is the first of a prompt a vLLM engine announced under the same value."""
    batch = decode(vector("kv_events_mooncake_master"))
    stored, removed, _cleared = batch.events
    assert isinstance(stored, Stored)
    directory = Directory(BLOCK, 1)
    directory.add_source(0, "Qwen/Qwen2.5-7B-Instruct")
    tokens = list(range(1000, 1016))
    blocks = chain(Identity("Qwen/Qwen2.5-7B-Instruct", block_tokens=BLOCK).root(), tokens, BLOCK)
    announced = Stored(stored.hashes, None, array("I", tokens), BLOCK, Tier.HBM)
    directory.apply(0, Batch(events=[announced]), 0.0)
    held = []
    for event in (stored, removed):
        directory.apply_store(Batch(events=[event]), 1.0)
        held.append(directory.match(blocks).store_blocks)
    assert held == [1, 0]
