"""A probe is not believed alone: an engine that hangs fails, one that is busy passes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web

from router.health import State
from router.http.contract import TimeOuts
from tests.router.field_bench import (
    MODEL,
    PATIENCE_S,
    QUICK,
    Router,
    Stub,
    a_page,
    a_router,
    answers,
    simulated,
    until,
    urls_of,
)

FIRST_BYTE = TimeOuts(first_byte_s=0.2)


async def _load(router: Router, seconds: float, model: str = MODEL) -> list[int]:
    """Requests at 20 a second, one after the other not waited for; their statuses."""
    asked = []
    for _ in range(int(20 * seconds)):
        asked.append(asyncio.ensure_future(router.ask(model, max_tokens=1)))
        await asyncio.sleep(0.05)
    return [answer.status for answer in await asyncio.gather(*asked)]


async def test_a_frozen_engine_whose_probes_are_well_is_left_alone_but_for_trials_and_comes_back() -> None:
    async with simulated("A100", "A100") as cluster:
        model = cluster.fleet.model.name
        async with a_router(urls_of(cluster), times=FIRST_BYTE) as router:
            faults = f"{urls_of(cluster)[0]}/sim/faults"
            async with router.client.post(faults, json={"hang_share": 1.0, "metrics_frozen": True}) as said:
                assert said.status == 200
            await _load(router, 0.8, model)
            assert router.state(0) in (State.OPEN, State.TRIAL)
            before, loop = router.tried["a"], asyncio.get_running_loop()
            began_s = loop.time()
            assert set(await _load(router, 1.5, model)) == {200}
            trials_due = 1 + (loop.time() - began_s) / QUICK.trial_interval_s
            assert router.tried["a"] - before <= trials_due
            async with router.client.delete(faults) as said:
                assert said.status == 200
            before, began_s = router.tried["a"], loop.time()
            while router.state(0) is not State.CLOSED:
                assert loop.time() - began_s < PATIENCE_S
                await _load(router, 0.1, model)
            assert router.tried["a"] - before <= 1, "the next trial, or the one after that was under way, ends it"


async def test_counters_that_stand_still_show_a_frozen_engine_before_any_request_fails() -> None:
    """Somebody else's requests are in it, and nothing moves; nobody asks it anything here."""
    patient = msgspec.structs.replace(QUICK, trial_interval_s=60.0)
    async with Stub(page=a_page(2, 0, generated=7)).serving() as stuck, Stub(page=a_page(0, 0)).serving() as idle:
        async with a_router([stuck.url, idle.url], health=patient) as router:
            await until(lambda: router.state(0) is State.OPEN)
            assert router.state(1) is State.CLOSED, "who has nothing to do stands still too"
            stuck.page = a_page(2, 0, generated=8)
            await until(lambda: router.dispatcher.health(0).may_take(router.gateway._clock()))
            for _ in range(2):
                await router.ask()
            assert router.state(0) is State.CLOSED
        assert (len(stuck.received), len(idle.received)) == (1, 1)


async def test_a_busy_replica_that_answers_no_probe_keeps_its_streams_and_its_traffic() -> None:
    over = asyncio.Event()

    async def late() -> int:
        await over.wait()
        return 200

    async def streams(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while not over.is_set():
            await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with Stub(streams).serving() as busy, a_router([busy.url]) as router:
        open_streams = [asyncio.ensure_future(router.ask(stream=True)) for _ in range(20)]
        await until(lambda: busy.open == 20)
        probed = busy.probes
        busy.probe = late
        await until(lambda: busy.probes > probed + 2 * QUICK.misses_to_eject)
        assert router.state(0) is State.CLOSED
        one_more = asyncio.ensure_future(router.ask(stream=True))
        await until(lambda: busy.open == 21)
        over.set()
        assert all(answer.body.endswith(b"[DONE]\n\n") for answer in await asyncio.gather(*open_streams, one_more))


@pytest.mark.parametrize("missed", [1, 2])
async def test_a_few_missed_probes_change_nothing(missed: int) -> None:
    left = 0

    async def probe() -> int:
        nonlocal left
        left -= 1
        return 503 if left >= 0 else 200

    async with Stub(probe=probe).serving() as replica, a_router([replica.url]) as router:
        left = missed
        probed = replica.probes
        await until(lambda: replica.probes > probed + missed + 2)
        assert router.state(0) is State.CLOSED
        assert router.dispatcher.health(0).share(router.gateway._clock()) == 1.0
        assert (await router.ask()).status == 200


async def test_a_dead_replica_is_out_after_a_few_probes_and_its_silent_streams_are_not_cut() -> None:
    may_answer = asyncio.Event()

    async def waits(request: web.Request, body: bytes) -> web.StreamResponse:
        await may_answer.wait()
        return await answers(request, body)

    async def ill() -> int:
        return 503

    async with Stub(waits).serving() as dead, Stub().serving() as well, a_router([dead.url, well.url]) as router:
        asked = [asyncio.ensure_future(router.ask()) for _ in range(2)]
        await until(lambda: dead.open == 1)
        dead.probe = ill
        await until(lambda: router.state(0) is State.DOWN)
        assert {(await router.ask()).fields["x-tfirst-replica"] for _ in range(4)} == {"b"}
        may_answer.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200, 200]
