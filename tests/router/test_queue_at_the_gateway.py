"""The queue as clients and operators of a whole router see it: who goes first, who is refused, what is shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.admission import AdmissionConfig
from tests.router.field_bench import Answer, Router, Stub, a_router, answers, simulated, until, urls_of


class OneByOne:
    """A replica that answers when it is let, in front of it a router that gives it one request at a time."""

    def __init__(self) -> None:
        self.stub = Stub(self._script)
        self.names: list[str] = []
        self._may_go = asyncio.Semaphore(0)

    async def _script(self, request: web.Request, body: bytes) -> web.StreamResponse:
        self.names.append(json.loads(body).get("user", ""))
        await self._may_go.acquire()
        return await answers(request, body)

    def let_go(self, count: int) -> None:
        for _ in range(count):
            self._may_go.release()

    @asynccontextmanager
    async def full(self, **admission: Any) -> AsyncIterator[Router]:
        """The router, with one request in the replica."""
        config = AdmissionConfig(max_in_flight=1, **admission)
        async with self.stub.serving(), a_router([self.stub.url], admission=config) as router:
            first = asyncio.ensure_future(router.ask(user="first"))
            await until(lambda: self.stub.open == 1)
            yield router
            self.let_go(100)
            assert (await first).status == 200

    async def queue(self, router: Router, name: str, **headers: str) -> asyncio.Future[Answer]:
        """One more request that waits."""
        waiting = sum(router.dispatcher.queued.values())
        fields = {key.replace("_", "-"): value for key, value in headers.items()}
        asked = asyncio.ensure_future(router.ask(headers=fields, user=name))
        await until(lambda: sum(router.dispatcher.queued.values()) == waiting + 1)
        return asked


async def test_priority_goes_first_and_equal_ones_in_order() -> None:
    table = OneByOne()
    async with table.full() as router:
        asked = [
            await table.queue(router, "plain"),
            await table.queue(router, "low", x_priority="-1"),
            await table.queue(router, "high", x_priority="5"),
            await table.queue(router, "next"),
        ]
        table.let_go(100)
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
    assert table.names == ["first", "high", "plain", "next", "low"]


async def test_a_flood_of_one_tenant_takes_neither_turns_nor_places_of_another() -> None:
    table = OneByOne()
    async with table.full(max_queued=4, shares={"blue": 1.0}) as router:
        flood = [await table.queue(router, f"red{n}", x_tenant="red") for n in range(4)]
        blue = asyncio.ensure_future(router.ask(headers={"x-tenant": "blue"}, user="blue"))
        last = await flood[-1]
        assert (last.status, int(last.fields["retry-after"]) >= 1) == (429, True)
        assert router.dispatcher.queued == {"red": 3, "blue": 1}
        table.let_go(100)
        assert [answer.status for answer in await asyncio.gather(*flood[:3], blue)] == [200] * 4
    assert table.names.index("blue") <= 2


async def test_what_waits_and_what_was_refused_is_shown_without_labels_that_clients_make_up() -> None:
    table = OneByOne()
    async with table.full(max_queued=3, queue_timeout_s=0.4, shares={"blue": 2.0}) as router:
        asked = [await table.queue(router, name, x_tenant=name) for name in ("blue", "made-up", "other")]
        assert (await router.ask(headers={"x-tenant": "late"})).status == 429
        assert (await router.ask("no-such-model")).status == 404
        text = await _metrics(router)
        assert 'tfirst_queued_requests{tenant="blue"} 1.0' in text
        assert 'tfirst_queued_requests{tenant=""} 2.0' in text
        assert "made-up" not in text
        fleet = await _fleet(router)
        assert fleet["queued"] == {"blue": 1, "made-up": 1, "other": 1}
        assert fleet["replicas"][0]["health"]["state"] == "closed"
        assert {answer.status for answer in await asyncio.gather(*asked)} == {503}
        text = await _metrics(router)
        for cause, total in (("queue_full", 1.0), ("unknown_model", 1.0), ("queue_timeout", 3.0)):
            assert f'tfirst_refusals_total{{cause="{cause}"}} {total}' in text
        assert 'tfirst_replica_health{replica="a",state="closed"} 1.0' in text
        assert 'tfirst_replica_health{replica="a",state="open"} 0.0' in text
        assert "tfirst_retry_budget 10.0" in text
        assert 'tfirst_retries_total{result="made"} 0.0' in text


async def _metrics(router: Router) -> str:
    async with router.client.get(f"http://127.0.0.1:{router.gateway.admin_port}/metrics") as response:
        return await response.text()


async def _fleet(router: Router) -> Any:
    async with router.client.get(f"http://127.0.0.1:{router.gateway.admin_port}/fleet") as response:
        return await response.json()


async def test_a_deadline_that_nobody_can_meet_is_refused_early_where_that_is_wanted() -> None:
    table = OneByOne()
    async with table.full(late="refuse") as router:
        late = await router.ask(headers={"x-slo-ttft-ms": "0.001"})
        assert (late.status, b"longer than the" in late.body) == (429, True)
        in_time = await table.queue(router, "in time", x_slo_ttft_ms="60000")
        table.let_go(100)
        assert (await in_time).status == 200
    assert table.names == ["first", "in time"]


@pytest.mark.parametrize("fields", [{"x-priority": "high"}, {"x-slo-ttft-ms": "-1"}])
async def test_a_wish_that_cannot_be_read_is_refused_before_anybody_is_asked(fields: dict[str, str]) -> None:
    async with Stub().serving() as replica, a_router([replica.url]) as router:
        answer = await router.ask(headers=fields)
        assert (answer.status, json.loads(answer.body)["error"]["type"]) == (400, "BadRequestError")
    assert replica.received == []


async def test_clients_that_leave_the_queue_of_busy_engines_cost_them_nothing() -> None:
    """Half of the crowd gives up while it waits; what the engines computed is what was asked for to the end."""
    config = AdmissionConfig(max_in_flight=2)
    async with simulated("A100", "A100") as cluster, a_router(urls_of(cluster), admission=config) as router:
        model = cluster.fleet.model.name
        body: dict[str, Any] = {"max_tokens": 200, "sim_output_tokens": 200}
        asked = [asyncio.ensure_future(router.ask(model, **body)) for _ in range(40)]
        await until(lambda: sum(router.dispatcher.queued.values()) + router.dispatcher.in_flight == 40)
        waiting = sum(router.dispatcher.queued.values())
        assert waiting > 20
        for one in asked[-20:]:
            one.cancel()
        await until(lambda: sum(receipt.outcome == "cancelled" for receipt in router.receipts) == 20)
        assert [answer.status for answer in await asyncio.gather(*asked[:20])] == [200] * 20
        cancelled = [receipt for receipt in router.receipts if receipt.outcome == "cancelled"]
        assert all(receipt.attempts == 0 for receipt in cancelled), "none of them reached an engine"
