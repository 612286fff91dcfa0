"""For tests: a whole router in front of replicas that fail in the ways of the field, all over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from router.config import LoadConfig, PolicyConfig, RouterConfig
from router.fleet import Fleet, ReplicaSpec
from router.gateway import Gateway
from router.health import HealthConfig, State
from router.http.contract import TimeOuts
from router.receipts import Receipt
from sim_backends.cluster import Cluster, ClusterSettings
from tests.sim_backends.builders import a_fleet

MODEL = "m1"
PATIENCE_S = 15.0
QUICK = HealthConfig(
    probe_period_s=0.05, trial_interval_s=0.5, avoid_s=0.0, frozen_s=1.0, slow_start_s=0.0
)  # the defaults, ten and more times as fast


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for _ in iter(holds, True):
            await asyncio.sleep(0.005)


# -- replicas


Script = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


async def answers(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.json_response({"usage": {"prompt_tokens": 3, "completion_tokens": 1}})


async def silence(request: web.Request, body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody waits that long")


@dataclass
class Stub:
    """A replica with the routes of vLLM that the router needs.

    script : what a generation gets; probe : what /health does; page : what /metrics says
    """

    script: Script = answers
    probe: Callable[[], Awaitable[int]] | None = None
    page: str = ""
    url: str = ""
    port: int = 0
    received: list[bytes] = field(default_factory=list)
    probes: int = 0
    open: int = 0  # generations it works on
    most_open: int = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Stub]:
        """The port stays the same from one time to the next."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=200 if self.probe is None else await self.probe())

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.received.append(body)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            return await self.script(request, body)
        finally:
            self.open -= 1


def a_page(running: int, waiting: int, generated: int = 0) -> str:
    labels = '{engine="0",model_name="m1"}'
    return (
        f"vllm:num_requests_running{labels} {running}\n"
        f"vllm:num_requests_waiting{labels} {waiting}\n"
        f"vllm:generation_tokens_total{labels} {generated}\n"
        f"vllm:prompt_tokens_total{labels} 0\n"
    )


@contextlib.asynccontextmanager
async def simulated(*cards: str, port: int = 0) -> AsyncIterator[Cluster]:
    """Simulated engines, fifty times as fast as the hardware. port : of the first; 0: whatever is free"""
    cluster = Cluster(a_fleet(*cards, speed=50.0), ClusterSettings(port=port))
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


def urls_of(cluster: Cluster) -> list[str]:
    return [replica.url or "" for replica in cluster.fleet.replicas]


# -- the router


@dataclass
class Answer:
    status: int
    fields: dict[str, str]  # names in lower case
    body: bytes


class Router:
    """A started router, a client of it, and the receipts of what ended."""

    def __init__(self, gateway: Gateway, client: aiohttp.ClientSession, receipts: list[Receipt]) -> None:
        self.gateway = gateway
        self.client = client
        self.receipts = receipts
        self.dispatcher = gateway._core.dispatcher
        self.url = f"http://127.0.0.1:{gateway.traffic_port}"

    async def ask(self, model: str = MODEL, *, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        """One completion. A stream that breaks raises what the client library makes of it."""
        data = {"model": model, "prompt": [1, 2, 3], **body}
        async with self.client.post(f"{self.url}/v1/completions", json=data, headers=headers) as response:
            read = await response.read()
        fields = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, fields, read)

    async def read_into(self, got: bytearray, model: str, **body: Any) -> None:
        """One stream, what came of it in `got`. Raises what the client library makes of its end."""
        data = {"model": model, "prompt": [1, 2, 3], "stream": True, **body}
        async with self.client.post(f"{self.url}/v1/completions", json=data) as response:
            async for piece in response.content.iter_any():
                got += piece

    async def get(self, path: str) -> Any:
        async with self.client.get(f"{self.url}{path}") as response:
            return json.loads(await response.read())

    def state(self, row: int) -> State:
        return self.dispatcher.health(row).state()

    async def until_up(self, *rows: int) -> None:
        await until(lambda: all(self.dispatcher.is_up(row) for row in rows))

    @property
    def tried(self) -> Counter[str]:
        """How often each replica failed a request that went on elsewhere."""
        return Counter(name for receipt in self.receipts for name in receipt.tried)


@contextlib.asynccontextmanager
async def a_router(
    urls: Sequence[str],
    policy: str = "round_robin",
    *,
    health: HealthConfig = QUICK,
    times: TimeOuts | None = None,
    load: LoadConfig | None = None,
    await_all: bool = True,
    **config: Any,
) -> AsyncIterator[Router]:
    """On leaving nothing may be held: no place, no exchange, no connection in use."""
    names = "abcdefgh"
    fleet = Fleet(replicas=[ReplicaSpec(name=name, url=url) for name, url in zip(names, urls, strict=False)])
    settings = RouterConfig(
        host="127.0.0.1",
        port=0,
        admin_host="127.0.0.1",
        admin_port=0,
        policy=PolicyConfig(name=policy),
        load=load or LoadConfig(period_s=0.05, timeout_s=0.2),
        health=health,
        time_outs=times or TimeOuts(),
        drain_s=0.01,
        **config,
    )
    gateway = Gateway(settings, fleet)
    receipts: list[Receipt] = []
    finished = gateway._finished

    def noted(receipt: Receipt) -> None:
        receipts.append(receipt)
        finished(receipt)

    gateway._finished = noted  # type: ignore[method-assign]
    await gateway.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            router = Router(gateway, client, receipts)
            if await_all:
                await router.until_up(*range(len(urls)))
            yield router
        await until(lambda: router.dispatcher.in_flight == 0 and not router.dispatcher.queued)
        traffic = gateway._traffic
        await until(lambda: traffic.open_exchanges == traffic.pool.in_use == 0)
        assert traffic.counts.internal_errors == 0
        assert len({receipt.request_id for receipt in receipts}) == len(receipts)
    finally:
        await gateway.stop()
