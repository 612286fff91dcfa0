"""The traffic port: listens, knows its connections, and stops without losing an answer it can still finish."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence

from router.http.client import ClientConnection
from router.http.contract import (
    Admit,
    Answer,
    Clock,
    Decider,
    Endpoint,
    Heard,
    Limits,
    PromptReader,
    Resumable,
    TimeOuts,
)
from router.http.pool import Pool
from router.http.shared import Counts, Shared

_BACKLOG = 4096  # a burst of clients must not meet refused connections


class TrafficPort:
    """Owns the listening socket, all client connections and the pool. Made and used inside a running loop.

    decider : owns every rule
    read_prompt : makes `RequestFacts` of a whole request, or a refusal, at once or in a while
    answer : makes the router's own answers
    clock : what the decider is told as `now_s`; the loop's clock when None
    heard : shown the head of every answer of a replica; what it raises costs the answer nothing
    upstream_tls : context for https endpoints; the system's trust store when None
    upstream_tls_name : name their certificates must carry; their host when None
    allowed_address : why an endpoint may not be at this numeric address and port; None where it may
    admit : refuses a request by its head, before its body is read; None lets it in
    drops : lower-case names of clients' fields that no replica is shown, their credentials for example
    via : value of a Via field that every request gets on its way; b"" for none
    admin : refuses what changes replicas; None lets it through. Without one such paths are hidden
    endpoints : whom a request to all is sent to
    relay_unknown : whether paths in no row of `router.routes` are relayed, by load
    resumable : how streams of each model go on elsewhere when their replica fails; None: no stream does
    """

    def __init__(
        self,
        decider: Decider,
        *,
        read_prompt: PromptReader,
        answer: Answer,
        clock: Clock | None = None,
        limits: Limits | None = None,
        times: TimeOuts | None = None,
        heard: Heard | None = None,
        upstream_tls: ssl.SSLContext | None = None,
        upstream_tls_name: str | None = None,
        allowed_address: Callable[[str, int], str | None] | None = None,
        admit: Admit | None = None,
        drops: frozenset[bytes] = frozenset(),
        via: bytes = b"",
        admin: Admit | None = None,
        endpoints: Callable[[], Sequence[Endpoint]] = tuple,
        relay_unknown: bool = True,
        resumable: Resumable | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        limits = limits or Limits()
        times = times or TimeOuts()
        pool = Pool(
            loop, limits=limits, times=times, tls=upstream_tls, tls_name=upstream_tls_name, allowed=allowed_address
        )
        self._shared = Shared(loop, decider, read_prompt, answer, clock or loop.time, pool, limits, times, heard)
        self._shared.admit, self._shared.drops, self._shared.via = admit, drops, via
        self._shared.admin, self._shared.endpoints, self._shared.relay_unknown = admin, endpoints, relay_unknown
        self._shared.resumable = resumable
        self._server: asyncio.Server | None = None

    @property
    def counts(self) -> Counts:
        return self._shared.counts

    @property
    def pool(self) -> Pool:
        return self._shared.pool

    @property
    def open_connections(self) -> int:
        """Client connections."""
        return len(self._shared.clients)

    @property
    def open_exchanges(self) -> int:
        """Requests that were placed, or wait to be, and are not answered yet."""
        return sum(client.busy for client in self._shared.clients)

    def spoke(self, row: int) -> bool:
        """Whether bytes of an answer of `row` came since this was last asked."""
        spoke = row in self._shared.spoke
        self._shared.spoke.discard(row)
        return spoke

    def look(self) -> None:
        """Who waits may go, or has nowhere to go: the decider was told of a replica by somebody else."""
        self._shared.messenger.look()

    @property
    def port(self) -> int:
        """The port listened on, which the system chose when 0 was asked for."""
        assert self._server is not None, "the port was started"
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        """Listen.

        Raises
        ------
        OSError : the address is in use or not ours
        """
        self._server = await self._shared.loop.create_server(
            lambda: ClientConnection(self._shared),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._shared.times.request_head_s,
            backlog=_BACKLOG,
        )

    async def stop(self, grace_s: float) -> None:
        """Accept nobody, let answers in progress end for at most `grace_s`, cut the rest visibly, close all."""
        if self._server is not None:
            self._server.close()
        for client in list(self._shared.clients):
            client.stop()
        await self._wait_for_clients(grace_s)
        self.cut()
        await self._wait_for_clients(1.0)
        self._shared.messenger.stop()
        await self._shared.pool.close()
        if self._server is not None:
            await self._server.wait_closed()

    def cut(self) -> None:
        """Cut all answers in progress, visibly; a `stop` that waits for them then goes on."""
        for client in list(self._shared.clients):
            client.stop_now()

    async def _wait_for_clients(self, limit_s: float) -> None:
        """Until no client is connected, or the limit has passed."""
        self._shared.deserted.clear()
        if self._shared.clients:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._shared.deserted.wait()
