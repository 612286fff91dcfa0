"""Bodies that are framed anew: by themselves, and in answers over real sockets."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.request import RequestFacts
from router.actions import Cause, Ended
from router.http.contract import Rewritten
from router.http.head import RequestHead
from router.http.reframing import Reframer
from router.http.splice import UsageSwallower
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Decisions,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    chunk,
    on_uvloop,
    post,
    says,
    says_and_closes,
)

TOKEN = 'data: {"choices":[{"text":"北京🙂"}]}\n\n'.encode()
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
ASKED_FOR = b'{"stream":true,"stream_options":{"include_usage":true}}'


def unchunked(data: bytes) -> bytes:
    """Strictly: sizes that are wrong, empty chunks before the last, or bytes behind it fail."""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, end, data = body + data[:length], data[length : length + 2], data[length + 2 :]
        assert end == b"\r\n"
        if not length:
            assert data == b""
            return body


@given(at=st.lists(st.integers(0, 300)), swallows=st.booleans(), chunked=st.booleans())
def test_what_comes_out_is_the_body_in_whatever_pieces_it_went_in(at: list[int], swallows: bool, chunked: bool) -> None:
    body = TOKEN + USAGE + TOKEN + DONE + b"data: unfinished"
    ends = sorted({0, *(end for end in at if end < len(body)), len(body)})
    reframer = Reframer(chunked=chunked, filter_=UsageSwallower() if swallows else None)
    out = b"".join(reframer.feed(body[start:end]) for start, end in pairwise(ends))
    out += reframer.end()
    assert (unchunked(out) if chunked else out) == (body.replace(USAGE, b"") if swallows else body)


def test_of_a_body_that_breaks_everything_passes_but_no_end() -> None:
    reframer = Reframer(chunked=True, filter_=UsageSwallower())
    assert reframer.feed(TOKEN + b"data: hal") + reframer.rest() == chunk(TOKEN) + chunk(b"data: hal")


# -- usage that the router asked for


def asks_for_usage(head: RequestHead, body: bytes) -> Rewritten:
    return Rewritten(RequestFacts("made-1", "m1", streams=True, path=head.path), ASKED_FOR, swallows_usage=True)


@pytest.mark.parametrize("size", [1, 7, 4096])
@on_uvloop
async def test_usage_that_the_client_did_not_ask_for_is_learned_and_not_relayed(size: int) -> None:
    body = TOKEN + USAGE + DONE
    pieces = [chunk(body[at : at + size]) for at in range(0, len(body), size)]
    async with a_replica(says(STREAM_HEAD, *pieces, LAST_CHUNK)) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, read_prompt=asks_for_usage) as port, a_client(port) as client:
            for _ in range(2):
                got = await client.ask(post(b'{"stream":true}'))
                assert (got.status, got.body) == (200, TOKEN + DONE)
    assert {seen.body for seen in replica.received} == {ASKED_FOR}
    assert decisions.of("finished") == [Ended(200, output_tokens=1, prompt_tokens=9)] * 2
    assert replica.opened == 1


@on_uvloop
async def test_a_client_of_http_1_0_gets_the_rest_plain() -> None:
    async with (
        a_replica(says(STREAM_HEAD + chunk(TOKEN + USAGE + DONE) + LAST_CHUNK)) as replica,
        a_port(Decisions([replica.url]), read_prompt=asks_for_usage) as port,
    ):
        got = await ask(port, post().replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (got.body, got.values(b"transfer-encoding")) == (TOKEN + DONE, [])


@on_uvloop
async def test_an_answer_that_ends_with_its_connection_is_cut_too() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with (
        a_replica(says_and_closes(head + TOKEN + USAGE + DONE)) as replica,
        a_port(Decisions([replica.url]), read_prompt=asks_for_usage) as port,
    ):
        assert (await ask(port, post())).body == TOKEN + DONE


@pytest.mark.parametrize("said", [answer(b'{"choices":[],"usage":{}}'), answer(b'{"e":1}', b"400 Bad Request")])
@on_uvloop
async def test_an_answer_that_is_no_stream_passes_as_it_came(said: bytes) -> None:
    async with a_replica(says(said)) as replica, a_port(Decisions([replica.url]), read_prompt=asks_for_usage) as port:
        got = await ask(port, post())
    assert json.loads(got.raw_body) == json.loads(said.partition(b"\r\n\r\n")[2])


@on_uvloop
async def test_a_stream_that_breaks_is_shown_as_broken_with_all_that_came() -> None:
    async with a_replica(says_and_closes(STREAM_HEAD + chunk(TOKEN) + chunk(b"data: hal"))) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, read_prompt=asks_for_usage) as port, a_client(port) as client:
            client.writer.write(post())
            await client.read_head()
            seen = await client.reader.read()  # to the end of the connection, which comes before the last chunk
    assert seen == chunk(TOKEN) + chunk(b"data: hal")
    assert decisions.of("failed") == [Cause.BROKEN]
