"""Requests that two readers could understand differently are refused whole, and such answers never pass for good."""

from __future__ import annotations

import json
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.actions import Cause
from router.errors import RequestUnacceptable
from router.http.assembler import RequestAssembler
from router.http.contract import Limits
from tests.router.http.stubs import (
    STREAM_HEAD,
    Decisions,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    chunk,
    get,
    on_uvloop,
    post,
    says,
    silence,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
NO_BODY = b"GET /x HTTP/1.1\r\nHost: gw\r\n"


def coded(encoding: bytes) -> bytes:
    return HEAD + b"Transfer-Encoding:" + encoding + b"\r\n\r\n0\r\n\r\n"


def declared(length: bytes) -> bytes:
    return HEAD + b"Content-Length:" + length + b"\r\n\r\nabc"


REFUSED: dict[str, tuple[bytes, int]] = {
    # two framings
    "length and chunks": (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks and length": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
    "no length and chunks": (HEAD + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    "two equal lengths": (HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "a length in the trailers": (CHUNKED + b"0\r\nContent-Length: 5\r\n\r\nabcde", 400),
    "chunks in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    # lengths
    "a list of lengths": (declared(b" 3, 3"), 400),
    "a signed length": (declared(b" +3"), 400),
    "a negative length": (declared(b" -3"), 400),
    "a length with a space": (declared(b" 1 2"), 400),
    "a length with an underscore": (declared(b" 1_0"), 400),
    "a hexadecimal length": (declared(b" 0x3"), 400),
    "a length behind a vertical tab": (declared(b" \x0b3"), 400),
    "a length in other digits": (declared(" ٣".encode()), 400),
    "a length beyond counting": (declared(b" 99999999999999999999999"), 400),
    "an empty length": (declared(b""), 400),
    # encodings
    "an unknown encoding": (coded(b" xchunked"), 400),
    "chunks, then identity": (coded(b" chunked, identity"), 400),
    "identity": (coded(b" identity"), 400),
    "an encoding below chunks": (coded(b" gzip, chunked"), 400),
    "an empty encoding first": (coded(b" ,chunked"), 400),
    "a quoted encoding": (coded(b' "chunked"'), 400),
    "an encoding with a parameter": (coded(b" chunked;q=1"), 400),
    "chunked behind a vertical tab": (coded(b" \x0bchunked"), 400),
    "chunked before a form feed": (coded(b" chunked\x0c"), 400),
    "an empty encoding": (coded(b""), 400),
    "chunked twice": (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    # chunks
    "a chunk extension": (CHUNKED + b"3;a=b\r\nabc\r\n0\r\n\r\n", 400),
    "an extension of the last chunk": (CHUNKED + b"3\r\nabc\r\n0;a\r\n\r\n", 400),
    "a line feed in an extension": (CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n", 400),
    "a chunk size beyond counting": (CHUNKED + b"fffffffffffffffff\r\nabc", 400),
    "a chunk size with many zeros": (CHUNKED + b"0" * 30 + b"3\r\nabc\r\n0\r\n\r\n", 400),
    "a chunk size without end": (CHUNKED + b"0" * 900, 400),
    "a chunk size with a space": (CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n", 400),
    "a chunk size with a prefix": (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
    "a signed chunk size": (CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n", 400),
    "a negative chunk size": (CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n", 400),
    "a chunk size with an underscore": (CHUNKED + b"1_0\r\nabc\r\n0\r\n\r\n", 400),
    "no chunk size": (CHUNKED + b"\r\nabc\r\n0\r\n\r\n", 400),
    "a line feed behind a size": (CHUNKED + b"3\nabc\r\n0\r\n\r\n", 400),
    "a line feed behind a chunk": (CHUNKED + b"3\r\nabc\n0\r\n\r\n", 400),
    "nothing behind a chunk": (CHUNKED + b"3\r\nabc0\r\n\r\n", 400),
    "a chunk longer than its size": (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "a line feed for an end": (CHUNKED + b"3\r\nabc\r\n0\n\n", 400),
    "a malformed trailer": (CHUNKED + b"0\r\nA b\r\n\r\n", 400),
    "a line feed in the trailers": (CHUNKED + b"0\r\nA: b\n\r\n", 400),
    "chunks of one byte without end": (CHUNKED + b"1\r\nx\r\n" * 50_000, 400),
    "trailers without end": (CHUNKED + b"0\r\n" + b"A: b\r\n" * 20_000, 400),
    # lines and fields
    "bare line feeds": (b"GET / HTTP/1.1\nHost: gw\n\n", 400),
    "a line feed behind a field": (NO_BODY + b"A: 1\nB: 2\r\n\r\n", 400),
    "a line feed before a request": (b"\nGET / HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a carriage return in a field": (NO_BODY + b"A: 1\rB: 2\r\n\r\n", 400),
    "a folded field": (NO_BODY + b"A: 1\r\n b\r\n\r\n", 400),
    "a field folded from nothing": (NO_BODY + b"A:\r\n\tb\r\n\r\n", 400),
    "a folded first field": (b"GET / HTTP/1.1\r\n Host: gw\r\n\r\n", 400),
    "a space in a name": (NO_BODY + b"A B: 1\r\n\r\n", 400),
    "a space before the colon": (HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    "a tab before the colon": (HEAD + b"Content-Length\t: 3\r\n\r\nabc", 400),
    "no name": (NO_BODY + b": 1\r\n\r\n", 400),
    "no colon": (NO_BODY + b"A\r\n\r\n", 400),
    "a NUL in a name": (NO_BODY + b"A\0: 1\r\n\r\n", 400),
    "a high byte in a name": (NO_BODY + b"A\xff: 1\r\n\r\n", 400),
    "a NUL in a value": (NO_BODY + b"A: a\0b\r\n\r\n", 400),
    "a control byte in a value": (NO_BODY + b"A: a\x01b\r\n\r\n", 400),
    "a DEL in a value": (NO_BODY + b"A: a\x7fb\r\n\r\n", 400),
    # hosts and targets
    "two hosts": (NO_BODY + b"Host: other\r\n\r\n", 400),
    "no host": (b"GET /x HTTP/1.1\r\n\r\n", 400),
    "an empty host": (b"GET /x HTTP/1.1\r\nHost:\r\n\r\n", 400),
    "a list of hosts": (b"GET /x HTTP/1.1\r\nHost: gw, other\r\n\r\n", 400),
    "a host with a path": (b"GET /x HTTP/1.1\r\nHost: gw/x\r\n\r\n", 400),
    "a host with a user": (b"GET /x HTTP/1.1\r\nHost: user@gw\r\n\r\n", 400),
    "a target of another host": (b"GET http://other/x HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a target with a user": (b"GET http://gw@other/x HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a target of another scheme": (b"GET ftp://gw/x HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a target that is no path": (b"GET gw:80 HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a target of the whole server": (b"GET * HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a target with a fragment": (b"GET /x#y HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a target with an encoded NUL": (b"GET /x%00y HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a target with a NUL": (b"GET /x\0y HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a target with a high byte": (b"GET /x\xff HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    # request lines
    "tabs": (b"GET\t/x\tHTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "two spaces before the target": (b"GET  /x HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "two spaces behind the target": (b"GET /x  HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a space behind the version": (b"GET /x HTTP/1.1 \r\nHost: gw\r\n\r\n", 400),
    "a space before the method": (b" GET /x HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "a method in lower case": (b"get /x HTTP/1.1\r\nHost: gw\r\n\r\n", 400),
    "another protocol": (b"GET /x RTSP/1.0\r\nHost: gw\r\n\r\n", 400),
    "a stream source": (b"SOURCE /x ICE/1.0\r\nHost: gw\r\n\r\n", 400),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "HTTP/0.9": (b"GET /x\r\n\r\n", 505),
    "HTTP/1.2": (b"GET /x HTTP/1.2\r\nHost: gw\r\n\r\n", 400),
    "HTTP/2": (b"GET /x HTTP/2.0\r\nHost: gw\r\n\r\n", 505),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a tunnel": (b"CONNECT gw:80 HTTP/1.1\r\nHost: gw\r\n\r\n", 405),
    # sizes
    "a large field": (NO_BODY + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    "many fields": (NO_BODY + b"X: 1\r\n" * 100 + b"\r\n", 431),
    "a large target": (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: gw\r\n\r\n", 431),
    "empty lines without end": (b"\r\n" * 40_000, 431),
    "a body declared too large": (declared(b" 100001"), 413),
    "chunks too large": (CHUNKED + (b"400\r\n" + b"x" * 1024 + b"\r\n") * 100, 413),
    "a chunk declared too large": (CHUNKED + b"ffffffff\r\nx", 413),
}


@pytest.mark.parametrize("case", REFUSED)
@on_uvloop
async def test_what_cannot_be_a_request_is_refused_and_nothing_of_it_goes_on(case: str) -> None:
    request, status = REFUSED[case]
    limits = Limits(max_body_bytes=100_000)
    async with a_replica(silence) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions, limits=limits) as port, a_client(port) as client:
            got = await client.ask(request + get(b"/smuggled"))
            assert await client.reader.read() == b""
            assert port.counts.rejected == {status: 1}
    assert got.status == status
    assert json.loads(got.body)["error"]["code"] == status
    assert got.values(b"connection") == [b"close"]
    assert decisions.kinds == []
    assert replica.opened == 0


@pytest.mark.parametrize("case", REFUSED)
@settings(max_examples=12, deadline=None)
@given(at=st.lists(st.integers(0, 200), max_size=8))
def test_no_split_lets_a_request_through(case: str, at: list[int]) -> None:
    request, status = REFUSED[case]
    assembler = RequestAssembler(Limits(max_body_bytes=100_000))
    ends = sorted({*(end for end in at if end < len(request)), len(request)})
    pieces = [request[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    with pytest.raises(RequestUnacceptable) as caught:
        deque(map(assembler.feed, [*pieces, get(b"/smuggled")]), maxlen=0)
    assert caught.value.status == status
    assert not assembler.complete


@pytest.mark.parametrize("surplus", [b"\0", b"abc", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 300])
@on_uvloop
async def test_bytes_behind_a_request_are_no_part_of_it(surplus: bytes) -> None:
    """The request they follow is whole and is served; they are not, and the connection ends."""
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        assert (await client.ask(post(b"body") + surplus + b"\r\n\r\n")).status == 200
        assert (await client.read()).status == 400
        assert await client.reader.read() == b""
    assert [seen.body for seen in replica.received] == [b"body"]


ACCEPTED = {
    "spaces around a length": (declared(b"  3  "), b"abc"),
    "a length with zeros": (declared(b" 003"), b"abc"),
    "capitals": (coded(b" CHUNKED"), b""),
    "trailers": (CHUNKED + b"3\r\nabc\r\n0\r\nX-A: 1\r\nX-B: 2\r\n\r\n", b"abc"),
    "sixteen digits": (CHUNKED + b"0000000000000003\r\nabc\r\n0\r\n\r\n", b"abc"),
    "an empty line before": (b"\r\n" + declared(b" 3"), b"abc"),
    "the target of this host": (b"GET http://gw:80/x HTTP/1.1\r\nHost: GW\r\n\r\n", b""),
    "an address": (b"GET / HTTP/1.1\r\nHost: [::1]:30000\r\n\r\n", b""),
    "HTTP/1.0 without a host": (b"GET / HTTP/1.0\r\n\r\n", b""),
    "a high byte in a value": (NO_BODY + b"A: \xff\r\n\r\n", b""),
    "encoded bytes in a target": (b"GET /a%0d%0a?y=%E4&z=%zz HTTP/1.1\r\nHost: gw\r\n\r\n", b""),
}


@pytest.mark.parametrize("case", ACCEPTED)
@settings(max_examples=12, deadline=None)
@given(at=st.lists(st.integers(0, 100), max_size=8))
def test_what_has_one_meaning_is_taken(case: str, at: list[int]) -> None:
    request, body = ACCEPTED[case]
    assembler = RequestAssembler(Limits())
    ends = sorted({*(end for end in at if end < len(request)), len(request)})
    for start, end in zip([0, *ends], ends, strict=False):
        assembler.feed(request[start:end])
    assert [body for _, body in assembler.complete] == [body]
    assert not assembler.unfinished


# -- the same from a replica

OK = b"HTTP/1.1 200 OK\r\n"
BAD_HEADS = {
    "length and chunks": OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "two equal lengths": OK + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": OK + b"Content-Length: 3, 3\r\n\r\nabc",
    "a signed length": OK + b"Content-Length: +3\r\n\r\nabc",
    "an unknown encoding": OK + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks, then another": OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "an encoding in two fields": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "identity": OK + b"Transfer-Encoding: identity\r\n\r\nabc",
    "chunked behind a vertical tab": OK + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
    "a folded field": OK + b"A: 1\r\n b\r\nContent-Length: 3\r\n\r\nabc",
    "a space before the colon": OK + b"Content-Length : 3\r\n\r\nabc",
    "a NUL in a value": OK + b"A: a\0b\r\nContent-Length: 0\r\n\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "a status below 100": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 1000 OK\r\nContent-Length: 0\r\n\r\n",
    "a giant head": OK + b"A: x\r\n" * 20_000 + b"\r\n",
    "interim heads without end": b"HTTP/1.1 100 Continue\r\n\r\n" * 4_000,
    "a switch nobody asked for": b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("case", BAD_HEADS)
@on_uvloop
async def test_an_answer_with_two_meanings_is_a_502_and_its_connection_is_not_used_again(case: str) -> None:
    async with a_replica(says(BAD_HEADS[case])) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            for _ in range(2):
                assert (await client.ask(post())).status == 502
                assert port.pool.idle == 0
    assert decisions.of("failed") == [Cause.BAD_ANSWER] * 2
    assert replica.opened == 2


BAD_BODIES = {
    "a chunk longer than its size": STREAM_HEAD + b"3\r\nabcd\r\n0\r\n\r\n",
    "a signed chunk size": STREAM_HEAD + chunk(b"abc") + b"+3\r\nabc\r\n0\r\n\r\n",
    "a chunk size beyond counting": STREAM_HEAD + chunk(b"abc") + b"fffffffffffffffff\r\n0\r\n\r\n",
    "a line feed behind a size": STREAM_HEAD + chunk(b"abc") + b"3\nabc\r\n0\r\n\r\n",
    "a line feed for an end": STREAM_HEAD + chunk(b"abc") + b"0\r\n\n",
    "a malformed trailer": STREAM_HEAD + chunk(b"abc") + b"0\r\nA b\r\n\r\n",
    "a length in the trailers": STREAM_HEAD + chunk(b"abc") + b"0\r\nContent-Length: 4\r\n\r\nabcd",
    "trailers without end": STREAM_HEAD + chunk(b"abc") + b"0\r\n" + b"A: 0\r\n" * 30_000,
}


@pytest.mark.parametrize("case", BAD_BODIES)
@on_uvloop
async def test_a_body_that_breaks_its_framing_is_never_ended_for_the_client(case: str) -> None:
    async with a_replica(says(BAD_BODIES[case])) as replica:
        decisions = Decisions([replica.url])
        async with a_port(decisions) as port, a_client(port) as client:
            client.writer.write(post())
            await client.read_head()
            seen = await client.reader.read(2**26)
            while piece := await client.reader.read(2**26):
                seen += piece
            assert port.pool.idle == 0
    assert not seen.endswith((b"\r\n\r\n", b"\n\n"))
    assert decisions.of("failed") == [Cause.BROKEN]


@on_uvloop
async def test_what_follows_an_answer_is_not_the_answer_to_the_next_request() -> None:
    forged = answer(b"forged")
    async with a_replica(says(answer(b"first") + forged)) as replica, a_port(Decisions([replica.url])) as port:
        for _ in range(3):
            assert (await ask(port, post())).body == b"first"
        assert (replica.opened, port.pool.idle) == (3, 0)


@on_uvloop
async def test_a_reason_with_control_bytes_is_cleaned() -> None:
    said = b"HTTP/1.1 200 O\0K\x01\r\nContent-Length: 0\r\n\r\n"
    async with a_replica(says(said)) as replica, a_port(Decisions([replica.url])) as port, a_client(port) as client:
        client.writer.write(post())
        head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
