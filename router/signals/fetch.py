"""GET over one kept connection, for control calls that are made many times a second.

Model     one connection per endpoint, one request at a time on it; opened when first needed, opened anew when the
          server has closed it. A request that met a connection closed meanwhile is sent once more on a new one.
          `get` deals with all that; `ask` uses an open connection or leaves it, and costs no task
Valid     http and https, HTTP/1.1 with a length, chunks or an end of connection; redirects to the same server
Blind to  proxies from the environment, cookies, compression (none is asked for)
Source    RFC 9112; measured by loadtest/bench_load_poll.py
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urljoin, urlsplit

import aiohttp
import httptools

REDIRECTS = frozenset({301, 302, 307, 308})
_MAX_HOPS = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply; `status` 0 means none came and `body` says why. The body is kept for status 200 only.

    cut : the body was longer than what is kept of it
    """

    status: int
    body: bytes
    cut: bool = False


async def body_of(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body of an answer that aiohttp reads, cut at `most_bytes`: servers are not trusted with our memory."""
    body = bytearray()
    while len(body) < most_bytes:
        piece = await response.content.read(most_bytes - len(body))
        if not piece:
            break
        body += piece
    return bytes(body)


Done = Callable[[Answer | Exception], object]


class Fetcher:
    """Owner of the connection to one endpoint.

    base_url : http(s)://host[:port], without a path
    headers : sent with every request
    max_body_bytes : a longer body is cut there, and the connection closed
    tls : context for https; the system's trust store when None
    tls_name : name its certificate must carry; the URL's host when None
    refused : why it may not be at an address and port, None when it may; asked before anything is sent
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        max_body_bytes: int,
        tls: ssl.SSLContext | None = None,
        tls_name: str | None = None,
        refused: Callable[[str, int], str | None] = lambda address, port: None,
    ) -> None:
        parts = urlsplit(base_url)
        self._base_url = base_url
        self._host = parts.hostname or ""
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._tls_name = tls_name if self._tls is not None else None
        self._refused = refused
        self._port = parts.port or (443 if self._tls is not None else 80)
        fixed = {"host": parts.netloc.rpartition("@")[2], "accept": "*/*", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items()).encode("latin-1") + b"\r\n"
        self._max_body_bytes = max_body_bytes
        self._moved: dict[str, str] = {}  # path -> where the server says it is
        self._connection: _Connection | None = None
        self._busy = asyncio.Lock()

    @property
    def ready(self) -> bool:
        """Whether `ask` may be called: a connection is open and nothing is under way on it."""
        connection = self._connection
        return connection is not None and not (connection.closed or connection.busy or self._busy.locked())

    def ask(self, path: str, done: Done) -> None:
        """Send a request on the open connection; `done` gets the answer, or the reason why none will come.

        No time limit: whoever waits long enough calls `close`, and `done` hears of it.
        """
        assert self.ready, "ask follows ready"
        assert self._connection is not None, "ready says so"
        self._connection.ask(self._request(self._moved.get(path, path)), done)

    async def get(self, path: str, *, timeout_s: float) -> Answer:
        """Ask for `path`; never raises for what a server or a network can do."""
        async with self._busy:
            if self._connection is not None and self._connection.busy:
                self.close()  # an `ask` nobody waits for any more
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._answer(path)
            except TimeoutError:
                return Answer(0, b"no answer within the time limit")
            except (OSError, httptools.HttpParserError) as exc:
                return Answer(0, (str(exc) or type(exc).__name__).encode())

    def close(self) -> None:
        """Close the connection; a later `get` opens another."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _answer(self, path: str) -> Answer:
        for _ in range(_MAX_HOPS):
            answer, location = await self._once_or_twice(self._moved.get(path, path))
            if answer.status not in REDIRECTS or location is None:
                break
            target = urlsplit(urljoin(self._base_url + path, location))
            if target.netloc not in ("", urlsplit(self._base_url).netloc):
                break  # another server's answer would be taken for this one's
            self._moved[path] = target.path + (f"?{target.query}" if target.query else "")
        return answer

    async def _once_or_twice(self, target: str) -> tuple[Answer, str | None]:
        request = self._request(target)
        reused = self._connection is not None and not self._connection.closed
        try:
            return await self._exchange(request)
        except ConnectionError:
            if not reused:
                raise
        return await self._exchange(request)

    def _request(self, target: str) -> bytes:
        return b"GET " + target.encode("ascii", "replace") + b" HTTP/1.1\r\n" + self._head

    async def _exchange(self, request: bytes) -> tuple[Answer, str | None]:
        connection = self._connection
        if connection is None or connection.closed:
            connection = self._connection = await self._connect()
        outcome: asyncio.Future[Answer | Exception] = asyncio.get_running_loop().create_future()

        def done(result: Answer | Exception) -> None:
            if not outcome.done():
                outcome.set_result(result)

        connection.ask(request, done)
        try:
            result = await outcome
        except asyncio.CancelledError:
            self.close()  # half an answer may be on its way
            raise
        if isinstance(result, Exception):
            raise result
        return result, connection.location

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(
            lambda: _Connection(self._max_body_bytes),
            self._host,
            self._port,
            ssl=self._tls,
            server_hostname=self._tls_name,
        )
        reason = self._refused(*transport.get_extra_info("peername")[:2])
        if reason is not None:
            connection.abort()
            raise OSError(reason)
        return connection


class _Connection(asyncio.Protocol):
    """One TCP connection, and the answer that is coming in on it."""

    def __init__(self, max_body_bytes: int) -> None:
        self.closed = False
        self.location: str | None = None
        self._max_body_bytes = max_body_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: Done | None = None
        self._start_over()

    @property
    def busy(self) -> bool:
        return self._done is not None

    def _start_over(self) -> None:
        self._status = 0
        self._framed = False
        self._chunks: list[bytes] = []
        self._size = 0
        self.location = None

    def ask(self, request: bytes, done: Done) -> None:
        """Send one request. `done` gets an `OSError` or a parser's error when no whole answer comes."""
        assert self._transport is not None, "asked before the connection was made"
        self._start_over()
        self._done = done
        self._transport.write(request)

    def abort(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None:
            self.abort()  # nobody asked: whatever comes next could not be told from the next answer
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._done is None:
            return
        if exc is None and self._status and not self._framed:
            self._finish(reusable=False)  # without a length the end of the connection is the end of the body
        else:
            self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the connection was closed"))

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif lower == b"location":
            self.location = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._status == 200:
            self._chunks.append(body)
        if self._size > self._max_body_bytes:
            self._finish(reusable=False)

    def on_message_complete(self) -> None:
        if 100 <= self._status < 200:
            self._start_over()
            return
        self._finish(reusable=self._parser.should_keep_alive())  # last: what is done next may ask again

    def _finish(self, *, reusable: bool) -> None:
        if self._done is None:
            return
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        if not reusable:
            self.abort()
        most = self._max_body_bytes
        self._settle(Answer(self._status, body[:most], cut=len(body) > most))

    def _fail(self, exc: Exception) -> None:
        self.abort()
        self._settle(exc)

    def _settle(self, result: Answer | Exception) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(result)
