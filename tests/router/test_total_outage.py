"""When every replica is gone the router says so at once, and it finds them again without being asked anything."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web

from router.health import HealthConfig, State
from tests.router.field_bench import MODEL, Answer, Stub, a_page, a_router, answers, until

IN_FLIGHT = 200


async def streams_for_ever(request: web.Request, body: bytes) -> web.StreamResponse:
    if b'"stream"' not in body:
        return await answers(request, body)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
    await asyncio.Event().wait()
    return response


async def _failed_visibly(asked: asyncio.Future[Answer]) -> bool:
    try:
        return (await asked).status in (502, 503)
    except aiohttp.ClientError:
        return True


async def test_everybody_is_answered_503_while_all_are_away_and_served_as_soon_as_one_is_back() -> None:
    replicas = [Stub(streams_for_ever), Stub(streams_for_ever)]
    async with AsyncExitStack() as stack:
        async with replicas[0].serving(), replicas[1].serving():
            router = await stack.enter_async_context(a_router([replica.url for replica in replicas]))
            streams = [asyncio.ensure_future(router.ask(stream=True)) for _ in range(IN_FLIGHT)]
            await until(lambda: sum(replica.open for replica in replicas) == IN_FLIGHT)
        assert all([await _failed_visibly(stream) for stream in streams])
        await until(lambda: router.dispatcher.in_flight == 0)
        for _ in range(3):
            refused = await asyncio.gather(*(router.ask() for _ in range(20)))
            assert {answer.status for answer in refused} == {503}
            assert all(int(answer.fields["retry-after"]) >= 1 for answer in refused)
            assert all(receipt.attempts <= 2 for receipt in router.receipts[-20:]), "nobody is waited for"
        await until(lambda: {router.state(0), router.state(1)} == {State.DOWN})
        async with replicas[0].serving(), replicas[1].serving():
            await until(lambda: router.state(0) is State.CLOSED)
            assert (await router.ask()).status == 200
            await until(lambda: router.state(1) is State.CLOSED)
        assert len(router.receipts) == IN_FLIGHT + 60 + 1
        assert None not in {receipt.outcome for receipt in router.receipts}


async def test_refused_connections_alone_are_over_with_the_first_probe_that_is_answered() -> None:
    """Faster than probes miss, requests have found out; no request is needed to find out the end of it."""
    patient = HealthConfig(probe_period_s=0.05, misses_to_eject=1000, trial_interval_s=600.0, slow_start_s=0.0)
    replica = Stub()
    async with AsyncExitStack() as stack:
        async with replica.serving():
            router = await stack.enter_async_context(a_router([replica.url], health=patient))
        for _ in range(4):
            assert (await router.ask()).status == 503
        assert router.state(0) is State.OPEN
        async with replica.serving():
            await until(lambda: router.state(0) is State.CLOSED)
            assert (await router.ask()).status == 200


async def test_a_router_starts_with_what_is_there_and_the_rest_joins_later() -> None:
    late, there = Stub(), Stub()
    async with late.serving():
        pass  # so that its address is known
    async with there.serving(), a_router([late.url, there.url], await_all=False) as router:
        await router.until_up(1)
        listed = await router.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == [MODEL]
        assert {(await router.ask()).fields["x-tfirst-replica"] for _ in range(4)} == {"b"}
        async with late.serving():
            await router.until_up(0)
            assert {(await router.ask()).fields["x-tfirst-replica"] for _ in range(4)} == {"a", "b"}


async def test_another_process_at_the_same_address_starts_with_an_empty_cache_and_slowly() -> None:
    health = HealthConfig(probe_period_s=0.05, slow_start_s=600.0)
    started, prompt = a_page(0, 0) + "process_start_time_seconds %d\n", list(range(200))
    async with Stub(page=started % 1000).serving() as replica, a_router([replica.url], "e2e", health=health) as router:

        async def reused() -> int:
            await router.ask(prompt=prompt)
            choice = router.receipts[-1].choice
            assert choice is not None
            return choice.local_tokens

        def share() -> float:
            return router.dispatcher.health(0).share(router.gateway._clock())

        await until(lambda: router.gateway._sources.is_guessed(0) and 0 in router.gateway._reported._alive_s)
        await reused()
        assert await reused() > 0
        assert share() == 1.0
        replica.page = started % 2000
        await until(lambda: share() < 0.5)
        assert await reused() == 0
