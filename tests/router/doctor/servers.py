"""Small servers that say what a test wants, and the doctor's report about them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from router.cli.doctor import examine_all
from router.doctor.examine import Plan, Server
from router.doctor.judge import Finding, Level
from router.doctor.show import Report
from router.signals.subscriber import Source

MODELS = {"object": "list", "data": [{"id": "m1", "object": "model", "owned_by": "vllm", "parent": None}]}
SGLANG_MODELS = {"object": "list", "data": [{"id": "m1", "object": "model", "owned_by": "sglang", "parent": None}]}


@asynccontextmanager
async def a_server(answers: Mapping[str, Any], *, key: str | None = None) -> AsyncIterator[str]:
    """Serves each path: values as JSON, text as it is, a `web.Response` maker when called; every other path is 404."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        said = answers.get(request.path)
        if callable(said):
            made: web.StreamResponse = await said(request)
            return made
        if said is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.Response(text=said) if isinstance(said, str) else web.json_response(said)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@asynccontextmanager
async def raw_bytes(answer: bytes | None) -> AsyncIterator[str]:
    """Listens, reads, and writes these bytes before it hangs up; None takes the connection and says nothing."""
    hold = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if answer is None:
            await hold.wait()
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        hold.set()


async def report_on(
    url: str,
    *sources: Source,
    listed: int = 1,
    block_tokens: int | None = None,
    use_probe: bool = False,
    key: str | None = None,
    timeout_s: float = 5.0,
    wait_s: float = 5.0,
    **plan: Any,
) -> Report:
    """What the doctor says of one server. Waits end when there is nothing more to wait for."""
    server = Server(url=url, sources=sources, listed=listed, block_tokens=block_tokens)
    how = Plan(wait_s=wait_s, use_probe=use_probe, **plan)
    (report,) = await examine_all([server], how, timeout_s=timeout_s, key=key, rng=random.Random(7))
    return report


def about(report: Report, word: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.about == word]


def only(report: Report, word: str) -> Finding:
    (finding,) = about(report, word)
    return finding


def problems(report: Report) -> list[str]:
    return [finding.about for finding in report.findings if finding.level is Level.PROBLEM]
