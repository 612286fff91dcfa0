"""Answers that depend on the request say nothing about the replica that gave them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from router.health import State
from tests.router.field_bench import MODEL, Stub, a_router, answers

REFUSAL = '{"error":{"message":"too long","code":%d}}'


async def by_wish(request: web.Request, body: bytes) -> web.StreamResponse:
    """A status that the body names, or an answer."""
    wish = (await request.json()).get("wish")
    if wish is None:
        return await answers(request, body)
    return web.Response(
        status=wish, text=REFUSAL % wish, content_type="application/json", headers={"X-Reason": f"ctx-{wish}"}
    )


@pytest.mark.parametrize("stubs", [1, 2])
async def test_one_clients_bad_requests_take_nobody_out_and_reach_it_unchanged(stubs: int) -> None:
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(Stub(by_wish).serving()) for _ in range(stubs)]
        router = await stack.enter_async_context(a_router([replica.url for replica in replicas]))
        wishes = [400] * 50 + [404, 413, 422] * 10
        got = await asyncio.gather(*(router.ask(MODEL, wish=wish) for wish in wishes))
        for wish, answer in zip(wishes, got, strict=True):
            assert answer.status == wish
            assert answer.body.decode() == REFUSAL % wish
            assert answer.fields["x-reason"] == f"ctx-{wish}"
        assert (await router.ask(MODEL)).status == 200
        assert sum(len(replica.received) for replica in replicas) == len(wishes) + 1, "none was asked of another"
        assert [router.state(row) for row in range(stubs)] == [State.CLOSED] * stubs
        assert all(router.dispatcher.health(row).failures == 0 for row in range(stubs))


async def test_client_errors_end_no_outage_either() -> None:
    """They are neutral both ways: a replica that is left alone is not taken back for refusing a request."""

    async def broken(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=500, text="{}")

    async with Stub(broken).serving() as replica, a_router([replica.url]) as router:
        for _ in range(3):
            assert (await router.ask()).status == 500
        assert router.state(0) is State.OPEN
        replica.script = by_wish
        assert (await router.ask(MODEL, wish=400)).status == 400
        assert router.state(0) is not State.CLOSED
        await router.ask(MODEL)
        assert router.state(0) is State.CLOSED
