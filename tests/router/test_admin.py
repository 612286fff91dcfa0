from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from router.admin import AdminPort

KEY = {"authorization": "Bearer s3cret"}


class Taken:
    """Who takes pushed events: keeps what came and answers with a fixed status."""

    def __init__(self, status: int = 200) -> None:
        self.pushes: list[tuple[bytes, str]] = []
        self._status = status

    async def __call__(self, body: bytes, content_type: str) -> tuple[int, dict[str, Any]]:
        self.pushes.append((body, content_type))
        return self._status, {"applied": 1}


@asynccontextmanager
async def a_port(taken: Taken | None, key: str | None = "s3cret") -> AsyncIterator[str]:
    port = AdminPort(not_ready=lambda: None, metrics_text=lambda: b"", fleet=dict, pushed=taken, key=key)
    await port.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port.port}"
    finally:
        await port.stop()


async def post(base_url: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/events", data=io.BytesIO(body), headers=headers) as response,
    ):
        text = await response.text()
        return response.status, msgspec.json.decode(text) if response.content_type == "application/json" else text


@pytest.mark.parametrize("status", [200, 409, 422])
async def test_events_posted_with_the_key_are_handed_on_and_answered(status: int) -> None:
    taken = Taken(status)
    async with a_port(taken) as base_url:
        answer = await post(base_url, b"{}", {**KEY, "content-type": "application/msgpack"})
    assert (answer, taken.pushes) == ((status, {"applied": 1}), [(b"{}", "application/msgpack")])


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}, {"authorization": "Bearer \xff\u20ac"}],
)
async def test_without_the_key_nothing_is_taken(headers: dict[str, str]) -> None:
    taken = Taken()
    async with a_port(taken) as base_url:
        status, answer = await post(base_url, b"{}", headers)
    assert (status, taken.pushes) == (401, [])
    assert "key" in answer["error"]


async def test_with_no_key_configured_nobody_may_post() -> None:
    taken = Taken()
    async with a_port(taken, key=None) as base_url:
        status, _ = await post(base_url, b"{}", {"authorization": "Bearer None"})
    assert (status, taken.pushes) == (403, [])


async def test_a_push_larger_than_a_megabyte_is_taken() -> None:
    taken = Taken()
    async with a_port(taken) as base_url:
        status, _ = await post(base_url, b"x" * (3 << 20), KEY)
    assert (status, len(taken.pushes[0][0])) == (200, 3 << 20)


async def test_a_router_that_takes_no_events_has_no_such_route() -> None:
    async with a_port(None) as base_url:
        assert (await post(base_url, b"{}", KEY))[0] == 404
