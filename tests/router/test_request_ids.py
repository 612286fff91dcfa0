"""Which ids of clients are kept, and that everybody is told the same one."""

from __future__ import annotations

import re

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router.request_ids import LONGEST, clients_own, kept_or_made
from tests.router.field_bench import Stub, a_router, answers
from tests.router.http.stubs import ask, get, post

BODY = b'{"model":"m1","prompt":[1,2,3]}'
MADE = re.compile("[0-9a-f]{32}")
UNFIT = [b"x" * (LONGEST + 1), b"x" * 20_000, b"a\x85b", b"caf\xe9", b"a\x9b31mb", b"a\tb", b"   "]


@pytest.mark.parametrize("field", [b"q1", b"x" * LONGEST, b"two words", b"00-0af7651916cd43dd-01", b'{"a":1}'])
def test_a_short_plain_id_is_kept_as_it_is(field: bytes) -> None:
    assert clients_own(field) == kept_or_made(field) == field.decode()


@pytest.mark.parametrize("field", [None, b"", *UNFIT])
def test_any_other_is_as_good_as_none(field: bytes | None) -> None:
    assert clients_own(field) == ""
    made = {kept_or_made(field) for _ in range(50)}
    assert len(made) == 50
    assert all(map(MADE.fullmatch, made))


@given(st.binary(max_size=300))
def test_whatever_is_sent_the_id_is_one_short_line_of_ascii(field: bytes) -> None:
    request_id = kept_or_made(field)
    assert 0 < len(request_id) <= LONGEST
    assert request_id.isascii()
    assert request_id.isprintable()
    assert kept_or_made(request_id.encode()) == request_id


@pytest.mark.parametrize("field", [b"q1", *UNFIT])
async def test_replica_client_and_receipt_are_told_the_same_id(field: bytes) -> None:
    seen: list[list[str]] = []

    async def noting(request: web.Request, body: bytes) -> web.StreamResponse:
        seen.append(request.headers.getall("x-request-id"))
        return await answers(request, body)

    stub = Stub(script=noting)
    async with stub.serving(), a_router([stub.url]) as router:
        got = await ask(router.gateway._traffic, post(BODY, b"X-Request-Id: " + field))
        assert got.status == 200
        (told,) = got.values(b"x-request-id")
        assert seen == [[told.decode()]]
        assert [receipt.request_id for receipt in router.receipts] == [told.decode()]
        assert (told == field) is (field == b"q1")


async def test_a_second_id_does_not_reach_the_replica() -> None:
    seen: list[list[str]] = []

    async def noting(request: web.Request, body: bytes) -> web.StreamResponse:
        seen.append(request.headers.getall("x-request-id"))
        return await answers(request, body)

    stub = Stub(script=noting)
    async with stub.serving(), a_router([stub.url]) as router:
        port = router.gateway._traffic
        for first, second in ((b"q1", b"q1"), (b"q2", b"other"), (b"q3", b"y" * 5000)):
            await ask(port, post(BODY, b"x-request-id: " + first, b"X-Request-ID: " + second))
    assert seen == [["q1"], ["q2"], ["q3"]]


@pytest.mark.parametrize("path", [b"/health", b"/metrics", b"/v1/completions"])
async def test_answers_of_the_routers_own_have_an_id_too(path: bytes) -> None:
    stub = Stub()
    async with stub.serving(), a_router([stub.url]) as router:
        port = router.gateway._traffic
        kept = await ask(port, get(path, b"x-request-id: q1") if path != b"/v1/completions" else bad(b"q1"))
        made = await ask(port, get(path, b"x-request-id: " + UNFIT[0]) if path != b"/v1/completions" else bad(UNFIT[0]))
    assert kept.values(b"x-request-id") == [b"q1"]
    (own,) = made.values(b"x-request-id")
    assert MADE.fullmatch(own.decode())


def bad(request_id: bytes) -> bytes:
    """A request that the prompt reader refuses."""
    return post(b"{", b"x-request-id: " + request_id)
