"""Traces of requests through a whole router: what is noted of each, and what engines are told of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Event
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.admission import AdmissionConfig
from router.errors import ConfigError
from router.http.head import RequestHead
from router.resume.pools import ResumePools
from router.routes import classify
from router.telemetry import provider
from router.telemetry.config import TracingConfig
from router.telemetry.context import parent_of, traceparent
from router.telemetry.trace import asked_of, server_of
from tests.router.field_bench import Router, Script, Stub, a_router, answers, until
from tests.router.resume.streams import DONE, text, told

SECRET = "the-words-of-a-prompt"
CHUNKS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(3)]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\ndata: [DONE]\n\n'


async def streams(request: web.Request, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for chunk in (*CHUNKS, USAGE):
        await response.write(chunk)
    return response


class Seen:
    """What was exported, and the heads of what replicas got."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.fields: list[list[str]] = []  # values of traceparent, of each request

    def keeps_fields(self, script: Script) -> Script:
        async def noted(request: web.Request, body: bytes) -> web.StreamResponse:
            self.fields.append(request.headers.getall("traceparent", []))
            return await script(request, body)

        return noted

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    @property
    def root(self) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.parent is None or span.parent.is_remote]
        return span


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    monkeypatch.setattr(provider, "exporter_class", lambda: lambda **settings: seen.exporter)
    return seen


@asynccontextmanager
async def traced(seen: Seen, *scripts: Script, share: float = 1.0, **config: Any) -> AsyncIterator[Router]:
    """A router that notes everything; spans are there once it has ended."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = [Stub(script=seen.keeps_fields(script)) for script in scripts]
        for stub in stubs:
            await stack.enter_async_context(stub.serving())
        tracing = TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces", share=share)
        urls = [stub.url for stub in stubs]
        yield await stack.enter_async_context(a_router(urls, config.pop("policy", "e2e"), tracing=tracing, **config))


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return int(span.parent.span_id)


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


async def test_one_stream_is_one_trace_from_prompt_to_end(seen: Seen) -> None:
    async with traced(seen, streams) as router:
        got = bytearray()
        await router.read_into(got, "m1", max_tokens=5)
        assert bytes(got) == b"".join((*CHUNKS, USAGE))
    root = seen.root
    assert root.name == "text_completion m1"
    said = attributes(root)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.model"] == "m1"
    assert said["gen_ai.request.max_tokens"] == 5
    assert said["gen_ai.usage.input_tokens"] == 9
    assert said["gen_ai.usage.output_tokens"] == 3
    assert said["http.response.status_code"] == 200
    assert said["tfirst.outcome"] == "ok"
    decide, attempt = seen.one("router.decide"), seen.one("router.attempt")
    for name in ("router.receive", "router.tokenise", "router.decide", "router.attempt"):
        assert parent(seen.one(name)) == span_id(root)
    for name in ("router.match", "router.estimate", "router.choose", "router.book"):
        part = seen.one(name)
        assert parent(part) == span_id(decide)
        assert decide.start_time is not None
        assert part.start_time is not None
        assert part.end_time is not None
        assert decide.end_time is not None
        assert decide.start_time - 1e6 <= part.start_time <= part.end_time <= decide.end_time + 1e6
    assert [parent(seen.one(name)) for name in ("router.first_token", "router.stream")] == [span_id(attempt)] * 2
    assert attributes(decide)["tfirst.reason"] == "only_ready" or attributes(decide)["tfirst.expected.compute_s"] > 0
    assert attributes(attempt)["tfirst.replica"] == "a"
    assert all(span.end_time is not None and span.start_time is not None for span in seen.spans)


@pytest.mark.parametrize(
    ("base_url", "address", "port"),
    [
        ("http://10.0.0.5:8000", "10.0.0.5", 8000),
        ("http://[fd00::5]:8000", "fd00::5", 8000),
        ("https://engine.example", "engine.example", 443),
        ("http://engine.example", "engine.example", 80),
    ],
)
def test_an_attempt_names_host_and_port_of_its_replica_apart(base_url: str, address: str, port: int) -> None:
    assert server_of(base_url) == {"server.address": address, "server.port": port}


async def test_an_attempt_says_which_server_it_went_to(seen: Seen) -> None:
    async with traced(seen, streams) as router:
        await router.read_into(bytearray(), "m1", max_tokens=5)
    said = attributes(seen.one("router.attempt"))
    assert said["server.address"] == "127.0.0.1"
    assert isinstance(said["server.port"], int)


def a_head(method: bytes, target: str, *fields: tuple[bytes, bytes], http10: bool = False) -> RequestHead:
    path = target.partition("?")[0]
    named = [(name, name, value) for name, value in fields]
    return RequestHead(method, target.encode(), path, named, classify(method, path), http10=http10)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (
            a_head(b"POST", "/v1/completions?key=sk-1"),
            {
                "http.request.method": "POST",
                "url.scheme": "https",
                "url.path": "/v1/completions",
                "http.route": "/v1/completions",
                "network.protocol.version": "1.1",
            },
        ),
        (
            a_head(b"GET", "/v1/responses/resp_1", (b"x-forwarded-proto", b"HTTP"), http10=True),
            {
                "http.request.method": "GET",
                "url.scheme": "http",
                "url.path": "/v1/responses/resp_1",
                "http.route": "/v1/responses/*",
                "network.protocol.version": "1.0",
            },
        ),
        (
            a_head(b"BREW", "/pot/7", (b"x-forwarded-proto", b"gopher")),
            {
                "http.request.method": "_OTHER",
                "http.request.method_original": "BREW",
                "url.scheme": "https",
                "url.path": "/pot/7",
                "network.protocol.version": "1.1",
            },
        ),
    ],
    ids=["as it came", "behind a proxy", "made up"],
)
def test_a_server_span_says_what_the_conventions_require_and_no_query(
    head: RequestHead, said: dict[str, object]
) -> None:
    assert asked_of(head, scheme="https") == said


async def test_the_two_ends_of_a_relayed_request_are_described_as_http(seen: Seen) -> None:
    async with traced(seen, answers) as router:
        await router.ask()
        async with router.client.get(f"{router.url}/scan/7?key=sk-1") as response:
            assert response.status == 404
    spans = {attributes(span)["url.path"]: span for span in seen.spans if span.parent is None}
    assert (spans["/scan/7"].name, spans["/v1/completions"].name) == ("GET", "text_completion m1")
    assert not {"http.route", "gen_ai.operation.name"} & attributes(spans["/scan/7"]).keys()
    assert attributes(spans["/v1/completions"])["url.scheme"] == "http"
    first, second = (attributes(span) for span in seen.named("router.attempt"))
    assert first["url.full"].endswith("/v1/completions")
    assert first["url.full"].startswith(f"http://127.0.0.1:{first['server.port']}/")
    assert (first["http.request.method"], second["http.request.method"]) == ("POST", "GET")
    assert (second["http.response.status_code"], second["error.type"]) == (404, "404")
    assert second["url.full"].endswith("/scan/7")
    assert "tfirst.path" in first
    assert "tfirst.path" not in second


async def test_an_answer_of_the_routers_own_has_its_status_on_the_server_span(seen: Seen) -> None:
    async with traced(seen, breaks, max_attempts=1) as router:
        assert (await router.ask()).status == 502
    assert attributes(seen.root)["http.response.status_code"] == 502
    assert "http.response.status_code" not in attributes(seen.one("router.attempt"))


async def test_the_engine_is_told_its_attempt_and_the_client_is_the_parent_of_all(seen: Seen) -> None:
    client = traceparent(7, 8, sampled=True)
    async with traced(seen, answers, share=0.0) as router:
        await router.ask(headers={"traceparent": client.decode(), "tracestate": "vendor=1"})
    root, attempt = seen.root, seen.one("router.attempt")
    assert root.context is not None
    assert (root.context.trace_id, parent(root)) == (7, 8)
    ((told,),) = seen.fields
    assert parent_of(told.encode()) == (7, span_id(attempt), True)


@pytest.mark.parametrize("client", [traceparent(7, 8, sampled=False).decode(), "rubbish", None])
async def test_what_is_not_sampled_keeps_its_clients_context_and_has_no_span(seen: Seen, client: str | None) -> None:
    async with traced(seen, answers, share=0.0) as router:
        await router.ask(headers=None if client is None else {"traceparent": client})
    assert not seen.spans
    assert seen.fields == [[client] if client not in (None, "rubbish") else []]


async def breaks(request: web.Request, body: bytes) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_each_attempt_has_a_span_of_its_own_and_only_the_last_is_well(seen: Seen) -> None:
    async with traced(seen, breaks, answers, policy="round_robin") as router:
        assert (await router.ask()).status == 200
    first, second = seen.named("router.attempt")
    assert (attributes(first)["error.type"], attributes(first)["tfirst.replica"]) == ("no_answer", "a")
    assert "error.type" not in attributes(second)
    resent = [attributes(attempt).get("http.request.resend_count") for attempt in (first, second)]
    assert resent == [None, 1]
    assert [parent_of(told.encode())[1] for (told,) in seen.fields] == [span_id(first), span_id(second)]  # type: ignore[index]
    assert attributes(seen.root)["tfirst.attempts"] == 2


async def test_a_stream_that_breaks_is_an_error_of_the_whole(seen: Seen) -> None:
    async def cut(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(CHUNKS[0])
        return await breaks(request, body)

    async with traced(seen, cut) as router:
        with contextlib.suppress(aiohttp.ClientError):
            await router.read_into(bytearray(), "m1")
    assert attributes(seen.root)["tfirst.outcome"] == "failed"
    assert attributes(seen.one("router.attempt"))["error.type"] == "broken"


async def test_refusals_end_their_trace(seen: Seen) -> None:
    async with traced(seen, answers) as router:
        assert (await router.ask("nobody-has-it")).status == 404
    assert attributes(seen.root)["tfirst.cause"] == "unknown_model"
    assert not seen.named("router.attempt")


async def test_a_body_that_cannot_be_read_ends_its_trace(seen: Seen) -> None:
    async with traced(seen, answers) as router, router.client.post(f"{router.url}/v1/completions", data=b"{") as got:
        assert got.status == 400
    assert attributes(seen.root)["http.response.status_code"] == 400


async def test_waiting_has_a_span_and_a_client_that_leaves_ends_it(seen: Seen) -> None:
    let_go = asyncio.Event()

    async def holds(request: web.Request, body: bytes) -> web.StreamResponse:
        await let_go.wait()
        return await answers(request, body)

    async with traced(seen, holds, admission=AdmissionConfig(max_in_flight=1, max_queued=9)) as router:
        first = asyncio.ensure_future(router.ask())
        await until(lambda: router.dispatcher.in_flight == 1)
        second, leaves = (asyncio.ensure_future(router.ask()) for _ in range(2))
        await until(lambda: sum(router.dispatcher.queued.values()) == 2)
        leaves.cancel()
        await until(lambda: sum(router.dispatcher.queued.values()) == 1)
        let_go.set()
        assert (await first).status == (await second).status == 200
    assert len(seen.named("router.queue")) == 2
    outcomes = [attributes(span)["tfirst.outcome"] for span in seen.spans if span.parent is None]
    assert sorted(outcomes) == ["cancelled", "ok", "ok"]
    assert len(seen.named("router.attempt")) == 2


async def test_no_span_holds_text_of_a_prompt(seen: Seen) -> None:
    async with traced(seen, answers) as router:
        await router.ask(prompt=SECRET)
        await router.ask(prompt=[SECRET])
        await router.ask("nobody-has-it", prompt=SECRET)
    assert seen.spans
    assert SECRET not in "".join(span.to_json() for span in seen.spans)


async def test_a_share_of_requests_is_sampled(seen: Seen) -> None:
    async with traced(seen, answers, share=0.5) as router:
        for _ in range(40):
            await router.ask()
    roots = [span for span in seen.spans if span.parent is None]
    assert 5 < len(roots) < 35  # by chance once in a million
    assert sum(bool(fields) for fields in seen.fields) == len(roots)


def test_an_endpoint_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(provider, "import_module", missing)
    with pytest.raises(ConfigError, match="tfirst\\[otlp\\]"):
        provider.by_otlp(TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces"))


async def test_a_collector_that_takes_nothing_does_not_keep_the_router(caplog: pytest.LogCaptureFixture) -> None:
    let_go = Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            assert let_go.wait(60.0)

    config = TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces", timeout_s=0.05)
    async with asyncio.timeout(20):
        await provider.Provider(config, Stuck()).stop()
    let_go.set()
    assert "did not take the last spans within 0.05 s" in caplog.text


async def test_what_is_left_is_sent_before_the_router_ends(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    async with traced(seen, answers) as router:
        await router.ask()
    assert seen.named("router.attempt")
    assert "last spans" not in caplog.text


async def test_spans_reach_a_collector_by_otlp() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otlp")
    got: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        got.append(await request.read())
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    stub = Stub()
    try:
        async with stub.serving(), a_router([stub.url], tracing=TracingConfig(endpoint=endpoint, share=1.0)) as router:
            await router.ask()
        assert b"router.attempt" in b"".join(got)
    finally:
        await runner.cleanup()


async def test_the_rest_of_a_broken_stream_is_another_attempt_of_the_same_trace(seen: Seen) -> None:
    def gives(*events: bytes, then_breaks: bool) -> Script:
        async def script(request: web.Request, body: bytes) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for piece in events:
                await response.write(piece)
            return await breaks(request, body) if then_breaks else response

        return script

    first = gives(text("a"), text("b"), then_breaks=True)
    second = gives(text("c", finish="length"), DONE, then_breaks=False)
    pools = ResumePools(enabled=True)
    async with traced(seen, first, second, policy="round_robin", resume=pools) as router:
        got = bytearray()
        await router.read_into(got, "m1", prompt="Say it:", max_tokens=3)
        assert told(bytes(got))[0] == "abc"
        async with router.client.get(f"http://127.0.0.1:{router.gateway.admin_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        assert "tfirst_received_requests_total 1.0" in lines
        assert 'tfirst_requests_total{outcome="ok"} 1.0' in lines
    assert attributes(seen.root)["tfirst.outcome"] == "ok"
    broken, whole = seen.named("router.attempt")
    assert (attributes(broken)["error.type"], attributes(broken)["tfirst.replica"]) == ("broken", "a")
    assert attributes(whole)["tfirst.replica"] == "b"
    assert len(seen.named("router.tokenise")) == 2
    assert len(seen.named("router.stream")) == 2
    assert len({span.context.trace_id for span in seen.spans if span.context is not None}) == 1


async def test_a_request_that_comes_in_parts_is_received_from_its_first_to_its_last(seen: Seen) -> None:
    body = b'{"model":"m1","prompt":[1,2,3]}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with traced(seen, answers) as router:
        shared = router.gateway._traffic._shared
        reader, writer = await asyncio.open_connection("127.0.0.1", router.gateway.traffic_port)
        writer.write(head + body[:5])
        await until(lambda: any(client._began_s is not None for client in shared.clients))
        writer.write(body[5:] + head + body)  # and another, whole, behind it
        assert b"200" in await reader.readline()
        await until(lambda: len(router.receipts) == 2)
        writer.close()
        await writer.wait_closed()
    first, second = seen.named("router.receive")
    assert first.start_time is not None
    assert first.end_time is not None
    assert first.end_time > first.start_time
    assert second.start_time == second.end_time
