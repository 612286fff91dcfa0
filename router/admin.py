"""The admin port: metrics, probes, the fleet as JSON and as a page, and two ways in, behind the key: cache events, and
which replicas there are.

Whoever may use them can steer traffic, so without a key configured nobody may.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from router.errors import PortInUse
from router.keys import SecretKey, bearer

# aiohttp shows the bytes of requests it cannot read, which may hold keys, to whoever logs at level debug.
_server_log = logging.getLogger(f"{__name__}.server")
_server_log.setLevel(logging.INFO)

_MAX_PUSH_BYTES = 4 << 20  # some 45,000 blocks, which take 0.1 s to be taken in; in slices, if in several batches


class AdminPort:
    """An aiohttp server of read-only views, of POST /events and of POST /replicas/{add, drain, undrain, remove}.

    not_ready : why no requests should be sent here now; None when they may
    metrics_text : everything in Prometheus' text format
    fleet : what /fleet shows, as plain values
    pushed : body and content type of a POST /events -> HTTP status and what to answer
    edited : the call and decoded JSON of a POST /replicas/{call} -> HTTP status and what to answer
    page : adds routes for whoever looks at it with a browser
    key : what `authorization: Bearer ...` must say to post; None: nobody may
    """

    def __init__(
        self,
        *,
        not_ready: Callable[[], str | None],
        metrics_text: Callable[[], bytes],
        fleet: Callable[[], dict[str, Any]],
        pushed: Callable[[bytes, str], Awaitable[tuple[int, dict[str, Any]]]] | None = None,
        edited: Callable[[str, Any], tuple[int, dict[str, Any]]] | None = None,
        page: Callable[[web.Application], None] | None = None,
        key: str | None = None,
    ) -> None:
        self._edited = edited
        self._not_ready = not_ready
        self._metrics_text = metrics_text
        self._fleet = fleet
        self._pushed = pushed
        self._key = None if key is None else SecretKey(key)
        app = web.Application(client_max_size=_MAX_PUSH_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._readiness)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/fleet", self._show_fleet)
        if pushed is not None:
            app.router.add_post("/events", self._take_events)
        if edited is not None:
            app.router.add_post("/replicas/{call}", self._edit_replicas)
        if page is not None:
            page(app)
        self._runner = web.AppRunner(app, access_log=None, logger=_server_log, shutdown_timeout=1.0)
        self._site: web.TCPSite | None = None

    @property
    def port(self) -> int:
        """The port listened on, which the system chose when 0 was asked for."""
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises `PortInUse` when the address cannot be had."""
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port)
        try:
            await self._site.start()
        except OSError as exc:
            raise PortInUse(host, port, "the admin port", exc.strerror or str(exc)) from exc

    async def stop(self) -> None:
        """Close the socket and its connections."""
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readiness(self, request: web.Request) -> web.Response:
        why = self._not_ready()
        return web.json_response({"status": why or "ready"}, status=503 if why else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics_text(), headers={"content-type": "text/plain; version=0.0.4"})

    async def _show_fleet(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._fleet()), content_type="application/json")

    async def _edit_replicas(self, request: web.Request) -> web.Response:
        if not self._authorised(request):
            return self._turned_away("change replicas")
        assert self._edited is not None, "the route exists only with somebody to take the edits"
        try:
            body = msgspec.json.decode(await request.read())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return web.json_response({"error": "the body is no JSON"}, status=400)
        status, answer = self._edited(request.match_info["call"], body)
        return web.json_response(answer, status=status)

    def _turned_away(self, what: str) -> web.Response:
        if self._key is None:
            return web.json_response({"error": f"nobody may {what}: admin_key_env names no key"}, status=403)
        return web.json_response({"error": "the admin key is missing or wrong"}, status=401)

    async def _take_events(self, request: web.Request) -> web.Response:
        if not self._authorised(request):
            return self._turned_away("post events")
        assert self._pushed is not None, "the route exists only with somebody to take the events"
        status, answer = await self._pushed(await request.read(), request.content_type)
        return web.json_response(answer, status=status)

    def _authorised(self, request: web.Request) -> bool:
        # Headers may hold any byte, which aiohttp keeps as lone surrogates.
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        return self._key is not None and self._key.matches(bearer(given))
