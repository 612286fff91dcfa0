"""A head like an earlier one is read as if it were read anew."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import RequestUnacceptable
from router.http.assembler import RequestAssembler
from router.http.contract import Limits
from router.http.head import RequestHead
from router.http.same_head import KnownHead


def a_request(body: bytes, *, fields: bytes = b"Accept: */*\r\n", length: bytes | None = None) -> bytes:
    said = b"%d" % len(body) if length is None else length
    head = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: gw\r\nContent-Length: %b\r\n%b\r\n" % (said, fields)
    return head + body


def taken(assembler: RequestAssembler) -> list[tuple[RequestHead, bytes]]:
    found = list(assembler.complete)
    assembler.complete.clear()
    return found


def alone(request: bytes, limits: Limits) -> tuple[RequestHead, bytes]:
    assembler = RequestAssembler(limits)
    assembler.feed(request)
    return assembler.complete[0]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.sampled_from((b"A: b", b"B: %d", b"c-l: 7")), max_size=2)), max_size=6
    ),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_a_connections_requests_are_read_as_each_alone_however_they_are_split(
    requests: list[tuple[int, list[bytes]]], splits: list[int]
) -> None:
    limits, assembler = Limits(), RequestAssembler(Limits())
    whole = [
        a_request(b"x" * size, fields=b"".join(b"%b\r\n" % field.replace(b"%d", b"%d" % number) for field in fields))
        for number, (size, fields) in enumerate(requests)
    ]
    data, at, turn = b"".join(whole), 0, 0
    while at < len(data):
        size = splits[turn % len(splits)]
        assembler.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert taken(assembler) == [alone(request, limits) for request in whole]
    assert (assembler.begun, assembler.unfinished, assembler.pending_bytes) == (len(whole), False, 0)


@pytest.mark.parametrize(
    "length", [b"+4", b"-4", b"4 ", b" 4", b"0x4", b"4,4", b"", b"4_0", b"\xb2", b"4\t", b"99999999999999999999"]
)
def test_only_digits_stand_for_another_length(length: bytes) -> None:
    """Whatever else stands there is read anew: as a first request it means the same, or is refused alike."""
    outcomes = []
    for first in (b"", a_request(b"seen")):
        assembler = RequestAssembler(Limits())
        assembler.feed(first)
        taken(assembler)
        try:
            assembler.feed(a_request(b"four", length=length))
            outcomes.append(repr(taken(assembler)))
        except RequestUnacceptable as exc:
            outcomes.append(repr((exc.status, taken(assembler))))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "more",
    [
        b"Content-Length: 4\r\n",
        b"content-length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
    ],
)
def test_what_says_more_about_the_body_is_another_head(more: bytes) -> None:
    outcomes: list[object] = []
    for first in (b"", a_request(b"seen")):
        assembler = RequestAssembler(Limits())
        assembler.feed(first)
        taken(assembler)
        try:
            assembler.feed(a_request(b"", fields=b"Accept: */*\r\n" + more, length=b"4"))
            outcomes.append((assembler.asks_to_continue, assembler.unfinished))
        except RequestUnacceptable as exc:
            outcomes.append((exc.status, exc.kind))
    assert outcomes[0] == outcomes[1]


_PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b" ",
    b"0",
    b"-",
    b",",
    b":",
)


def what_comes_of(parts: list[bytes], *, compares: bool) -> list[object]:
    """All that an owner can see, part by part."""
    assembler, seen = RequestAssembler(Limits(max_body_bytes=50)), list[object]()
    if not compares:
        assembler._known._tries = 0
    try:
        for part in parts:
            assembler.feed(part)
            seen += [assembler.begun, assembler.unfinished, assembler.head_done, assembler.pending_bytes]
            seen += taken(assembler)
    except RequestUnacceptable as exc:
        seen += [exc.status, str(exc)]
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_damaged_requests_are_read_or_refused_as_if_nothing_had_come_before(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(400):
        parts = [a_request(b"hello world!", fields=b"Connection: keep-alive\r\n")]
        for _ in range(chance.randint(1, 3)):
            size = chance.choice((0, 5, 12, 40, 51, 10**16))
            damaged = bytearray(
                a_request(b"z" * min(size, 60), fields=b"Connection: keep-alive\r\n", length=b"%d" % size)
            )
            for _ in range(chance.choice((0, 0, 1, 2))):
                place = chance.randrange(len(damaged))
                if chance.random() < 0.6:
                    damaged[place:place] = chance.choice(_PIECES)
                else:
                    del damaged[place : place + chance.randint(1, 4)]
            cut = chance.randint(0, len(damaged))
            parts += [bytes(damaged[:cut]), bytes(damaged[cut:])]
        assert what_comes_of(parts, compares=True) == what_comes_of(parts, compares=False), parts


def test_a_body_that_is_too_large_is_refused_behind_a_known_head_too() -> None:
    assembler = RequestAssembler(Limits(max_body_bytes=10))
    assembler.feed(a_request(b"seen"))
    with pytest.raises(RequestUnacceptable) as refused:
        assembler.feed(a_request(b"x" * 11))
    assert refused.value.status == 413


def test_a_head_whose_body_is_still_to_come_is_known_to_who_must_judge_it() -> None:
    assembler = RequestAssembler(Limits())
    assembler.feed(a_request(b"seen"))
    assembler.feed(a_request(b"half", length=b"8"))
    assert (assembler.begun, assembler.unfinished, assembler.head_done, assembler.pending_bytes) == (2, True, True, 4)
    head = assembler.seen_of_last()
    assert (head.method, head.target, head.get(b"content-length")) == (b"POST", b"/v1/completions?a=b", b"8")


def test_a_client_that_changes_every_head_is_soon_not_compared_any_more() -> None:
    known, limits = KnownHead(), Limits()
    for number in range(20):
        raw = a_request(b"", fields=b"X-Trace: %d\r\n" % number, length=b"0")
        known.learn(raw, alone(raw, limits)[0])
    assert known.match(raw, 100) is None
    met = a_request(b"", fields=b"X-Trace: 7\r\n", length=b"0")
    found = known.match(met.replace(b"h: 0", b"h: 12"), 100)
    assert found is not None
    head, length, size = found
    assert (length, size, head.get(b"content-length")) == (12, len(met) + 1, b"12")
