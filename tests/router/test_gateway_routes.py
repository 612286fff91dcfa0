"""Routes that are about state or about everybody, through a whole router in front of servers that keep responses."""

from __future__ import annotations

import os
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.test_gateway import MODEL, Engine, Running, running


class Keeper(Engine):
    """An engine that keeps the responses it makes, and loads adapters."""

    def __init__(self, name: str, card: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.name = name
        self.card = {"id": MODEL, **(card or {})}
        self.kept: list[str] = []
        self.asked = 0

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_get("/v1/responses/{id}", self._keeps)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [self.card, *({"id": name, "parent": MODEL} for name in self.adapters)]})

    async def _respond(self, request: web.Request) -> web.Response:
        asked = await request.json()
        previous = asked.get("previous_response_id")
        if previous is not None and previous not in self.kept:
            return web.json_response({"error": {"code": 404}}, status=404)
        self.kept.append(f"resp_{self.name}_{len(self.kept)}")
        return web.json_response({"id": self.kept[-1], "object": "response"})

    async def _keeps(self, request: web.Request) -> web.Response:
        self.asked += 1
        known = request.match_info["id"] in self.kept
        return web.json_response({"by": self.name}, status=200 if known else 404)

    async def _load(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.adapters[asked["lora_name"]] = asked.get("lora_path", "")
        return web.Response(text="Success")


async def ask(router: Running, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, router.traffic + path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def test_a_conversation_goes_on_where_its_responses_are_kept() -> None:
    engines = [Keeper(name) for name in "abc"]
    async with running(*engines) as router:
        for _ in range(4):
            status, made = await ask(router, "POST", "/v1/responses", {"model": MODEL, "input": "x"})
            assert status == 200
            for _ in range(3):
                body = {"model": MODEL, "input": "x", "previous_response_id": made["id"]}
                status, made = await ask(router, "POST", "/v1/responses", body)
                assert status == 200
                assert await ask(router, "GET", f"/v1/responses/{made['id']}") == (
                    200,
                    {"by": made["id"].split("_")[1]},
                )
    assert sum(engine.asked for engine in engines) == 12, "nobody else was asked"


async def test_a_response_made_before_this_router_started_is_found_and_one_nobody_made_is_not() -> None:
    engines = [Keeper(name) for name in "abc"]
    engines[2].kept.append("resp_old")
    async with running(*engines) as router:
        for _ in range(5):
            assert await ask(router, "GET", "/v1/responses/resp_old") == (200, {"by": "c"})
        assert (await ask(router, "GET", "/v1/responses/resp_none"))[0] == 404
        shown = await router.fleet()
        assert shown["in_flight"] == 0
        assert all(replica["up"] for replica in shown["replicas"])


async def test_an_adapter_is_loaded_everywhere_for_whoever_has_the_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "ADMIN", "s" * 40)
    engines = [Keeper(name) for name in "ab"]
    async with running(*engines, admin_key_env="ADMIN") as router:
        body = {"lora_name": "ad-1", "lora_path": "/a"}
        assert (await ask(router, "POST", "/v1/load_lora_adapter", body))[0] == 401
        status, report = await ask(router, "POST", "/v1/load_lora_adapter", body, key="s" * 40)
    assert (status, report["succeeded"]) == (200, 2)
    assert [[*engine.adapters] for engine in engines] == [["ad-1"], ["ad-1"]]


async def test_the_model_list_is_merged_from_replicas_that_are_up() -> None:
    engines = [Keeper("a", {"max_model_len": 40960, "created": 5, "root": "/m"}), Keeper("b", {"max_model_len": 8192})]
    async with running(*engines, model_aliases={"short": MODEL}) as router:
        status, listed = await ask(router, "GET", "/v1/models")
        assert status == 200
        assert listed == {
            "object": "list",
            "data": [{"id": MODEL, "max_model_len": 8192}, {"id": "short", "max_model_len": 8192}],
        }
