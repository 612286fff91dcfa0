"""Ask every endpoint again and again: is it up, what does it serve, how busy is it.

Model     each `period_s` one round per endpoint for its load; /health with it, but while all is well no oftener than
          `health_period_s`; and, while its models are not known or due again, /v1/models. Up after one good answer;
          whether it is down after a bad one, somebody else judges. Endpoints are asked a few together, and those groups
          are spread over the period. A round in which all is as it was runs in callbacks (`_ask_quickly`), any other
          as a task (`poll_once`)
Valid     vLLM, SGLang and anything with one of /health and /v1/models. Load comes from /metrics; where that names
          none, or is SGLang's (whose page lags by up to 40 steps), from /v1/loads or /get_load
Blind to  an engine that is stuck while its HTTP side still answers: progress of requests must show that
Source    field practice: one missed deadline is no death (a saturated engine answers probes late)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from router.signals.fetch import REDIRECTS, Answer, Fetcher
from router.signals.load import NUMBERS, Load, pick
from router.signals.load_answers import loads_of_get_load, loads_of_v1
from router.signals.prometheus_text import BIG_PAGE, PageReader

log = logging.getLogger(__name__)

_MODELS_EVERY = 20  # questions for health between two looks at /v1/models: adapters come and go
_TOGETHER = 16  # endpoints asked at once: each wake-up of the process costs as much as reading a page
_READ_AT_ONCE = 4  # pages read before others get the loop
MAX_PAGE_BYTES = 8 << 20  # for who makes the fetchers
_ABSENT = object()
_NO_SUCH_ROUTE = frozenset({404, 405, 501})


_LOAD_ROUTES: dict[str, Callable[[bytes], dict[str, Load]]] = {
    "/v1/loads": loads_of_v1,
    "/get_load": loads_of_get_load,
}
_ROUTES_EVERY = 20  # rounds between two tries of the load routes, while no load is known
_PAGE_EVERY = 10  # rounds between two looks at /metrics where another route gives the load


@dataclass(slots=True, eq=False)
class Polled:
    """One endpoint under observation.

    rows : row -> rank label of its metrics, None for the sum over all ranks
    models : names it serves, adapters included; empty while unknown
    parents : adapter name -> name of its base model
    roots : adapter name -> where its weights come from, as far as it is said
    cards : all it says of them
    load_route : where its load is read besides /metrics; None where /metrics is all there is
    """

    base_url: str
    rows: dict[int, str | None]
    up: bool = False
    misses: int = 0
    rounds: int = 0
    probes: int = 0
    models: tuple[str, ...] = ()
    parents: Mapping[str, str] = field(default_factory=dict)
    roots: Mapping[str, str] = field(default_factory=dict)
    cards: list[dict[str, Any]] = field(default_factory=list)
    load_route: str | None = None
    _reader: PageReader = field(default_factory=PageReader)
    _health_at_s: float = float("-inf")
    _load: Fetcher | None = None
    _probe: Fetcher | None = None  # a connection of its own: a slow page must not make a live engine look dead
    _asked_s: float | None = None  # when a quick round began that is still under way
    _round: asyncio.Task[None] | None = None


class LoadPoller:
    """Owner of all polling tasks. `start` inside a running loop; `watch` before or after; `stop` ends all.

    Parameters
    ----------
    fetcher : makes the owner of a kept connection to a base URL
    on_load : (row, load, sent_s, received_s) after each answered question for the load; `Load()` when it holds nothing
    on_up : (row, models) when an endpoint comes up, and again when the models it names or their weights change
    on_probe : (rows, reason) after each question for health, of all rows of the endpoint; reason : why it counts as
        missed, None when it was answered well. Whether any of them is up still, which counts after a miss
    period_s : seconds between the starts of two rounds, > 0; a slow round delays the next, never overlaps it
    health_period_s : least time between two questions for health, >= 0; an unanswered or missed one is followed at once
    timeout_s : for each request, > 0
    clock : the router's own clock, seconds
    """

    def __init__(
        self,
        fetcher: Callable[[str], Fetcher],
        *,
        on_load: Callable[[int, Load, float, float], object],
        on_up: Callable[[int, tuple[str, ...]], object],
        on_probe: Callable[[Collection[int], str | None], bool],
        period_s: float = 0.5,
        health_period_s: float = 1.0,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (period_s > 0 and timeout_s > 0 and health_period_s >= 0):
            raise ValueError("period_s and timeout_s must be positive")
        self.endpoints: dict[str, Polled] = {}
        self.errors = 0  # unexpected exceptions; the round was abandoned
        self._fetcher_of = fetcher
        self._on_load = on_load
        self._on_up = on_up
        self._on_probe = on_probe
        self._period_s = period_s
        self._health_period_s = 0.9 * health_period_s  # rounds are not exact
        self._timeout_s = timeout_s
        self._clock = clock
        self._groups: list[list[Polled]] = []
        self._tasks: list[asyncio.Task[None]] = []  # of each group
        self._ended: set[asyncio.Task[None]] = set()  # rounds that were given up and are not over yet
        self._started = False
        self._answers: deque[tuple[Polled, Answer | Exception]] = deque()  # come and not read
        self._stopped = False
        self._probed = asyncio.Event()  # since `asked_all` looked last

    def watch(self, row: int, base_url: str, rank: str | None = None) -> None:
        """Observe `base_url` for `row`; several rows may share one URL, told apart by rank."""
        url = base_url.rstrip("/")
        endpoint = self.endpoints.get(url)
        if endpoint is None:
            endpoint = self.endpoints[url] = Polled(url, {})
            if self._started:
                self._join_group(endpoint)
        endpoint.rows[row] = rank
        if endpoint.up:
            self._on_up(row, endpoint.models)

    def unwatch(self, row: int) -> None:
        """Observe nothing for `row` any more: its endpoint is left alone once nobody else has it."""
        for url, endpoint in list(self.endpoints.items()):
            if endpoint.rows.pop(row, _ABSENT) is not _ABSENT and not endpoint.rows:
                del self.endpoints[url]
                for group in self._groups:
                    if endpoint in group:
                        group.remove(endpoint)
                self._leave(endpoint)

    async def asked_all(self) -> None:
        """Return once every endpoint that is watched has answered its probe or missed one, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while any(not endpoint.up and not endpoint.misses for endpoint in self.endpoints.values()):
                    self._probed.clear()
                    await self._probed.wait()

    def start(self) -> None:
        self._started = True
        endpoints = list(self.endpoints.values())
        groups = [endpoints[first : first + _TOGETHER] for first in range(0, len(endpoints), _TOGETHER)]
        for place, group in enumerate(groups):
            self._begin_group(group, place / len(groups))

    async def stop(self) -> None:
        self._stopped = True  # first: an answer that comes meanwhile must not start another round
        for endpoint in self.endpoints.values():
            self._leave(endpoint)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._ended, return_exceptions=True)

    def _leave(self, endpoint: Polled) -> None:
        """Ask an endpoint nothing more; what it answers still is not read."""
        if endpoint._round is not None and not endpoint._round.done():
            endpoint._round.cancel()
            self._ended.add(endpoint._round)
            endpoint._round.add_done_callback(self._ended.discard)
        for fetcher in (endpoint._load, endpoint._probe):
            if fetcher is not None:
                fetcher.close()

    def _join_group(self, endpoint: Polled) -> None:
        group = next((group for group in self._groups if len(group) < _TOGETHER), None)
        if group is None:
            self._begin_group([endpoint], 0.0)
        else:
            group.append(endpoint)

    def _begin_group(self, group: list[Polled], phase: float) -> None:
        self._groups.append(group)
        task = asyncio.get_running_loop().create_task(self._watch_over(group, phase), name=f"poll {group[0].base_url}")
        self._tasks.append(task)

    async def _watch_over(self, group: list[Polled], phase: float) -> None:
        """Rounds without end; `phase` is the share of a period the second one waits, so that groups do not pile up."""
        loop = asyncio.get_running_loop()
        next_s = loop.time() + self._period_s * phase
        while True:
            next_s = max(next_s + self._period_s, loop.time())
            for endpoint in group:
                self._begin_round(endpoint)
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    def _begin_round(self, endpoint: Polled) -> None:
        if endpoint._round is not None and not endpoint._round.done():
            return
        if endpoint._asked_s is not None:
            if self._clock() - endpoint._asked_s > self._timeout_s and endpoint._load is not None:
                endpoint._load.close()  # which ends the quick round, see `_load_came`
        elif not self._ask_quickly(endpoint):
            self._start_round(endpoint)

    def _start_round(self, endpoint: Polled) -> None:
        endpoint._round = asyncio.get_running_loop().create_task(self._guarded_round(endpoint))

    async def _guarded_round(self, endpoint: Polled) -> None:
        try:
            await self.poll_once(endpoint)
        except Exception:
            self._failed(endpoint)

    def _failed(self, endpoint: Polled) -> None:
        self.errors += 1
        log.exception("polling %s failed", endpoint.base_url)

    # A round in which all is as it was

    def _ask_quickly(self, endpoint: Polled) -> bool:
        """Begin a round in callbacks; False when it needs more than one answer to the question for load."""
        load, probe = endpoint._load, endpoint._probe
        if load is None or probe is None or not load.ready or self._is_special(endpoint, endpoint.rounds + 1):
            return False
        asks_health = self._health_is_due(endpoint)
        in_doubt = endpoint.misses or endpoint._health_at_s == float("-inf")
        if asks_health and (in_doubt or not probe.ready or not self._models_are_known(endpoint)):
            return False
        endpoint.rounds += 1
        if asks_health:
            endpoint.probes += 1
            endpoint._health_at_s = self._clock()
            probe.ask("/health", partial(self._health_came, endpoint))
        endpoint._asked_s = self._clock()
        load.ask(endpoint.load_route or "/metrics", partial(self._load_came, endpoint))
        return True

    def _health_came(self, endpoint: Polled, answer: Answer | Exception) -> None:
        if not endpoint.rows:
            return
        if isinstance(answer, Answer) and answer.status == 200:
            endpoint.misses = 0
            self._on_probe(endpoint.rows, None)
        elif not self._stopped:
            endpoint._health_at_s = float("-inf")  # the next round asks again, and judges

    def _load_came(self, endpoint: Polled, answer: Answer | Exception) -> None:
        if self._stopped or not endpoint.rows:
            return
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._read_some)
        self._answers.append((endpoint, answer))

    def _read_some(self) -> None:
        """Read a few of the answers that came together; what else is ready runs before the next few."""
        for _ in range(min(_READ_AT_ONCE, len(self._answers))):
            self._read(*self._answers.popleft())
        if self._answers:
            asyncio.get_running_loop().call_soon(self._read_some)

    def _read(self, endpoint: Polled, answer: Answer | Exception) -> None:
        asked_s, endpoint._asked_s = endpoint._asked_s, None
        if self._stopped or not endpoint.rows:
            return
        whole = isinstance(answer, Answer) and answer.status not in REDIRECTS and len(answer.body) <= BIG_PAGE
        if not isinstance(answer, Answer) or not whole or asked_s is None:
            self._start_round(endpoint)
            return
        try:
            if endpoint.load_route is None:
                loads = endpoint._reader.read(answer.body.decode("utf-8", errors="replace"))
            else:
                loads = _LOAD_ROUTES[endpoint.load_route](answer.body)
                endpoint.load_route = endpoint.load_route if loads else None
            self._report(endpoint, loads, asked_s)
        except Exception:
            self._failed(endpoint)

    def _is_special(self, endpoint: Polled, number: int) -> bool:
        """Whether round `number` asks more than one route for the load."""
        if endpoint.load_route is not None:
            return number % _PAGE_EVERY == 0
        return self._wants_another_route(endpoint, number)

    def _health_is_due(self, endpoint: Polled) -> bool:
        waited_s = self._clock() - endpoint._health_at_s
        return waited_s >= self._health_period_s or bool(endpoint.misses) or not endpoint.up

    def _models_are_known(self, endpoint: Polled) -> bool:
        return bool(endpoint.models) and endpoint.up and endpoint.probes % _MODELS_EVERY > 0

    # Any other round

    async def poll_once(self, endpoint: Polled) -> None:
        """One round: ask, then report what changed."""
        if endpoint._load is None or endpoint._probe is None:
            endpoint._load, endpoint._probe = self._fetcher(endpoint), self._fetcher(endpoint)
        endpoint.rounds += 1
        if self._health_is_due(endpoint):
            await asyncio.gather(self._ask_health(endpoint, endpoint._probe), self._ask_load(endpoint, endpoint._load))
        elif not await self._ask_load(endpoint, endpoint._load):
            await self._ask_health(endpoint, endpoint._probe)

    def _fetcher(self, endpoint: Polled) -> Fetcher:
        return self._fetcher_of(endpoint.base_url)

    # Health and models

    async def _ask_health(self, endpoint: Polled, probe: Fetcher) -> None:
        endpoint._health_at_s = self._clock()
        asks_models = not self._models_are_known(endpoint)
        endpoint.probes += 1
        health = await probe.get("/health", timeout_s=self._timeout_s)
        no_route = health.status in _NO_SUCH_ROUTE
        models = None
        if no_route or (asks_models and health.status):
            models = await probe.get("/v1/models", timeout_s=self._timeout_s)
        if health.status == 200 or (no_route and models is not None and models.status == 200):
            self._came_up(endpoint, models)
        else:
            self._missed(endpoint, health)

    def _came_up(self, endpoint: Polled, models: Answer | None) -> None:
        endpoint.misses = 0
        cards = model_cards(models.body) if models is not None and models.status == 200 else []
        endpoint.cards = cards or endpoint.cards  # a broken answer is no reason to stop serving what was named before
        known = Listed(endpoint.models, endpoint.parents, endpoint.roots)
        listed = listed_on(cards) if cards else known
        news = not endpoint.up or listed != known
        names, endpoint.parents, endpoint.roots = listed
        endpoint.models = names  # before anybody is told, who may look them up here
        if news:
            for row in endpoint.rows:
                self._on_up(row, names)
        endpoint.up = True
        self._on_probe(endpoint.rows, None)
        self._probed.set()

    def _missed(self, endpoint: Polled, health: Answer) -> None:
        endpoint.misses += 1
        reason = f"/health answered {health.status}" if health.status else health.body.decode(errors="replace")
        if not self._on_probe(endpoint.rows, reason):
            endpoint.up = False
        self._probed.set()

    # Load

    async def _ask_load(self, endpoint: Polled, fetcher: Fetcher) -> bool:
        """Whether anything was answered."""
        sent_s = self._clock()
        route = endpoint.load_route
        if route is None or endpoint.rounds % _PAGE_EVERY == 0:
            answer = await fetcher.get("/metrics", timeout_s=self._timeout_s)
            if not answer.status:
                return False
            await self._read_page(endpoint, answer)
        loads = endpoint._reader.loads
        if route is not None:
            sent_s = self._clock()
            loads = await self._loads_at(fetcher, route)
            if not loads:  # an upgrade took the route away; the page is asked next
                endpoint.load_route = None
                return True
        elif self._wants_another_route(endpoint, endpoint.rounds):
            asked_s = self._clock()
            found = await self._try_routes(endpoint, fetcher)
            if found:
                loads, sent_s = found, asked_s
        self._report(endpoint, loads, sent_s)
        return True

    def _report(self, endpoint: Polled, loads: dict[str, Load], sent_s: float) -> None:
        page, received_s = endpoint._reader.loads, self._clock()
        for row, rank in endpoint.rows.items():
            load = pick(loads, rank)
            self._on_load(row, load if loads is page else _over(load, pick(page, rank)), sent_s, received_s)

    async def _read_page(self, endpoint: Polled, answer: Answer) -> None:
        body = answer.body
        if answer.cut:  # perhaps in the middle of a number
            body = body[: body.rfind(b"\n") + 1]
        text = body.decode("utf-8", errors="replace")
        for _ in endpoint._reader.slices(text):
            if len(text) > BIG_PAGE:
                await asyncio.sleep(0)

    def _wants_another_route(self, endpoint: Polled, number: int) -> bool:
        if (number - 1) % _ROUTES_EVERY:
            return False
        return endpoint._reader.is_sglang or not any(load.says_something() for load in endpoint._reader.loads.values())

    async def _try_routes(self, endpoint: Polled, fetcher: Fetcher) -> dict[str, Load]:
        for route in _LOAD_ROUTES:
            loads = await self._loads_at(fetcher, route)
            if any(load.says_something() for load in loads.values()):
                endpoint.load_route = route
                return loads
        return {}

    async def _loads_at(self, fetcher: Fetcher, route: str) -> dict[str, Load]:
        answer = await fetcher.get(route, timeout_s=self._timeout_s)
        return _LOAD_ROUTES[route](answer.body) if answer.status == 200 else {}


def _over(load: Load, page: Load) -> Load:
    """`load`, and from the page what it does not say. How busy an engine is comes from `load` alone: it is newer."""
    facts = {name: getattr(page, name) for name in NUMBERS if getattr(load, name) is None and name not in _BUSY}
    return replace(load, **facts)


_BUSY = frozenset({"running", "waiting", "kv_usage", "waiting_tokens", "used_tokens"})


class Listed(NamedTuple):
    """What an engine serves. parents, roots : as in `Polled`"""

    names: tuple[str, ...] = ()
    parents: Mapping[str, str] = MappingProxyType({})
    roots: Mapping[str, str] = MappingProxyType({})


def models_in(body: bytes) -> Listed:
    """What an answer of /v1/models lists. A broken answer names nothing."""
    return listed_on(model_cards(body))


def model_cards(body: bytes) -> list[dict[str, Any]]:
    """Cards in an answer of /v1/models, each with its name as `id`. A broken answer has none."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []
    cards: Any = answer.get("data") if isinstance(answer, dict) else None
    cards = cards if isinstance(cards, list) else []
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]


def listed_on(cards: list[dict[str, Any]]) -> Listed:
    """Names on cards, the base model of each adapter, and where its weights come from."""
    parents = {card["id"]: card["parent"] for card in cards if isinstance(card.get("parent"), str)}
    roots = {card["id"]: card["root"] for card in cards if card["id"] in parents and isinstance(card.get("root"), str)}
    return Listed(tuple(card["id"] for card in cards), parents, roots)
