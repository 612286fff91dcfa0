"""Thousands of clients that leave in every phase of a request, against the real books: afterwards nothing is held."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Hold, Send
from router.http.client import ClientConnection
from router.http.contract import Endpoint, Read, TimeOuts
from router.http.exchange import Exchange
from router.http.head import RequestHead
from router.http.question import Question
from router.http.resumed import ResumedExchange
from router.http.resuming import Resuming
from router.http.server import TrafficPort
from router.http.to_all import ToAll
from router.http.upstream import UpstreamConnection
from router.resume.log import ResumeConfig
from router.resume.reasons import WhyNot
from router.retries import RetryConfig
from tests.builders import MODEL
from tests.router.dispatch_bench import Bench, nothing_is_left
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Client,
    Replica,
    Script,
    a_replica,
    answer,
    chunk,
    events,
    here,
    on_uvloop,
    post,
    reset,
    says,
    says_and_closes,
    silence,
    until,
)

CLIENTS = 2000
AT_ONCE = 40
EVENTS = events("sse_chat_stream.txt")


async def _dies(_: object, writer: asyncio.StreamWriter) -> None:
    reset(writer)


REPLICAS: dict[str, Script] = {  # what each does with a request; the request says which it wants
    "answers": says(answer()),
    "streams": says(STREAM_HEAD, *map(chunk, EVENTS), LAST_CHUNK),
    "stops": says(STREAM_HEAD, *map(chunk, EVENTS[:2])),
    "breaks": says_and_closes(STREAM_HEAD, *map(chunk, EVENTS[:3])),
    "is silent": silence,
    "says a head": says(STREAM_HEAD),
    "is busy": says(answer(b"busy", b"503 Busy")),
    "fails": says(answer(b"{}", b"500 Internal Server Error")),
    "dies": _dies,
}
DEAF = "accepts nobody"  # one more: a listen queue that nobody empties
NAMES = [*REPLICAS, DEAF]
SENDING = ("nothing", "half a head", "half a body")  # phases before the whole request is here


class Books:
    """The real dispatcher, with the addresses of this test's replicas."""

    def __init__(self, urls: list[str]) -> None:
        retries = RetryConfig(share=1.0)
        self.bench = Bench(*["A100"] * len(urls), policy="round_robin", retries=retries)
        self.names = list(self.bench.view.names)
        self.ends: collections.Counter[str] = collections.Counter()
        self._urls = dict(zip(self.names, urls, strict=True))
        self._dispatcher = self.bench.dispatcher

    @property
    def resumed(self) -> int:
        """Streams that went on elsewhere at least once, whether or not that replica brought anything."""
        return sum(bool(receipt.resumes) for receipt in self.bench.receipts)

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        return self._at_home(self._dispatcher.arrived(request, now_s))

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        return self._dispatcher.first_token(sent, now_s)

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        self.ends["finished"] += 1
        return self._dispatcher.finished(sent, ended, now_s)

    def failed(self, sent: Send, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]:
        self.ends[cause.value] += 1
        return self._at_home(self._dispatcher.failed(sent, cause, now_s, retry_after_s))

    def broke(self, sent: Send, rest: RequestFacts | WhyNot, now_s: float) -> list[Action]:
        self.ends["broke"] += 1
        if isinstance(rest, RequestFacts):
            rest = replace(rest, only="")  # whom the client wanted was for the first answer
        return self._at_home(self._dispatcher.broke(sent, rest, now_s))

    def cancelled(self, sent: Send, now_s: float) -> list[Action]:
        self.ends["cancelled"] += 1
        return self._dispatcher.cancelled(sent, now_s)

    def left(self, hold: Hold, now_s: float, *, cause: Cause | None = None) -> list[Action]:
        return self._dispatcher.left(hold, now_s, cause=cause)

    def due(self, now_s: float) -> list[Action]:
        return self._dispatcher.due(now_s)

    @property
    def next_due_s(self) -> float | None:
        return self._dispatcher.next_due_s

    def _at_home(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Send):
                action.base_url = self._urls[action.replica]
        return actions


class Reader:
    """Binds requests to the replica they ask for; of some the prompt is never read to its end."""

    def __init__(self, names: list[str]) -> None:
        self._names = dict(zip(NAMES, names, strict=True))
        self.reading: list[asyncio.Future[Read]] = []

    def __call__(self, head: RequestHead, body: bytes) -> Read | asyncio.Future[Read]:
        wanted = (head.get(b"x-wanted") or b"").decode()
        if wanted == "a slow prompt":
            self.reading.append(asyncio.get_running_loop().create_future())
            return self.reading[-1]
        return RequestFacts(
            "made-1", MODEL, prompt_tokens=100, streams=True, path=head.path, only=self._names.get(wanted, "")
        )


@contextlib.asynccontextmanager
async def the_replicas() -> AsyncIterator[list[Replica]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(a_replica(script)) for script in REPLICAS.values()]


@contextlib.contextmanager
def a_full_queue() -> collections.abc.Iterator[str]:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}"
        for filler in fillers:
            filler.close()


class Visit:
    """One client: what it sends, how far it goes, how it leaves."""

    def __init__(self, chance: random.Random) -> None:
        self.wanted = chance.choice([*NAMES, "any", "a slow prompt", "to all"])
        self.phase = chance.choice([*SENDING, "at once", "turns later", "turns later", "first bytes", "the end"])
        if self.wanted in (DEAF, "is silent", "a slow prompt", "says a head", "to all") and self.phase == "the end":
            self.phase = "turns later"  # there is none
        self.turns = chance.randrange(1, 30)
        self.how = chance.choice(["end", "reset"])
        target = b"/v1/load_lora_adapter" if self.wanted == "to all" else b"/v1/completions"
        self.request = post(b'{"prompt":"Why?","stream":true}', b"x-wanted: " + self.wanted.encode(), target=target)

    async def make(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = Client(reader, writer)
        cut = {"nothing": 0, "half a head": 30, "half a body": len(self.request) - 5}
        writer.write(self.request[: cut.get(self.phase, len(self.request))])
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._go_on(client)
        client.leave(self.how)

    async def _go_on(self, client: Client) -> None:
        if self.phase == "turns later":
            for _ in range(self.turns):
                await asyncio.sleep(0)
        elif self.phase == "first bytes" and self.wanted in ("answers", "streams", "stops", "breaks", "is busy"):
            await client.reader.readexactly(self.turns)
        elif self.phase == "the end" and self.wanted == "breaks":  # it may wait for who goes on with it for ever
            await client.read_head()
            for _ in range(3 * self.turns):
                await asyncio.sleep(0)
        elif self.phase == "the end" and self.wanted in ("answers", "streams", "is busy", "fails", "dies"):
            await client.read()
            if self.turns % 2:  # once more, on the same connection
                await client.ask(self.request)


@pytest.mark.parametrize("goes_on", [False, True], ids=["cut streams", "streams that go on elsewhere"])
@on_uvloop
async def test_nothing_is_held_after_thousands_of_clients_have_left_in_every_phase(goes_on: bool) -> None:
    chance = random.Random("clients that leave")
    async with the_replicas() as replicas:
        with a_full_queue() as deaf:
            urls = [*(replica.url for replica in replicas), deaf]
            books = Books(urls)
            reader = Reader(books.names)
            port = TrafficPort(
                books,
                read_prompt=reader,
                answer=here,
                times=TimeOuts(connect_s=60.0, linger_s=0.01),  # no limit ends what should have been ended
                admin=lambda head: None,
                endpoints=lambda: [Endpoint("e", url) for url in urls],
                resumable=(lambda model: ResumeConfig(enabled=True)) if goes_on else None,
            )
            await port.start("127.0.0.1", 0)
            tasks = len(asyncio.all_tasks())
            try:
                await _hammer(port, [Visit(chance) for _ in range(CLIENTS // 2 if goes_on else CLIENTS)])
                await _nothing_is_held(port, books, replicas, tasks)
            finally:
                await port.stop(grace_s=0.0)
            assert all(reading.cancelled() for reading in reader.reading)
    assert len(reader.reading) > CLIENTS / 100
    assert {"finished", "cancelled", "no_answer", "overloaded"} <= set(books.ends)
    assert books.ends["broke" if goes_on else "broken"] > CLIENTS / 500
    assert bool(books.resumed) is goes_on


async def _hammer(port: TrafficPort, visits: list[Visit]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(visit: Visit) -> None:
        async with gate:
            await visit.make(port.port)

    await asyncio.gather(*map(one, visits))


async def _nothing_is_held(port: TrafficPort, books: Books, replicas: list[Replica], tasks: int) -> None:
    await until(lambda: port.open_connections == port.open_exchanges == 0)
    await until(lambda: port.pool.in_use == port.pool.connecting == 0)
    await until(lambda: sum(replica.open for replica in replicas) == port.pool.idle)
    assert books.bench.dispatcher.in_flight == 0
    assert nothing_is_left(books.bench)
    assert all(receipt.outcome is not None for receipt in books.bench.receipts)
    assert port.counts.internal_errors == port.counts.reader_failures == 0
    assert port._shared.per_client == {}
    await until(lambda: _at_work() <= tasks + port.pool.idle)
    gc.collect()
    alive = collections.Counter(type(thing) for thing in gc.get_objects())
    assert [alive[kind] for kind in (Exchange, ResumedExchange, Resuming, ToAll, Question, ClientConnection)] == [0] * 6
    assert alive[UpstreamConnection] == port.pool.idle


def _at_work() -> int:
    """Tasks that are not those of the replicas: each of their connections has two."""
    return sum("Replica" not in repr(task) for task in asyncio.all_tasks())
