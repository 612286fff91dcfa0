"""The production shell: sockets and the wall clock around a `Dispatcher` that has neither."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
import numpy as np
import zmq

import router
from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Send
from router.admin import AdminPort
from router.assemble import Core, assemble
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.errors import ConfigError, PortInUse
from router.fleet import Fleet, ReplicaSpec
from router.http.contract import Limits, TimeOuts
from router.http.head import RequestHead
from router.http.server import TrafficPort
from router.metrics import Metrics
from router.receipts import Receipt, ReceiptWriter
from router.signals.discovery import event_sources
from router.signals.poller import LoadPoller
from router.signals.prometheus_text import Load, load_of
from router.signals.sequence import State
from router.signals.subscriber import EventSubscriber, Source
from router.signals.wire import Batch

log = logging.getLogger(__name__)

STORE_SOURCE = "store"  # its name in metrics and on /fleet
SOURCES_AGAIN_S = 30.0  # between two questions to a replica that named no event source
STORE_FIRST_SEQ = 1  # the Mooncake master numbers its batches from 1


class TimedDecider:
    """The dispatcher as the traffic port calls it, with the time each decision took."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._arrived = dispatcher.arrived
        self._took = metrics.decision.observe
        self.first_token: Callable[[Send, float], list[Action]] = dispatcher.first_token
        self.finished: Callable[[Send, Ended, float], list[Action]] = dispatcher.finished
        self.failed: Callable[[Send, Cause, float], list[Action]] = dispatcher.failed
        self.cancelled: Callable[[Send, float], list[Action]] = dispatcher.cancelled

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        began_s = perf_counter()
        actions = self._arrived(request, now_s)
        self._took(perf_counter() - began_s)
        return actions


class Gateway:
    """One running router. `start` it inside a running loop, `stop` it once."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = Metrics()
        self._writer: ReceiptWriter | None = None
        self._clock = time.monotonic  # not the loop's: uvloop's counts whole milliseconds
        self._started_at = int(time.time())
        self._zmq = zmq.Context[zmq.Socket[bytes]]()
        self._subscribers: dict[str, EventSubscriber] = {}
        self._searches: dict[int, asyncio.Task[None]] = {}  # by row
        self._warned_sizes: set[int] = set()
        self._started_s: dict[int, float] = {}  # Unix time each replica's process says it started at, by row
        self._session: aiohttp.ClientSession
        self._core: Core
        self._traffic: TrafficPort
        self._admin: AdminPort
        self._poller: LoadPoller
        self._closers: list[Callable[[], Awaitable[None]]] = []  # in order of starting

    @property
    def traffic_port(self) -> int:
        return self._traffic.port

    @property
    def admin_port(self) -> int:
        return self._admin.port

    @property
    def dispatcher(self) -> Dispatcher:
        return self._core.dispatcher

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
        config = self._config
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._closers.append(self._session.close)
        self._open_receipts()
        self._core = assemble(
            config,
            self._fleet,
            on_receipt=self._finished,
            epoch_s=time.time() - self._clock(),
            block_tokens=await reported_block_tokens(self._session, self._fleet, config.load.timeout_s),
        )
        self._poller = LoadPoller(
            self._session,
            on_load=self._on_load,
            on_up=self._on_up,
            on_down=self._on_down,
            period_s=config.load.period_s,
            timeout_s=config.load.timeout_s,
            misses_to_down=config.load.misses_to_down,
            clock=self._clock,
        )
        for row, replica in enumerate(self._fleet.replicas):
            self._poller.watch(row, replica.url or "")
        self._closers.append(self._stop_subscribers)
        self._follow_configured_sources()
        self._poller.start()
        self._closers.append(self._poller.stop)
        await self._start_admin()
        await self._start_traffic()  # last in, first out: signals are followed until the last stream has ended

    async def _start_admin(self) -> None:
        config = self._config
        self._admin = AdminPort(ready=self._ready, metrics_text=self._metrics_text, fleet=self.fleet_state)
        self._closers.append(self._admin.stop)
        await self._admin.start(config.admin_host, config.admin_port)

    async def _start_traffic(self) -> None:
        config, limits = self._config, self._config.limits
        self._traffic = TrafficPort(
            TimedDecider(self._core.dispatcher, self._metrics),
            read_prompt=self._core.prompts.facts_of,
            answer=self._answer,
            clock=self._clock,
            limits=Limits(max_body_bytes=limits.max_body_bytes),
            times=TimeOuts(connect_s=limits.connect_s, first_byte_s=limits.first_byte_s, stall_s=limits.stall_s),
        )
        self._closers.append(self._stop_traffic)
        try:
            await self._traffic.start(config.host, config.port)
        except OSError as exc:
            raise PortInUse(config.host, config.port, "traffic", exc.strerror or str(exc)) from exc

    async def _stop_traffic(self) -> None:
        await self._traffic.stop(self._config.limits.drain_s)

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

    # Events

    def _follow_configured_sources(self) -> None:
        for row, replica in enumerate(self._fleet.replicas):
            if replica.events is not None:
                self._follow(row, replica, Source(events=replica.events, replay=replica.replay))
        store = self._fleet.store
        if store is not None and store.events is not None:
            directory = self._core.directory
            self._subscribe(
                STORE_SOURCE,
                Source(events=store.events, first_seq=STORE_FIRST_SEQ),
                lambda batch: directory.apply_store(batch, self._clock()),
                directory.clear_store,
            )

    def _follow(self, row: int, replica: ReplicaSpec, source: Source) -> None:
        directory = self._core.directory

        def apply(batch: Batch) -> None:
            directory.apply(row, batch, self._clock())

        directory.add_source(row, self._model_of(row), one_copy=source.one_copy)
        self._subscribe(replica.name, source, apply, partial(directory.clear, row))

    def _subscribe(
        self, name: str, source: Source, apply: Callable[[Batch], object], cleared: Callable[[], object]
    ) -> None:
        subscriber = EventSubscriber(source, apply, cleared, clock=self._clock, context=self._zmq)
        self._subscribers[name] = subscriber
        subscriber.start()

    async def _stop_subscribers(self) -> None:
        for search in self._searches.values():
            search.cancel()
        await asyncio.gather(*self._searches.values(), return_exceptions=True)
        await asyncio.gather(*(subscriber.stop() for subscriber in self._subscribers.values()))
        self._zmq.destroy(linger=0)

    async def _find_sources(self, row: int, replica: ReplicaSpec) -> None:
        """Ask a replica that came up where it publishes its events, again from time to time until it says so."""
        warned = False
        while self._core.dispatcher.up[row]:
            sources = await event_sources(self._session, replica.url or "")
            if sources:
                self._follow(row, replica, sources[0])
                log.info("%s publishes cache events at %s", replica.name, sources[0].events)
                return
            if not warned:
                warned = True
                log.warning("%s names no cache events: what it holds is unknown (see README)", replica.name)
            await asyncio.sleep(SOURCES_AGAIN_S)

    def _model_of(self, row: int) -> str:
        """The base model a replica serves: the one it names first; the fleet file's until it has answered."""
        endpoint = self._poller.endpoints.get(self._fleet.replicas[row].url or "")
        if endpoint is not None and endpoint.models:
            return endpoint.models[0]
        return self._fleet.model.name if self._fleet.model is not None else ""

    # Load and health

    def _on_load(self, row: int, load: Load, sent_s: float, received_s: float) -> None:
        known = load.running is not None and load.waiting is not None
        requests = (load.running or 0.0) + (load.waiting or 0.0) if known else None
        self._core.dispatcher.load_reported(row, requests, sent_s, received_s)
        self._notice_restart(row, load)
        if load.num_gpu_blocks is not None and load.block_size is not None:
            self._core.dispatcher.view.kv_capacity_tokens[row] = load.num_gpu_blocks * load.block_size
        if load.block_size not in (None, self._core.block_tokens) and row not in self._warned_sizes:
            self._warned_sizes.add(row)
            log.warning(
                "%s has blocks of %s tokens, the router expects %d: its cache cannot be matched (block_tokens in the"
                " fleet file)",
                self._fleet.replicas[row].name,
                load.block_size,
                self._core.block_tokens,
            )

    def _notice_restart(self, row: int, load: Load) -> None:
        """A process that started anew, or sleeps, holds nothing, whether or not its event stream said so."""
        restarted = load.started_s is not None and self._started_s.setdefault(row, load.started_s) != load.started_s
        if restarted and load.started_s is not None:
            self._started_s[row] = load.started_s
            log.warning("%s was restarted: what it held is forgotten", self._fleet.replicas[row].name)
        if restarted or load.asleep:
            self._core.directory.clear(row)

    def _on_up(self, row: int, models: tuple[str, ...]) -> None:
        replica = self._fleet.replicas[row]
        self._core.dispatcher.replica_up(row, frozenset(models))
        log.info("%s is up and serves %s", replica.name, ", ".join(models) or "what it does not say")
        subscriber = self._subscribers.get(replica.name)
        if subscriber is not None:
            self._core.directory.add_source(row, self._model_of(row), one_copy=subscriber.source.one_copy)
        elif row not in self._searches or self._searches[row].done():
            self._searches[row] = asyncio.get_running_loop().create_task(self._find_sources(row, replica))

    def _on_down(self, row: int, reason: str) -> None:
        self._core.dispatcher.replica_down(row)
        log.warning("%s is down: %s", self._fleet.replicas[row].name, reason)

    # Answers and views

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
        return any(self._core.dispatcher.up)

    def _finished(self, receipt: Receipt) -> None:
        self._metrics.count(receipt)
        if self._writer is not None:
            self._writer.write(receipt)

    def _metrics_text(self) -> bytes:
        metrics, now_s = self._metrics, self._clock()
        metrics.show_fleet(self._core.dispatcher.view, self._core.dispatcher.up, now_s)
        for tier, blocks in self._core.directory.stats().blocks.items():
            metrics.directory_blocks.labels(tier.value).set(blocks)
        for name, subscriber in self._subscribers.items():
            for state in State:
                metrics.event_sources.labels(name, state.value).set(subscriber.state is state)
        metrics.receipts_dropped.set(self._writer.dropped if self._writer is not None else 0)
        return metrics.text()

    def fleet_state(self) -> dict[str, Any]:
        """What the router believes of every replica and event source, as plain values; unknown is null."""
        dispatcher, view, now_s = self._core.dispatcher, self._core.dispatcher.view, self._clock()
        replicas = [
            {
                "name": replica.name,
                "url": replica.url,
                "card": replica.card,
                "up": dispatcher.up[row],
                "models": sorted(view.models[row]),
                "booked": int(view.booked[row]),
                "decoding": int(view.decode_batch[row]),
                "prefill_ahead_s": max(0.0, float(view.head_ends_s[row]) - now_s) + float(view.waiting_compute_s[row]),
                "reported_requests": known(view.reported_requests[row]),
                "signal_age_s": known(now_s - view.sampled_at_s[row]),
                "coefficients": view.coefficients[row].tolist(),
                "pace_scale": float(view.pace_scale[row]),
            }
            for row, replica in enumerate(self._fleet.replicas)
        ]
        sources = [
            {
                "name": name,
                "address": subscriber.source.events,
                "state": subscriber.state.value,
                "batches": subscriber.counts.batches,
                "gaps": subscriber.sequence.gaps,
                "restarts": subscriber.sequence.restarts,
                "bad_frames": subscriber.counts.bad_frames,
                "age_s": None if subscriber.sequence.last_event_s is None else now_s - subscriber.sequence.last_event_s,
            }
            for name, subscriber in self._subscribers.items()
        ]
        stats = self._core.directory.stats()
        return {
            "policy": dispatcher.policy_name,
            "block_tokens": self._core.block_tokens,
            "in_flight": dispatcher.in_flight,
            "replicas": replicas,
            "event_sources": sources,
            "directory_blocks": {tier.value: blocks for tier, blocks in stats.blocks.items()},
        }


def known(value: float) -> float | None:
    """A number as JSON can carry it: unknown (NaN) is null, never zero."""
    return None if np.isnan(value) else float(value)


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
