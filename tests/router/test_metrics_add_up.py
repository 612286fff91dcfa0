"""Requests of every fate over real sockets: what was received, what became of it, and what replicas saw, agree."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
from aiohttp import web

from router.admission import AdmissionConfig
from router.http.contract import Limits, TimeOuts
from tests.router.field_bench import Router, Stub, a_router, answers, until

CHUNK = b'data: {"choices":[{"text":"a"}]}\n\n'


async def shown(router: Router) -> dict[str, float]:
    """Every sample of /metrics."""
    async with router.client.get(f"http://127.0.0.1:{router.gateway.admin_port}/metrics") as response:
        text = await response.text()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def outcome(samples: dict[str, float], name: str) -> float:
    return samples[f'tfirst_requests_total{{outcome="{name}"}}']


async def as_asked(request: web.Request, body: bytes) -> web.StreamResponse:
    """What the request's `user` says."""
    fate = (await request.json()).get("user", "normal")
    if fate == "bad":
        return web.json_response({"error": {"message": "no"}}, status=400)
    if fate in ("abort", "reset", "hold"):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(CHUNK)
        if fate == "reset":
            assert request.transport is not None
            request.transport.abort()
            return response
        await asyncio.Event().wait()
    if fate == "silent":
        await asyncio.Event().wait()
    return await answers(request, body)


async def test_every_request_received_has_exactly_one_outcome_and_attempts_are_what_replicas_saw() -> None:
    stub = Stub(script=as_asked)
    limits, times = Limits(max_body_bytes=4096), TimeOuts(first_byte_s=0.2, response_head_s=0.2)
    admission = AdmissionConfig(max_in_flight=1, max_queued=1)
    async with (
        stub.serving(),
        a_router([stub.url], limits=limits, times=times, admission=admission, max_attempts=1) as router,
    ):
        assert (await router.ask()).status == 200
        assert (await router.ask()).status == 200
        assert (await router.ask(user="bad")).status == 400
        assert (await router.ask(user="x" * 5000)).status == 413
        assert (await router.ask("nobody-has-it")).status == 404
        assert (await router.ask(user="silent")).status == 502
        with contextlib.suppress(aiohttp.ClientError):
            await router.read_into(bytearray(), "m1", user="reset")

        holding = asyncio.ensure_future(router.read_into(bytearray(), "m1", user="hold"))
        await until(lambda: router.dispatcher.in_flight == 1)
        waiting = asyncio.ensure_future(router.ask())
        await until(lambda: bool(sum(router.dispatcher.queued.values())))
        assert (await router.ask()).status == 429
        for gone in (waiting, holding):
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone
        await until(lambda: router.dispatcher.in_flight == 0 and not sum(router.dispatcher.queued.values()))

        samples = await shown(router)
        assert samples["tfirst_received_requests_total"] == 10
        found = {name: outcome(samples, name) for name in ("ok", "client_error", "failed", "cancelled", "refused")}
        assert found == {"ok": 2, "client_error": 3, "failed": 2, "cancelled": 2, "refused": 1}
        assert outcome(samples, "server_error") == 0
        assert samples["tfirst_attempts_total"] == len(stub.received) == 6
        assert samples["tfirst_in_flight_requests"] == 0
        assert samples['tfirst_queued_requests{tenant=""}'] == 0


async def test_fail_over_is_one_success_of_two_attempts() -> None:
    async def refuses(request: web.Request, body: bytes) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    broken, well = Stub(script=refuses), Stub()
    async with broken.serving(), well.serving(), a_router([broken.url, well.url]) as router:
        assert (await router.ask()).status == 200
        samples = await shown(router)
        assert (outcome(samples, "ok"), samples["tfirst_attempts_total"]) == (1, 2)
        assert samples['tfirst_failed_attempts_total{replica="a"}'] == 1


async def test_made_up_models_paths_and_methods_add_no_series() -> None:
    async def ask(router: Router, number: int) -> None:
        made_up: dict[str, Any] = {
            "json": {"model": f"m{number}", "prompt": "x"},
            "headers": {"x-tenant": f"t{number}"},
        }
        async with router.client.post(f"{router.url}/v1/completions", **made_up) as response:
            assert response.status == 404
        async with router.client.request(f"M{number}", f"{router.url}/nothing/{number}") as response:
            assert response.status in (400, 404, 405)

    stub = Stub()
    async with stub.serving(), a_router([stub.url]) as router:
        await router.ask()
        before = await shown(router)
        for start in range(10, 60, 10):
            await asyncio.gather(*(ask(router, number) for number in range(start, start + 10)))
        after = await shown(router)
        assert len(after) <= len(before) + 5
        assert outcome(after, "client_error") == 100
