"""Requests that find every replica full, on real sockets: who waits, who goes, who is forgotten, who hears what."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from router.http.contract import TimeOuts
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Client,
    Received,
    Replica,
    a_client,
    a_replica,
    answer,
    chunk,
    on_uvloop,
    post,
    until,
)
from tests.router.http.waiting_bench import Books, a_limited_port, a_post

TOKEN = chunk(b'data: {"choices":[{"text":"x"}]}\n\n')


class Gated:
    """A replica's script that answers each request when the test lets it."""

    def __init__(self, *, streams: bool = False) -> None:
        self.streams = streams
        self.may_start: dict[str, asyncio.Event] = {}
        self.may_end: dict[str, asyncio.Event] = {}
        self.names: list[str] = []

    async def __call__(self, received: Received, writer: asyncio.StreamWriter) -> None:
        name = received.values(b"x-request-id")[0].decode()
        self.names.append(name)
        if self.streams:
            await self.start(name).wait()
            writer.write(STREAM_HEAD + TOKEN)
            await self.end(name).wait()
            writer.write(LAST_CHUNK)
        else:
            await self.end(name).wait()
            writer.write(answer())

    def start(self, name: str) -> asyncio.Event:
        return self.may_start.setdefault(name, asyncio.Event())

    def end(self, name: str) -> asyncio.Event:
        return self.may_end.setdefault(name, asyncio.Event())


@on_uvloop
async def test_a_client_that_leaves_the_queue_is_forgotten_at_once_and_the_others_hear_the_true_cause() -> None:
    script = Gated()
    async with a_replica(script) as replica, AsyncExitStack() as clients:
        books = Books([replica.url], max_in_flight=1, queue_timeout_s=0.3)
        async with a_limited_port(books) as port:
            one, two, three, four = [await clients.enter_async_context(a_client(port)) for _ in range(4)]
            one.writer.write(a_post("1"))
            await until(lambda: script.names == ["1"])
            for client, name, waiting in ((two, "2", 1), (three, "3", 2), (four, "4", 3)):
                client.writer.write(a_post(name))
                await until(lambda waiting=waiting: books.queued == waiting)  # type: ignore[misc]
            two.leave("close")
            three.leave("reset")
            await until(lambda: books.queued == 1)
            assert books.outcomes == {"2": "cancelled", "3": "cancelled"}
            script.end("1").set()
            assert (await one.read()).status == 200
            await until(lambda: script.names == ["1", "4"])
            five = await clients.enter_async_context(a_client(port))
            timed_out = await five.ask(a_post("5"))
            assert timed_out.status == 503
            assert b"was full for the 0.3 s" in timed_out.body
            assert int(timed_out.values(b"retry-after")[0]) >= 1
            six = await clients.enter_async_context(a_client(port))
            six.writer.write(a_post("6"))
            await until(lambda: books.queued == 1)
            books.gone(port)
            nobody = await six.read()
            assert (nobody.status, b"no replica is up" in nobody.body) == (503, True)
            script.end("4").set()
            assert (await four.read()).status == 200
        assert script.names == ["1", "4"], "the replica is asked for nothing that nobody waits for"
        assert books.outcomes == {
            "1": "ok",
            "2": "cancelled",
            "3": "cancelled",
            "4": "ok",
            "5": "refused",
            "6": "refused",
        }


@on_uvloop
async def test_a_first_token_makes_room_for_another_clients_request() -> None:
    script = Gated(streams=True)
    async with a_replica(script) as replica:
        books = Books([replica.url], max_prefills=1)
        async with a_limited_port(books) as port, a_client(port) as one, a_client(port) as two:
            one.writer.write(a_post("1", stream=True))
            await until(lambda: script.names == ["1"])
            two.writer.write(a_post("2", stream=True))
            await until(lambda: books.queued == 1)
            script.start("1").set()
            await until(lambda: script.names == ["1", "2"])
            for name in ("1", "2"):
                script.start(name).set()
                script.end(name).set()
            assert (await one.read()).body == (await two.read()).body
    assert books.outcomes == {"1": "ok", "2": "ok"}


@on_uvloop
async def test_requests_of_one_connection_wait_one_after_the_other_and_keep_their_order() -> None:
    script = Gated()
    async with a_replica(script) as replica:
        books = Books([replica.url], max_in_flight=1)
        async with a_limited_port(books) as port, a_client(port) as first, a_client(port) as piping:
            first.writer.write(a_post("first"))
            await until(lambda: script.names == ["first"])
            piping.writer.write(a_post("a") + a_post("b"))
            await until(lambda: books.queued == 1)
            for name in ("first", "a", "b"):
                script.end(name).set()
            assert (await first.read()).status == 200
            ids = [(await piping.read()).values(b"x-request-id") for _ in range(2)]
            assert ids == [[b"a"], [b"b"]]


@on_uvloop
async def test_a_full_queue_is_said_with_429_and_when_to_come_back() -> None:
    script = Gated()
    async with a_replica(script) as replica:
        books = Books([replica.url], max_in_flight=1, max_queued=1)
        async with a_limited_port(books) as port, a_client(port) as one, a_client(port) as two, a_client(port) as three:
            one.writer.write(a_post("1"))
            await until(lambda: script.names == ["1"])
            two.writer.write(a_post("2"))
            await until(lambda: books.queued == 1)
            refused = await three.ask(a_post("3"))
            assert refused.status == 429
            assert 1 <= int(refused.values(b"retry-after")[0]) <= 600
            script.end("1").set()
            script.end("2").set()
            assert [(await one.read()).status, (await two.read()).status] == [200, 200]


@on_uvloop
async def test_a_retry_may_wait_for_the_replica_that_is_left() -> None:
    script = Gated()

    async def dies(received: Received, writer: asyncio.StreamWriter) -> None:
        await script.end("lost").wait()
        writer.close()

    async with a_replica(dies) as bad, a_replica(script) as good:
        books = Books([bad.url, good.url], policy="round_robin", max_in_flight=1)
        async with a_limited_port(books) as port, a_client(port) as one, a_client(port) as two:
            one.writer.write(a_post("1"))
            await until(lambda: len(bad.received) + len(good.received) == 1)
            two.writer.write(a_post("2"))
            await until(lambda: len(bad.received) + len(good.received) == 2)
            script.end("lost").set()
            await until(lambda: books.queued == 1)
            for name in ("1", "2"):
                script.end(name).set()
            assert [(await one.read()).status, (await two.read()).status] == [200, 200]
    assert sorted(script.names) == ["1", "2"]


@on_uvloop
async def test_a_request_that_waits_longer_than_all_may_take_is_told_so() -> None:
    script = Gated()
    async with a_replica(script) as replica:
        books = Books([replica.url], max_in_flight=1)
        async with a_limited_port(books, TimeOuts(total_s=0.2)) as port, a_client(port) as one, a_client(port) as two:
            one.writer.write(a_post("1"))
            await until(lambda: script.names == ["1"])
            two.writer.write(a_post("2"))
            await until(lambda: books.queued == 1)
            assert [(await one.read()).status, (await two.read()).status] == [504, 504]
    assert [(receipt.outcome, receipt.cause) for receipt in books.receipts] == [("failed", "too_long")] * 2
    assert books.dispatcher.health(0).failures == 0, "the limit is the router's own"


@on_uvloop
async def test_requests_that_a_stop_cuts_are_not_counted_as_clients_that_left() -> None:
    """One runs and is granted away to the one that waits, which is cut before it comes to be sent."""
    script = Gated()
    async with a_replica(script) as replica:
        books = Books([replica.url], max_in_flight=1)
        async with a_limited_port(books) as port, a_client(port) as one, a_client(port) as two, a_client(port) as three:
            one.writer.write(a_post("1"))
            await until(lambda: script.names == ["1"])
            for client, name in ((two, "2"), (three, "3")):
                client.writer.write(a_post(name))
            await until(lambda: books.queued == 2)
            port.cut()
            assert books.queued == 0
            for client in (one, two, three):
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await client.read()
    assert [(receipt.outcome, receipt.cause) for receipt in books.receipts] == [("failed", "stopping")] * 3
    assert books.dispatcher.health(0).failures == 0
    assert books.dispatcher.in_flight == 0
    assert script.names == ["1"]


@pytest.mark.parametrize("seed", range(4))
@on_uvloop
async def test_whoever_leaves_whenever_every_request_ends_once_and_no_place_is_lost(seed: int) -> None:
    chance = random.Random(seed)

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if chance.random() < 0.1:
            writer.close()
        else:
            writer.write(answer())

    async def a_visit(name: str, client: Client) -> None:
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(0)
        client.writer.write(a_post(name))
        if chance.random() < 0.5:
            await client.read()
        else:
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            client.leave(chance.choice(["close", "reset"]))

    async with AsyncExitStack() as stack:
        replicas: list[Replica] = [await stack.enter_async_context(a_replica(script)) for _ in range(2)]
        books = Books([replica.url for replica in replicas], max_in_flight=2, max_queued=8)
        async with a_limited_port(books) as port, AsyncExitStack() as clients:
            visits = [a_visit(str(n), await clients.enter_async_context(a_client(port))) for n in range(60)]
            await asyncio.gather(*visits)
    ended = [receipt.request_id for receipt in books.receipts]
    assert len(ended) == len(set(ended))
    assert {receipt.outcome for receipt in books.receipts} <= {"ok", "cancelled", "refused", "failed"}


@on_uvloop
async def test_a_request_that_is_aborted_while_it_waits_is_answered_and_forgotten() -> None:
    script = Gated()
    async with a_replica(script) as replica:
        books = Books([replica.url], max_in_flight=1)
        async with a_limited_port(books) as port, a_client(port) as one, a_client(port) as two, a_client(port) as three:
            one.writer.write(a_post("1"))
            await until(lambda: script.names == ["1"])
            two.writer.write(a_post("2"))
            await until(lambda: books.queued == 1)
            aborted = await three.ask(post(b'{"rid":"2"}', target=b"/abort_request"))
            assert aborted.status == 200
            assert (await two.read()).status == 400
            assert books.queued == 0
            script.end("1").set()
            assert (await one.read()).status == 200
    assert books.outcomes == {"2": "cancelled", "1": "ok"}
    assert script.names == ["1"]
