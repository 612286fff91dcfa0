"""The production shell: sockets and the wall clock around a `Dispatcher` that has neither."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter

import aiohttp
import msgspec

import router
from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Send
from router.admin import AdminPort
from router.assemble import Core, assemble
from router.config import RouterConfig
from router.dispatch import Dispatcher, Placement
from router.errors import ConfigError, PortInUse
from router.fleet import Fleet, ReplicaSpec
from router.http.head import RequestHead
from router.http.server import TrafficPort
from router.learning import PrefixCounters
from router.metrics import Metrics
from router.prompts.production import Prompts
from router.receipts import Receipt, ReceiptWriter
from router.signals.poller import LoadPoller
from router.signals.prometheus_text import Load, load_of
from router.sources import EventSources
from router.state import load_state, save_state
from router.views import Views

log = logging.getLogger(__name__)


class TimedDecider:
    """The dispatcher as the traffic port calls it, with the time each decision took."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, prompts: Prompts) -> None:
        self._arrived = dispatcher.arrived
        self._finished = dispatcher.finished
        self._took = metrics.decision.observe
        self._answered = prompts.answered
        self.first_token: Callable[[Send, float], list[Action]] = dispatcher.first_token
        self.failed: Callable[[Send, Cause, float], list[Action]] = dispatcher.failed
        self.cancelled: Callable[[Send, float], list[Action]] = dispatcher.cancelled

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        began_s = perf_counter()
        actions = self._arrived(request, now_s)
        self._took(perf_counter() - began_s)
        return actions

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        placement = sent.placement
        if sent.request.tokenised and isinstance(placement, Placement):
            self._answered(sent.request, ended, placement.booking.reused_tokens)
        return self._finished(sent, ended, now_s)


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
        self._prompts: Prompts
        self._asked_last = -1  # row of the replica that tokenised last
        self._sources: EventSources
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
        self._core = assemble(
            self._config,
            self._fleet,
            on_receipt=self._finished,
            epoch_s=time.time() - self._clock(),
            block_tokens=await reported_block_tokens(self._session, self._fleet, self._config.load.timeout_s),
        )
        self._take_over_state()
        await self._start_prompts(has_key=bool(headers))
        self._sources = EventSources(self._fleet, self._core.directory, self._session, self._clock)
        self._closers.append(self._sources.stop)
        self._sources.follow_store()
        self._start_poller()
        self._make_traffic_port()
        await self._start_admin()
        await self._start_traffic()  # last in, first out: signals are followed until the last stream has ended

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
            on_load=self._on_load,
            on_up=self._on_up,
            on_down=self._on_down,
            period_s=load.period_s,
            timeout_s=load.timeout_s,
            misses_to_down=load.misses_to_down,
            clock=self._clock,
        )
        for row, replica in enumerate(self._fleet.replicas):
            self._poller.watch(row, replica.url or "")
        self._poller.start()
        self._closers.append(self._poller.stop)

    async def _start_admin(self) -> None:
        views = Views(
            fleet=self._fleet,
            core=self._core,
            metrics=self._metrics,
            subscribers=self._sources.subscribers,
            poller=self._poller,
            traffic=self._traffic,
            writer=self._writer,
            clock=self._clock,
        )
        self._admin = AdminPort(
            ready=self._ready,
            metrics_text=views.metrics_text,
            fleet=lambda: {**views.fleet(), "prompts": self._prompts.report().as_values()},
        )
        self._closers.append(self._admin.stop)
        await self._admin.start(self._config.admin_host, self._config.admin_port)

    def _make_traffic_port(self) -> None:
        config = self._config
        self._traffic = TrafficPort(
            TimedDecider(self._core.dispatcher, self._metrics, self._prompts),
            read_prompt=self._prompts.read,
            answer=self._answer,
            clock=self._clock,
            limits=config.limits,
            times=config.time_outs,
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

    # What was learned

    def _take_over_state(self) -> None:
        """Read what an earlier router learned, if it is to be kept, and keep writing what this one learns."""
        path = self._config.state.path
        if path is None:
            return
        try:
            saved = load_state(Path(path))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"state.path: {exc}") from exc
        if saved is not None:
            learning, age_s = self._core.dispatcher.learning, saved.age_s(time.time())
            for sentence in learning.restore(saved.learned, now_s=self._clock(), age_s=age_s):
                log.warning("%s", sentence)
        saving = asyncio.get_running_loop().create_task(self._keep_saving(Path(path)), name="state")
        self._closers.append(partial(self._save_last, Path(path), saving))

    async def _keep_saving(self, path: Path) -> None:
        while True:
            await asyncio.sleep(self._config.state.every_s)
            await self._save(path)

    async def _save(self, path: Path) -> None:
        """One write; a disk that is full or gone costs nothing but the state."""
        learned = self._core.dispatcher.learning.state(self._clock())
        try:
            await asyncio.to_thread(save_state, path, learned, saved_at=time.time())
        except OSError as exc:
            log.warning("what was learned cannot be written to %s: %s", path, exc.strerror or exc)

    async def _save_last(self, path: Path, saving: asyncio.Task[None]) -> None:
        saving.cancel()
        with suppress(asyncio.CancelledError):
            await saving
        await self._save(path)

    # What replicas report

    def _on_load(self, row: int, load: Load, sent_s: float, received_s: float) -> None:
        dispatcher = self._core.dispatcher
        if load.num_gpu_blocks and load.block_size:
            dispatcher.capacity_reported(row, float(load.num_gpu_blocks * load.block_size))
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
        expected = self._core.prompts.block_tokens
        if load.block_size not in (None, expected) and row not in self._warned_sizes:
            self._warned_sizes.add(row)
            log.warning(
                "%s has blocks of %s tokens, the router expects %d: its cache cannot be matched; set block_tokens in a"
                " fleet file, or start the router after the replicas",
                *(self._fleet.replicas[row].name, load.block_size, expected),
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
        parents = self._poller.endpoints[replica.url or ""].parents
        self._core.names.listed(row, models, parents)
        self._core.dispatcher.replica_up(row, frozenset(models))
        base, _ = self._core.names.resolve(models[0] if models else "")
        self._sources.replica_up(row, base)
        self._prompts.replica_up(replica.name, replica.url or "", model=base, name=models[0] if models else "")
        log.info("%s is up and serves %s", replica.name, ", ".join(models) or "what it does not say")
        if not models:
            log.warning("%s named no models (does it want a key? load.api_key_env): no prompt is matched", replica.name)

    def _on_down(self, row: int, reason: str) -> None:
        self._core.dispatcher.replica_down(row)
        log.warning("%s is down: %s", self._fleet.replicas[row].name, reason)

    # Answers

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
        if self._writer is not None:
            self._writer.write(receipt)


def control_headers(config: RouterConfig) -> dict[str, str]:
    """Headers of the router's own calls to replicas: the key they want, from the environment."""
    variable = config.load.api_key_env
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"load.api_key_env names the environment variable {variable}, which holds no usable key")
    return {"authorization": f"Bearer {key}"}


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
