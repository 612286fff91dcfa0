"""Requests out of bytes, without a socket."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestUnacceptable
from router.http.assembler import RequestAssembler
from router.http.contract import Limits
from router.routes import Route

TWO = (
    b"POST /v1/completions?x=%20 HTTP/1.1\r\nHost: gw\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n0\r\nX-Trailer: t\r\n\r\n"
    b"GET /health HTTP/1.1\r\nhOST: gw\r\nConnection: close, X-A\r\n\r\n"
)


@given(at=st.lists(st.integers(0, len(TWO))))
def test_any_split_gives_the_same_requests(at: list[int]) -> None:
    assembler = RequestAssembler(Limits())
    ends = sorted({*at, len(TWO)})
    for start, end in zip([0, *ends], ends, strict=False):
        assembler.feed(TWO[start:end])
    (first, body), (second, nothing) = assembler.complete
    assert (first.method, first.target, first.path) == (b"POST", b"/v1/completions?x=%20", "/v1/completions")
    assert [(name, value) for _, name, value in first.headers] == [
        (b"Host", b"gw"),
        (b"X-A", b"1"),
        (b"Transfer-Encoding", b"chunked"),
    ]
    assert (first.route, first.keep_alive, body) == (Route.GENERATE, True, b"abc")
    assert (second.get(b"host"), second.named, second.keep_alive) == (b"gw", frozenset({b"x-a"}), False)
    assert (second.route, nothing) == (Route.ANSWERED, b"")
    assert (assembler.begun, assembler.unfinished) == (2, False)


def test_requests_before_a_broken_one_are_kept() -> None:
    assembler = RequestAssembler(Limits())
    with pytest.raises(RequestUnacceptable) as caught:
        assembler.feed(TWO.replace(b"close, X-A", b"keep-alive") + b"\0\0")
    assert caught.value.status == 400
    assert len(assembler.complete) == 2


def test_a_part_of_a_head_and_a_part_of_a_body_are_told_apart() -> None:
    assembler = RequestAssembler(Limits())
    assembler.feed(b"POST / HTTP/1.1\r\nHost: gw\r\nExpect: 100-continue\r\n")
    assert (assembler.unfinished, assembler.head_done, assembler.asks_to_continue) == (True, False, False)
    assembler.feed(b"Content-Length: 2\r\n\r\n")
    assert (assembler.unfinished, assembler.head_done, assembler.asks_to_continue) == (True, True, True)
    assembler.feed(b"ab")
    assert (assembler.unfinished, assembler.asks_to_continue) == (False, False)


def test_an_http_1_0_client_is_not_asked_to_continue() -> None:
    assembler = RequestAssembler(Limits())
    assembler.feed(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert not assembler.asks_to_continue


def test_fields_at_the_limit_pass() -> None:
    assembler = RequestAssembler(Limits(max_head_fields=3))
    assembler.feed(b"GET / HTTP/1.1\r\nHost: gw\r\nA: 1\r\nB: 2\r\n\r\n")
    assert len(assembler.complete) == 1
    with pytest.raises(RequestUnacceptable) as caught:
        assembler.feed(b"GET / HTTP/1.1\r\nHost: gw\r\nA: 1\r\nB: 2\r\nC: 3\r\n\r\n")
    assert caught.value.status == 431


@given(data=st.binary(max_size=300), start=st.sampled_from([b"", b"GET / HTTP/1.1\r\n", TWO[:120]]))
def test_no_bytes_make_it_fail_in_another_way(data: bytes, start: bytes) -> None:
    assembler = RequestAssembler(Limits())
    with contextlib.suppress(RequestUnacceptable):
        assembler.feed(start + data)
    assert len(assembler.complete) <= assembler.begun
