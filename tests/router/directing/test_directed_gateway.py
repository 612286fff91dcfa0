"""A whole router before simulated engines that do what they are told and nothing else, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from router.config import PolicyConfig, ReceiptConfig
from router.fleet import load_fleet
from sim_backends import fleet as fleet_file
from sim_backends.bringing import Bring
from sim_backends.cluster import Cluster, ClusterSettings
from tests.router.test_gateway import Running, running
from tests.sim_backends.builders import a_fleet, prompt

MODEL = "Qwen/Qwen3-8B"
CARDS = {
    "A100": {"peak_tflops": 312, "memory_gb_s": 2039, "memory_gib": 80},
    "OLD": {"peak_tflops": 20, "memory_gb_s": 2039, "memory_gib": 80},
}
LINKS = {"store": {"gb_s": 2.5}, "pcie": {"gb_s": 25}, "nic": {"gb_s": 50}}
HELD = prompt(4000)
PATIENCE_S = 20.0


@dataclass
class Bench:
    cluster: Cluster
    router: Running
    session: aiohttp.ClientSession
    receipts: Path

    async def direct(self, index: int, tokens: list[int]) -> None:
        """Have a replica compute a prompt without the router."""
        body = {"prompt": tokens, "max_tokens": 1}
        url = f"{self.cluster.fleet.replicas[index].url}/v1/completions"
        async with self.session.post(url, json=body) as response:
            assert response.status == 200
            await response.read()

    async def known(self, tier: str, blocks: int = len(HELD) // 16) -> None:
        await self.router.until(lambda shown: shown["directory_blocks"][tier] >= blocks)

    async def only_in_store(self) -> None:
        """Have the first replica compute the prompt and forget it; the store does not."""
        await self.direct(0, HELD)
        await self.known("remote")
        async with self.session.post(f"{self.cluster.fleet.replicas[0].url}/reset_prefix_cache") as response:
            assert response.status == 200
        await self.direct(0, prompt(64, start=70_000))  # an idle engine announces nothing
        await self.router.until(lambda shown: shown["directory_blocks"]["hbm"] < len(HELD) // 16)

    async def ask(self, tokens: list[int], **fields: Any) -> tuple[int, str, Any]:
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 2, **fields}
        async with self.session.post(f"{self.router.traffic}/v1/completions", json=body) as response:
            return response.status, response.headers["x-tfirst-replica"], await response.json()

    async def hints(self, **counted: int) -> None:
        """Until the router has counted so many."""
        await self.router.until(lambda shown: counted.items() <= shown["directions"]["hints"].items())

    def fetched(self, index: int) -> dict[str, int]:
        fetcher = self.cluster.world.engines[index].fetcher
        assert fetcher is not None
        return dict(fetcher.fetched_tokens)

    async def brought(self) -> Bring:
        """The first thing that LMCache was asked for, once it was."""
        face = self.cluster.lmcache
        assert face is not None
        async with asyncio.timeout(PATIENCE_S):
            while not face.brings:  # noqa: ASYNC110  a simulated service has no event to await
                await asyncio.sleep(0.002)
        return face.brings[0]


@asynccontextmanager
async def bench(
    tmp_path: Path, *replicas: dict[str, Any], seen: int | None = None, speed: float = 50.0, **sections: Any
) -> AsyncIterator[Bench]:
    """seen : how many of the replicas the router knows; None: all"""
    rows = [{"name": f"r{number}", **row} for number, row in enumerate(replicas)]
    parts: dict[str, Any] = {"cards": CARDS, "links": LINKS, "peers": {"link": "nic"}, **sections}
    cluster = Cluster(a_fleet(replicas=rows, speed=speed, **parts), ClusterSettings())
    await cluster.start()
    try:
        path = tmp_path / "fleet.yaml"
        fleet_file.write(cluster.fleet, path)
        fleet = load_fleet(path)
        fleet = msgspec.structs.replace(fleet, replicas=fleet.replicas[:seen])
        receipts = tmp_path / "receipts"
        options = {"policy": PolicyConfig(name="ttft"), "receipts": ReceiptConfig(path=str(receipts))}
        timeout = aiohttp.ClientTimeout(PATIENCE_S)
        async with running(fleet=fleet, **options) as router, aiohttp.ClientSession(timeout=timeout) as session:
            yield Bench(cluster, router, session, receipts)
    finally:
        await cluster.stop()


def told_peer(way: str, **more: Any) -> dict[str, Any]:
    fetch = {"by": "directed", "discipline": "overlapped", "minimum_tokens": 64}
    return {"fetch": fetch, "told": {"peer": way, "store": "never"}, "store": None, **more}


@pytest.mark.parametrize("way", ["header", "body"])
async def test_a_prompt_that_a_slow_replica_holds_is_read_from_it_by_a_fast_one(tmp_path: Path, way: str) -> None:
    async with bench(tmp_path, {"card": "A100"}, {"card": "OLD"}, **told_peer(way)) as use:
        await use.direct(1, HELD)
        await use.known("hbm")
        status, replica, answer = await use.ask([*HELD, *prompt(1500, start=60_000)])
        assert (status, replica) == (200, "r0")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(HELD)
        assert use.fetched(0)["peer"] == len(HELD)
        await use.hints(**{f"{way}_told": 1, f"{way}_worked": 1})
        assert f'tfirst_hints_total{{kind="{way}_worked"}} 1.0' in await use.router.metrics()
    receipt = json.loads(use.receipts.read_text().splitlines()[-1])
    assert receipt["directed"] == way
    assert receipt.get("edited", []) == ([] if way == "header" else ["kv_transfer_params"])
    assert receipt["candidates"][receipt["chosen"]]["path"] == "peer"


async def test_clients_cannot_name_a_peer_to_read(tmp_path: Path) -> None:
    async with bench(tmp_path, {"card": "A100"}, {"card": "A100"}, **told_peer("header"), seen=1) as use:
        await use.direct(1, HELD)
        other = (use.cluster.fleet.replicas[1].url or "").removeprefix("http://")
        body = {"model": MODEL, "prompt": HELD, "max_tokens": 1}
        field = {"x-kv-cache-source-host-port": other}
        async with use.session.post(f"{use.router.traffic}/v1/completions", json=body, headers=field) as response:
            assert response.status == 200
        assert use.fetched(0) == {}


async def test_engines_that_do_not_listen_are_told_no_more_and_answer_all_the_same(tmp_path: Path) -> None:
    """The router names peers in the body; the engines listen to the head."""
    sections = told_peer("header")
    async with bench(tmp_path, {"card": "A100"}, {"card": "OLD"}, **sections) as use:
        fleet_text = (tmp_path / "fleet.yaml").read_text().replace("peer: header", "peer: body")
        (tmp_path / "deaf.yaml").write_text(fleet_text)
        async with running(fleet=load_fleet(tmp_path / "deaf.yaml"), policy=PolicyConfig(name="ttft")) as deaf:
            use.router = deaf
            for number in range(4):
                there = prompt(4000, start=5000 * (number + 1))
                await use.direct(1, there)
                await use.known("hbm", (number + 1) * (4000 // 16) + number * (1500 // 16))
                status, replica, _ = await use.ask([*there, *prompt(1500, start=60_000)])
                assert (status, replica) == (200, "r0")
            await use.hints(body_failed=4, body_rest=1)
            shown = await deaf.fleet()
            assert shown["directions"]["resting"] == {"r0": "body"}


def prefetching(**more: Any) -> dict[str, Any]:
    """Engines that look into host memory at their turn, and a store that only LMCache's coordinator reads."""
    return {
        "fetch": {"by": "directed", "discipline": "serial", "minimum_tokens": 64},
        "tiers": {"host": {"capacity_gib": 8, "link": "pcie"}},
        "told": {"store": "prefetch"},
        "lmcache": {},
        **more,
    }


async def behind(use: Bench, tokens: int) -> asyncio.Task[Any]:
    """A long prompt on the one replica, so that the next one queues."""
    ahead = asyncio.create_task(use.ask(prompt(tokens, start=20_000)))
    await use.router.until(lambda shown: shown["in_flight"] == 1)
    return ahead


async def test_what_the_store_has_is_in_host_memory_when_a_queued_request_has_its_turn(tmp_path: Path) -> None:
    async with bench(tmp_path, {"card": "A100"}, speed=4.0, **prefetching()) as use:
        await use.only_in_store()
        ahead = await behind(use, 20_000)
        _, _, answer = await use.ask([*HELD, *prompt(100, start=60_000)])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(HELD)
        assert use.fetched(0) == {"host": len(HELD)}
        assert (await ahead)[0] == 200
        await use.hints(prefetch_worked=1)


async def test_a_prefetch_stops_when_the_client_of_its_request_leaves(tmp_path: Path) -> None:
    links = {**LINKS, "store": {"gb_s": 0.15}}  # a second, half as long as computing takes such a card
    async with bench(tmp_path, {"card": "OLD"}, speed=4.0, **prefetching(links=links)) as use:
        await use.only_in_store()
        ahead = await behind(use, 10_000)
        asked = asyncio.create_task(use.ask([*HELD, *prompt(100, start=60_000)]))
        begun = await use.brought()
        asked.cancel()
        await use.hints(prefetch_withdrawn=1)
        assert begun.stopped
        assert begun.brought < begun.blocks
        ahead.cancel()


async def test_a_coordinator_that_is_down_costs_nothing_but_the_state(tmp_path: Path) -> None:
    async with bench(tmp_path, {"card": "A100"}, speed=4.0, **prefetching()) as use:
        path = tmp_path / "down.yaml"
        text = (tmp_path / "fleet.yaml").read_text()
        assert use.cluster.fleet.lmcache is not None
        path.write_text(text.replace(str(use.cluster.fleet.lmcache.coordinator), "http://127.0.0.1:1"))
        async with running(fleet=load_fleet(path), policy=PolicyConfig(name="ttft")) as router:
            use.router = router
            await use.only_in_store()
            ahead = await behind(use, 20_000)
            status, _, answer = await use.ask([*HELD, *prompt(100, start=60_000)])
            assert (status, answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
            assert (await ahead)[0] == 200
            await use.hints(prefetch_failed=1)
