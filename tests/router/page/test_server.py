"""The page over HTTP: files, a stream of news, one decision opened."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from router.admin import AdminPort
from router.page import Live, Page, server
from router.page.server import MOST_WATCHERS
from tests.router.field_bench import until
from tests.router.page.builders import a_candidate, a_fleet_view, a_replica, end


class Served:
    """A running admin port with a page, and a client of it."""

    def __init__(self, port: AdminPort, client: aiohttp.ClientSession) -> None:
        self.port = port
        self.client = client
        self.url = f"http://127.0.0.1:{port.port}"

    async def get(self, path: str, **fields: str) -> tuple[int, aiohttp.ClientResponse, bytes]:
        async with self.client.get(f"{self.url}{path}", headers=fields) as response:
            return response.status, response, await response.read()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[aiohttp.StreamReader]:
        async with self.client.get(f"{self.url}/page/events") as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            yield response.content


async def news(stream: aiohttp.StreamReader) -> dict[str, Any]:
    """The next event of a stream."""
    async with asyncio.timeout(10):
        while not (line := await stream.readline()).startswith(b"data: "):
            assert line, "the stream ended"
    told: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data: "))
    return told


@asynccontextmanager
async def serving(
    live: Live | None = None, fleet: Callable[[], dict[str, Any]] = lambda: a_fleet_view(a_replica())
) -> AsyncIterator[Served]:
    page = Page(live or Live(), fleet, can_edit=True, period_s=0.01)
    port = AdminPort(not_ready=lambda: None, metrics_text=lambda: b"", fleet=fleet, page=page.add_to)
    await port.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as client:
            yield Served(port, client)
    finally:
        await port.stop()


async def test_everything_the_page_asks_for_is_there_and_nothing_is_from_elsewhere() -> None:
    async with serving() as served:
        seen, waiting = set(), {"/"}
        while waiting:
            path = waiting.pop()
            status, response, body = await served.get(path)
            assert status == 200, path
            assert "default-src 'none'" in response.headers["content-security-policy"]
            seen.add(path)
            text = body.decode()
            named = re.findall(r'(?:src|href)="(page/[^"]+)"', text) + [
                f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)
            ]
            waiting |= {f"/{name}" for name in named} - seen
            elsewhere = set(re.findall(r"https?://[^\s\"'<>]+", text)) - {"http://www.w3.org/2000/svg"}
            assert not elsewhere, path
        kinds = {path.rpartition(".")[2] for path in seen}
        assert kinds == {"/", "css", "js", "svg"}


async def test_a_file_that_is_known_is_not_sent_again() -> None:
    async with serving() as served:
        _, response, body = await served.get("/page/main.js")
        assert body
        status, _, again = await served.get("/page/main.js", **{"if-none-match": response.headers["etag"]})
    assert (status, again) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/__init__.py", "/page/..%2fserver.py", "/page/%2e%2e/admin.py", "/page/"]
)
async def test_only_the_pages_own_files_are_served(path: str) -> None:
    async with serving() as served:
        assert (await served.get(path))[0] == 404


async def test_who_watches_gets_all_there_is_and_then_what_ended_since() -> None:
    live = Live()
    for index in range(3):
        end(live, index, at=1000.0 + index)
    async with serving(live) as served, served.watching() as stream:
        first = await news(stream)
        assert first["first"]
        assert [one["id"] for one in first["decisions"]] == ["r-0", "r-1", "r-2"]
        assert len(first["points"]) == 3
        assert first["fleet"]["replicas"][0]["name"] == "a"
        second = await news(stream)
        assert (second["first"], second["decisions"], second["points"]) == (False, [], [])
        end(live, 3, at=1010.0)
        while not (told := await news(stream))["decisions"]:
            pass
        assert [one["id"] for one in told["decisions"]] == ["r-3"]
        assert told["run"] == first["run"]


async def test_text_of_a_request_cannot_end_an_event_or_begin_another() -> None:
    live = Live()
    end(live, request_id="x\n\nevent: news\ndata: {}\r\n")
    async with serving(live) as served, served.watching() as stream:
        told = await news(stream)
        assert told["decisions"][0]["id"] == "x\n\nevent: news\ndata: {}\r\n"
        assert not (await news(stream))["first"]


async def test_the_fleet_is_read_once_for_all_who_watch() -> None:
    reads = 0

    def fleet() -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return a_fleet_view(a_replica())

    page = Page(Live(), fleet, can_edit=False, clock=lambda: 0.0)
    for _ in range(5):
        page._news(None)
    assert reads == 1


async def test_an_opened_decision_names_every_candidate() -> None:
    live = Live()
    end(live, 0, a_candidate(replica="b"))
    async with serving(live) as served:
        status, _, body = await served.get("/page/decisions/1")
        told = msgspec.json.decode(body)
    assert status == 200
    assert [one["replica"] for one in told["candidates"]] == ["a", "b"]


@pytest.mark.parametrize("path", ["/page/decisions/2", "/page/decisions/1?run=other", "/page/decisions/x"])
async def test_a_decision_that_is_not_there_is_not_another_one(path: str) -> None:
    live = Live()
    end(live)
    async with serving(live) as served:
        assert (await served.get(path))[0] == 404


async def test_there_is_a_limit_to_open_pages_and_one_that_is_closed_makes_room() -> None:
    async with serving() as served:
        held = [served.watching() for _ in range(MOST_WATCHERS)]
        for one in held:
            await news(await one.__aenter__())
        assert (await served.get("/page/events"))[0] == 503
        for one in held:
            await one.__aexit__(None, None, None)
        async with asyncio.timeout(10):
            while True:
                async with served.client.get(f"{served.url}/page/events") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.01)


async def test_a_watcher_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.05)
    large = a_fleet_view(a_replica("x" * 1_000_000))
    page = Page(Live(), lambda: large, can_edit=False, period_s=0.001)
    port = AdminPort(not_ready=lambda: None, metrics_text=lambda: b"", fleet=dict, page=page.add_to)
    await port.start("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", port.port)) as client:
            client.sendall(b"GET /page/events HTTP/1.1\r\nHost: h\r\n\r\n")
            await until(lambda: page._watchers == 1)
            await until(lambda: page._watchers == 0)
    finally:
        await port.stop()


async def test_when_the_router_ends_the_stream_ends_whole_rather_than_by_force() -> None:
    async with serving() as served, served.watching() as stream:
        await news(stream)
        await served.port.stop()
        rest = await stream.read()  # would raise if it were cut
    assert rest.endswith(b"\n")
