"""Prompts whose reading takes a while: who waits, who does not, and what is sent."""

from __future__ import annotations

import asyncio

import pytest

from estimators.request import RequestFacts
from router.actions import Refuse
from router.http.contract import Read, Rewritten
from router.http.head import RequestHead
from tests.router.http.stubs import (
    Decisions,
    a_client,
    a_port,
    a_replica,
    answer,
    facts_of,
    on_uvloop,
    post,
    says,
    until,
)


class Slow:
    """A reader that answers bodies that begin with `slow` when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Read]] = []

    def __call__(self, head: RequestHead, body: bytes) -> RequestFacts | Refuse | asyncio.Future[Read]:
        if not body.startswith(b"slow"):
            return facts_of(head, body)
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]


FACTS = RequestFacts("made-1", "m1")


@on_uvloop
async def test_a_prompt_that_is_read_slowly_holds_up_nobody_else() -> None:
    reader = Slow()
    async with (
        a_replica(says(answer())) as replica,
        a_port(Decisions([replica.url]), read_prompt=reader) as port,
        a_client(port) as slow,
        a_client(port) as quick,
    ):
        slow.writer.write(post(b"slow"))
        await until(lambda: len(reader.waiting) == 1)
        assert port.open_exchanges == 1
        assert (await quick.ask(post(b"quick"))).status == 200
        assert [received.body for received in replica.received] == [b"quick"]
        reader.waiting[0].set_result(FACTS)
        assert (await slow.read()).status == 200
        assert [received.body for received in replica.received] == [b"quick", b"slow"]


@on_uvloop
async def test_requests_behind_a_slow_one_on_its_connection_keep_their_turn() -> None:
    reader = Slow()
    async with (
        a_replica(says(answer())) as replica,
        a_port(Decisions([replica.url]), read_prompt=reader) as port,
        a_client(port) as client,
    ):
        client.writer.write(post(b"slow") + post(b"quick"))
        await until(lambda: len(reader.waiting) == 1)
        reader.waiting[0].set_result(FACTS)
        assert [(await client.read()).status for _ in range(2)] == [200, 200]
        assert [received.body for received in replica.received] == [b"slow", b"quick"]


@on_uvloop
async def test_a_client_that_leaves_ends_the_reading_and_the_decider_hears_nothing() -> None:
    reader, decisions = Slow(), Decisions(["http://127.0.0.1:1"])
    async with a_port(decisions, read_prompt=reader) as port:
        async with a_client(port) as client:
            client.writer.write(post(b"slow"))
            await until(lambda: len(reader.waiting) == 1)
        await until(lambda: reader.waiting[0].cancelled())
    assert decisions.kinds == []


@on_uvloop
async def test_a_rewritten_body_goes_on_with_its_own_length() -> None:
    reader = Slow()
    async with (
        a_replica(says(answer())) as replica,
        a_port(Decisions([replica.url]), read_prompt=reader) as port,
        a_client(port) as client,
    ):
        client.writer.write(post(b"slow and long"))
        await until(lambda: len(reader.waiting) == 1)
        reader.waiting[0].set_result(Rewritten(FACTS, b'{"prompt":[1,2]}'))
        assert (await client.read()).status == 200
        assert replica.received[0].body == b'{"prompt":[1,2]}'
        assert replica.received[0].values(b"content-length") == [b"16"]


@pytest.mark.parametrize(
    ("end", "status", "bugs"),
    [(Refuse(400, "BadRequestError", "no"), 400, 0), (RuntimeError, 500, 1), (None, 503, 0)],
    ids=["refused", "raised", "given up"],
)
@on_uvloop
async def test_a_reading_that_ends_badly_is_answered(
    end: Refuse | type[Exception] | None, status: int, bugs: int
) -> None:
    reader, decisions = Slow(), Decisions()
    async with a_port(decisions, read_prompt=reader, bugs=bugs) as port, a_client(port) as client:
        client.writer.write(post(b"slow"))
        await until(lambda: len(reader.waiting) == 1)
        if end is None:
            reader.waiting[0].cancel()
        elif isinstance(end, Refuse):
            reader.waiting[0].set_result(end)
        else:  # made here: one that lived as long as this module would keep the connection alive with its traceback
            reader.waiting[0].set_exception(end("a bug"))
        assert (await client.read()).status == status
    assert decisions.kinds == []
