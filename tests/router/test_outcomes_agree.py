"""Requests of every fate over real sockets: receipts, metrics, log lines and spans call its end by one name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.actions import Outcome, Why
from router.admission import AdmissionConfig
from router.config import PromptConfig
from router.http.contract import Limits, TimeOuts
from router.telemetry import provider
from router.telemetry.config import TracingConfig
from tests.router.field_bench import QUICK, Router, Stub, a_router, until
from tests.router.test_metrics_add_up import as_asked as by_user

TRACED = TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces", share=1.0)
End = tuple[str | None, str | None, int | None]  # outcome, cause and status


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(provider, "exporter_class", lambda: lambda **settings: exporter)
    return exporter


async def as_asked(request: web.Request, body: bytes) -> web.StreamResponse:
    if (await request.json()).get("user") == "breaks":
        return web.json_response({"error": {"message": "no"}}, status=500)
    return await by_user(request, body)


def ends_in_spans(exporter: InMemorySpanExporter) -> tuple[dict[str, End], Counter[str]]:
    """How requests ended by their id, and the outcomes of those that came to none because they were not placed."""
    named: dict[str, End] = {}
    unnamed: Counter[str] = Counter()
    for span in exporter.get_finished_spans():
        said = dict(span.attributes or {})
        if span.parent is not None:
            continue
        outcome = str(said["tfirst.outcome"])
        if "tfirst.request_id" in said:
            named[str(said["tfirst.request_id"])] = end_of(said, "tfirst.", "http.response.status_code")
        else:
            unnamed[outcome] += 1
    return named, unnamed


def end_of(said: dict[str, Any], prefix: str, status: str) -> End:
    return said.get(f"{prefix}outcome"), said.get(f"{prefix}cause"), said.get(status)


async def every_fate(router: Router) -> None:
    """One request at least of every outcome, and of every place where that is decided."""
    assert (await router.ask()).status == 200
    assert (await router.ask(user="bad")).status == 400
    assert (await router.ask(user="breaks")).status == 500
    assert (await router.ask("nobody-has-it")).status == 404
    assert (await router.ask(headers={"x-tfirst-policy": "nonsense"})).status == 403
    assert (await router.ask(headers={"x-priority": "much"})).status == 400  # its reader refuses it
    assert (await router.ask(user="x" * 5000)).status == 413  # its head does
    assert (await router.ask(user="silent")).status == 502
    with contextlib.suppress(aiohttp.ClientError):
        await router.read_into(bytearray(), "m1", user="reset")
    holding = asyncio.ensure_future(router.read_into(bytearray(), "m1", user="hold"))
    await until(lambda: router.dispatcher.in_flight == 1)
    waiting = asyncio.ensure_future(router.ask())
    await until(lambda: bool(sum(router.dispatcher.queued.values())))
    assert (await router.ask()).status == 429
    waiting.cancel()
    await until(lambda: not sum(router.dispatcher.queued.values()))
    holding.cancel()
    await asyncio.gather(waiting, holding, return_exceptions=True)
    await until(lambda: router.dispatcher.in_flight == 0)


async def test_every_end_has_one_name_in_receipts_metrics_logs_and_spans(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    stub = Stub(script=as_asked)
    admission = AdmissionConfig(max_in_flight=1, max_queued=1)
    times = TimeOuts(first_byte_s=0.2, response_head_s=0.2)
    with caplog.at_level(logging.DEBUG, "router.requests"):
        async with (
            stub.serving(),
            a_router(
                [stub.url],
                limits=Limits(max_body_bytes=4096),
                times=times,
                health=QUICK,
                admission=admission,
                max_attempts=1,
                tracing=TRACED,
            ) as router,
        ):
            await every_fate(router)
            counted = {outcome: total for (outcome,), total in router.gateway._metrics.requests.totals.items()}
            beside = router.gateway._metrics.requests.beside
            assert beside is not None
            at_the_edge = {outcome: total for (outcome,), total in beside().items()}
    receipts = {one.request_id: (one.outcome, one.cause, one.status) for one in router.receipts}
    named, unnamed = ends_in_spans(spans)
    lines = [record.__dict__["facts"] for record in caplog.records if record.name == "router.requests"]

    assert Counter(counted) == Counter(outcome for outcome, _cause, _status in receipts.values())
    assert at_the_edge["client_error"] == 2
    assert {outcome for outcome, total in counted.items() if total} == {outcome.value for outcome in Outcome}
    assert {line["request_id"]: end_of(line, "", "status") for line in lines} == receipts
    assert len(lines) == len(receipts)
    assert {name: end[:2] for name, end in named.items()} == {name: end[:2] for name, end in receipts.items()}
    assert all(named[name][2] == end[2] for name, end in receipts.items() if end[2] is not None)
    assert unnamed == {"client_error": 1}  # whose reader refused it; the head of the other was enough


@pytest.mark.parametrize("leaves", [True, False], ids=["its client leaves", "it takes too long"])
async def test_what_ends_while_its_prompt_is_read_ends_alike_in_metrics_and_spans(
    leaves: bool, spans: InMemorySpanExporter
) -> None:
    """The tokenizer it waits for never answers."""
    reading = asyncio.Event()

    async def silent(request: web.Request, body: bytes) -> web.StreamResponse:
        raise AssertionError("nothing is generated")

    async def tokenize(request: web.Request) -> web.Response:
        reading.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody waits that long")

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    prompts = PromptConfig(
        source="tokenize", url=f"http://127.0.0.1:{runner.addresses[0][1]}", check=False, timeout_s=30.0
    )
    stub = Stub(script=silent)
    times = TimeOuts(total_s=None if leaves else 0.2)
    try:
        async with stub.serving(), a_router([stub.url], times=times, prompts=prompts, tracing=TRACED) as router:
            asked = asyncio.ensure_future(router.ask(prompt="words"))
            await reading.wait()
            if leaves:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            else:
                assert (await asked).status == 504
            await until(lambda: router.gateway._traffic.open_exchanges == 0)
            beside = router.gateway._metrics.requests.beside
            assert beside is not None
            counted = Counter({outcome: int(total) for (outcome,), total in beside().items() if total})
    finally:
        await runner.cleanup()
    assert router.receipts == []
    assert ends_in_spans(spans) == ({}, counted)
    assert counted == {"cancelled" if leaves else "refused": 1}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 422, 431])
def test_what_no_replica_could_have_answered_is_the_clients_error(status: int) -> None:
    assert Outcome.of_own_answer(status) is Outcome.CLIENT_ERROR


@pytest.mark.parametrize("status", [429, 503, 504, 508])
def test_what_another_moment_could_have_brought_is_refused(status: int) -> None:
    assert Outcome.of_own_answer(status) is Outcome.REFUSED


def test_the_routers_own_mistake_is_a_failure() -> None:
    assert Outcome.of_own_answer(500, Why.INTERNAL) is Outcome.FAILED
