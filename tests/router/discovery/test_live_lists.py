"""Who is gone from a list gets nothing and leaves nothing behind; who is broken off a list changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestServer

from router.config import RouterConfig, fleet_of
from router.discovery.config import DiscoveryConfig
from router.discovery.sources import NoList
from router.fleet import Fleet, ReplicaSpec
from router.health import HealthConfig
from router.http.contract import TimeOuts
from tests.router.discovery.live import KEY, Live, Registry, Streaming, engines, flags, live
from tests.router.test_gateway import MODEL, Engine

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
        async with asyncio.timeout(5):  # far less than a ghost costs without a limit on connecting
            assert {await router.complete() for _ in range(4)} == {"b"}
        assert router.gateway._core.dispatcher.health(1).failures > 0, "it was tried"
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


async def test_a_server_that_is_listed_once_for_each_rank_is_another_one_and_its_ranks_are_told_apart(
    tmp_path: Path,
) -> None:
    file = FleetFile(tmp_path / "fleet.json")
    async with live(engines("a", "b"), file) as router:
        await router.until_up("a", "b")
        file.urls["r0"] = file.urls["r1"] = file.urls["b"]
        file.write("r0", "r1")
        await router.until_up("r0", "r1")
        router.engines["b"].sent.clear()
        assert {await router.complete() for _ in range(8)} == {"r0", "r1"}
        told = {sent["x-data-parallel-rank"] for sent in router.engines["b"].sent}
        file.write("b")
        await router.until_up("b")
        assert await router.complete() == "b"
        assert "x-data-parallel-rank" not in router.engines["b"].sent[-1]
    assert told == {"0", "1"}


async def test_an_entry_that_changed_into_one_that_cannot_be_had_leaves_its_replica_as_it_was() -> None:
    registry = Registry()
    async with live(engines("a", "b"), flags("a"), registry) as router:
        registry.answer = [router.spec("b")]
        await router.until_up("a", "b")
        registry.answer = [msgspec.structs.replace(router.spec("b"), api_key_env="NO_SUCH_VARIABLE")]
        shown = await router.until(lambda shown: shown["discovery"]["left_out"])
        assert "NO_SUCH_VARIABLE" in shown["discovery"]["left_out"][0]
        assert {await router.complete() for _ in range(8)} == {"a", "b"}


async def test_another_event_address_changes_a_replica_under_way(tmp_path: Path) -> None:
    registry = Registry()
    async with live(engines("a", "b"), flags("a"), registry) as router:
        registry.answer = [router.spec("b")]
        await router.until_up("a", "b")
        learned = router.gateway._core.dispatcher.view
        learned.samples[1] = 7
        registry.answer = [msgspec.structs.replace(router.spec("b"), events="tcp://127.0.0.1:1")]
        await router.until(
            lambda shown: [one["address"] for one in shown["event_sources"]] == [None, "tcp://127.0.0.1:1"]
        )
        assert {await router.complete() for _ in range(8)} == {"a", "b"}
        assert learned.samples[1] == 7


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
