"""Connections to endpoints: the most recently used idle one first, or a new one.

Model     idle connections are a stack per base URL, so that in quiet times the surplus ages out; there is no cap on
          those in use, because a cap lets one endpoint that hangs starve its clients' other requests
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

from router.errors import ReplicaUnreachable
from router.http.contract import Limits, TimeOuts
from router.http.upstream import UpstreamConnection


@dataclass(frozen=True, slots=True)
class Origin:
    """A base URL taken apart. host_field : value of Host; prefix : path without a slash at the end."""

    host: str
    port: int
    tls: bool
    host_field: bytes
    prefix: bytes


@lru_cache(maxsize=4096)
def origin_of(base_url: str) -> Origin:
    """Take a base URL apart.

    Raises
    ------
    ValueError : it is not an http or https URL with a host

    >>> origin_of("http://10.0.0.7:8000/")
    Origin(host='10.0.0.7', port=8000, tls=False, host_field=b'10.0.0.7:8000', prefix=b'')
    """
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{base_url!r} is not a URL like http://host:port")
    tls = url.scheme == "https"
    host_field = url.netloc.rpartition("@")[2].encode("ascii")
    return Origin(url.hostname, url.port or (443 if tls else 80), tls, host_field, url.path.rstrip("/").encode("ascii"))


class Pool:
    """Owns every upstream connection of one traffic port, idle or in use, and the attempts to make more.

    tls : context for https endpoints; the system's trust store when None
    tls_name : name their certificates must carry, and SNI asks for; their host when None
    allowed : why an endpoint may not be at this numeric address and port, None where it may; asked before anything
        is sent
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        limits: Limits,
        times: TimeOuts,
        tls: ssl.SSLContext | None = None,
        tls_name: str | None = None,
        allowed: Callable[[str, int], str | None] | None = None,
    ) -> None:
        self._tls_name = tls_name
        self._allowed = allowed
        self._loop = loop
        self._limits = limits
        self._times = times
        self._tls = tls  # the default one is made once, when first needed: it reads the whole trust store
        self._idle: dict[str, list[UpstreamConnection]] = {}
        self._open: set[UpstreamConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._emptied = asyncio.Event()

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    @property
    def in_use(self) -> int:
        return sum(connection.busy for connection in self._open)

    @property
    def connecting(self) -> int:
        return len(self._connecting)

    def take(self, base_url: str) -> UpstreamConnection | None:
        """An idle connection, now the caller's; None when there is none."""
        idle = self._idle.get(base_url)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    def connect(
        self,
        base_url: str,
        connected: Callable[[UpstreamConnection], None],
        failed: Callable[[ReplicaUnreachable], None],
    ) -> asyncio.Task[None]:
        """Make a connection; exactly one of the two is called, or neither once the task was cancelled."""
        task = self._loop.create_task(self._connect(base_url, connected, failed))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def close(self) -> None:
        """Close all connections, end all attempts to make one, and wait until they are gone."""
        for task in list(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        self._emptied.clear()
        for connection in list(self._open):
            connection.close()
        if self._open:
            await self._emptied.wait()  # aborted: the loop reports each within its next turns

    # -- reported by the connections

    def opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)

    def settled(self, connection: UpstreamConnection) -> None:
        idle = self._idle.setdefault(connection.base_url, [])
        if len(idle) < self._limits.max_idle_per_endpoint:
            idle.append(connection)
            connection.rest(self._times.pool_idle_s)
        else:
            connection.close()

    def gone(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._emptied.set()
        idle = self._idle.get(connection.base_url)
        if idle is not None:
            if connection in idle:
                idle.remove(connection)
            if not idle:  # an endpoint that left the fleet leaves nothing here
                del self._idle[connection.base_url]

    # -- making connections

    async def _connect(
        self,
        base_url: str,
        connected: Callable[[UpstreamConnection], None],
        failed: Callable[[ReplicaUnreachable], None],
    ) -> None:
        try:
            async with asyncio.timeout(self._times.connect_s):
                connection = await self._open_connection(base_url)
        except TimeoutError:
            failed(ReplicaUnreachable(base_url, f"not within {self._times.connect_s:g} s"))
        except (OSError, ValueError) as exc:
            failed(ReplicaUnreachable(base_url, str(exc) or type(exc).__name__))
        else:
            connected(connection)

    async def _open_connection(self, base_url: str) -> UpstreamConnection:
        origin = origin_of(base_url)
        connection = UpstreamConnection(self._loop, base_url, self._times, self)
        try:
            if origin.tls:
                await self._open_secured(connection, origin)
            else:
                transport, _ = await self._loop.create_connection(lambda: connection, origin.host, origin.port)
                self._check_address(transport)
        except BaseException:
            self.gone(connection)  # cancelled after it was made, uvloop closes it without a report
            raise
        return connection

    async def _open_secured(self, connection: UpstreamConnection, origin: Origin) -> None:
        """Connect, and begin TLS there, so that the connection can reach what is below TLS.

        Raises
        ------
        OSError : no connection, or no trust
        ValueError : the endpoint is where none may be
        """
        if self._tls is None:
            self._tls = ssl.create_default_context()
        plain, _ = await self._loop.create_connection(asyncio.Protocol, origin.host, origin.port)
        try:
            self._check_address(plain)
            name = self._tls_name or origin.host
            transport = await self._loop.start_tls(plain, connection, self._tls, server_hostname=name)
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the endpoint closed the connection behind its handshake")
        except BaseException:
            plain.abort()
            raise
        connection.secured(transport, plain)

    def _check_address(self, transport: asyncio.BaseTransport) -> None:
        """Names are checked by where they lead, at each connection, because that may change.

        Raises
        ------
        ValueError : the endpoint is where none may be
        """
        if self._allowed is None:
            return
        address, port = transport.get_extra_info("peername")[:2]
        problem = self._allowed(address, port)
        if problem is not None:
            cast(asyncio.Transport, transport).abort()
            raise ValueError(problem)
