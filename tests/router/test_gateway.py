"""A whole router in this process, in front of servers that answer as engines do: what its parts tell each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.config import (
    ArmConfig,
    ExperimentConfig,
    LoadConfig,
    LookUpConfig,
    OtherTiersConfig,
    PolicyConfig,
    ReceiptConfig,
    RouterConfig,
)
from router.errors import ConfigError
from router.fleet import Fleet, LinkSpec, ReplicaSpec, StoreSpec
from router.gateway import Gateway
from router.signals import poller

MODEL = "m"
KEY = {"authorization": "Bearer s3cret"}
PAGE = """vllm:num_requests_running{engine="0",model_name="m"} 1
vllm:num_requests_waiting{engine="0",model_name="m"} 2
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1
"""


class Engine:
    """A server with the routes of vLLM that the router needs, which notes what it is sent."""

    def __init__(self, page: str = PAGE, answer_fields: dict[str, str] | None = None) -> None:
        self.page = page
        self.answer_fields = answer_fields or {}
        self.sent: list[dict[str, str]] = []
        self.url = ""
        self.adapters: dict[str, str] = {}  # name -> where its weights come from

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        adapters = [{"id": name, "parent": MODEL, "root": root} for name, root in self.adapters.items()]
        return web.json_response({"data": [{"id": MODEL}, *adapters]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page)

    async def _complete(self, request: web.Request) -> web.Response:
        await request.read()
        self.sent.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response({"usage": {"prompt_tokens": 3, "completion_tokens": 1}}, headers=self.answer_fields)


class Running:
    """A started router and a client of it."""

    def __init__(self, gateway: Gateway, client: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.traffic = f"http://127.0.0.1:{gateway.traffic_port}"
        self.admin = f"http://127.0.0.1:{gateway.admin_port}"
        self._client = client

    async def fleet(self) -> Any:
        async with self._client.get(f"{self.admin}/fleet") as response:
            return await response.json()

    async def metrics(self) -> set[str]:
        async with self._client.get(f"{self.admin}/metrics") as response:
            return set((await response.text()).splitlines())

    async def complete(self, fields: dict[str, str] | None = None, **changes: Any) -> str:
        """The replica that answered. fields : of the head"""
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1, **changes}
        async with self._client.post(f"{self.traffic}/v1/completions", json=body, headers=fields) as response:
            await response.read()
            assert response.status == 200
            return response.headers["x-tfirst-replica"]

    async def post_events(self, push: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        async with self._client.post(f"{self.admin}/events", json=push, headers=headers) as response:
            return response.status, await response.json()

    async def until(self, holds: Callable[[Any], bool]) -> Any:
        """/fleet, once `holds` says so of it."""
        async with asyncio.timeout(10):
            while True:
                shown = await self.fleet()
                if holds(shown):
                    return shown
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*engines: Engine, fleet: Fleet | None = None, **changes: Any) -> AsyncIterator[Running]:
    """A router in front of `engines`, up; `fleet` may name them otherwise once their URLs are known."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            server = await stack.enter_async_context(TestServer(engine.app()))
            engine.url = str(server.make_url("")).rstrip("/")
        replicas = [ReplicaSpec(name=f"r{at}", url=engine.url) for at, engine in enumerate(engines)]
        config = RouterConfig(host="127.0.0.1", port=0, admin_host="127.0.0.1", admin_port=0, **changes)
        gateway = Gateway(config, fleet or Fleet(replicas=replicas))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        router = Running(gateway, client)
        await router.until(lambda shown: all(replica["models"] for replica in shown["replicas"]))
        yield router


def a_push(source: str) -> dict[str, Any]:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": list(range(16)),
        "block_size": 16,
        "lora_id": None,
    }
    return {"source": source, "incarnation": 1, "batches": [{"seq": 1, "events": [stored]}]}


async def test_posted_events_reach_the_directory_with_the_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY", "s3cret")
    async with running(Engine(), admin_key_env="ADMIN_KEY") as router:
        assert (await router.post_events(a_push("r0"), {}))[0] == 401
        status, answer = await router.post_events(a_push("r0"), KEY)
        assert (status, answer["applied"], answer["state"]) == (200, 1, "live")
        shown = await router.fleet()
        (source,) = shown["event_sources"]
        assert (source["name"], source["carrier"], source["state"]) == ("r0", "http", "live")
        assert shown["directory_blocks"]["hbm"] == 1
        assert 'tfirst_event_source_state{source="r0",state="live"} 1.0' in await router.metrics()


async def test_a_process_that_started_anew_loses_what_was_posted_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ADMIN_KEY", "s3cret")
    engine = Engine(PAGE + "process_start_time_seconds 1.0\n")
    async with running(engine, admin_key_env="ADMIN_KEY", load=LoadConfig(period_s=0.02)) as router:
        await router.until(lambda shown: shown["replicas"][0]["foreign_waiting"])
        await router.post_events(a_push("r0"), KEY)
        assert (await router.fleet())["directory_blocks"]["hbm"] == 1
        engine.page = engine.page.replace("} 2", "} 7")  # it is seen alive after it posted
        await router.until(lambda shown: shown["replicas"][0]["foreign_waiting"] == 7.0)
        engine.page = PAGE + "process_start_time_seconds 2.0\n"
        shown = await router.until(lambda shown: shown["directory_blocks"]["hbm"] == 0)
        assert shown["event_sources"][0]["state"] == "degraded"
        await router.post_events({**a_push("r0"), "incarnation": 2}, KEY)
        shown = await router.until(lambda shown: shown["directory_blocks"]["hbm"] == 1)
        assert shown["event_sources"][0]["state"] == "live"


@pytest.mark.parametrize("then", [{}, {"ad-1": "/new"}])
async def test_an_adapter_that_left_or_came_anew_under_its_name_loses_its_credit(
    then: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADMIN_KEY", "s3cret")
    monkeypatch.setattr(poller, "_MODELS_EVERY", 1)
    engine = Engine()
    engine.adapters = {"ad-1": "/old", "ad-2": "/old"}
    async with running(engine, admin_key_env="ADMIN_KEY", load=LoadConfig(period_s=0.02)) as router:
        push = a_push("r0")
        (event,) = push["batches"][0]["events"]
        push["batches"][0]["events"] = [
            {**event, "lora_name": f"ad-{number}", "block_hashes": [number]} for number in (1, 2)
        ]
        await router.post_events(push, KEY)
        assert (await router.fleet())["directory_blocks"]["hbm"] == 2
        engine.adapters = {**then, "ad-2": "/old"}
        shown = await router.until(lambda shown: shown["directory_blocks"]["hbm"] < 2)
        assert (shown["directory_blocks"]["hbm"], shown["event_sources"][0]["state"]) == (1, "live")


async def test_without_an_admin_key_nobody_may_post() -> None:
    async with running(Engine()) as router:
        assert (await router.post_events(a_push("r0"), KEY))[0] == 403


@pytest.mark.parametrize("changes", [{"admin_key_env": "NO_KEY"}, {"api_key_env": "NO_KEY"}])
async def test_a_key_that_is_not_in_the_environment_stops_the_start(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    gateway = Gateway(
        RouterConfig(host="127.0.0.1", port=0, admin_host="127.0.0.1", admin_port=0, **changes),
        Fleet(replicas=[ReplicaSpec(name="a", url="http://127.0.0.1:9")]),
    )
    with pytest.raises(ConfigError, match="NO_KEY, which holds no usable key"):
        await gateway.start()


async def test_ranks_behind_one_url_have_their_own_load_and_get_their_own_requests() -> None:
    page = PAGE + PAGE.replace('engine="0"', 'engine="1"').replace("} 2", "} 5")
    engine = Engine(page)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(TestServer(engine.app()))
        url = str(server.make_url(""))
        ranks = Fleet(replicas=[ReplicaSpec(name=f"r{rank}", url=url) for rank in range(2)])
        router = await stack.enter_async_context(running(fleet=ranks))
        shown = await router.until(lambda shown: all(r["foreign_waiting"] for r in shown["replicas"]))
        assert [replica["foreign_waiting"] for replica in shown["replicas"]] == [2.0, 5.0]
        served_by = [await router.complete() for _ in range(4)]
    assert [f"r{sent['x-data-parallel-rank']}" for sent in engine.sent] == served_by


@pytest.mark.parametrize(
    ("asks", "streams", "asked"), [(True, False, True), (True, True, False), (False, False, False)]
)
async def test_load_that_answers_tell_is_taken_in_and_asked_for_only_where_configured(
    asks: bool, streams: bool, asked: bool
) -> None:
    told = {"endpoint-load-metrics": "TEXT named_metrics.num_requests_waiting=7.0"}
    engine = Engine(answer_fields=told)
    async with running(engine, load=LoadConfig(from_answers=asks)) as router:
        await router.complete(stream=streams)
        assert 'tfirst_load_reports_total{origin="response"} 1.0' in await router.metrics()
        assert {"poll", "response"} <= (await router.fleet())["replicas"][0]["load_age_s"].keys()
    assert ("endpoint-load-metrics-format" in engine.sent[0]) == asked


@pytest.mark.parametrize(("engine_size", "warned"), [(64, False), (8, False), (24, True)])
async def test_blocks_that_do_not_fit_are_warned_of_and_others_are_not(
    engine_size: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Engine(), Engine(PAGE.replace('block_size="16"', f'block_size="{engine_size}"'))
    async with running(*engines) as router:
        await router.until(lambda shown: all(replica["foreign_waiting"] for replica in shown["replicas"]))
    assert ("its cache cannot be matched" in caplog.text) is warned


async def test_what_the_router_shows_is_json_with_every_part() -> None:
    async with running(Engine(), Engine()) as router:
        shown = await router.fleet()
        assert [source["state"] for source in shown["event_sources"]] == ["never_connected"] * 2
        assert shown["prompts"]["source"] == "bytes"
        assert shown["other_tiers"] == {}
        assert shown["replicas"][0]["capacity_tokens"] == 16000.0
        assert msgspec.json.decode(msgspec.json.encode(shown)) == shown


@pytest.mark.parametrize("prompt", [[7] * 400, "once upon a time " * 100])
async def test_without_events_a_prompt_goes_back_to_the_replica_that_computed_it(
    prompt: object, tmp_path: Path
) -> None:
    receipts = tmp_path / "receipts.jsonl"
    async with running(Engine(), Engine(), receipts=ReceiptConfig(path=str(receipts))) as router:
        shown = await router.until(lambda shown: all(r["cache_is_guessed"] for r in shown["replicas"]))
        assert [source["state"] for source in shown["event_sources"]] == ["never_connected"] * 2
        served_by = [await router.complete(prompt=prompt) for _ in range(6)]
    assert len(set(served_by)) == 1
    *lines, _ = receipts.read_text().split("\n")
    written = [msgspec.json.decode(line) for line in lines]
    local = [receipt["candidates"][receipt["chosen"]]["local_tokens"] for receipt in written]
    assert local[0] == 0
    assert all(tokens >= 16 for tokens in local[1:])


class Pool:
    """A coordinator of LMCache whose shared pool has every chunk it is asked about."""

    async def answer(self, request: web.Request) -> web.Response:
        chunks = len((await request.json())["token_ids"]) // 256
        placement = {"instance_id": "mp-0", "tier": "L2", "incarnation": 1, "shared": True}
        results = [{"key": {"chunk_hash_hex": f"{at:x}"}, "placements": [placement]} for at in range(chunks)]
        return web.json_response({"chunks": chunks, "results": results})


async def test_what_a_look_up_found_is_a_path_of_the_next_prompt(tmp_path: Path) -> None:
    receipts = tmp_path / "receipts.jsonl"
    app = web.Application()
    app.router.add_post("/directory/lookup", Pool().answer)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(TestServer(app))
        engines = [await stack.enter_async_context(TestServer(Engine().app())) for _ in range(2)]
        fleet = Fleet(
            replicas=[ReplicaSpec(name=f"r{at}", url=str(engine.make_url(""))) for at, engine in enumerate(engines)],
            links={"net": LinkSpec(gb_s=10.0), "pcie": LinkSpec(gb_s=25.0)},
            store=StoreSpec(network="net", host="pcie"),
        )
        look_up = LookUpConfig(service="coordinator", url=str(pool.make_url("")), model=MODEL, deadline_s=5.0)
        router = await stack.enter_async_context(
            running(
                fleet=fleet,
                other_tiers=OtherTiersConfig(look_up=look_up),
                receipts=ReceiptConfig(path=str(receipts)),
            )
        )
        await router.complete(prompt=[7] * 1025)
        await router.until(lambda shown: shown["other_tiers"]["look_up"]["blocks_remembered"] == 4)
        await router.complete(prompt=[7] * 1025)
        assert 'tfirst_look_ups_total{result="asked"} 1.0' in await router.metrics()
    *lines, _ = receipts.read_text().split("\n")
    found = [
        {(candidate["path"], candidate["fetched_tokens"]) for candidate in receipt["candidates"]}
        for receipt in map(msgspec.json.decode, lines)
    ]
    assert ("remote", 1024) not in found[0]
    assert ("remote", 1024) in found[1]


# Receipts and experiments


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


async def test_receipts_are_worked_out_beside_the_loop_and_whole(tmp_path: Path) -> None:
    path, prompt = tmp_path / "receipts.jsonl", list(range(100, 165))
    async with running(Engine(), Engine(), Engine(), receipts=ReceiptConfig(path=str(path), share=0.0)) as router:
        for session in ("s-1", "s-1", "s-2"):
            await router.complete({"x-session-id": session}, prompt=prompt)
        await router.complete({"x-tfirst-explain": "1"}, prompt=prompt)
        assert (await router.fleet())["receipts"]["dropped"] == 0
    first, second, third, explained = lines_of(path)
    assert len(first["candidates"]) == first["possible"] == 3  # no more than the best four beside the chosen
    assert (first["blocks"], first["block_tokens"], len(first["marks"])) == (4, 16, 4)
    assert first["marks"] == second["marks"] == third["marks"]
    assert first["unit"] == second["unit"] != third["unit"]
    assert "s-1" not in path.read_text()
    assert all(one["first_token_p99_s"] is not None for one in explained["candidates"])
    assert explained["explained"]


async def test_arms_are_dealt_by_a_header_written_down_counted_and_changed_by_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    rules = {
        "a": ArmConfig(policy=PolicyConfig(name="ttft")),
        "b": ArmConfig(policy=PolicyConfig(name="least_request")),
    }
    experiment = ExperimentConfig(arms=rules, assign_by="header:X-User")
    receipts = ReceiptConfig(path=str(path))
    async with running(Engine(), Engine(), experiment=experiment, receipts=receipts) as router:
        for user in range(12):
            for _ in range(2):
                await router.complete({"x-user": f"user-{user}"})
        assert (await router.fleet())["experiment"]["arms"]["b"] == {"policy": "least_request", "share": 0.5}
        assert any(
            line.startswith('tfirst_arm_requests_total{arm="a",outcome="ok"}') for line in await router.metrics()
        )
        only_b = ExperimentConfig(arms={"b": rules["b"]}, assign_by="header:X-User")
        router.gateway.reload(lambda: RouterConfig(experiment=only_b))
        await router.complete({"x-user": "user-1"})
        router.gateway.reload(lambda: RouterConfig())  # to end it takes a restart: nothing changes
        await router.complete({"x-user": "user-1"})
    lines = lines_of(path)
    arms: dict[str, set[str]] = {}
    for line in lines[:24]:
        arms.setdefault(line["unit"], set()).add(line["arm"])
    assert len(arms) == 12
    assert all(len(some) == 1 for some in arms.values())
    assert {line["arm"] for line in lines[:24]} == {"a", "b"}
    assert [line["arm"] for line in lines[24:]] == ["b", "b"]


async def test_a_client_that_nobody_trusts_may_not_choose_the_policy() -> None:
    async with running(Engine()) as router, aiohttp.ClientSession() as client:
        body = {"model": MODEL, "prompt": [1, 2, 3]}
        fields = {"x-tfirst-policy": "ttft"}
        async with client.post(f"{router.traffic}/v1/completions", json=body, headers=fields) as response:
            assert response.status == 403
            assert "may not choose the policy" in (await response.json())["error"]["message"]


class LateEngine(Engine):
    """One that answers its probes once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def _health(self, request: web.Request) -> web.Response:
        self.asked.set()
        await self.answers.wait()
        return web.Response()


async def test_the_first_request_after_a_start_is_not_refused_because_nobody_was_asked_yet() -> None:
    engine = LateEngine()
    async with TestServer(engine.app()) as server, aiohttp.ClientSession() as client:
        fleet = Fleet(replicas=[ReplicaSpec(name="a", url=str(server.make_url("")).rstrip("/"))])
        gateway = Gateway(RouterConfig(host="127.0.0.1", port=0, admin_host="127.0.0.1", admin_port=0), fleet)
        starting = asyncio.create_task(gateway.start())
        try:
            await engine.asked.wait()
            assert not starting.done()
            engine.answers.set()
            await starting
            assert await Running(gateway, client).complete() == "a"
        finally:
            engine.answers.set()
            await starting
            await gateway.stop()
