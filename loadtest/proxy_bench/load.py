"""The clients: requests over kept connections, one after another on each, and what came back.

Model     a closed loop: a connection sends its next request when the last is answered. Answers are parsed, so that a
          cut or a wrong one is not counted as an answer
Valid     loopback; the clients share a core with the stub engines, never with the proxy
Clock     time.perf_counter around the socket, for first bytes
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import httptools


@dataclass(slots=True)
class Tally:
    """What all connections of one run saw."""

    answered: int = 0  # whole answers with status 200
    wrong: int = 0  # other answers, and connections that ended under way
    pieces: int = 0  # body pieces that arrived
    status: int = 0  # of the last wrong answer


class Client(asyncio.Protocol):
    """One connection. Each `ask` is answered by its future: True for a whole answer with status 200."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[bool] | None = None
        self.first_byte_s = 0.0  # perf_counter at the first byte of the last answer
        self._awaiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> asyncio.Future[bool]:
        self._answer = asyncio.get_running_loop().create_future()
        self._awaiting = True
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        self._answer = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._awaiting:
            self._awaiting, self.first_byte_s = False, perf_counter()
        self._parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        self._tally.pieces += 1

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._ended(status == 200, status)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(False, 0)

    def _ended(self, well: bool, status: int) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if well:
            self._tally.answered += 1
        else:
            self._tally.wrong += 1
            self._tally.status = status
        answer.set_result(well)


def request_of(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    """A POST as client libraries send it."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
        f"User-Agent: bench/1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connected(port: int, tally: Tally) -> Client:
    """A new connection."""
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(lambda: Client(tally), "127.0.0.1", port))[1]


async def closed_loop(port: int, requests: Sequence[bytes], *, connections: int, seconds: float, seed: int) -> Tally:
    """Ask for `seconds`, then let every answer come."""
    tally = Tally()
    clients = [await connected(port, tally) for _ in range(connections)]
    until_s = perf_counter() + seconds

    async def ask_on(client: Client, rng: random.Random) -> None:
        while perf_counter() < until_s and await client.ask(rng.choice(requests)):
            pass

    await asyncio.gather(*(ask_on(client, random.Random(f"{seed}/{at}")) for at, client in enumerate(clients)))
    for client in clients:
        client.close()
    return tally


async def streams(port: int, request: bytes, *, count: int, over_s: float, limit_s: float) -> Tally:
    """Open `count` streams, spread over `over_s`, and read each to its end; one not over in `limit_s` is wrong."""
    tally = Tally()

    async def one(at: int) -> None:
        await asyncio.sleep(at * over_s / count)
        try:
            client = await connected(port, tally)
            async with asyncio.timeout(limit_s):
                await client.ask(request)
            client.close()
        except (OSError, TimeoutError):
            tally.wrong += 1

    await asyncio.gather(*(one(at) for at in range(count)))
    return tally


async def first_bytes(ports: Sequence[int], request: bytes, *, times: int) -> list[list[float]]:
    """Seconds from a request to the first byte of its answer, for each port, asked in turn, one at a time."""
    tally = Tally()
    clients = [await connected(port, tally) for port in ports]
    took_s: list[list[float]] = [[] for _ in ports]
    for _ in range(times):
        for client, taken in zip(clients, took_s, strict=True):
            began_s = perf_counter()
            await client.ask(request)
            taken.append(client.first_byte_s - began_s)
    for client in clients:
        client.close()
    if tally.wrong:
        raise RuntimeError(f"{tally.wrong} answers were wrong (status {tally.status})")
    return took_s


async def slowest_health(port: int, request: bytes, *, busy: int, seconds: float) -> tuple[list[float], Tally]:
    """How long /health takes, asked every 2 ms, while `busy` connections send one long request after another."""
    tally, probes = Tally(), Tally()
    probe = await connected(port, probes)
    health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    clients = [await connected(port, tally) for _ in range(busy)]
    until_s, took_s = perf_counter() + seconds, []

    async def ask_on(client: Client) -> None:
        while perf_counter() < until_s and await client.ask(request):
            pass

    asking = [asyncio.ensure_future(ask_on(client)) for client in clients]
    while (began_s := perf_counter()) < until_s:
        await probe.ask(health)
        took_s.append(probe.first_byte_s - began_s)
        await asyncio.sleep(0.002)
    await asyncio.gather(*asking)
    for client in [*clients, probe]:
        client.close()
    return took_s, tally
