"""The admin port: metrics, probes and the fleet as JSON. Reads only; nothing here changes the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from router.errors import PortInUse


class AdminPort:
    """An aiohttp server of read-only views.

    ready : whether a request could be served now
    metrics_text : everything in Prometheus' text format
    fleet : what /fleet shows, as plain values
    """

    def __init__(
        self, *, ready: Callable[[], bool], metrics_text: Callable[[], bytes], fleet: Callable[[], dict[str, Any]]
    ) -> None:
        self._ready = ready
        self._metrics_text = metrics_text
        self._fleet = fleet
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._readiness)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/fleet", self._show_fleet)
        self._runner = web.AppRunner(app, access_log=None)
        self._site: web.TCPSite | None = None

    @property
    def port(self) -> int:
        """The port listened on, which the system chose when 0 was asked for."""
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises `PortInUse` when the address cannot be had."""
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, shutdown_timeout=1.0)
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
        ready = self._ready()
        return web.json_response({"status": "ready" if ready else "no replica is up"}, status=200 if ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics_text(), headers={"content-type": "text/plain; version=0.0.4"})

    async def _show_fleet(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._fleet()), content_type="application/json")
