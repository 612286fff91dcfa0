from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.signals import discovery
from router.signals.discovery import event_sources, published, sglang_load, sglang_sources, vllm_sources
from router.signals.subscriber import Source
from tests.router.signals.events import VECTORS


def recorded(name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text())
    return answer


@asynccontextmanager
async def an_engine(**answers: object) -> AsyncIterator[str]:
    """Serves each path in `answers` as JSON; every other path is 404."""

    async def answer(request: web.Request) -> web.Response:
        body = answers.get(request.path.strip("/"))
        return web.json_response(body) if body is not None else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def sources_of(base_url: str) -> list[Source]:
    async with aiohttp.ClientSession() as session:
        return await event_sources(session, base_url, timeout_s=2.0)


async def test_vllm_names_a_source_for_each_rank_at_the_host_of_its_url() -> None:
    async with an_engine(kv_event_sources=recorded("vllm_kv_event_sources")) as url:
        assert await sources_of(url) == [
            Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5567", rank=0),
            Source("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5568", rank=1),
        ]


async def test_sglang_names_base_ports_to_which_the_rank_is_added() -> None:
    async with an_engine(server_info=recorded("sglang_server_info_kv_events")) as url:
        assert await sources_of(url) == [
            Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559", rank=0, one_copy=True),
            Source("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5560", rank=1, one_copy=True),
        ]


async def test_sglang_names_its_load_sockets_in_the_same_answer() -> None:
    info = recorded("sglang_server_info_kv_events")
    async with an_engine(get_server_info=info) as url, aiohttp.ClientSession() as session:
        found = await published(session, url, timeout_s=2.0)
    assert (found.load, found.load_topic) == (("tcp://127.0.0.1:5561", "tcp://127.0.0.1:5562"), "load")
    assert len(found.events) == 2


@pytest.mark.parametrize("answer", [[], {"0": None}, {"kv_events": None}, {"0": {"publisher": "null"}}, {"x": {}}])
async def test_an_engine_that_names_nothing_usable_has_no_sources(answer: object) -> None:
    async with an_engine(kv_event_sources=answer, server_info=answer) as url:
        assert await sources_of(url) == []


async def test_an_engine_that_is_down_has_no_sources() -> None:
    async with an_engine() as url:
        assert await sources_of(url) == []
    assert await sources_of(url) == []


def test_a_named_host_is_kept_and_a_version_6_host_is_bracketed() -> None:
    entry = {"publisher": "zmq", "endpoint": "tcp://10.0.0.7:5557", "replay_endpoint": None, "topic": "kv"}
    assert vllm_sources({"0": entry}, "example") == [Source("tcp://10.0.0.7:5557", None, "kv", 0)]
    entry["endpoint"] = "tcp://*:5557"
    assert vllm_sources({"0": entry}, "fd00::1")[0].events == "tcp://[fd00::1]:5557"
    info = {"publisher": "zmq", "endpoint_host": "10.0.0.8", "endpoint_port_base": 7000}
    assert sglang_sources({"kv_events": info}, "x") == [Source("tcp://10.0.0.8:7000", rank=0, one_copy=True)]


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": "garbage"},
        {"endpoint": "tcp://"},
        {"endpoint": "tcp://h:0"},
        {"endpoint": "tcp://h:65536"},
        {"endpoint": "tcp://h 1:5"},
        {"endpoint": 7},
    ],
)
def test_an_address_no_socket_can_be_attached_to_is_no_source(changes: dict[str, object]) -> None:
    entry = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None, **changes}
    assert vllm_sources({"0": entry}, "h") == []
    assert [source.rank for source in vllm_sources({"0": entry, "1": {**entry, "endpoint": "tcp://*:5558"}}, "h")] == [
        1
    ]


def test_a_replay_address_that_is_none_costs_only_the_replay() -> None:
    entry = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:"}
    assert vllm_sources({"0": entry}, "h") == [Source("tcp://h:5557", None, rank=0)]


@pytest.mark.parametrize("rank", ["9" * 5000, "1024", "-1", "²", "", "1.5"])
def test_a_rank_that_cannot_be_is_none(rank: str) -> None:
    assert vllm_sources({rank: {"publisher": "zmq", "endpoint": "tcp://*:5557"}}, "h") == []


@pytest.mark.parametrize("base", [0, -5, 70_000, 10**30, "5557", True])
def test_a_base_port_that_is_none_names_no_source_and_no_load_socket(base: object) -> None:
    info = {"publisher": "zmq", "endpoint_port_base": base, "load_endpoint_port_base": base}
    assert sglang_sources({"kv_events": info}, "h") == []
    assert sglang_load({"kv_events": info}, "h") == ((), "")


async def test_an_answer_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_MAX_ANSWER_BYTES", 10)
    async with an_engine(kv_event_sources=recorded("vllm_kv_event_sources")) as url:
        assert await sources_of(url) == []
