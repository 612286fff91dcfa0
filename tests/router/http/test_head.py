"""What passes from head to head."""

from __future__ import annotations

import pytest

from router.errors import RequestUnacceptable
from router.http.head import (
    Field,
    Forwarded,
    RequestHead,
    ResponseHead,
    client_head,
    field_value,
    named_by_connection,
    origin_form,
    plain_request,
    upstream_head,
)
from router.routes import Route


def fields(*lines: bytes) -> list[Field]:
    pairs = [line.partition(b": ") for line in lines]
    return [(name.lower(), name, value) for name, _, value in pairs]


def sent(
    *lines: bytes,
    named: bytes = b"close",
    body_bytes: int = 0,
    prefix: bytes = b"",
    extra: list[tuple[bytes, bytes]] | None = None,
) -> list[bytes]:
    head = RequestHead(b"GET", b"/x?y", "/x", fields(*lines), Route.RELAY, named_by_connection(named))
    raw = upstream_head(
        head,
        host=b"replica:1",
        prefix=prefix,
        body_bytes=body_bytes,
        request_id=b"id-1",
        forwarded=Forwarded(b"10.0.0.9", b"https"),
        extra=extra or [],
    )
    assert raw.endswith(b"\r\n\r\n")
    return raw[:-4].split(b"\r\n")


def relayed(*lines: bytes, named: bytes = b"close", unchunked: bool = False, closing: bool = False) -> list[bytes]:
    response = ResponseHead(200, b"OK", fields(*lines), named_by_connection(named))
    raw = client_head(response, request_id=b"id-1", replica=b"r", explain=None, closing=closing, unchunked=unchunked)
    assert raw.endswith(b"\r\n\r\n")
    return raw[:-4].split(b"\r\n")


def test_a_request_without_a_body_declares_none() -> None:
    assert not [line for line in sent(b"Host: gw") if line.lower().startswith(b"content-length")]
    assert b"Content-Length: 0" in sent(b"Host: gw", b"Content-Length: 0")
    assert b"Content-Length: 4" in sent(b"Transfer-Encoding: chunked", body_bytes=4)


def test_fields_the_router_adds_stand_alone_whatever_the_client_sent() -> None:
    client = (b"Host: gw", b"X-Data-Parallel-Rank: 3", b"x-data-parallel-rank: 4", b"X-Other: 1")
    lines = sent(*client, extra=[(b"X-data-parallel-rank", b"1")])
    assert [line for line in lines if line.lower().startswith(b"x-data")] == [b"X-data-parallel-rank: 1"]
    assert b"X-Other: 1" in lines
    assert [line for line in sent(*client) if line.lower().startswith(b"x-data")] == list(client[1:3])


def test_the_path_of_a_base_url_comes_before_the_target() -> None:
    assert sent(prefix=b"/engine")[0] == b"GET /engine/x?y HTTP/1.1"


def test_what_earlier_proxies_said_is_kept_and_continued() -> None:
    lines = sent(
        b"Host: gw",
        b"X-Forwarded-For: 1.1.1.1",
        b"x-forwarded-for: 2.2.2.2",
        b"X-Forwarded-Proto: http",
        b"X-Forwarded-Host: first",
    )
    assert lines[1:] == [
        b"Host: replica:1",
        b"X-Forwarded-Proto: http",
        b"X-Forwarded-Host: first",
        b"x-request-id: id-1",
        b"x-forwarded-for: 1.1.1.1, 2.2.2.2, 10.0.0.9",
    ]


def test_a_field_named_by_connection_ends_here_and_an_id_is_made_anew() -> None:
    lines = sent(b"Host: gw", b"X-Request-Id: theirs", b"X-P: 1", named=b"x-request-id, x-p")
    assert b"x-request-id: id-1" in lines
    assert not [line for line in lines if line.startswith((b"X-Request-Id", b"X-P"))]


def test_an_answers_own_id_is_not_repeated() -> None:
    lines = relayed(b"X-Request-Id: theirs", b"Keep-Alive: 5", b"Proxy-Authenticate: x", b"Trailer: t", b"A: 1")
    assert lines == [b"HTTP/1.1 200 OK", b"X-Request-Id: theirs", b"A: 1", b"x-tfirst-replica: r"]


def test_chunk_framing_is_declared_unless_it_is_taken_off() -> None:
    assert b"Transfer-Encoding: chunked" in relayed(b"Transfer-Encoding: chunked")
    lines = relayed(b"Transfer-Encoding: chunked", unchunked=True, closing=True)
    assert lines[1:] == [b"x-request-id: id-1", b"x-tfirst-replica: r", b"Connection: close"]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/a?b", b"/a?b"),
        (b"*", b"*"),
        (b"http://h/a?b", b"/a?b"),
        (b"HTTPS://h:1", b"/"),
        (b"http://h?q=/x", b"/?q=/x"),
    ],
)
def test_every_form_of_a_target_becomes_a_path(target: bytes, path: bytes) -> None:
    assert origin_form(target) == path


@pytest.mark.parametrize("target", [b"host:80", b"ftp://h/x", b""])
def test_a_target_without_a_path_is_refused(target: bytes) -> None:
    with pytest.raises(RequestUnacceptable):
        origin_form(target)


def test_no_text_can_end_its_header_line() -> None:
    assert field_value('{"a":"b"}\r\nX: 1\0é北') == b'{"a":"b"}  X: 1 \xe9?'


def test_a_wish_for_an_upgrade_is_taken_out_and_a_wish_to_close_stays() -> None:
    headers = fields(b"Host: gw", b"Connection: Upgrade, close", b"Upgrade: h2c", b"A: 1")
    assert plain_request(b"GET", b"/", headers, http10=False) == (
        b"GET / HTTP/1.1\r\nHost: gw\r\nA: 1\r\nConnection: close\r\n\r\n"
    )
