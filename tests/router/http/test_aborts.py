"""POST /abort_request over real sockets: which open requests an id means, and how each of them ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from estimators.request import RequestFacts
from router.actions import Refuse
from router.http.contract import Endpoint, Read
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
    until,
)

ABORT = b"/abort_request"
TOKEN = b'data: {"id":"chatcmpl-9","choices":[{"text":"a"}]}\n\n'


def read(head: RequestHead, body: bytes) -> Read:
    facts = facts_of(head, body)
    assert isinstance(facts, RequestFacts)
    return replace(facts, streams=True, own_id=msgspec.json.decode(body).get("rid", ""))


class Engine:
    """Streams one token and waits; when asked to abort, it answers as told and ends the stream if that is well."""

    def __init__(self, abort_answer: bytes) -> None:
        self.abort_answer = abort_answer
        self.aborted: list[Received] = []
        self._end = asyncio.Event()

    async def __call__(self, received: Received, writer: asyncio.StreamWriter) -> None:
        if received.head.startswith(b"POST " + ABORT):
            self.aborted.append(received)
            writer.write(self.abort_answer)
            if b" 200 " in self.abort_answer:
                self._end.set()
            return
        writer.write(STREAM_HEAD + chunk(TOKEN))
        await self._end.wait()
        writer.write(LAST_CHUNK)


def wish(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize("name", ["rid-1", "chatcmpl-9"], ids=["the body's id", "the answer's id"])
@on_uvloop
async def test_the_engine_that_runs_it_is_asked_and_ends_the_answer_itself(name: str) -> None:
    engine = Engine(answer(b"null"))
    async with a_replica(engine) as replica:
        decisions = Decisions([replica.url], extra_headers=[(b"Authorization", b"Bearer out")])
        async with a_port(decisions, read_prompt=read) as port, a_client(port) as client:
            client.writer.write(post(wish(rid="rid-1")))
            await client.read_head()
            await client.reader.readexactly(len(chunk(TOKEN)))
            got = await ask(port, post(wish(rid=name), b"Authorization: Bearer mine", target=ABORT))
            assert await client.reader.readexactly(len(LAST_CHUNK)) == LAST_CHUNK
    assert (got.status, json.loads(got.body)) == (200, {"object": "abort", "told": ["r1"], "cut": 0})
    (seen,) = engine.aborted
    assert seen.body == wish(rid=name)
    assert seen.values(b"authorization") == [b"Bearer out"]
    assert decisions.kinds == ["arrived", "first_token", "finished"]


@pytest.mark.parametrize(
    ("name", "told"), [("rid-1", 1), ("q1", 0)], ids=["an engine without the route", "an id the engine does not know"]
)
@on_uvloop
async def test_otherwise_its_connection_is_closed_and_its_client_sees_a_cut(name: str, told: int) -> None:
    engine = Engine(answer(b"no route", b"404 Not Found"))
    async with a_replica(engine) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, read_prompt=read) as port, a_client(port) as client:
            client.writer.write(post(wish(rid="rid-1"), b"x-request-id: q1"))
            await client.read_head()
            await client.reader.readexactly(len(chunk(TOKEN)))
            got = await ask(port, post(wish(rid=name), target=ABORT))
            assert await client.reader.read() == b"", "the connection ends, and no last chunk came"
            await until(lambda: replica.open == port.pool.idle)
    assert json.loads(got.body) == {"object": "abort", "told": [], "cut": 1}
    assert len(engine.aborted) == told
    assert decisions.kinds == ["arrived", "first_token", "cancelled"]


@pytest.mark.parametrize("name", ["q1", "rid-1", "rid-2"])
@on_uvloop
async def test_one_whose_prompt_is_still_read_gets_an_error_and_its_connection_goes_on(name: str) -> None:
    reading: asyncio.Future[Read] = asyncio.get_running_loop().create_future()

    def slow(head: RequestHead, body: bytes) -> Read | asyncio.Future[Read]:
        return reading if b"slow" in body else read(head, body)

    async with a_replica(Engine(answer())) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, read_prompt=slow) as port, a_client(port) as client:
            client.writer.write(post(wish(slow=1, rid="rid-1", request_id="rid-2"), b"x-request-id: q1"))
            await until(lambda: port.open_exchanges == 1)
            got = await ask(port, post(wish(rid=name), target=ABORT))
            answered = await client.read()
            await until(reading.cancelled)
            await until(lambda: port.open_connections == 1)
    assert json.loads(got.body)["cut"] == 1
    assert (answered.status, json.loads(answered.body)["error"]["code"]) == (400, 400)
    assert decisions.kinds == []


@on_uvloop
async def test_an_id_nobody_has_is_not_found_and_reaches_no_replica() -> None:
    engine = Engine(answer())
    async with a_replica(engine) as replica, a_port(Decisions([replica.url])) as port:
        got = await ask(port, post(wish(rid="rid-9"), target=ABORT))
    assert (got.status, json.loads(got.body)["error"]["param"]) == (404, "rid")
    assert replica.opened == 0


@pytest.mark.parametrize("body", [b"", b"rid", b"[1]", b'{"rid":7}', b'{"rid":["a"]}', b'"\xff"'])
@on_uvloop
async def test_a_wish_that_cannot_be_read_is_refused(body: bytes) -> None:
    async with a_port(Decisions()) as port:
        assert (await ask(port, post(body, target=ABORT))).status == 400


@pytest.mark.parametrize("body", [wish(abort_all=True), wish(rid=""), wish(), wish(rid="rid-1", abort_all=True)])
@on_uvloop
async def test_to_end_everything_takes_the_admin_key(body: bytes) -> None:
    def admin(head: RequestHead) -> Refuse | None:
        return None if head.get(b"x-admin") else Refuse(401, "AuthenticationError", "No.")

    engine = Engine(answer(b"null"))
    async with a_replica(engine) as replica:
        parts: dict[str, Any] = {"admin": admin, "endpoints": lambda: [Endpoint("r0", replica.url)]}
        async with a_port(Decisions(), **parts) as port:
            assert (await ask(port, post(body, target=ABORT))).status == 401
            assert replica.opened == 0
            got = await ask(port, post(body, b"x-admin: 1", target=ABORT))
    assert (got.status, json.loads(got.body)["succeeded"]) == (200, 1)
    assert [seen.body for seen in engine.aborted] == [body]


@on_uvloop
async def test_clients_with_keys_of_their_own_end_only_their_own_requests() -> None:
    def admit(head: RequestHead) -> None:
        head.client = (head.get(b"x-api-key") or b"").decode()

    engine = Engine(answer(b"null"))
    async with (
        a_replica(engine) as replica,
        a_port(Decisions([replica.url]), read_prompt=read, admit=admit) as port,
        a_client(port) as client,
    ):
        client.writer.write(post(wish(rid="rid-1"), b"x-api-key: ann"))
        await client.read_head()
        stranger = await ask(port, post(wish(rid="rid-1"), b"x-api-key: bob", target=ABORT))
        assert (stranger.status, engine.aborted) == (404, [])
        assert (await ask(port, post(wish(rid="rid-1"), b"x-api-key: ann", target=ABORT))).status == 200
        await client.reader.readuntil(LAST_CHUNK)


@on_uvloop
async def test_a_tunnel_is_ended_on_both_sides() -> None:
    switched = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    wishes = (b"Connection: Upgrade", b"Upgrade: websocket", b"x-request-id: q1")
    async with a_replica(says(switched)) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            client.writer.write(get(b"/v1/realtime", *wishes))
            assert (await client.read_head())[0] == 101
            got = await ask(port, post(wish(rid="q1"), target=ABORT))
            assert json.loads(got.body)["cut"] == 1
            assert await client.reader.read() == b""
            await until(lambda: replica.open == port.open_connections == 0)
    assert decisions.kinds == ["arrived", "cancelled"]
