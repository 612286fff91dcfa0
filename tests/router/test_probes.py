"""Liveness and streams while prompts are read: heavy work is somewhere else, or waits its turn in slices."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.config import PromptConfig, RouterConfig
from router.fleet import Fleet, ReplicaSpec
from router.gateway import Gateway
from tests.router.http.stubs import until


class Engine:
    """A server whose tokenizer answers nobody before it is released."""

    def __init__(self) -> None:
        self.asked = 0
        self.release = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._empty)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.asked += 1
        await self.release.wait()
        return web.json_response({"tokens": [1, 2, 3]})

    async def _complete(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({})


@asynccontextmanager
async def a_router(engine: Engine) -> AsyncIterator[Gateway]:
    async with TestServer(engine.app()) as server:
        config = RouterConfig(
            host="127.0.0.1",
            port=0,
            admin_host="127.0.0.1",
            admin_port=0,
            prompts=PromptConfig(source="tokenize", timeout_s=60.0),
        )
        gateway = Gateway(config, Fleet(replicas=[ReplicaSpec(name="a", url=str(server.make_url("")))]))
        await gateway.start()
        try:
            async with asyncio.timeout(20):
                await until(gateway._ready)
                yield gateway
        finally:
            engine.release.set()
            await gateway.stop()


async def complete(client: aiohttp.ClientSession, gateway: Gateway, body: bytes) -> int:
    url = f"http://127.0.0.1:{gateway.traffic_port}/v1/completions"
    async with client.post(url, data=io.BytesIO(body)) as response:
        await response.read()
        return response.status


async def test_probes_are_answered_while_a_tokenizer_hangs_and_every_prompt_waits_for_it() -> None:
    engine = Engine()
    async with a_router(engine) as gateway, aiohttp.ClientSession() as client:
        body = json.dumps({"model": "m", "prompt": "once upon a time " * 1000}).encode()
        waiting = [asyncio.ensure_future(complete(client, gateway, body)) for _ in range(20)]
        await until(lambda: engine.asked == 20)
        for port in (gateway.traffic_port, gateway.admin_port):
            for path in ("health", "ready"):
                async with client.get(f"http://127.0.0.1:{port}/{path}") as response:
                    assert response.status == 200
        assert not any(task.done() for task in waiting)
        engine.release.set()
        assert await asyncio.gather(*waiting) == [200] * 20


async def test_the_loop_turns_while_a_million_token_ids_are_read() -> None:
    """Read in one piece they would take the loop for some 100 ms; in slices, others get some hundred turns."""
    engine = Engine()
    async with a_router(engine) as gateway, aiohttp.ClientSession() as client:
        body = b'{"model":"m","prompt":[' + b"123," * 999_999 + b"7]}"
        turns, reading = 0, gateway._prompts
        answer = asyncio.ensure_future(complete(client, gateway, body))
        await until(lambda: reading.report().waiting == 1)
        while reading.report().waiting:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 50
        assert await answer == 200
