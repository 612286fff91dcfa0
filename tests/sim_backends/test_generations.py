"""Each generation as a whole replica shows it over real sockets."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from sim_backends.block_hash import BlockHasher
from sim_backends.generations import GENERATIONS
from sim_backends.publisher import END_OF_REPLAY
from tests.sim_backends.builders import prompt, vector
from tests.sim_backends.serving import Client, serving

DIGESTS = BlockHasher(block_tokens=16, vocab=151936).chain(prompt(64))
VLLM_LOW = [int.from_bytes(digest[-8:], "big") for digest in DIGESTS]
SGLANG = [value % 2**64 for value in vector("block_hash_vectors.json")["sglang_page_sha256"]["wire_int64"]]


async def published(client: Client) -> tuple[list[Any], list[list[bytes]]]:
    """Events of everything published so far, by an untyped decoder, and the frames of the replay."""
    context = zmq.asyncio.Context()
    frames = await client.replayed(context)
    context.destroy(linger=0)
    return [event for *_head, payload in frames[:-1] for event in msgspec.msgpack.decode(payload)[1]], frames


def part(event: Any, index: int, name: str) -> Any:
    return event[index] if isinstance(event, list) else event[name]


@pytest.mark.parametrize("name", GENERATIONS)
async def test_a_prompt_is_announced_and_replayed_in_the_form_of_the_generation(name: str) -> None:
    generation = GENERATIONS[name]
    async with serving(generation=generation) as client:
        assert (await client.post("/v1/completions", {"prompt": prompt(64), "max_tokens": 1}))[0] == 200
        events, frames = await published(client)
    stored = [event for event in events if part(event, 0, "type") == "BlockStored"]
    assert all(isinstance(event, dict) == (generation.version >= first_map(name)) for event in events)
    hashes = [value % 2**64 for event in stored for value in part(event, 1, "block_hashes")]
    assert hashes == (SGLANG if generation.is_sglang else VLLM_LOW)
    assert [token for event in stored for token in part(event, 3, "token_ids")] == prompt(64)
    one_each = generation.is_sglang and generation.version < (0, 5, 18)
    assert len(stored) == (4 if one_each else 1)
    newer = vector("zmq_frames.json")["replay_reply_new" if generation.topic_in_replay else "replay_reply_old"]
    assert [len(frame) for frame in frames] == [len(newer["dealer_receives"][0])] * (len(frames) - 1) + [
        len(newer["end"])
    ]
    assert frames[-1][-2:] == [END_OF_REPLAY, b""]


def first_map(name: str) -> tuple[int, int, int]:
    return (0, 5, 20) if name.startswith("sglang") else (0, 24, 0)


@pytest.mark.parametrize("name", GENERATIONS)
async def test_only_sglang_says_at_its_start_that_all_is_cleared(name: str) -> None:
    async with serving(generation=GENERATIONS[name]) as client:
        events, _frames = await published(client)
    kinds = [part(event, 0, "type") for event in events]
    assert kinds == (["AllBlocksCleared"] if name.startswith("sglang") else [])


@pytest.mark.parametrize("name", ["vllm-0.12", "vllm-0.33"])
async def test_raw_hashes_are_whole_digests(name: str) -> None:
    async with serving(generation=GENERATIONS[name], raw_hashes=True) as client:
        await client.post("/v1/completions", {"prompt": prompt(64), "max_tokens": 1})
        (stored,), _frames = await published(client)
    assert part(stored, 1, "block_hashes") == DIGESTS


@pytest.mark.parametrize(
    ("name", "routes", "absent"),
    [
        ("vllm-0.33", ["/version", "/kv_event_sources"], ["/server_info", "/v1/loads"]),
        ("vllm-0.24", ["/version", "/load"], ["/kv_event_sources"]),
        ("sglang-0.5.23", ["/server_info", "/v1/loads"], ["/version", "/kv_event_sources", "/get_load"]),
        ("sglang-0.5.18", ["/server_info", "/v1/loads", "/get_load"], []),
        ("sglang-0.5.6", ["/get_server_info", "/get_load"], ["/v1/loads"]),
    ],
)
async def test_routes_are_those_of_the_release(name: str, routes: list[str], absent: list[str]) -> None:
    async with serving(generation=GENERATIONS[name]) as client:
        assert [(await client.get(path))[0] for path in routes] == [200] * len(routes)
        assert [(await client.get(path))[0] for path in absent] == [404] * len(absent)


@pytest.mark.parametrize("name", ["vllm-0.9", "vllm-0.33"])
async def test_errors_are_nested_from_vllm_0_10_2_on(name: str) -> None:
    async with serving(generation=GENERATIONS[name]) as client:
        status, answer = await client.post("/v1/completions", {"model": "nope", "prompt": "x"})
        error = answer["error"] if name == "vllm-0.33" else answer
        assert (status, error["code"], error.get("object")) == (404, 404, None if name == "vllm-0.33" else "error")
        assert json.loads((await client.get("/version"))[1]) == {"version": GENERATIONS[name].release}
