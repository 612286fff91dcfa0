from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from sim_backends.block_hash import BlockHasher, wire_hash
from sim_backends.cluster import Cluster, ClusterSettings
from sim_backends.publisher import PortTaken
from tests.sim_backends.builders import a_fleet, prompt

TIMEOUT_S = 10.0
WIRE = [wire_hash(digest) for digest in BlockHasher(block_tokens=16, vocab=151936).chain(prompt(64))]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(a_fleet("A100", "H20", speed=50.0), ClusterSettings())
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def complete(url: str, tokens: list[int]) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
        data = json.dumps({"prompt": tokens, "max_tokens": 1})
        async with session.post(f"{url}/v1/completions", data=data) as response:
            assert response.status == 200


async def replayed(context: zmq.asyncio.Context, address: str) -> list[list[object]]:
    reader = context.socket(zmq.DEALER)
    reader.connect(address)
    await reader.send_multipart([b"", (0).to_bytes(8, "big")])
    batches = []
    while (payload := (await asyncio.wait_for(reader.recv_multipart(), TIMEOUT_S))[-1]) != b"":
        batches.append(msgspec.msgpack.decode(payload))
    reader.close()
    return batches


async def test_every_address_is_real_after_start(cluster: Cluster) -> None:
    for replica in cluster.fleet.replicas:
        async with aiohttp.ClientSession() as session, session.get(f"{replica.url}/kv_event_sources") as response:
            source = (await response.json())["0"]
        assert (source["endpoint"], source["replay_endpoint"]) == (replica.events, replica.replay)
        assert set(source) == {
            "enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint",
            "buffer_steps", "hwm", "max_queue_size", "topic",
        }  # fmt: skip
    addresses = [a for r in cluster.fleet.replicas for a in (r.url, r.events, r.replay)]
    assert None not in addresses
    assert len(set(addresses)) == 6


async def test_blocks_of_a_prompt_are_announced_by_the_replica_that_computed_it(
    cluster: Cluster, context: zmq.asyncio.Context
) -> None:
    first, second = cluster.fleet.replicas
    await complete(first.url or "", prompt(64))
    (batch,) = await replayed(context, first.replay or "")
    stamp, events, rank = batch
    assert stamp == pytest.approx(time.time(), abs=60.0)
    assert rank == 0
    assert isinstance(events, list)
    assert (events[0]["type"], events[0]["block_hashes"], events[0]["token_ids"]) == ("BlockStored", WIRE, prompt(64))
    assert await replayed(context, second.replay or "") == []


async def test_a_reset_is_announced_with_the_next_step(cluster: Cluster, context: zmq.asyncio.Context) -> None:
    replica = cluster.fleet.replicas[0]
    await complete(replica.url or "", prompt(64))
    async with aiohttp.ClientSession() as session, session.post(f"{replica.url}/reset_prefix_cache") as response:
        assert response.status == 200
    await complete(replica.url or "", prompt(64))
    batches = await replayed(context, replica.replay or "")
    kinds = [event["type"] for batch in batches for event in batch[1]]  # type: ignore[attr-defined]
    assert kinds == ["BlockStored", "AllBlocksCleared", "BlockStored"]


async def test_the_store_announces_hashes_in_its_own_form_from_sequence_one(
    cluster: Cluster, context: zmq.asyncio.Context
) -> None:
    assert cluster.fleet.store is not None
    reader = context.socket(zmq.SUB)
    reader.connect(cluster.fleet.store.events or "")
    reader.subscribe(b"")
    start = 0
    while not await reader.poll(20):  # until the subscription has reached the publisher
        start += 1000
        await complete(cluster.fleet.replicas[1].url or "", prompt(64, start=start))
    topic, seq, payload = await reader.recv_multipart()
    _stamp, events, _rank = msgspec.msgpack.decode(payload)
    assert (topic, len(events)) == (b"", 4)
    assert 1 <= int.from_bytes(seq, "big") <= start // 1000
    assert {event["type"] for event in events} == {"BlockStored"}
    assert all(event["object_key"].endswith(event["connector_block_hash"]) for event in events)
    assert [int(event["connector_block_hash"][-16:], 16) for event in events] == [
        event["block_hashes"][0] for event in events
    ]
    reader.close()


async def test_without_events_nothing_is_published_or_recorded() -> None:
    cluster = Cluster(a_fleet("A100", speed=50.0), ClusterSettings(use_events=False, use_store=False))
    await cluster.start()
    replica = cluster.fleet.replicas[0]
    await complete(replica.url or "", prompt(64))
    assert (replica.events, replica.replay, cluster.world.store) == (None, None, None)
    assert cluster.world.engines[0].take_event_batches() == []
    await cluster.stop()


async def test_given_addresses_are_used_and_a_taken_one_leaves_nothing_listening() -> None:
    with socket.socket() as taken, socket.socket() as probe:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
        probe.close()
        fleet = a_fleet("A100", "A100")
        urls = [f"http://127.0.0.1:{free}", f"http://127.0.0.1:{taken.getsockname()[1]}"]
        rows = [msgspec.structs.replace(row, url=url) for row, url in zip(fleet.replicas, urls, strict=True)]
        with pytest.raises(PortTaken, match=f"{urls[1].removeprefix('http://')}: the port is in use"):
            await Cluster(msgspec.structs.replace(fleet, replicas=rows), ClusterSettings()).start()
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", free)
