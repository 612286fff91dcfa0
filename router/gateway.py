"""The production shell: sockets and the wall clock around a `Dispatcher` that has neither."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec

import router
from estimators.request import RequestFacts
from router.actions import Send
from router.admin import AdminPort
from router.assemble import DEFAULT_BLOCK_TOKENS, Core, assemble
from router.beside_events import BesideEvents
from router.config import RouterConfig
from router.decider import TimedDecider, ranks_of
from router.errors import ConfigError, PortInUse
from router.fleet import Fleet, ReplicaSpec
from router.http.contract import Read
from router.http.head import RequestHead, ResponseHead
from router.http.server import TrafficPort
from router.keeping import StateKeeper
from router.learning import PrefixCounters
from router.metrics import Metrics
from router.prompts.production import Prompts
from router.receipts import Receipt, ReceiptWriter
from router.signals.load import Load
from router.signals.load_board import LoadBoard
from router.signals.orca import RESPONSE_HEADER
from router.signals.poller import LoadPoller
from router.signals.prometheus_text import load_of
from router.sources import EventSources
from router.views import Views

log = logging.getLogger(__name__)


class Gateway:
    """One running router. `start` it inside a running loop, `stop` it once."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = Metrics()
        self._writer: ReceiptWriter | None = None
        self._warned_sizes: set[int] = set()
        self._process_started_s: dict[int, float] = {}  # Unix time each replica's process says, by row
        self._clock = time.monotonic  # not the loop's: uvloop's counts whole milliseconds
        self._started_at = int(time.time())
        self._session: aiohttp.ClientSession
        self._core: Core
        self._beside: BesideEvents
        self._prompts: Prompts
        self._asked_last = -1  # row of the replica that tokenised last
        self._sources: EventSources
        self._ranks = ranks_of([replica.url for replica in fleet.replicas])
        fresh_s = max(2.0, 2 * config.load.period_s)  # a poll counts until the next one is overdue
        self._board = LoadBoard(len(fleet.replicas), self._on_load, fresh_s=fresh_s)
        self._poller: LoadPoller
        self._traffic: TrafficPort
        self._admin: AdminPort
        self._closers: list[Callable[[], Awaitable[None]]] = []  # in order of starting

    @property
    def traffic_port(self) -> int:
        return self._traffic.port

    @property
    def admin_port(self) -> int:
        return self._admin.port

    async def start(self) -> None:
        """Listen, watch the replicas, follow their events.

        Raises
        ------
        PortInUse : one of the two addresses cannot be had
        ConfigError : the receipts cannot be written, or the policy cannot be built
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop accepting, let streams finish for a while, close everything."""
        while self._closers:
            await self._closers.pop()()

    def cut(self) -> None:
        """Cut the streams a `stop` in progress is waiting for, visibly."""
        self._traffic.cut()

    async def _start(self) -> None:
        headers = control_headers(self._config)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)
        self._closers.append(self._session.close)
        self._open_receipts()
        reported = await reported_block_tokens(self._session, self._fleet, self._config.load.timeout_s)
        block_tokens = self._fleet.block_tokens or reported or DEFAULT_BLOCK_TOKENS
        self._start_beside(block_tokens)
        self._core = assemble(
            self._config,
            self._fleet,
            on_receipt=self._finished,
            epoch_s=time.time() - self._clock(),
            block_tokens=block_tokens,
            answers=self._beside.answers,
            written=self._beside.written,
        )
        self._start_keeping()
        await self._start_prompts(has_key=bool(headers))
        self._sources = EventSources(
            self._fleet, self._core.directory, self._session, self._clock, on_pushed_load=self._board.pushed
        )
        self._closers.append(self._sources.stop)
        self._sources.follow_store()
        self._start_poller()
        self._make_traffic_port()
        await self._start_admin()
        await self._start_traffic()  # last in, first out: signals are followed until the last stream has ended

    def _start_beside(self, block_tokens: int) -> None:
        self._beside = BesideEvents(
            self._config.other_tiers,
            self._fleet,
            block_tokens=block_tokens,
            adapter_of=lambda name: self._core.names.resolve(name)[1],
            clock=self._clock,
        )
        self._closers.append(self._beside.stop)
        self._beside.start()

    def _start_keeping(self) -> None:
        """Take over what an earlier router learned, if it is to be kept, and keep what this one learns."""
        state, learning = self._config.state, self._core.dispatcher.learning
        if state.path is not None:
            keeper = StateKeeper(Path(state.path), learning, self._clock, every_s=state.every_s)
            keeper.start()
            self._closers.append(keeper.stop)

    async def _start_prompts(self, *, has_key: bool) -> None:
        self._prompts = Prompts(
            self._config.prompts,
            self._core.prompts,
            self._session,
            url_of=self._tokenizing_url,
            has_key=has_key,
            clock=self._clock,
            registry=self._metrics.registry,
        )
        self._closers.append(self._prompts.stop)
        await self._prompts.start()

    def _tokenizing_url(self, model: str) -> str | None:
        """Whom to ask for the tokens of a base model: the replicas that serve it, in turn."""
        dispatcher, replicas = self._core.dispatcher, self._fleet.replicas
        for step in range(1, len(replicas) + 1):
            row = (self._asked_last + step) % len(replicas)
            serves = dispatcher.models_of(row)  # empty: it does not say, so any
            if dispatcher.is_up(row) and (not model or not serves or model in serves):
                self._asked_last = row
                return replicas[row].url
        return None

    def _start_poller(self) -> None:
        load = self._config.load
        self._poller = LoadPoller(
            self._session,
            on_load=self._board.polled,
            on_up=self._on_up,
            on_down=self._on_down,
            period_s=load.period_s,
            timeout_s=load.timeout_s,
            misses_to_down=load.misses_to_down,
            clock=self._clock,
        )
        for row, replica in enumerate(self._fleet.replicas):
            rank = self._ranks[row]
            self._poller.watch(row, replica.url or "", None if rank is None else str(rank))
        self._poller.start()
        self._closers.append(self._poller.stop)

    async def _start_admin(self) -> None:
        views = Views(
            fleet=self._fleet,
            core=self._core,
            metrics=self._metrics,
            sources=self._sources,
            board=self._board,
            beside=self._beside,
            prompts=self._prompts,
            poller=self._poller,
            traffic=self._traffic,
            writer=self._writer,
            clock=self._clock,
        )
        self._admin = AdminPort(
            ready=self._ready,
            metrics_text=views.metrics_text,
            fleet=views.fleet,
            pushed=self._sources.pushed,
            key=admin_key(self._config),
        )
        self._closers.append(self._admin.stop)
        await self._admin.start(self._config.admin_host, self._config.admin_port)

    def _make_traffic_port(self) -> None:
        config = self._config
        self._traffic = TrafficPort(
            TimedDecider(
                self._core.dispatcher,
                took=self._metrics.decision.observe,
                answered=self._prompts.answered,
                ranks=self._ranks,
                asks_load=config.load.from_answers,
            ),
            read_prompt=self._read_and_look_up if self._beside.asks else self._prompts.read,
            answer=self._answer,
            clock=self._clock,
            limits=config.limits,
            times=config.time_outs,
            heard=self._heard,
        )

    async def _start_traffic(self) -> None:
        config = self._config
        self._closers.append(self._stop_traffic)
        try:
            await self._traffic.start(config.host, config.port)
        except OSError as exc:
            raise PortInUse(config.host, config.port, "traffic", exc.strerror or str(exc)) from exc

    async def _stop_traffic(self) -> None:
        await self._traffic.stop(self._config.drain_s)

    def _open_receipts(self) -> None:
        path = self._config.receipts.path
        if path is None:
            return
        try:
            self._writer = ReceiptWriter(Path(path))
        except OSError as exc:
            raise ConfigError(f"receipts cannot be written to {path}: {exc.strerror}") from exc
        self._closers.append(self._close_receipts)

    async def _close_receipts(self) -> None:
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)

    # What replicas report

    def _heard(self, sent: Send, response: ResponseHead) -> None:
        """Take in the load an answer's head tells. That of a server with several ranks is of all of them together."""
        told = response.get(RESPONSE_HEADER)
        if told is not None and self._ranks[sent.row] is None:
            self._board.load_from_response(sent.row, [(RESPONSE_HEADER, told)], self._clock())

    def _on_load(self, row: int, load: Load, sent_s: float, received_s: float) -> None:
        dispatcher, block_tokens = self._core.dispatcher, self._core.prompts.block_tokens
        capacity_tokens = load.max_tokens or (load.num_gpu_blocks or 0) * (load.block_size or 0)
        if capacity_tokens:
            dispatcher.capacity_reported(row, float(capacity_tokens))
        if capacity_tokens >= block_tokens:
            self._sources.capacity_reported(row, int(capacity_tokens) // block_tokens)
        counters = None
        if load.prefix_queries is not None and load.prefix_hits is not None:
            counters = PrefixCounters(load.prefix_queries, load.prefix_hits)
        dispatcher.load_reported(
            row,
            running=load.running,
            waiting=load.waiting,
            sent_s=sent_s,
            now_s=received_s,
            kv_used_share=load.kv_usage,
            prefix=counters,
        )
        self._notice_restart(row, load)
        if load.block_size not in (None, block_tokens) and row not in self._warned_sizes:
            self._warned_sizes.add(row)
            log.warning(
                "%s has blocks of %s tokens, the router expects %d: its cache cannot be matched; set block_tokens in a"
                " fleet file, or start the router after the replicas",
                *(self._fleet.replicas[row].name, load.block_size, block_tokens),
            )

    def _notice_restart(self, row: int, load: Load) -> None:
        """A process that started anew, or sleeps, holds nothing, whether or not its event stream said so."""
        restarted = load.started_s is not None and (
            self._process_started_s.setdefault(row, load.started_s) != load.started_s
        )
        if restarted and load.started_s is not None:
            self._process_started_s[row] = load.started_s
            log.warning("%s was restarted: what it held is forgotten", self._fleet.replicas[row].name)
        if restarted or load.asleep:
            self._core.directory.clear(row)
        if restarted:
            self._core.dispatcher.learning.restarted(row)

    def _on_up(self, row: int, models: tuple[str, ...]) -> None:
        replica = self._fleet.replicas[row]
        parents = self._poller.endpoints[(replica.url or "").rstrip("/")].parents
        self._core.names.listed(row, models, parents)
        self._core.dispatcher.replica_up(row, frozenset(models), self._clock())
        base, _ = self._core.names.resolve(models[0] if models else "")
        self._sources.replica_up(row, base)
        self._prompts.replica_up(replica.name, replica.url or "", model=base, name=models[0] if models else "")
        log.info("%s is up and serves %s", replica.name, ", ".join(models) or "what it does not say")
        if not models:
            log.warning("%s named no models (does it want a key? load.api_key_env): no prompt is matched", replica.name)

    def _on_down(self, row: int, reason: str) -> None:
        self._core.dispatcher.replica_down(row)
        if self._sources.is_guessed(row):  # nobody will announce what it lost
            self._core.directory.clear(row)
        log.warning("%s is down: %s", self._fleet.replicas[row].name, reason)

    # Prompts and answers

    def _read_and_look_up(self, head: RequestHead, body: bytes) -> Read | asyncio.Future[Read]:
        read = self._prompts.read(head, body)
        if isinstance(read, RequestFacts):
            self._beside.read(read, body)
        return read

    def _answer(self, head: RequestHead) -> tuple[int, bytes]:
        """The router's own answers on the traffic port."""
        if head.path == "/v1/models":
            cards = [
                {"id": name, "object": "model", "created": self._started_at, "owned_by": "tfirst"}
                for name in self._core.dispatcher.models
            ]
            return 200, msgspec.json.encode({"object": "list", "data": cards})
        if head.path == "/version":
            return 200, msgspec.json.encode({"version": router.__version__})
        if head.path == "/ready" and not self._ready():
            return 503, b'{"status":"no replica is up"}'
        return 200, b'{"status":"ok"}'

    def _ready(self) -> bool:
        return any(self._core.dispatcher.is_up(row) for row in range(len(self._fleet.replicas)))

    def _finished(self, receipt: Receipt) -> None:
        self._metrics.count(receipt)
        if receipt.choice is not None and receipt.prompt_tokens:  # nothing else leaves blocks to tell of
            self._sources.served(receipt.choice.replica)
        if self._writer is not None:
            self._writer.write(receipt)


def control_headers(config: RouterConfig) -> dict[str, str]:
    """Headers of the router's own calls to replicas: the key they want, from the environment."""
    key = _key("load.api_key_env", config.load.api_key_env)
    return {} if key is None else {"authorization": f"Bearer {key}"}


def admin_key(config: RouterConfig) -> str | None:
    """What a POST on the admin port must carry, from the environment; None: nobody may post."""
    return _key("admin_key_env", config.admin_key_env)


def _key(setting: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"{setting} names the environment variable {variable}, which holds no usable key")
    return key


async def reported_block_tokens(session: aiohttp.ClientSession, fleet: Fleet, timeout_s: float) -> int | None:
    """Block size the replicas report, when the fleet file does not say: the first answer wins, None without any."""
    if fleet.block_tokens is not None:
        return None
    timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def ask(replica: ReplicaSpec) -> int | None:
        try:
            async with session.get(f"{replica.url}/metrics", timeout=timeout) as response:
                return load_of(await response.text()).block_size
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    sizes = await asyncio.gather(*(ask(replica) for replica in fleet.replicas))
    return next((size for size in sizes if size is not None), None)
