"""The page over HTTP: its files, a stream of what changes, and one decision opened.

Model     who watches gets everything once, then each second the fleet and what happened since, as server-sent events.
          What all of them get is made once. A watcher that does not read is cut off; with nobody watching nothing is
          made
Valid     behind the admin port, which says who may reach it. The page asks for nothing from elsewhere, runs no text of
          a request, and may not be framed
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from hashlib import blake2b
from importlib.resources import files
from time import monotonic
from typing import Any

import msgspec
from aiohttp import web

from router.page import shown
from router.page.live import Live

PERIOD_S = 1.0
ARMS_EVERY_S = 5.0  # quantiles of thousands of lines
POINTS = 600  # of expected and observed first tokens that a new watcher gets
FIRST = 40  # decisions of either kind that a watcher gets at a time, beside those under way
MOST_WATCHERS = 16
SEND_S = 10.0  # a watcher that reads nothing for so long has gone
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SAFE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Page:
    """Routes of the page, for an admin port.

    fleet : what /fleet shows; can_edit : whether replicas may be drained with an admin key
    """

    def __init__(
        self,
        live: Live,
        fleet: Callable[[], dict[str, Any]],
        *,
        can_edit: bool,
        clock: Callable[[], float] = monotonic,
        period_s: float = PERIOD_S,
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._can_edit = can_edit
        self._clock = clock
        self._period_s = period_s
        self._run = secrets.token_hex(4)  # numbers of decisions begin anew with every router
        self._closing = asyncio.Event()
        self._watchers = 0
        self._made: dict[str, tuple[float, Any]] = {}  # what all watchers get: when it was made, and what
        self._files = {name: (body, kind, f'"{_digest(body)}"') for name, body, kind in _static()}

    def add_to(self, app: web.Application) -> None:
        """Serve it at the root of `app`, until that shuts down."""
        app.router.add_get("/", self._index)
        app.router.add_get("/page/events", self._watch)
        app.router.add_get(r"/page/decisions/{number:\d{1,15}}", self._open)
        app.router.add_get("/page/{name}", self._file)
        app.on_shutdown.append(self._close)

    async def _close(self, app: web.Application) -> None:
        self._closing.set()

    # Files

    async def _index(self, request: web.Request) -> web.Response:
        return self._sent(request, "index.html")

    async def _file(self, request: web.Request) -> web.Response:
        return self._sent(request, request.match_info["name"])

    def _sent(self, request: web.Request, name: str) -> web.Response:
        if name not in self._files:
            return web.json_response({"error": "the page has no such file"}, status=404, headers=SAFE)
        body, kind, tag = self._files[name]
        if request.headers.get("if-none-match") == tag:
            return web.Response(status=304, headers={**SAFE, "ETag": tag})
        return web.Response(body=body, content_type=kind, charset="utf-8", headers={**SAFE, "ETag": tag})

    # One decision

    async def _open(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        found = self._live.find(number)
        if found is None or request.query.get("run", self._run) != self._run:
            message = "this decision is no longer kept here; its receipt may be: tfirst explain"
            return web.json_response({"error": message}, status=404, headers=SAFE)
        values = await asyncio.to_thread(shown.opened, found)
        return web.Response(body=msgspec.json.encode(values), content_type="application/json", headers=SAFE)

    # What changes

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self._watchers >= MOST_WATCHERS:
            return web.json_response(
                {"error": f"{MOST_WATCHERS} pages are open already"}, status=503, headers={**SAFE, "Retry-After": "10"}
            )
        self._watchers += 1
        try:
            return await self._follow(request)
        finally:
            self._watchers -= 1

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={**SAFE, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        after: int | None = None
        try:
            await response.prepare(request)
            while not self._closing.is_set():
                event = _event(self._news(after))
                after = self._live.changes
                async with asyncio.timeout(SEND_S):
                    await response.write(event)
                await self._rest()
        except (ConnectionError, TimeoutError):
            pass  # it has gone, or does not read
        return response

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(self._period_s):
                await self._closing.wait()
        except TimeoutError:
            pass

    def _news(self, after: int | None) -> dict[str, Any]:
        """Everything there is, or what came after that change."""
        live, first = self._live, after is None
        live.look()
        lines = live.lines_after(after or 0)[-POINTS:]
        decisions = live.decisions(after=after or 0, most=FIRST)
        return {
            "run": self._run,
            "first": first,
            "can_edit": self._can_edit,
            "fleet": self._shared("fleet", self._period_s / 2, lambda: shown.fleet(self._fleet())),
            "arms": self._shared("arms", ARMS_EVERY_S, lambda: shown.arms(live.lines)),
            "decisions": [shown.decision(one) for one in decisions],
            "points": shown.points(lines),
            "steps": shown.steps(live, None if first else 2),
        }

    def _shared(self, name: str, keep_s: float, make: Callable[[], Any]) -> msgspec.Raw:
        """What `make` gives, as JSON, made anew when it is older than `keep_s`."""
        now_s = self._clock()
        made = self._made.get(name)
        if made is None or now_s - made[0] >= keep_s:
            made = self._made[name] = now_s, msgspec.Raw(msgspec.json.encode(make()))
        raw: msgspec.Raw = made[1]
        return raw


def _event(values: dict[str, Any]) -> bytes:
    """One server-sent event. JSON has no line breaks in it, so it is one line."""
    return b"retry: 1000\nevent: news\ndata: " + msgspec.json.encode(values) + b"\n\n"


def _static() -> list[tuple[str, bytes, str]]:
    """Name, bytes and content type of every file of the page."""
    folder = files("router.page") / "static"
    return [
        (entry.name, entry.read_bytes(), TYPES[f".{entry.name.rpartition('.')[2]}"])
        for entry in folder.iterdir()
        if f".{entry.name.rpartition('.')[2]}" in TYPES
    ]


def _digest(body: bytes) -> str:
    return blake2b(body, digest_size=8).hexdigest()
