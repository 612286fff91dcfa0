"""Responses that one replica keeps: noted as they pass, asked for where they are, over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Refuse
from router.http.head import RequestHead
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Decisions,
    Received,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    chunk,
    facts_of,
    get,
    on_uvloop,
    post,
    says,
)

CREATED = (
    b'event: response.created\ndata: {"response":{"id":"resp_1","object":"response"},"type":"response.created"}\n\n'
)
TOKEN = b'event: response.output_text.delta\ndata: {"delta":"Hi"}\n\n'
NOT_HERE = answer(b'{"error":{"code":404}}', b"404 Not Found")


class Placed(Decisions):
    """Notes what each request is bound to."""

    def __init__(self, urls: list[str], **changes: list[str | Refuse]) -> None:
        super().__init__(urls, **changes)  # type: ignore[arg-type]
        self.only: list[str] = []

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        self.only.append(request.only)
        return super().arrived(request, now_s)


def read(head: RequestHead, body: bytes) -> RequestFacts:
    facts = facts_of(head, body)
    assert isinstance(facts, RequestFacts)
    said = msgspec.json.decode(body) if body else {}
    return replace(facts, streams=bool(said.get("stream")), continues=said.get("previous_response_id", ""))


@pytest.mark.parametrize(
    "made",
    [
        answer(b'{"id":"resp_1","object":"response","output":[]}'),
        STREAM_HEAD + chunk(CREATED) + chunk(TOKEN) + LAST_CHUNK,
        STREAM_HEAD + b"".join(chunk(CREATED[at : at + 1]) for at in range(len(CREATED))) + chunk(TOKEN) + LAST_CHUNK,
    ],
    ids=["json", "stream", "stream in bytes"],
)
@on_uvloop
async def test_a_response_is_asked_for_where_it_was_made(made: bytes) -> None:
    streams = b'{"stream":true}' if made.startswith(STREAM_HEAD) else b"{}"
    async with a_replica(says(made)) as replica:
        decisions = Placed([replica.url])
        async with a_port(decisions, read_prompt=read) as port:
            await ask(port, post(streams, target=b"/v1/responses"))
            await ask(port, get(b"/v1/responses/resp_1"))
            await ask(port, post(b"", target=b"/v1/responses/resp_1/cancel"))
            await ask(port, get(b"/v1/responses/resp_1/input_items?limit=3"))
            await ask(port, get(b"/v1/responses/resp_1", method=b"DELETE"))
            await ask(port, post(b'{"previous_response_id":"resp_1"}', target=b"/v1/responses"))
            await ask(port, post(b'{"previous_response_id":"resp_0"}', target=b"/v1/responses"))
            await ask(port, get(b"/v1/responses/resp_0"))
    assert decisions.only == ["", *["r1"] * 5, "", ""]


@on_uvloop
async def test_a_response_may_be_asked_for_before_its_first_token() -> None:
    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        cancels = b"/cancel" in received.head
        writer.write(answer(b'{"id":"resp_1"}') if cancels else STREAM_HEAD + chunk(CREATED))

    async with a_replica(script) as replica:
        decisions = Placed([replica.url])
        async with a_port(decisions, read_prompt=read) as port, a_client(port) as client:
            client.writer.write(post(b'{"stream":true}', target=b"/v1/responses"))
            await client.read_head()
            await client.reader.readuntil(b"resp_1")
            await ask(port, post(b"", target=b"/v1/responses/resp_1/cancel"))
            client.leave("end")
    assert decisions.only == ["", "r1"]
    assert "first_token" not in decisions.kinds


@on_uvloop
async def test_other_apis_leave_nothing_behind() -> None:
    async with a_replica(says(answer(b'{"id":"resp_1"}'))) as replica:
        decisions = Placed([replica.url])
        async with a_port(decisions, read_prompt=read) as port:
            await ask(port, post())
            await ask(port, get(b"/v1/responses/resp_1"))
    assert decisions.only == ["", ""]


@on_uvloop
async def test_a_response_nobody_knows_is_asked_for_until_a_replica_has_it() -> None:
    async with a_replica(says(NOT_HERE)) as one, a_replica(says(answer(b'{"id":"resp_1"}'))) as two:
        decisions = Placed([one.url], on_failure=[two.url])
        async with a_port(decisions, read_prompt=read) as port:
            got = await ask(port, get(b"/v1/responses/resp_1"))
    assert (got.status, got.body) == (200, b'{"id":"resp_1"}')
    assert decisions.of("failed") == [Cause.ELSEWHERE]
    assert decisions.of("finished") == [Ended(200)]


class NobodyElse(Placed):
    """As the dispatcher does for an answer that asks for another replica when there is none."""

    def failed(self, sent: object, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]:
        self.heard.append(("failed", "r1", cause))
        return []


@on_uvloop
async def test_when_no_replica_has_it_the_last_ones_own_answer_is_relayed() -> None:
    async with a_replica(says(NOT_HERE)) as replica:
        decisions = NobodyElse([replica.url])
        async with a_port(decisions, read_prompt=read) as port:
            got = await ask(port, get(b"/v1/responses/resp_1"))
    assert (got.status, got.body) == (404, b'{"error":{"code":404}}')
    assert decisions.of("finished") == [Ended(404)]


@on_uvloop
async def test_a_404_of_the_replica_that_made_it_or_of_another_route_is_the_answer() -> None:
    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b'{"id":"resp_1"}') if received.head.startswith(b"POST") else NOT_HERE)

    async with a_replica(script) as replica:
        decisions = Placed([replica.url])
        async with a_port(decisions, read_prompt=read) as port:
            await ask(port, post(target=b"/v1/responses"))
            assert (await ask(port, get(b"/v1/responses/resp_1"))).status == 404
            assert (await ask(port, get(b"/v1/new-thing"))).status == 404
    assert decisions.of("failed") == []
