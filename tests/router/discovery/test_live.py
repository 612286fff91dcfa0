"""A whole router whose replicas come and go, over real sockets: who is gone gets nothing and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.config import LoadConfig, PolicyConfig, RouterConfig, fleet_of
from router.discovery.config import DiscoveryConfig
from router.discovery.sources import NoList, Source
from router.fleet import Fleet, ReplicaSpec
from router.gateway import Gateway
from router.health import HealthConfig
from router.http.contract import TimeOuts
from tests.router.test_gateway import MODEL, Engine

KEY = {"authorization": "Bearer s3cret"}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.discovery.assembly.LOOK_EVERY_S", 0.01)
    monkeypatch.setenv("ADMIN_KEY", "s3cret")


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


# Ghosts


def black_hole(port: int, held: list[socket.socket]) -> None:
    """From now on connections to `port` are neither made nor refused, for as long as `held` is."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(0)
    held.append(listener)
    for _ in range(2):  # a backlog of nobody still takes one
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        held.append(one)


@pytest.mark.parametrize("way", ["deleted while the watch was down", "address null", "silent"])
async def test_a_ghost_costs_little_and_is_gone_at_the_next_look(way: str) -> None:
    registry, held, a, b = Registry(), list[socket.socket](), Engine(), Engine()
    at_a = TestServer(a.app(), shutdown_timeout=0.1)
    await at_a.start_server()
    a.url = str(at_a.make_url("")).rstrip("/")
    ghost = ReplicaSpec(name="a", url=a.url)
    settings = {"health": HealthConfig(misses_to_eject=1000), "time_outs": TimeOuts(connect_s=0.2)}
    registry.answer = NoList("not yet")
    async with live({"b": b}, flags("b"), registry, **settings) as router:
        registry.answer = [ghost]
        await router.until_up("a", "b")
        push = {"source": "a", "incarnation": 1, "batches": [{"seq": 1, "events": [stored(48)]}]}
        async with router.client.post(f"{router.admin}/events", json=push, headers=KEY) as response:
            assert response.status == 200, await response.text()
        assert (await router.fleet())["directory_blocks"]["hbm"] > 0
        port = at_a.port
        assert port is not None
        await at_a.close()
        black_hole(port, held)
        loop = asyncio.get_running_loop()
        took_s = []
        for _ in range(4):
            began_s = loop.time()
            assert await router.complete() == "b"
            took_s.append(loop.time() - began_s)
        assert max(took_s) < 0.2 + 1.0
        if way == "deleted while the watch was down":
            registry.answer = OSError("the watch was cut")
            await router.until(lambda shown: any(one["rejected"] for one in shown["discovery"]["sources"]))
            assert "a" in {one["name"] for one in (await router.fleet())["replicas"]}  # what was known last counts
        registry.answer = [ReplicaSpec(name="a", url=None)] if way == "address null" else []
        shown = await router.until_up("b")
        assert [one["name"] for one in shown["replicas"]] == ["b"]
        assert shown["directory_blocks"]["hbm"] == 0
        assert {one["name"] for one in shown["event_sources"]} == {"b"}
        await router.until(lambda shown: shown["discovery"]["rows"]["leaving"] == 0)
        assert not [line for line in await router.metrics() if '"a"' in line]
        for one in held:
            one.close()
        assert {await router.complete() for _ in range(8)} == {"b"}


def stored(tokens: int) -> dict[str, Any]:
    hashes = [1000 + block for block in range(tokens // 16)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(range(1, tokens + 1)),
        "block_size": 16,
        "lora_id": None,
    }


# A fleet file


class FleetFile:
    """A fleet file of these engines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, engines: dict[str, Engine]) -> tuple[Fleet, dict[str, Any]]:
        self.urls = {name: engine.url for name, engine in engines.items()}
        self.path.write_text(self.text("a", "b"))
        config = RouterConfig(fleet=str(self.path))
        return fleet_of(config), {"fleet": str(self.path)}

    def text(self, *names: str) -> str:
        return json.dumps({"replicas": [{"name": name, "url": self.urls.get(name, "nowhere")} for name in names]})

    def write(self, *names: str) -> None:
        self.put(self.text(*names))

    def put(self, text: str) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        os.replace(beside, self.path)


def rejected(shown: Any) -> str | None:
    found: list[str | None] = [one["rejected"] for one in shown["discovery"]["sources"] if one["name"] == "file"]
    return found[0]


async def gauge(router: Live) -> float:
    (line,) = [line for line in await router.metrics() if line.startswith("tfirst_replica_list_rejected{")]
    return float(line.split()[-1])


async def test_a_broken_file_changes_nothing_and_a_mended_one_counts_while_traffic_goes_on(tmp_path: Path) -> None:
    file = FleetFile(tmp_path / "fleet.json")
    stops, answered = asyncio.Event(), 0
    async with live(engines("a", "b", "c"), file) as router:
        await router.until_up("a", "b")

        async def traffic() -> None:
            nonlocal answered
            while not stops.is_set():
                await router.complete()
                answered += 1

        going = asyncio.create_task(traffic())
        broken = [
            file.text("a", "b", "c")[:-9],  # half of it
            "",
            file.text("a", "b", "nowhere"),
            file.text("a", "a"),
            '{"replicas": [], "replika": 1}',
        ]
        for text in broken:
            file.put(text)
            assert "\n" not in (rejected(await router.until(lambda shown: rejected(shown) is not None)) or "\n")
            assert await gauge(router) == 1.0
            assert {one["name"] for one in (await router.fleet())["replicas"]} == {"a", "b"}
            file.write("a", "b")  # as it was
            await router.until(lambda shown: rejected(shown) is None)
            assert await gauge(router) == 0.0
        file.path.unlink()
        await router.until(lambda shown: rejected(shown) is not None)
        file.write("a", "b", "c")
        assert rejected(await router.until_up("a", "b", "c")) is None
        assert await router.complete() in {"a", "b", "c"}
        stops.set()
        await going
    assert answered > 20


async def test_who_is_taken_out_of_the_file_finishes_its_stream_and_gets_nothing_new(tmp_path: Path) -> None:
    file, b = FleetFile(tmp_path / "fleet.json"), Streaming()
    async with live({"a": Engine(), "b": b}, file) as router:
        await router.until_up("a", "b")
        await router.edit("drain", {"name": "a"})
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with router.client.post(f"{router.traffic}/v1/chat/completions", json=body) as response:
            assert await response.content.readany()
            await router.edit("undrain", {"name": "a"})
            file.write("a")
            shown = await router.until_up("a")
            assert [(one["name"], one["booked"]) for one in shown["discovery"]["leaving"]] == [("b", 1)]
            served = len(b.sent)
            assert {await router.complete() for _ in range(20)} == {"a"}
            assert len(b.sent) == served
            b.ends.set()
            assert (await response.content.read()).endswith(b"[DONE]\n\n")
        await router.until(lambda shown: not shown["discovery"]["leaving"])


async def test_who_returns_while_its_stream_runs_is_a_replica_again(tmp_path: Path) -> None:
    file, b = FleetFile(tmp_path / "fleet.json"), Streaming()
    async with live({"a": Engine(), "b": b}, file) as router:
        await router.until_up("a", "b")
        await router.edit("drain", {"name": "a"})
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with router.client.post(f"{router.traffic}/v1/chat/completions", json=body) as response:
            assert await response.content.readany()
            file.write("a")
            await router.until_up("a")
            file.write("a", "b")
            shown = await router.until_up("a", "b")
            assert shown["discovery"]["leaving"] == []
            assert next(one["booked"] for one in shown["replicas"] if one["name"] == "b") == 1
            b.ends.set()
            await response.content.read()


async def test_a_reload_keeps_what_was_learned_of_who_stays(tmp_path: Path) -> None:
    file = FleetFile(tmp_path / "fleet.json")
    async with live(engines("a", "b", "c"), file) as router:
        before = await router.until_up("a", "b")
        learned = router.gateway._core.dispatcher.learning
        learned._view.coefficients[0] *= 1.25
        learned._view.samples[0] = 7
        file.write("a", "c")
        after = await router.until_up("a", "c")
    a_before, a_after = (next(one for one in shown["replicas"] if one["name"] == "a") for shown in (before, after))
    assert a_after["samples"] == 7
    assert a_after["coefficients"] == [value * 1.25 for value in a_before["coefficients"]]


async def test_too_many_replicas_in_a_file_are_refused_whole(tmp_path: Path) -> None:
    file = FleetFile(tmp_path / "fleet.json")
    async with live(engines("a", "b", "c"), file, discovery=DiscoveryConfig(max_replicas=2)) as router:
        await router.until_up("a", "b")
        file.write("a", "b", "c")
        shown = await router.until(lambda shown: rejected(shown) is not None)
        assert "discovery.max_replicas" in (rejected(shown) or "")
        assert {one["name"] for one in shown["replicas"]} == {"a", "b"}


async def test_a_file_that_is_not_watched_is_not_read_again(tmp_path: Path) -> None:
    file = FleetFile(tmp_path / "fleet.json")
    async with live(engines("a", "b", "c"), file, discovery=DiscoveryConfig(watch_fleet=False)) as router:
        await router.until_up("a", "b")
        file.write("a", "b", "c")
        router.gateway.reload()
        assert len((await router.fleet())["replicas"]) == 2


# Admin calls


async def test_replicas_are_added_drained_and_removed_by_admin_calls() -> None:
    async with live(engines("a", "b"), flags("a")) as router:
        await router.until_up("a")
        assert (await router.edit("add", {"url": router.engines["b"].url, "name": "b"}))[0] == 201
        await router.until_up("a", "b")
        assert {await router.complete() for _ in range(20)} == {"a", "b"}
        assert (await router.edit("drain", {"name": "a"}))[0] == 200
        assert {await router.complete() for _ in range(20)} == {"b"}
        assert [one["drained"] for one in (await router.fleet())["replicas"]] == [True, False]
        assert (await router.edit("undrain", {"name": "a"}))[0] == 200
        assert (await router.edit("remove", {"name": "b"}))[0] == 200
        assert {await router.complete() for _ in range(20)} == {"a"}


async def test_a_router_whose_last_replica_is_removed_is_not_ready_and_says_so() -> None:
    async with live(engines("a"), flags("a")) as router:
        await router.until_up("a")
        await router.edit("remove", {"name": "a"})
        async with router.client.get(f"{router.traffic}/ready") as response:
            assert response.status == 503
        body = {"model": MODEL, "prompt": [1, 2, 3]}
        async with router.client.post(f"{router.traffic}/v1/completions", json=body) as response:
            assert response.status == 503
        await router.edit("add", {"url": router.engines["a"].url, "name": "a"})
        await router.until_up("a")
        assert await router.complete() == "a"


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"authorization": "Bearer wrong"}, 401)])
async def test_nobody_changes_replicas_without_the_key(headers: dict[str, str], status: int) -> None:
    async with live(engines("a"), flags("a")) as router:
        assert (await router.edit("remove", {"name": "a"}, headers))[0] == status
        assert len((await router.fleet())["replicas"]) == 1


async def test_without_a_key_configured_nobody_changes_replicas() -> None:
    async with live(engines("a"), flags("a")) as other:
        settings = {"host": "127.0.0.1", "port": 0, "admin_host": "127.0.0.1", "admin_port": 0}
        gateway = Gateway(RouterConfig(**settings), Fleet(replicas=[other.spec("a")]))  # type: ignore[arg-type]
        await gateway.start()
        try:
            status, _ = await Live(gateway, other.client, {}).edit("remove", {"name": "a"})
            assert status == 403
        finally:
            await gateway.stop()


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 5000])
async def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    async with live(engines("a"), flags("a")) as router:
        response = await router.client.post(f"{router.admin}/replicas/add", data=body, headers=KEY)
        assert response.status == 400
        assert (await response.json())["error"]


async def test_an_unknown_call_is_refused_with_the_known_ones() -> None:
    async with live(engines("a"), flags("a")) as router:
        status, answer = await router.edit("explode", {})
        assert status == 404
        assert "add, drain, undrain, remove" in answer["error"]


@pytest.mark.parametrize(
    "body",
    [
        {"url": "http://169.254.169.254"},
        {"url": "http://127.0.0.1:1", "api_key_env": "HOME"},
        {"url": "http://127.0.0.1:1", "card": "none_such"},
        {"url": "http://127.0.0.1:1", "events": "udp://x"},
        {"url": "http://127.0.0.1:1", "name": "(spare 3)"},
        {"url": "http://127.0.0.1:1", "name": "store"},
    ],
)
async def test_a_replica_that_this_router_cannot_have_is_refused(body: dict[str, str]) -> None:
    async with live(engines("a"), flags("a")) as router:
        status, answer = await router.edit("add", body)
        assert (status, bool(answer["error"])) == (400, True)
        assert len((await router.fleet())["replicas"]) == 1


async def test_two_hundred_replicas_that_came_and_went_leave_nothing_behind() -> None:
    async with live(engines("a"), flags("a")) as router:
        await router.until_up("a")
        await router.complete()
        lines, tasks = len(await router.metrics()), len(asyncio.all_tasks())
        for number in range(200):
            name = {"name": f"x{number}"}
            assert (await router.edit("add", {"url": "http://127.0.0.1:1", **name}))[0] == 201
            assert (await router.edit("remove", name))[0] == 200
        await router.until(lambda shown: shown["discovery"]["rows"]["spare"] == 7)
        assert len(await router.metrics()) == lines
        await router.until(lambda shown: len(asyncio.all_tasks()) <= tasks)
        assert await router.complete() == "a"


async def test_a_replica_that_served_and_left_again_and_again_leaves_nothing_behind() -> None:
    settings = {"policy": PolicyConfig(), "time_outs": TimeOuts(pool_idle_s=0.1)}
    async with live(engines("a", "b"), flags("a"), **settings) as router:
        await router.until_up("a")
        await router.complete()
        settled = await router.metrics()
        tasks = len(asyncio.all_tasks())
        for _ in range(12):
            await router.edit("add", {"url": router.engines["b"].url, "name": "b"})
            await router.until_up("a", "b")
            await router.edit("drain", {"name": "a"})
            assert await router.complete() == "b"
            await router.edit("undrain", {"name": "a"})
            await router.edit("remove", {"name": "b"})
        await router.until(lambda shown: shown["discovery"]["rows"]["spare"] == 7)
        assert len(await router.metrics()) == len(settled)
        await router.until(lambda shown: len(asyncio.all_tasks()) <= tasks)
        assert set(router.gateway._sources._served) <= {"a"}
        assert await router.complete() == "a"


# DNS


async def test_a_name_is_a_replica_at_each_of_its_addresses() -> None:
    def dns(engines: dict[str, Engine]) -> tuple[Fleet, dict[str, Any]]:
        port = engines["a"].url.rpartition(":")[2]
        config = RouterConfig(worker_urls=[f"dns://localhost:{port}"])
        return fleet_of(config), {"worker_urls": config.worker_urls}

    async with live(engines("a"), dns) as router:
        address = router.engines["a"].url.removeprefix("http://")
        await router.until_up(address)
        assert await router.complete() == address
