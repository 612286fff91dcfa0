"""A second attempt is made before the client has seen a byte, elsewhere, and after the first one is given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from router.health import State
from router.http.contract import TimeOuts
from router.retries import RetryConfig
from sim_backends.cluster import Cluster
from tests.router.field_bench import QUICK, Answer, Router, Stub, a_router, answers, simulated, until, urls_of

QUICK_TIMES = TimeOuts(first_byte_s=0.3)
STREAM = {"stream": True, "max_tokens": 8, "sim_output_tokens": 8}


async def _fault(router: Router, cluster: Cluster, **values: Any) -> None:
    async with router.client.post(f"{urls_of(cluster)[0]}/sim/faults", json=values) as said:
        assert said.status == 200


async def _prompts_of(router: Router, cluster: Cluster) -> list[float]:
    """Prompt tokens each engine has computed or reused, as it tells."""
    told = []
    for url in urls_of(cluster):
        async with router.client.get(f"{url}/metrics") as page:
            lines = (await page.text()).splitlines()
        told.append(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total")))
    return told


async def test_a_stream_that_breaks_after_its_first_byte_fails_visibly_and_is_sent_nowhere_else() -> None:
    async with simulated("A100", "A100") as cluster, a_router(urls_of(cluster)) as router:
        model = cluster.fleet.model.name
        await _fault(router, cluster, reset_next=1, reset_after_tokens=3)
        got = bytearray()
        with pytest.raises(aiohttp.ClientError):
            await router.read_into(got, model, max_tokens=8, sim_output_tokens=8)
        assert got.count(b"data: ") == 3
        assert b"[DONE]" not in got
        await until(lambda: len(router.receipts) == 1)
        assert (router.receipts[0].outcome, router.receipts[0].cause) == ("failed", "broken")
        assert await _prompts_of(router, cluster) == [3.0, 0.0]


@pytest.mark.parametrize(
    "fault",
    [
        {"cut_next": 1},
        {"reset_next": 1},
        {"hang_next": 1},
        {"hang_next": 1, "hang_after_tokens": 0},
        {"error_next": 1, "error_status": 503},
        {"error_next": 1, "error_status": 429},
    ],
    ids=lambda fault: " ".join(map(str, fault.items())),
)
async def test_before_the_first_byte_one_whole_answer_comes_from_somebody_else(fault: dict[str, Any]) -> None:
    async with simulated("A100", "A100") as cluster, a_router(urls_of(cluster), times=QUICK_TIMES) as router:
        model = cluster.fleet.model.name
        await _fault(router, cluster, **fault)
        answer = await router.ask(model, headers={"x-request-id": "q1"}, request_id="q1", **STREAM)
        assert (answer.status, answer.fields["x-tfirst-replica"], answer.fields["x-request-id"]) == (200, "b", "q1")
        events = [event for event in answer.body.split(b"\n\n") if event.startswith(b"data: {")]
        tokens = [choice["text"] for event in events for choice in json.loads(event[6:])["choices"] if choice["text"]]
        assert len(tokens) == 8
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert router.receipts[0].tried == ["a"]
        first = cluster.world.engines[0]
        await until(lambda: not first.running)  # nobody listens to the first attempt, so it does not go on


class Log:
    """What two replicas saw, in one order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def silent(self, name: str) -> Callable[[web.Request, bytes], Any]:
        async def script(request: web.Request, body: bytes) -> web.StreamResponse:
            self.seen.append(f"{name} asked")
            try:
                await asyncio.Event().wait()
            finally:
                self.seen.append(f"{name} left")
            raise AssertionError

        return script

    def well(self, name: str) -> Callable[[web.Request, bytes], Any]:
        async def script(request: web.Request, body: bytes) -> web.StreamResponse:
            self.seen.append(f"{name} asked")
            return await answers(request, body)

        return script


async def test_the_first_attempt_is_closed_before_the_second_is_made() -> None:
    log = Log()
    async with (
        Stub(log.silent("a")).serving() as one,
        Stub(log.well("b")).serving() as two,
        a_router([one.url, two.url], times=QUICK_TIMES) as router,
    ):
        assert (await router.ask()).status == 200
        await until(lambda: len(log.seen) == 3)
    assert log.seen in (["a asked", "a left", "b asked"], ["a asked", "b asked", "a left"])
    assert one.received == two.received, "the same bytes"


async def test_no_replica_that_failed_a_request_is_asked_for_it_again() -> None:
    log = Log()
    async with (
        Stub(log.silent("a")).serving() as one,
        Stub(log.silent("b")).serving() as two,
        a_router([one.url, two.url], times=QUICK_TIMES, max_attempts=8) as router,
    ):
        answer = await router.ask()
    assert answer.status == 502
    assert sorted(entry for entry in log.seen if "asked" in entry) == ["a asked", "b asked"]


async def test_an_outage_is_multiplied_by_no_more_than_the_budget() -> None:
    async def dies(request: web.Request, body: bytes) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    config = RetryConfig(share=0.1, per_s=0.0, burst=5.0)
    async with Stub(dies).serving() as one, Stub(dies).serving() as two, Stub(dies).serving() as three:
        stubs = [one, two, three]
        health = msgspec.structs.replace(QUICK, failures_to_open=10_000)
        async with a_router([stub.url for stub in stubs], retries=config, health=health) as router:
            answers_: list[Answer] = [await router.ask() for _ in range(200)]
            budget = router.dispatcher.retries
            assert budget.made == sum(len(stub.received) for stub in stubs) - 200 <= 5 + 0.1 * 200
            assert budget.denied > 0
    assert {answer.status for answer in answers_} == {502}
    assert all(int(answer.fields["retry-after"]) >= 1 for answer in answers_)
    assert any(b"budget" in answer.body for answer in answers_)


async def test_a_pooled_connection_that_died_is_repeated_once_and_is_no_failure() -> None:
    """Every second request on a connection finds it closed by a server that has had enough of it."""
    executed = 0
    seen: set[int] = set()

    async def once(request: web.Request, body: bytes) -> web.StreamResponse:
        nonlocal executed
        assert request.transport is not None
        if id(request.transport) in seen:
            seen.discard(id(request.transport))
            request.transport.abort()
            return web.Response()
        seen.add(id(request.transport))
        executed += 1
        return await answers(request, body)

    async with Stub(once).serving() as replica, a_router([replica.url]) as router:
        assert [(await router.ask()).status for _ in range(20)] == [200] * 20
        assert executed == 20
        assert (router.state(0), router.dispatcher.health(0).failures) == (State.CLOSED, 0)
        assert router.dispatcher.retries.made == 0
        assert router.gateway._traffic.counts.repeats == 19


async def test_a_replica_that_asks_for_patience_is_left_alone_for_that_long() -> None:
    async def busy(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"error": "busy"}, status=503, headers={"Retry-After": "60"})

    async with Stub(busy).serving() as one, Stub().serving() as two, a_router([one.url, two.url]) as router:
        got = [await router.ask() for _ in range(12)]
        assert {answer.status for answer in got} == {200}
        assert len(one.received) == 1
        assert router.state(0) is State.CLOSED, "it works, and says so"
