"""Admin calls add, drain and remove replicas of a running router, and leave nothing of them behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.config import PolicyConfig, RouterConfig, fleet_of
from router.fleet import Fleet
from router.gateway import Gateway
from router.http.contract import TimeOuts
from tests.router.discovery.live import KEY, Live, engines, flags, live
from tests.router.test_gateway import MODEL, Engine

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


async def test_a_hundred_replicas_that_came_and_went_leave_nothing_behind() -> None:
    async with live(engines("a"), flags("a")) as router:
        await router.until_up("a")
        await router.complete()
        lines, tasks = len(await router.metrics()), len(asyncio.all_tasks())
        for number in range(100):
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
