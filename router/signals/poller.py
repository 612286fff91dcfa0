"""Ask every endpoint again and again: is it up, what does it serve, how busy is it.

Model     each `period_s` one round per endpoint: /health, /metrics and, while its models are not known or due
          again, /v1/models, together. Up after one good round, down after `misses_to_down` bad ones in a row.
Valid     vLLM, SGLang and anything with one of /health and /v1/models; /metrics may be empty or absent
Blind to  an engine that is stuck while its HTTP side still answers: progress of requests must show that
Source    field practice: one missed deadline is no death (a saturated engine answers probes late)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from router.signals.prometheus_text import Load, load_of

log = logging.getLogger(__name__)

_MODELS_EVERY = 20  # rounds between two looks at /v1/models: adapters come and go
_MAX_PAGE_BYTES = 8 << 20
_NO_SUCH_ROUTE = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply; `status` 0 means none came and `body` says why."""

    status: int
    body: bytes


@dataclass(slots=True, eq=False)
class Polled:
    """One endpoint under observation.

    rows : row -> rank label of its metrics, None for the sum over all ranks
    models : names it serves, adapters included; empty while unknown
    parents : adapter name -> name of its base model
    """

    base_url: str
    rows: dict[int, str | None]
    up: bool = False
    misses: int = 0
    rounds: int = 0
    models: tuple[str, ...] = ()
    parents: dict[str, str] = field(default_factory=dict)


class LoadPoller:
    """Owner of one polling task per endpoint. `watch`, then `start` inside a running loop; `stop` ends all.

    Parameters
    ----------
    session : used for every request, not closed here; its connector must allow three connections per endpoint
    on_load : (row, load, sent_s, received_s) after each answered /metrics; `Load()` when it holds nothing
    on_up : (row, models) when an endpoint comes up, and again when the models it names change
    on_down : (row, reason) after `misses_to_down` bad rounds in a row
    period_s : seconds between the starts of two rounds, > 0; a slow round delays the next, never overlaps it
    timeout_s : for each request, > 0
    clock : the router's own clock, seconds
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        on_load: Callable[[int, Load, float, float], object],
        on_up: Callable[[int, tuple[str, ...]], object],
        on_down: Callable[[int, str], object],
        period_s: float = 0.5,
        timeout_s: float = 2.0,
        misses_to_down: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (period_s > 0 and timeout_s > 0 and misses_to_down >= 1):
            raise ValueError("period_s and timeout_s must be positive, misses_to_down at least 1")
        self.endpoints: dict[str, Polled] = {}
        self.errors = 0  # unexpected exceptions; the round was abandoned
        self._session = session
        self._on_load = on_load
        self._on_up = on_up
        self._on_down = on_down
        self._period_s = period_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._misses_to_down = misses_to_down
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self, row: int, base_url: str, rank: str | None = None) -> None:
        """Observe `base_url` for `row`; several rows may share one URL, told apart by rank. Before `start`."""
        assert not self._tasks, "watch comes before start"
        url = base_url.rstrip("/")
        self.endpoints.setdefault(url, Polled(url, {})).rows[row] = rank

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._watch_over(endpoint), name=f"poll {endpoint.base_url}")
            for endpoint in self.endpoints.values()
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    async def _watch_over(self, endpoint: Polled) -> None:
        loop = asyncio.get_running_loop()
        while True:
            next_s = loop.time() + self._period_s
            try:
                await self.poll_once(endpoint)
            except Exception:
                self.errors += 1
                log.exception("polling %s failed", endpoint.base_url)
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    async def poll_once(self, endpoint: Polled) -> None:
        """One round: ask, then report what changed."""
        sent_s = self._clock()
        asks_models = not endpoint.models or not endpoint.up or endpoint.rounds % _MODELS_EVERY == 0
        endpoint.rounds += 1
        health, metrics, models = await asyncio.gather(
            self._get(endpoint, "/health"),
            self._get(endpoint, "/metrics"),
            self._get(endpoint, "/v1/models") if asks_models else _nothing(),
        )
        received_s = self._clock()
        if health.status in _NO_SUCH_ROUTE and models is None:
            models = await self._get(endpoint, "/v1/models")
        alive = health.status == 200
        if health.status in _NO_SUCH_ROUTE:
            alive = models is not None and models.status == 200
        if alive:
            self._came_up(endpoint, models)
        else:
            self._missed(endpoint, health)
        if metrics.status:
            self._report_load(endpoint, metrics, sent_s, received_s)

    def _came_up(self, endpoint: Polled, models: Answer | None) -> None:
        endpoint.misses = 0
        names, parents = model_names(models.body) if models is not None and models.status == 200 else ((), {})
        if not names:  # a broken answer is no reason to stop serving what was named before
            names, parents = endpoint.models, endpoint.parents
        news = not endpoint.up or (names, parents) != (endpoint.models, endpoint.parents)
        endpoint.models, endpoint.parents = names, parents  # before anybody is told, who may look them up here
        if news:
            for row in endpoint.rows:
                self._on_up(row, names)
        endpoint.up = True

    def _missed(self, endpoint: Polled, health: Answer) -> None:
        endpoint.misses += 1
        if endpoint.misses == self._misses_to_down:
            endpoint.up = False
            reason = f"/health answered {health.status}" if health.status else health.body.decode(errors="replace")
            for row in endpoint.rows:
                self._on_down(row, reason)

    def _report_load(self, endpoint: Polled, metrics: Answer, sent_s: float, received_s: float) -> None:
        text = metrics.body.decode("utf-8", errors="replace") if metrics.status == 200 else ""
        for row, rank in endpoint.rows.items():
            self._on_load(row, load_of(text, rank), sent_s, received_s)

    async def _get(self, endpoint: Polled, path: str) -> Answer:
        try:
            async with self._session.get(endpoint.base_url + path, timeout=self._timeout) as response:
                body = await response.content.read(_MAX_PAGE_BYTES + 1) if response.status == 200 else b""
                while body and len(body) <= _MAX_PAGE_BYTES and (more := await response.content.readany()):
                    body += more
                return Answer(response.status, body[:_MAX_PAGE_BYTES])
        except TimeoutError:
            return Answer(0, b"no answer within the time limit")
        except (aiohttp.ClientError, OSError) as exc:
            return Answer(0, (str(exc) or type(exc).__name__).encode())


async def _nothing() -> None:
    return None


def model_names(body: bytes) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names in an answer of /v1/models, and the base model of each adapter. A broken answer names none."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return (), {}
    cards: Any = answer.get("data") if isinstance(answer, dict) else None
    cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    named = [card for card in cards if isinstance(card.get("id"), str)]
    parents = {card["id"]: card["parent"] for card in named if isinstance(card.get("parent"), str)}
    return tuple(card["id"] for card in named), parents
