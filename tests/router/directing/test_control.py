"""The calls behind hints, against a server that answers as LMCache does, or does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.actions import Hint, Means, Withdraw
from router.directing import control
from router.directing.control import Control, PromptIds
from router.directing.settings import LmcacheSpec
from tests.builders import MODEL, a_request

IDS = b"[1, 2, 3]"
Answer = Callable[[web.Request], Any]


class Lmcache:
    """Both services on one port. answers : to each POST; by default as if all went well"""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, Any]] = []
        self.status = 200
        self.answer: bytes | None = None
        self.release = asyncio.Event()
        self.release.set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._hear)
        return app

    async def _hear(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.heard.append((request.method, request.raw_path, json.loads(text) if text else None))
        await self.release.wait()
        good = b'{"num_tokens": 48, "request_id": "p 1", "chunks": 3}'
        return web.Response(status=self.status, body=good if self.answer is None else self.answer)


class Bench:
    def __init__(self, control: Control, lmcache: Lmcache, results: list[str]) -> None:
        self.control, self.lmcache, self.results = control, lmcache, results

    def hint(self, means: Means = Means.PREFETCH, **request: Any) -> Hint:
        hint = Hint(means, a_request(**request), 0, 1)
        self.control.obey(hint)
        return hint

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110  what a server has heard is no event of ours
                await asyncio.sleep(0.002)

    async def results_are(self, *results: str) -> None:
        await self.until(lambda: len(self.results) >= len(results))
        assert self.results == list(results)


@asynccontextmanager
async def bench(*, url: str | None = None, timeout_s: float = 5.0, salt: str = "") -> AsyncIterator[Bench]:
    lmcache, results = Lmcache(), list[str]()
    server = TestServer(lmcache.app())
    await server.start_server()
    where = url or str(server.make_url("")).rstrip("/")
    spec = LmcacheSpec(controller=f"{where}/", coordinator=where, timeout_s=timeout_s)
    control = Control(spec, ["i0", "i1"], lambda hint, result: results.append(result))
    control.prompts.remember(a_request(), IDS, salt)
    try:
        yield Bench(control, lmcache, results)
    finally:
        lmcache.release.set()
        await control.stop()
        await server.close()


async def test_each_hint_is_one_call_with_the_prompt_as_it_came() -> None:
    async with bench() as use:
        for means in (Means.MOVE, Means.PIN, Means.PREFETCH):
            use.hint(means)
            await use.until(lambda: len(use.results) == len(use.lmcache.heard) > 0)
        await use.results_are("worked", "worked", "worked")
        (_, move, moved), (_, pin, pinned), (_, load, loaded) = use.lmcache.heard
        assert (move, pin, load) == ("/move", "/pin", "/cache/prefetches")
        assert moved["old_position"] == ["i1", "LocalCPUBackend"]
        assert moved["new_position"] == ["i0", "LocalCPUBackend"]
        assert (pinned["instance_id"], pinned["tokens"]) == ("i0", [1, 2, 3])
        assert (loaded["model_name"], loaded["world_size"], loaded["token_ids"]) == (MODEL, 1, [1, 2, 3])


@pytest.mark.parametrize(
    ("status", "answer", "result"),
    [
        (200, b'{"num_tokens": 0, "chunks": 0}', "nothing"),
        (500, b"{}", "failed"),
        (404, None, "failed"),
        (301, None, "failed"),
        (200, b"<html>", "failed"),
        (200, b"", "failed"),
        (200, b"[" * 200_000, "failed"),
    ],
)
@pytest.mark.parametrize("means", [Means.MOVE, Means.PREFETCH])
async def test_rubbish_and_refusals_are_counted_and_nothing_more(
    means: Means, status: int, answer: bytes | None, result: str
) -> None:
    async with bench() as use:
        use.lmcache.status, use.lmcache.answer = status, answer
        use.hint(means)
        await use.results_are(result)
        use.lmcache.status, use.lmcache.answer = 200, None
        use.hint(means)
        await use.results_are(result, "worked")


async def test_a_service_that_is_down_is_a_failure() -> None:
    async with bench(url="http://127.0.0.1:1") as use:
        use.hint()
        await use.results_are("failed")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"rubbish\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
async def test_a_service_that_breaks_off_is_a_failure(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, bench(url=f"http://127.0.0.1:{port}") as use:
        use.hint()
        await use.results_are("failed")


async def test_a_service_that_does_not_answer_is_given_up() -> None:
    async with bench(timeout_s=0.05) as use:
        use.lmcache.release.clear()
        use.hint()
        await use.results_are("failed")


async def test_a_prefetch_that_has_begun_is_taken_back_by_a_second_call() -> None:
    async with bench() as use:
        hint = use.hint()
        await use.results_are("worked")
        use.control.obey(Withdraw(hint))
        await use.results_are("worked", "withdrawn")
        assert use.lmcache.heard[1] == ("DELETE", "/cache/prefetches/i0/p%201", None)
        use.control.obey(Withdraw(hint))  # once is enough
        await use.control.stop()
        assert len(use.lmcache.heard) == 2


async def test_one_that_is_taken_back_while_it_is_asked_for_ends_when_its_name_is_known() -> None:
    async with bench() as use:
        use.lmcache.release.clear()
        hint = use.hint()
        await use.until(lambda: len(use.lmcache.heard) == 1)
        use.control.obey(Withdraw(hint))
        use.lmcache.release.set()
        await use.results_are("worked", "withdrawn")
        assert [method for method, _, _ in use.lmcache.heard] == ["POST", "DELETE"]


async def test_one_that_was_not_asked_for_yet_never_is() -> None:
    async with bench() as use:
        use.lmcache.release.clear()
        for _ in range(control.CALLS_AT_ONCE):
            use.hint()
        last = use.hint()
        await use.until(lambda: len(use.lmcache.heard) == control.CALLS_AT_ONCE)
        use.control.obey(Withdraw(last))
        use.lmcache.release.set()
        await use.results_are("withdrawn", *["worked"] * control.CALLS_AT_ONCE)
        assert len(use.lmcache.heard) == control.CALLS_AT_ONCE


@pytest.mark.parametrize("status", [404, 405])
async def test_a_service_that_cannot_take_back_goes_on_and_that_is_counted(status: int) -> None:
    async with bench() as use:
        hint = use.hint()
        await use.results_are("worked")
        use.lmcache.status = status
        use.control.obey(Withdraw(hint))
        await use.results_are("worked", "not_withdrawn")


async def test_a_copy_that_has_begun_cannot_be_taken_back() -> None:
    async with bench() as use:
        hint = use.hint(Means.MOVE)
        await use.results_are("worked")
        use.control.obey(Withdraw(hint))
        await use.results_are("worked", "not_withdrawn")
        assert len(use.lmcache.heard) == 1


async def test_a_slow_service_costs_hints_and_not_memory() -> None:
    async with bench() as use:
        use.lmcache.release.clear()
        for _ in range(control.MOST_OPEN + 5):
            use.hint()
        assert use.results == ["dropped"] * 5


async def test_a_prompt_whose_tokens_are_not_known_is_not_told_of() -> None:
    async with bench() as use:
        use.hint(request_id="unknown")
        await use.results_are("untold")


async def test_a_salted_prompt_is_told_to_who_knows_salts() -> None:
    async with bench(salt="s") as use:
        use.hint(Means.MOVE)
        use.hint(Means.PREFETCH)
        await use.results_are("untold", "worked")
        assert use.lmcache.heard[0][2]["cache_salt"] == "s"


def test_prompts_are_remembered_up_to_a_size_the_oldest_go_first() -> None:
    prompts = PromptIds(most_bytes=10)
    for number in range(3):
        prompts.remember(a_request(request_id=str(number)), b"[1,2]", "")
    assert [prompts.get(str(number)) is None for number in range(3)] == [True, False, False]
    prompts.remember(a_request(request_id="2"), b"[1]", "")
    assert len(prompts) == 2
    prompts.remember(a_request(request_id="large"), b"[1,2,3,4,5,6]", "")
    assert len(prompts) == 2


@pytest.mark.parametrize(("ids", "base"), [(b"[[1], [2]]", ""), (b" [ [1]]", ""), (b"[1]", "base-of-an-adapter")])
def test_batches_and_adapters_are_not_remembered(ids: bytes, base: str) -> None:
    prompts = PromptIds()
    prompts.remember(a_request(base_model=base), memoryview(ids), "")
    assert len(prompts) == 0
