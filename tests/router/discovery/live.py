"""For tests: a whole router whose replicas come and go, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.config import LoadConfig, PolicyConfig, RouterConfig
from router.discovery.sources import Source
from router.fleet import Fleet, ReplicaSpec
from router.gateway import Gateway
from tests.router.test_gateway import MODEL, Engine

KEY = {"authorization": "Bearer s3cret"}


class Registry:
    """A source that lists what it is told to; an exception is what happens when it is read."""

    name = "registry"
    every_s = 0.01

    def __init__(self) -> None:
        self.answer: Sequence[ReplicaSpec] | Exception = []

    async def read(self) -> Sequence[ReplicaSpec]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Streaming(Engine):
    """An engine whose streams go on until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = asyncio.Event()
        self.streams = 0

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/v1/chat/completions", self._stream)
        return app

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.streams += 1
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        await self.ends.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


class Live:
    """A started router, its engines by name, and a client of it."""

    def __init__(self, gateway: Gateway, client: aiohttp.ClientSession, engines: dict[str, Engine]) -> None:
        self.gateway = gateway
        self.client = client
        self.engines = engines
        self.admin = f"http://127.0.0.1:{gateway.admin_port}"
        self.traffic = f"http://127.0.0.1:{gateway.traffic_port}"

    def spec(self, name: str) -> ReplicaSpec:
        return ReplicaSpec(name=name, url=self.engines[name].url)

    async def complete(self) -> str:
        """The replica that answered."""
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
        async with self.client.post(f"{self.traffic}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()
            return response.headers["x-tfirst-replica"]

    async def fleet(self) -> Any:
        async with self.client.get(f"{self.admin}/fleet") as response:
            return await response.json()

    async def metrics(self) -> list[str]:
        async with self.client.get(f"{self.admin}/metrics") as response:
            return (await response.text()).splitlines()

    async def edit(self, call: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        url = f"{self.admin}/replicas/{call}"
        async with self.client.post(url, json=body, headers=KEY if headers is None else headers) as response:
            return response.status, await response.json()

    async def until(self, holds: Callable[[Any], bool]) -> Any:
        """/fleet, once `holds` says so of it."""
        async with asyncio.timeout(10):
            while True:
                shown = await self.fleet()
                if holds(shown):
                    return shown
                await asyncio.sleep(0.01)

    async def until_up(self, *names: str) -> Any:
        """/fleet, once exactly these are there, and up."""
        return await self.until(lambda shown: {one["name"] for one in shown["replicas"] if one["up"]} == set(names))


@asynccontextmanager
async def live(
    engines: dict[str, Engine],
    fleet: Callable[[dict[str, Engine]], tuple[Fleet, dict[str, Any]]],
    *sources: Source,
    **changes: Any,
) -> AsyncIterator[Live]:
    """A router in front of these engines; `fleet` makes fleet and settings of them, once they have URLs."""
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            server = await stack.enter_async_context(TestServer(engine.app(), shutdown_timeout=0.1))
            engine.url = str(server.make_url("")).rstrip("/")
        configured, settings = fleet(engines)
        config = RouterConfig(
            host="127.0.0.1",
            port=0,
            admin_host="127.0.0.1",
            admin_port=0,
            admin_key_env="ADMIN_KEY",
            **{
                "load": LoadConfig(period_s=0.02),
                "policy": PolicyConfig(name="round_robin"),
                **settings,
                **changes,
            },
        )
        gateway = Gateway(config, configured, sources=sources)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Live(gateway, client, engines)


def flags(*names: str) -> Callable[[dict[str, Engine]], tuple[Fleet, dict[str, Any]]]:
    """A fleet of these engines that never changes by itself."""
    return lambda engines: (Fleet(replicas=[ReplicaSpec(name=name, url=engines[name].url) for name in names]), {})


def engines(*names: str) -> dict[str, Engine]:
    return {name: Engine() for name in names}
