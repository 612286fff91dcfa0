"""A request and its relay over real sockets: what reaches whom, byte for byte, and what is learned from it."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from router.actions import Ended
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
    events,
    get,
    on_uvloop,
    post,
    says,
    says_and_closes,
    streamed,
    until,
)

ASKS_STREAM = b'{"stream":true}'
UNUSUAL_JSON = (
    rb'{"model":"m1","temperature":1.0,"top_p":1E-1,"seed":12345678901234567890,"x":"a\/b\ud83d","rid":"r-1",'
    rb'"cache_salt":"s","chat_template_kwargs":{"enable_thinking":false},"messages":[{"role":"user","content":"hi"}]}'
)
MULTIPART = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--b--\r\n'


# -- fidelity


@pytest.mark.parametrize(
    ("target", "kind", "body"),
    [
        (b"/v1/chat/completions?x=%20+%2B&y=%E4", b"application/json", UNUSUAL_JSON),
        (b"/v1/audio/transcriptions", b"multipart/form-data; boundary=b", MULTIPART),
        (b"/v1/new-thing", b"text/plain", b"not json"),
    ],
)
@on_uvloop
async def test_body_and_target_reach_the_replica_byte_for_byte(target: bytes, kind: bytes, body: bytes) -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port:
        got = await ask(port, post(body, b"Content-Type: " + kind, target=target))
    assert got.status == 200
    (seen,) = replica.received
    assert seen.head.startswith(b"POST " + target + b" HTTP/1.1\r\n")
    assert seen.body == body
    assert seen.values(b"content-type") == [kind]


@on_uvloop
async def test_request_fields_keep_order_and_repeats_while_hop_by_hop_ones_end_here() -> None:
    async with a_replica(says(answer())) as replica:
        decisions = Decisions([replica.url], extra_headers=[(b"X-data-parallel-rank", b"3")])
        fields = [
            b"X-One: 1",
            b"Connection: keep-alive, X-Private",
            b"X-Private: 1",
            b"Keep-Alive: timeout=5",
            b"TE: trailers",
            b"X-One: 2",
            b"authorization: Bearer k",
            b"X-Forwarded-For: 10.0.0.1",
            b"x-request-id: q1",
        ]
        async with a_port(decisions) as port:
            got = await ask(port, post(b"{}", *fields))
            host = replica.url.removeprefix("http://").encode()
    assert replica.received[0].lines == [
        b"Host: " + host,
        b"X-One: 1",
        b"X-One: 2",
        b"authorization: Bearer k",
        b"x-request-id: q1",
        b"Content-Length: 2",
        b"x-forwarded-for: 10.0.0.1, 127.0.0.1",
        b"x-forwarded-proto: http",
        b"x-forwarded-host: gw",
        b"X-data-parallel-rank: 3",
    ]
    assert got.values(b"x-request-id") == [b"q1"]


@on_uvloop
async def test_a_request_without_id_gets_one_that_replica_and_client_both_see() -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port:
        got = await ask(port, post())
    assert replica.received[0].values(b"x-request-id") == got.values(b"x-request-id") == [b"made-1"]


@on_uvloop
async def test_a_chunked_request_body_goes_on_with_its_length() -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"003\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        for byte in request:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.read()).status == 200
    (seen,) = replica.received
    assert (seen.body, seen.values(b"content-length"), seen.values(b"transfer-encoding")) == (b"abcde", [b"5"], [])
    assert seen.values(b"x-trailer") == []


@on_uvloop
async def test_an_encoded_answer_and_the_fields_that_describe_it_stay_together() -> None:
    body = gzip.compress(b'{"ok":true}')
    fields = [b"Content-Encoding: gzip", b"Set-Cookie: a=1", b"X-N: 1", b"Set-Cookie: b=2", b"X-N: 2"]
    async with a_replica(says(answer(body, b"200 OK", *fields))) as replica, a_port(Decisions([replica.url])) as port:
        got = await ask(port, post(b"{}", b"Accept-Encoding: gzip"))
    assert gzip.decompress(got.body) == b'{"ok":true}'
    assert got.values(b"content-encoding") == [b"gzip"]
    assert got.values(b"set-cookie") == [b"a=1", b"b=2"]
    assert got.values(b"x-n") == [b"1", b"2"]


@pytest.mark.parametrize("sent", [[], [b"Accept-Encoding: br"]])
@on_uvloop
async def test_no_encoding_is_asked_for_that_the_client_did_not_ask_for(sent: list[bytes]) -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port:
        await ask(port, post(b"{}", *sent))
    assert [b"Accept-Encoding: " + v for v in replica.received[0].values(b"accept-encoding")] == sent


@on_uvloop
async def test_answers_without_a_body_leave_both_connections_usable() -> None:
    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        status = {b"HEAD": b"200 OK", b"GET ": b"204 No Content", b"PUT ": b"304 Not Modified"}.get(received.head[:4])
        if status is None:
            writer.write(answer())
        else:
            length = b"" if status.startswith(b"204") else b"Content-Length: 31\r\n"
            writer.write(b"HTTP/1.1 %b\r\n%b\r\n" % (status, length))

    async with a_replica(script) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        statuses = []
        for method in (b"HEAD", b"GET", b"PUT"):
            got = await client.ask(get(b"/thing", method=method), bodiless=True)
            statuses.append(got.status)
        assert (await client.ask(post())).body == b'{"ok":true}'
        assert statuses == [200, 204, 304]
        assert replica.opened == 1


@pytest.mark.parametrize("split", ["one byte each", "one write"])
@on_uvloop
async def test_a_chunked_stream_passes_byte_for_byte_however_it_is_split(split: str) -> None:
    crlf = b'data: {"t":"\xe5\x8c\x97\xe4\xba\xac\xf0\x9f\x99\x82"}\r\n\r\n'
    body = chunk(b": comment\n\n") + chunk(crlf) + chunk(b"data: 0\n\n0\r\n\r\n") + streamed("sse_chat_stream.txt")
    pieces = [bytes([byte]) for byte in STREAM_HEAD + body] if split == "one byte each" else [STREAM_HEAD + body]
    async with a_replica(says(*pieces)) as replica:
        decisions = Decisions([replica.url], explain='{"reason":"lower_load"}')
        async with a_port(decisions) as port, a_client(port) as client:
            got = await client.ask(post(ASKS_STREAM))
            assert got.raw_body == body
            assert got.values(b"x-tfirst-replica") == [b"r1"]
            assert got.values(b"x-tfirst-explain") == [b'{"reason":"lower_load"}']
            assert (await client.ask(post(ASKS_STREAM))).raw_body == body
    assert replica.opened == 1, "a complete stream leaves its connection in the pool"
    ended = Ended(200, output_tokens=3, cached_tokens=1984, prompt_tokens=2048)
    assert decisions.kinds == ["arrived", "first_token", "finished"] * 2
    assert decisions.of("finished") == [ended, ended]


@on_uvloop
async def test_trailers_reach_the_client_and_end_the_answer() -> None:
    body = chunk(b"abc") + b"0\r\nX-T: 1\r\n\r\n"
    for cut in range(len(body) + 1):
        pieces = (STREAM_HEAD + body[:cut], body[cut:])
        async with (
            a_replica(says(*pieces)) as replica,
            a_port(Decisions([replica.url])) as port,
            a_client(port) as client,
        ):
            client.writer.write(post())
            await client.read_head()
            assert await client.reader.readexactly(len(body)) == body


@on_uvloop
async def test_interim_answers_are_skipped() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"
    async with a_replica(says(interim, interim + answer())) as replica, a_port(Decisions([replica.url])) as port:
        got = await ask(port, post())
    assert (got.status, got.body, got.values(b"link")) == (200, b'{"ok":true}', [])


@on_uvloop
async def test_an_answer_of_undeclared_length_ends_with_both_connections() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    async with a_replica(says_and_closes(head, b'{"usage":', b'{"prompt_tokens":5}}')) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            got = await ask(port, post())
    assert got.values(b"connection") == [b"close"]
    assert got.body == b'{"usage":{"prompt_tokens":5}}'
    assert decisions.of("finished") == [Ended(200, prompt_tokens=5)]


@pytest.mark.parametrize("asked", [b"", b"Connection: keep-alive\r\n"])
@on_uvloop
async def test_an_http_1_0_client_gets_plain_bytes_and_the_end_of_the_connection(asked: bytes) -> None:
    body = streamed("sse_chat_stream.txt")
    async with a_replica(says(STREAM_HEAD + body[:50], body[50:])) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            client.writer.write(b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: 15\r\n\r\n" % asked + ASKS_STREAM)
            got = await client.read()
    assert got.body == b"".join(events("sse_chat_stream.txt"))
    assert (got.values(b"transfer-encoding"), got.values(b"connection")) == ([], [b"close"])
    assert decisions.kinds == ["arrived", "first_token", "finished"]


@pytest.mark.parametrize("surplus", [b"\r\n", b"X", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"])
@pytest.mark.parametrize(
    "whole", [answer(), STREAM_HEAD + chunk(b"x\n0\r\n\r\n") + LAST_CHUNK], ids=["declared", "chunked"]
)
@on_uvloop
async def test_bytes_after_an_answer_reach_nobody_and_their_connection_is_not_used_again(
    whole: bytes, surplus: bytes
) -> None:
    async with (
        a_replica(says(whole + surplus)) as replica,
        a_port(Decisions([replica.url])) as port,
        a_client(port) as client,
    ):
        first = await client.ask(post())
        second = await client.ask(post(b"{}", b"Connection: close"))
        assert first.raw_body == second.raw_body == whole.partition(b"\r\n\r\n")[2]
        assert replica.opened == 2
        assert await client.reader.read() == b""


@on_uvloop
async def test_an_unasked_answer_is_never_given_to_the_next_request() -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port:
        await ask(port, post())
        assert port.pool.idle == 1
        for writer in replica.writers:
            writer.write(answer(b"forged"))
        await until(lambda: port.pool.idle == 0)
        assert (await ask(port, post())).body == b'{"ok":true}'


# -- first token and usage


@on_uvloop
async def test_no_first_token_is_reported_for_an_answer_that_is_no_stream() -> None:
    usage = b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":null}}}'
    async with a_replica(says(answer(usage))) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            await ask(port, post(ASKS_STREAM))
    assert decisions.kinds == ["arrived", "finished"]
    assert decisions.of("finished") == [Ended(200, output_tokens=2, prompt_tokens=7)]


@on_uvloop
async def test_an_error_inside_a_stream_is_reported_and_passes_unchanged() -> None:
    body = streamed("sse_chat_stream_error.txt")
    async with a_replica(says(STREAM_HEAD + body)) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port:
            assert (await ask(port, post(ASKS_STREAM))).raw_body == body
    assert decisions.of("finished") == [Ended(200, stream_error=True)]


@on_uvloop
async def test_a_side_reader_that_fails_does_not_touch_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("cannot read this")

    monkeypatch.setattr("router.http.side_reader.StreamReader.feed", fail)
    monkeypatch.setattr("router.http.side_reader.JsonReader.learned", fail)
    body = streamed("sse_chat_stream.txt")
    async with a_replica(says(STREAM_HEAD, body)) as streaming, a_replica(says(answer())) as plain:
        decisions = Decisions([streaming.url, plain.url])
        async with a_port(decisions) as port:
            assert (await ask(port, post(ASKS_STREAM))).raw_body == body
            assert (await ask(port, post())).body == b'{"ok":true}'
            assert port.counts.reader_failures == 2
    assert decisions.of("finished") == [Ended(200), Ended(200)]


# -- heads


@on_uvloop
async def test_the_head_of_every_answer_is_shown_with_the_replica_it_came_from() -> None:
    shown: list[tuple[str, int, bytes | None]] = []
    full = answer(b"{}", b"503 Service Unavailable", b"X-Load: 9")
    async with a_replica(says(full)) as busy, a_replica(says(answer(b"{}", b"200 OK", b"X-Load: 1"))) as idle:
        decisions = Decisions([busy.url], on_failure=[idle.url])
        async with a_port(
            decisions, heard=lambda sent, head: shown.append((sent.replica, head.status, head.get(b"x-load")))
        ) as port:
            assert (await ask(port, post(b"{}"))).status == 200
    assert shown == [("r1", 503, b"9"), ("r2", 200, b"1")]


@on_uvloop
async def test_a_look_at_a_head_that_fails_costs_the_answer_nothing() -> None:
    def fails(*shown: object) -> None:
        raise ValueError("no such field")

    async with (
        a_replica(says(answer(b'{"whole":1}'))) as replica,
        a_port(Decisions([replica.url]), heard=fails) as port,
    ):
        got = await ask(port, post(b"{}"))
        assert (got.status, got.body) == (200, b'{"whole":1}')
        assert port.counts.reader_failures == 1
