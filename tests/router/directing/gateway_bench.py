"""For tests: a whole router before simulated engines that do what they are told and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

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
    "ANCIENT": {"peak_tflops": 2, "memory_gb_s": 2039, "memory_gib": 80},
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
