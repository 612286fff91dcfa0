"""One simulated replica behind real sockets, and a client that speaks to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from sim_backends.cluster import Cluster, ClusterSettings
from tests.sim_backends.builders import a_fleet

TIMEOUT_S = 10.0


class Client:
    """One replica's address, a session, and the engine behind it."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.session = session
        self.url = cluster.fleet.replicas[0].url or ""
        self.engine = cluster.world.engines[0]
        self.events = cluster.fleet.replicas[0].events or ""
        self.replay = cluster.fleet.replicas[0].replay or ""

    async def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read() or b"null")

    async def stream(self, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
        """Decoded events; the end marker is checked and left out."""
        data = json.dumps({**body, "stream": True})
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            events = (await response.read()).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def set_faults(self, **values: Any) -> None:
        status, answer = await self.post("/sim/faults", values)
        assert status == 200, answer

    async def replayed(self, context: zmq.asyncio.Context) -> list[list[bytes]]:
        """All frames a DEALER gets for a replay from 0, the end marker included."""
        reader = context.socket(zmq.DEALER)
        reader.connect(self.replay)
        await reader.send_multipart([b"", bytes(8)])
        got: list[list[bytes]] = []
        while not got or got[-1][-1]:
            got.append(await asyncio.wait_for(reader.recv_multipart(), TIMEOUT_S))
        reader.close()
        return got

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def until(self, condition: Any) -> None:
        """Wait for the engine's state, with a time-out."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110  an engine in virtual time has no event to await
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(*cards: str, speed: float = 50.0, **settings: Any) -> AsyncIterator[Client]:
    """These cards (one A100), stopped at the end; `settings` are the cluster's. The client speaks to the first."""
    cluster = Cluster(a_fleet(*cards, speed=speed), ClusterSettings(**settings))
    await cluster.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
            yield Client(cluster, session)
    finally:
        await cluster.stop()
