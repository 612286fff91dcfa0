"""Answers that break or never come, retries, and errors of the router's own parts, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Refuse, Send
from router.http.contract import TimeOuts
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
    on_uvloop,
    post,
    reset,
    says,
    says_and_closes,
    silence,
    streamed,
    until,
)

ASKS_STREAM = b'{"stream":true}'


# -- truncation


async def _reset(_: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: 1\n\n") + b"ff\r\ndata: {cut")
    await asyncio.sleep(0.05)  # a reset overtakes bytes the peer has not read yet
    reset(writer)


CUT_SHORT = {
    "end without last chunk": says_and_closes(STREAM_HEAD + chunk(b"data: 1\n\n") + b"ff\r\ndata: {cut"),
    "reset": _reset,
    "no chunk size": says(STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: {cut"), b"zz\r\n"),
    "a bare line feed for an end": says(STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: {cut") + b"0\n\n"),
    "less than declared": says_and_closes(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ndata: 1\n\ndata: {cut"),
}


@pytest.mark.parametrize("how", CUT_SHORT)
@on_uvloop
async def test_a_stream_that_breaks_is_shown_as_broken_with_all_that_came_before(how: str) -> None:
    async with a_replica(CUT_SHORT[how]) as replica:
        decisions = Decisions([replica.url], on_failure=["http://127.0.0.1:1"])
        async with a_port(decisions) as port, a_client(port) as client:
            client.writer.write(post(ASKS_STREAM))
            await client.read_head()
            seen = b""
            while data := await client.reader.read(65536):
                seen += data
    assert b"data: 1\n\n" in seen
    assert b"data: {cut" in seen
    assert LAST_CHUNK not in seen
    assert not seen.endswith(b"0\n\n")
    assert b"[DONE]" not in seen
    assert decisions.of("failed") == [Cause.BROKEN]


@on_uvloop
async def test_a_cut_is_visible_where_the_answer_ends_with_the_connection() -> None:
    async with a_replica(_reset) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        client.writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        await client.read_head()
        with pytest.raises(ConnectionResetError):
            await client.reader.read()


@on_uvloop
async def test_a_stream_without_done_passes_as_it_is() -> None:
    body = chunk(b"data: 1\n\n") + LAST_CHUNK
    async with a_replica(says(STREAM_HEAD + body)) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            assert (await ask(port, post(ASKS_STREAM))).raw_body == body
    assert decisions.kinds == ["arrived", "first_token", "finished"]


# -- failure and retry


@on_uvloop
async def test_dead_pooled_connections_cost_no_request() -> None:
    executed = 0

    async def every_second_dies(received: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal executed
        if writer in used:
            reset(writer)
        else:
            used.add(writer)
            executed += 1
            writer.write(answer())

    used: set[asyncio.StreamWriter] = set()
    async with a_replica(every_second_dies) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            statuses = [(await ask(port, post())).status for _ in range(20)]
            assert port.counts.repeats == 19
    assert statuses == [200] * 20
    assert executed == 20
    assert decisions.kinds == ["arrived", "finished"] * 20


async def _dies(_: Received, writer: asyncio.StreamWriter) -> None:
    reset(writer)


@pytest.mark.parametrize(
    ("first", "cause"),
    [
        (_dies, Cause.NO_ANSWER),
        (says_and_closes(b"HTTP/1.1 200 OK\r\nX-"), Cause.BAD_ANSWER),
        (says(b"SSH-2.0-OpenSSH_9\r\n"), Cause.BAD_ANSWER),
        (says(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), Cause.BAD_ANSWER),
        (says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70000), Cause.BAD_ANSWER),
        (
            says(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            Cause.BAD_ANSWER,
        ),
        (says(answer(b"busy", b"503 Service Unavailable")), Cause.OVERLOADED),
        (says(answer(b"slow down", b"429 Too Many Requests")), Cause.OVERLOADED),
        (says(answer(b"no engine behind this", b"502 Bad Gateway")), Cause.OVERLOADED),
    ],
    ids=["reset", "half a head", "not http", "switch", "endless head", "two framings", "503", "429", "502"],
)
@on_uvloop
async def test_a_failed_attempt_goes_to_another_replica_and_nothing_of_it_is_seen(first: object, cause: Cause) -> None:
    closed_before: list[bool] = []

    async def second(_: Received, writer: asyncio.StreamWriter) -> None:
        closed_before.append(one.open == 0)
        writer.write(answer())

    async with a_replica(first) as one, a_replica(second) as two:  # type: ignore[arg-type]
        decisions = Decisions([one.url], on_failure=[two.url])
        async with a_port(decisions) as port:
            got = await ask(port, post(b"body", b"x-request-id: q1"))
    assert (got.status, got.body) == (200, b'{"ok":true}')
    assert got.values(b"x-tfirst-replica") == [b"r2"]
    assert decisions.kinds == ["arrived", "failed", "finished"]
    assert decisions.of("failed") == [cause]
    assert two.received[0].body == b"body"
    assert two.received[0].values(b"x-request-id") == [b"q1"]
    assert closed_before == [True]


def an_unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://no-such-host.invalid", "ftp://x"])
@on_uvloop
async def test_an_endpoint_that_cannot_be_reached_is_a_failed_connect(url: str) -> None:
    decisions = Decisions([url.format(port=an_unused_port())])
    async with a_port(decisions) as port:
        got = await ask(port, post(b"{}", b"x-request-id: q1"))
    assert decisions.of("failed") == [Cause.CONNECT]
    assert got.status == 502
    assert json.loads(got.body)["error"]["code"] == 502
    assert got.values(b"x-request-id") == [b"q1"]


@on_uvloop
async def test_a_connection_that_is_not_made_in_time_is_a_failed_connect() -> None:
    with socket.socket() as full:  # a listen queue that nobody empties
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        decisions = Decisions([f"http://127.0.0.1:{full.getsockname()[1]}"])
        async with a_port(decisions, times=TimeOuts(connect_s=0.2)) as port:
            assert (await ask(port, post())).status == 502
        for filler in fillers:
            filler.close()
    assert decisions.of("failed") == [Cause.CONNECT]


@on_uvloop
async def test_a_503_with_no_other_replica_is_relayed_as_it_is() -> None:
    busy = answer(b'{"error":{}}', b"503 Service Unavailable", b"Retry-After: 7", b"X-Why: full")
    async with a_replica(says(busy)) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            for _ in range(2):
                got = await client.ask(post())
                assert (got.status, got.body) == (503, b'{"error":{}}')
                assert (got.values(b"retry-after"), got.values(b"x-why")) == ([b"7"], [b"full"])
    assert decisions.kinds == ["arrived", "failed", "finished"] * 2
    assert [ended.status for ended in decisions.of("finished")] == [503, 503]
    assert replica.opened == 1


@on_uvloop
async def test_a_503_that_is_relayed_and_lost_still_ends_the_clients_wait() -> None:
    async with a_replica(says_and_closes(b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nhalf")) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            with pytest.raises(asyncio.IncompleteReadError):
                await ask(port, post())
    assert decisions.of("failed") == [Cause.OVERLOADED, Cause.BROKEN]


@on_uvloop
async def test_a_client_error_of_the_replica_is_relayed_and_is_no_failure() -> None:
    async with a_replica(says(answer(b'{"e":1}', b"400 Bad Request", b"X-Reason: ctx"))) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            got = await ask(port, post())
    assert (got.status, got.body, got.values(b"x-reason")) == (400, b'{"e":1}', [b"ctx"])
    assert decisions.of("finished") == [Ended(400)]


@on_uvloop
async def test_a_replica_that_stays_silent_past_the_limit_has_given_no_answer() -> None:
    async with a_replica(silence) as replica, a_replica(says(answer())) as other:
        decisions = Decisions([replica.url], on_failure=[other.url])
        async with a_port(decisions, times=TimeOuts(first_byte_s=0.1)) as port:
            assert (await ask(port, post())).status == 200
    assert decisions.of("failed") == [Cause.NO_ANSWER]


@on_uvloop
async def test_a_stream_that_stalls_past_the_limit_is_cut() -> None:
    async with a_replica(says(STREAM_HEAD + chunk(b"data: 1\n\n"))) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, times=TimeOuts(stall_s=0.1)) as port:
            with pytest.raises(asyncio.IncompleteReadError):
                await ask(port, post(ASKS_STREAM))
            await until(lambda: replica.open == 0)
    assert decisions.of("failed") == [Cause.BROKEN]


@on_uvloop
async def test_one_silent_endpoint_does_not_starve_another() -> None:
    async with a_replica(silence) as hung, a_replica(says(answer())) as well:
        decisions = Decisions([hung.url] * 110 + [well.url])
        async with a_port(decisions) as port:
            waiting = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(110)]
            for _, writer in waiting:
                writer.write(post())
            await until(lambda: len(hung.received) == 110)
            assert (await ask(port, post())).status == 200
            for _, writer in waiting:
                writer.close()


# -- refusals and errors of our own


@on_uvloop
async def test_a_refusal_is_answered_in_the_form_of_the_api_and_the_connection_goes_on() -> None:
    refuse = Refuse(503, "ServiceUnavailableError", "No replica is ready.", retry_after_s=3)
    async with a_port(Decisions(arrival=[refuse])) as port, a_client(port) as client:
        first = await client.ask(post(b"{}", b"x-request-id: q1"))
        second = await client.ask(post(target=b"/v1/messages"))
    assert json.loads(first.body) == {
        "error": {
            "message": "No replica is ready.",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    }
    assert (first.values(b"retry-after"), first.values(b"x-request-id")) == ([b"3"], [b"q1"])
    assert json.loads(second.body)["error"]["type"] == "overloaded_error"


@on_uvloop
async def test_a_refusal_after_a_failed_attempt_is_the_answer() -> None:
    async with a_replica(says(answer(b"busy", b"503 Busy"))) as replica:
        decisions = Decisions([replica.url], on_failure=[Refuse(503, "X", "All replicas are busy.", 1)])
        async with a_port(decisions) as port:
            got = await ask(port, post())
            await until(lambda: replica.open == 0)
    assert json.loads(got.body)["error"]["message"] == "All replicas are busy."


class _Raises(Decisions):
    """Raises where it is told to, after having noted that it was told."""

    def __init__(self, url: str, where: str) -> None:
        super().__init__([url])
        self.where = where

    def _raise_at(self, where: str) -> None:
        if self.where == where:
            raise RuntimeError(f"a bug in {where}")

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        self._raise_at("arrived")
        return super().arrived(request, now_s)

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        self._raise_at("first_token")
        return super().first_token(sent, now_s)

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        super().finished(sent, ended, now_s)
        self._raise_at("finished")
        return []

    def failed(self, sent: Send, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]:
        super().failed(sent, cause, now_s)
        self._raise_at("failed")
        return []


@pytest.mark.parametrize(
    ("where", "status"), [("arrived", 500), ("failed", 500), ("first_token", 200), ("finished", 200)]
)
@on_uvloop
async def test_a_decider_that_raises_costs_its_request_an_answer_and_nothing_else(where: str, status: int) -> None:
    script = _dies if where == "failed" else says(STREAM_HEAD + streamed("sse_chat_stream.txt"))
    async with (
        a_replica(script) as replica,
        a_port(_Raises(replica.url, where), bugs=2) as port,
        a_client(port) as client,
    ):
        for _ in range(2):
            got = await client.ask(post(ASKS_STREAM))
            assert got.status == status
        if status == 500:
            assert json.loads(got.body)["error"]["type"] == "InternalServerError"


@on_uvloop
async def test_a_prompt_reader_that_raises_or_refuses_is_answered() -> None:
    def reader(head: RequestHead, body: bytes) -> RequestFacts | Refuse:
        if body == b"raise":
            raise RuntimeError("a bug")
        return Refuse(404, "NotFoundError", "No such model.", param="model")

    decisions = Decisions()
    async with a_port(decisions, read_prompt=reader, bugs=1) as port, a_client(port) as client:
        assert (await client.ask(post(b"raise"))).status == 500
        got = await client.ask(post())
    assert (got.status, json.loads(got.body)["error"]["param"]) == (404, "model")
    assert decisions.kinds == []
