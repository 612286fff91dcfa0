"""Ranks, models, roles, directives, tiers and life of replicas, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
import zmq.asyncio

from sim_backends.cluster import Cluster, ClusterSettings
from tests.sim_backends.builders import a_fleet, prompt
from tests.sim_backends.serving import TIMEOUT_S, Client

LINKS = {
    "store": {"gb_s": 25, "start_ms": 10},
    "pcie": {"gb_s": 25, "start_ms": 0},
    "nic": {"gb_s": 12.5, "start_ms": 2},
}
TINY = {
    "name": "tiny",
    "layers": 4,
    "hidden": 1024,
    "intermediate": 4096,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 128,
    "vocab": 151936,
}


class Other(Client):
    """A client of another replica of the cluster."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession, index: int) -> None:
        super().__init__(cluster, session)
        self.url = cluster.fleet.replicas[index].url or ""
        self.engine = cluster.world.engines[cluster.world.rows[index][0]]


@asynccontextmanager
async def playing(*replicas: dict[str, Any], use_events: bool = False, **sections: Any) -> AsyncIterator[list[Client]]:
    """A client for each of these replicas, fifty times faster than a card."""
    rows = [{"name": f"r{number}", "card": "A100", **row} for number, row in enumerate(replicas)]
    fleet = a_fleet(replicas=rows, speed=50.0, **sections)
    cluster = Cluster(fleet, ClusterSettings(use_events=use_events))
    await cluster.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
            yield [Other(cluster, session, index) for index in range(len(rows))]
    finally:
        await cluster.stop()


async def complete(client: Client, tokens: int = 64, headers: dict[str, str] | None = None, **body: Any) -> Any:
    asked = {"prompt": prompt(tokens), "max_tokens": 2, "ignore_eos": True, **body}
    status, answer = await client.post("/v1/completions", asked, **(headers or {}))
    assert status == 200, answer
    return answer


async def until_healthy(client: Client) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await client.get("/health"))[0] != 200:  # noqa: ASYNC110  another process has no event to await either
            await asyncio.sleep(0.01)


def cached(answer: Any) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def test_requests_go_round_the_ranks_unless_the_header_picks_one() -> None:
    async with playing({"ranks": 2}) as [client]:
        engines = client.cluster.world.engines
        for _ in range(4):
            await complete(client)
        assert [engine.counters.generation for engine in engines] == [4, 4]
        for _ in range(3):
            await complete(client, headers={"X-data-parallel-rank": "1"})
        assert [engine.counters.generation for engine in engines] == [4, 10]


@pytest.mark.parametrize("rank", ["2", "-1", "first"])
async def test_a_rank_that_is_not_there_is_a_bad_request(rank: str) -> None:
    async with playing({"ranks": 2}) as [client]:
        asked = {"prompt": prompt(8), "max_tokens": 1}
        status, answer = await client.post("/v1/completions", asked, **{"X-data-parallel-rank": rank})
        assert (status, answer["error"]["code"]) == (400, 400)
        assert "ranks 0..1" in answer["error"]["message"]


async def test_one_page_of_metrics_has_every_rank_under_its_label() -> None:
    async with playing({"ranks": 2}) as [client]:
        await complete(client, headers={"X-data-parallel-rank": "1"})
        _, page = await client.get("/metrics")
        name = "vllm:generation_tokens_total"
        values = {line.split()[0]: line.split()[1] for line in page.splitlines() if line.startswith(name)}
        assert values == {
            f'{name}{{engine="0",model_name="Qwen/Qwen3-8B"}}': "0.0",
            f'{name}{{engine="1",model_name="Qwen/Qwen3-8B"}}': "2.0",
        }
        assert page.count(f"# TYPE {name} ") == 1


async def test_every_rank_has_a_publisher_of_its_own_that_the_server_lists() -> None:
    async with playing({"ranks": 2}, {}, use_events=True) as [client, other]:
        listed = msgspec.json.decode((await client.get("/kv_event_sources"))[1])
        bases = [urlsplit(listed[rank]["endpoint"]).port or 0 for rank in ("0", "1")]
        replays = [urlsplit(listed[rank]["replay_endpoint"]).port or 0 for rank in ("0", "1")]
        assert (len(listed), bases[1] - bases[0], replays[1] - replays[0]) == (2, 1, 1)
        assert client.cluster.fleet.replicas[0].events == listed["0"]["endpoint"]
        assert len(msgspec.json.decode((await other.get("/kv_event_sources"))[1])) == 1
        await complete(client, headers={"X-data-parallel-rank": "1"})
        context = zmq.asyncio.Context()
        for rank, batches in (("0", 0), ("1", 1)):
            client.replay = listed[rank]["replay_endpoint"]
            frames = await client.replayed(context)
            assert [msgspec.msgpack.decode(frame[-1])[2] for frame in frames[:-1]] == [int(rank)] * batches
        context.term()


async def test_each_replica_serves_and_names_its_own_model() -> None:
    async with playing({}, {"model": "small"}, models={"small": TINY}) as [first, second]:
        assert '"id":"tiny"' in (await second.get("/v1/models"))[1]
        await complete(second, model="tiny")
        status, _ = await first.post("/v1/completions", {"model": "tiny", "prompt": prompt(8), "max_tokens": 1})
        assert status == 404


async def test_a_starting_replica_answers_503_until_its_time() -> None:
    async with playing({"start_s": 10.0}, {}) as [slow, quick]:  # a fifth of a second at this speed
        assert (await slow.get("/health"))[0] == 503
        assert (await slow.post("/v1/completions", {"prompt": prompt(8), "max_tokens": 1}))[0] == 503
        assert (await quick.get("/health"))[0] == 200
        await until_healthy(slow)
        await complete(slow)


async def test_a_draining_replica_finishes_its_stream_and_takes_nothing_new() -> None:
    async with playing({}) as [client]:
        asked = {"prompt": prompt(64), "max_tokens": 300, "ignore_eos": True}
        stream = asyncio.create_task(client.stream("/v1/completions", asked))
        await client.until(lambda: client.engine.running == 1)
        assert (await client.post("/sim/drain", b""))[1]["draining"] is True
        assert (await client.post("/v1/completions", {"prompt": prompt(8), "max_tokens": 1}))[0] == 503
        assert len(await stream) > 1
        assert client.engine.counters.generation == 300
        async with client.session.delete(client.url + "/sim/drain") as response:
            assert response.status == 200
        await complete(client)


async def test_a_restart_with_a_time_away_drops_its_requests_and_answers_503_until_then() -> None:
    async with playing({}) as [client]:
        await complete(client, tokens=640)
        asked = {"prompt": prompt(64), "max_tokens": 9000, "ignore_eos": True, "stream": True}
        stream = asyncio.create_task(client.stream("/v1/completions", asked))
        await client.until(lambda: client.engine.running == 1)
        assert (await client.post("/sim/restart", {"down_s": 0.3}))[1]["restarted"] is True
        with pytest.raises(aiohttp.ClientError):
            await stream
        assert (await client.get("/health"))[0] == 503
        await until_healthy(client)
        assert client.engine.counters.generation == 0
        assert cached(await complete(client, tokens=640)) == 624  # from the store, which is no part of the replica


@pytest.mark.parametrize("body", [b"{", b'{"down_s": -1}', b'{"for_s": 1}'])
async def test_a_restart_that_is_told_nonsense_does_nothing(body: bytes) -> None:
    async with playing({}) as [client]:
        status, answer = await client.post("/sim/restart", body)
        assert (status, client.engine.lifecycle.starts) == (400, 1)
        assert answer["problem"]


async def test_a_crash_in_virtual_time_cuts_streams_and_whole_answers() -> None:
    async with playing({}) as [client]:
        asked = {"prompt": prompt(64), "max_tokens": 9000, "ignore_eos": True}
        tasks = [
            asyncio.create_task(client.stream("/v1/completions", asked)),
            asyncio.create_task(client.post("/v1/completions", asked)),
        ]
        await client.until(lambda: client.engine.running == 2)
        driver = client.cluster._driver
        assert driver is not None
        driver.change(lambda now_s: client.cluster.world.crash(0, now_s, back_after_s=0.0))
        for task in tasks:
            with pytest.raises(aiohttp.ClientError):
                await task
        await complete(client)


async def test_a_directed_replica_reads_where_its_body_says() -> None:
    fetch = {"by": "directed", "minimum_tokens": 16}
    async with playing({}, {}, links=LINKS, fetch=fetch, peers={"link": "nic"}) as [first, second]:
        await complete(second, tokens=640)
        assert cached(await complete(first, tokens=640)) == 0
        from_peer = {"path": "peer", "source": "r1"}
        await complete(second, prompt=prompt(640, start=50_000))
        answer = await complete(first, prompt=prompt(640, start=50_000), sim_directive=from_peer)
        assert cached(answer) == 624
        assert first.engine.fetcher is not None
        assert first.engine.fetcher.fetched_tokens["peer"] == 624


async def test_a_prefill_is_handed_off_under_its_own_request_id() -> None:
    rows = ({"role": "prefill"}, {"role": "decode"})
    async with playing(*rows, links=LINKS, peers={"link": "nic"}, store=None) as [prefill, decode]:
        answer = await complete(prefill, tokens=600, headers={"x-request-id": "one"})
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (1, "length")
        taken = {"path": "hand_off", "source": "r0", "request_id": "one"}
        answer = await complete(decode, tokens=600, sim_directive=taken)
        assert (answer["usage"]["completion_tokens"], cached(answer)) == (2, 599)
        assert len(prefill.engine.kept) == 0


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"path": "peer"}, "needs a source"),
        ({"path": "hand_off", "source": "r0"}, "needs a request_id"),
        ({"path": "teleport"}, "Invalid enum value"),
        ({"to": "r0"}, "unknown field"),
    ],
)
async def test_a_directive_that_makes_no_sense_is_a_bad_request(told: dict[str, str], problem: str) -> None:
    async with playing({}) as [client]:
        asked = {"prompt": prompt(8), "max_tokens": 1, "sim_directive": told}
        status, answer = await client.post("/v1/completions", asked)
        assert status == 400
        assert problem in answer["error"]["message"]


async def test_blocks_that_go_to_the_host_are_announced_there_with_their_removal() -> None:
    """753 blocks of HBM: the second prompt of 500 pushes 247 of the first one's out."""
    tiers = {"host": {"capacity_gib": 10, "link": "pcie"}}
    engine = {"memory_share": 0.2114}
    async with playing({}, links=LINKS, tiers=tiers, engine=engine, use_events=True) as [client]:
        for start in (1000, 50_000):
            await complete(client, prompt=prompt(8000, start=start), max_tokens=1)
        context = zmq.asyncio.Context()
        frames = await client.replayed(context)
        context.term()
        events = [event for frame in frames[:-1] for event in msgspec.msgpack.decode(frame[-1])[1]]
        to_host = [event["block_hashes"][0] for event in events if event.get("medium") == "CPU"]
        gone = [event["block_hashes"][0] for event in events if event["type"] == "BlockRemoved"]
        assert len(to_host) == 247
        assert to_host == gone
