"""The production shell: sockets and the wall clock around a `Dispatcher` that has neither."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec

import router
from estimators.request import RequestFacts
from estimators.view import is_nobody
from router.actions import Send
from router.admin import AdminPort
from router.assemble import DEFAULT_BLOCK_TOKENS, Core, assemble
from router.beside_events import BesideEvents
from router.config import RouterConfig
from router.decider import TimedDecider, ranks_of
from router.directing.telling import Telling
from router.discovery.assembly import Discovery
from router.discovery.membership import Membership, Parts
from router.discovery.sources import Source
from router.edits import BodyEdits
from router.errors import ConfigError, PortInUse
from router.experiments import Experiments
from router.fleet import Fleet
from router.gate import Gate
from router.http.contract import Decider, PromptReader
from router.http.head import RequestHead, ResponseHead
from router.http.server import TrafficPort
from router.http.tls import read_again, server_context
from router.keeping import StateKeeper
from router.keys import SecretKey
from router.keys_file import KeysFile
from router.laps import TimedLaps
from router.metrics import Metrics
from router.model_list import merged
from router.notes import Notes
from router.outbound import Outbound, key_in
from router.page import Live, Page
from router.prompts.production import Prompts
from router.readiness import Readiness
from router.receipts import Receipt, ReceiptWriter
from router.receipts.writer import Detail
from router.reported import Reported, reported_block_tokens
from router.resume.log import ResumeConfig
from router.rows import members
from router.signals.load import Load
from router.signals.load_board import LoadBoard
from router.signals.orca import RESPONSE_HEADER
from router.signals.poller import MAX_PAGE_BYTES, LoadPoller
from router.sources import EventSources
from router.telemetry.context import TRACEPARENT
from router.telemetry.logs import log_request
from router.views import Views

if TYPE_CHECKING:
    from router.telemetry.spans import Tracing

log = logging.getLogger(__name__)


class Gateway:
    """One running router. `start` it inside a running loop, `stop` it once."""

    def __init__(self, config: RouterConfig, fleet: Fleet, *, sources: tuple[Source, ...] = ()) -> None:
        """`sources` : of replicas, others than the configured ones."""
        self._config = config
        self._fleet: Fleet  # its replicas come and go: one for each row of the core, nobody's among them
        self._configured = fleet
        self._metrics = Metrics()
        self._laps = TimedLaps(time.perf_counter, self._metrics.phases.observe)
        self._tracing: Tracing | None = None
        self._live = Live()
        self._writer: ReceiptWriter | None = None
        self._telling: Telling
        self._experiments: Experiments | None = None  # once there are replicas to choose from
        self._clock = time.monotonic  # not the loop's: uvloop's counts whole milliseconds
        self._discovery = Discovery(config, fleet, clock=self._clock, sources=sources)
        self._outbound: Outbound
        self._gate: Gate
        self._keys: KeysFile | None = None
        self._tls = None if config.tls is None else server_context(config.tls)
        self._session: aiohttp.ClientSession
        self._core: Core
        self._beside: BesideEvents
        self._prompts: Prompts
        self._edits: BodyEdits | None = None
        self._asked_last = -1  # row of the replica that tokenised last
        self._sources: EventSources
        self._ranks: list[int | None]
        self._reported: Reported
        self._board: LoadBoard
        self._decider: TimedDecider
        self._poller: LoadPoller
        self._traffic: TrafficPort
        self._admin: AdminPort
        self._readiness = Readiness(config.start, self._clock())
        self._serving = False
        self._hurried = asyncio.Event()
        self._closers: list[Callable[[], Awaitable[None]]] = []  # in order of starting

    @property
    def traffic_port(self) -> int:
        return self._traffic.port

    @property
    def replicas(self) -> int:
        """Replicas there are, up or not."""
        return len(members(self._fleet))

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
        """Be ready no more, stop accepting after a delay, let streams finish for a while, close everything."""
        self._readiness.stopping = True
        while self._closers:
            try:
                await self._closers.pop()()
            except Exception:  # a full disk, say: what was started before is to be closed all the same
                log.exception("a part of the router did not stop as it should")

    def reload(self, read: Callable[[], RouterConfig] | None = None) -> None:
        """Read the files of client keys, the certificate and the fleet again; what cannot be used changes nothing.

        read : the configuration anew, or raises ConfigError; of it the arms of an experiment are taken over
        """
        if read is not None and self._experiments is not None:
            try:
                self._experiments.reload(read().experiment)
            except ConfigError as exc:
                log.warning("the experiment stays as it was: %s", exc)
            else:
                if self._experiments.active:
                    log.info("the experiment was read again; its arms are %s", ", ".join(self._experiments.arms))
        self._discovery.reload()
        if self._keys is not None:
            self._keys.reload()
        if self._tls is not None and self._config.tls is not None:
            try:
                read_again(self._tls, self._config.tls)
            except ConfigError as exc:
                log.warning("the certificate stays as it was: %s", exc)
            else:
                log.info("the certificate was read again")

    def cut(self) -> None:
        """Cut the streams a `stop` in progress is waiting for, visibly, and wait for nothing more."""
        self._hurried.set()
        self._traffic.cut()

    async def _start(self) -> None:
        Outbound(self._config, self._configured)  # so that a key that is missing is heard of before a name is looked up
        self._fleet = await self._discovery.first()
        self._ranks = ranks_of([replica.url for replica in self._fleet.replicas])
        self._board = LoadBoard(len(self._fleet.replicas), self._on_load, fresh_s=self._config.load.fresh_s)
        self._outbound = Outbound(self._config, self._fleet)
        self._session = self._outbound.session()
        self._closers.append(self._session.close)
        self._open_gate()
        self._open_receipts()
        self._start_tracing()
        reported = await reported_block_tokens(self._session, self._fleet, self._config.load.timeout_s)
        block_tokens = self._fleet.block_tokens or reported or DEFAULT_BLOCK_TOKENS
        self._start_beside(block_tokens)
        self._core = assemble(
            self._config,
            self._fleet,
            on_receipt=self._finished,
            keep=self._keep,
            epoch_s=time.time() - self._clock(),
            block_tokens=block_tokens,
            answers=self._beside.answers,
            written=self._beside.written,
            every_candidate=False,
            forecasts=self._writer is not None
            or self._config.state.path is not None
            or self._fleet.says_how_told,  # who is told a path needs one
            laps=self._laps,
        )
        self._experiments = self._core.experiments
        self._start_telling()
        self._start_keeping()
        await self._start_prompts()
        self._start_edits()
        self._sources = EventSources(
            self._fleet,
            self._core.directory,
            self._session,
            self._clock,
            on_pushed_load=self._board.pushed,
            beliefs=self._config.directory,
        )
        self._closers.append(self._sources.stop)
        self._reported = Reported(
            self._fleet,
            self._core,
            self._sources,
            self._prompts,
            self._clock,
            spoke=lambda row: self._traffic.spoke(row),
            look=lambda: self._traffic.look(),
        )
        self._sources.follow_store()
        self._make_traffic_port()
        self._start_poller()
        self._start_discovery()
        await self._start_admin()
        await self._poller.asked_all()  # until then a request would be refused though replicas are well
        await self._start_traffic()  # last in, first out: signals are followed until the last stream has ended

    def _start_tracing(self) -> None:
        if self._config.tracing.endpoint is None:
            return
        from router.telemetry.provider import by_otlp  # the SDK takes a tenth of a second and 10 MB

        provider = by_otlp(self._config.tracing)
        if provider is not None:
            self._tracing = provider.tracing(self._laps, scheme="http" if self._tls is None else "https")
            self._closers.append(provider.stop)

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

    def _start_telling(self) -> None:
        """Tell engines where a prompt's state is, if the fleet file says how."""
        self._telling = Telling(self._fleet, self._core.dispatcher.view, self._clock)
        self._closers.append(self._telling.stop)

    def _start_keeping(self) -> None:
        """Take over what an earlier router learned, if it is to be kept, and keep what this one learns."""
        state, learning = self._config.state, self._core.dispatcher.learning
        if state.path is not None:
            keeper = StateKeeper(Path(state.path), learning, self._clock, every_s=state.every_s)
            keeper.start()
            self._closers.append(keeper.stop)

    def _open_gate(self) -> None:
        config = self._config
        key = admin_key(config)
        self._gate = Gate(admin=None if key is None else SecretKey(key))
        if config.client_keys is None:
            log.warning("no client_keys: whoever reaches %s:%d may use the replicas", config.host, config.port)
            return
        self._keys = KeysFile(Path(config.client_keys), self._gate)
        self._keys.start()
        self._closers.append(self._keys.stop)

    async def _start_prompts(self) -> None:
        self._prompts = Prompts(
            self._config.prompts,
            self._core.prompts,
            self._session,
            url_of=self._tokenizing_url,
            has_key=self._outbound.keeps_credentials,
            clock=self._clock,
            registry=self._metrics.registry,
            told=self._telling.reads_too(self._beside.read if self._beside.asks else None),
        )
        self._closers.append(self._prompts.stop)
        await self._prompts.start()

    def _start_edits(self) -> None:
        """Bodies are edited before anything reads them, if at all."""
        aliases, asks_usage = self._config.model_aliases, self._config.inject_usage
        if aliases or asks_usage:
            self._edits = BodyEdits(self._prompts.read, aliases=aliases, asks_usage=asks_usage)
            self._closers.append(self._edits.stop)

    def _tokenizing_url(self, model: str) -> str | None:
        """Whom to ask for the tokens of a base model: the replicas that serve it, in turn."""
        dispatcher, replicas = self._core.dispatcher, self._fleet.replicas
        for step in range(1, len(replicas) + 1):
            row = (self._asked_last + step) % len(replicas)
            serves = dispatcher.models_of(row)  # empty: it does not say, so any
            if (
                dispatcher.is_up(row)
                and not dispatcher.is_drained(row)
                and (not model or not serves or model in serves)
            ):
                self._asked_last = row
                return replicas[row].url
        return None

    def _start_poller(self) -> None:
        load = self._config.load
        self._poller = LoadPoller(
            partial(self._outbound.fetcher, max_body_bytes=MAX_PAGE_BYTES),
            on_load=self._board.polled,
            on_up=self._on_up,
            on_probe=self._reported.probed,
            period_s=load.period_s,
            health_period_s=self._config.health.probe_period_s,
            timeout_s=load.timeout_s,
            clock=self._clock,
        )
        for row, replica in members(self._fleet).items():
            rank = self._ranks[row]
            self._poller.watch(row, replica.url or "", None if rank is None else str(rank))
        self._poller.start()
        self._closers.append(self._poller.stop)

    def _start_discovery(self) -> None:
        parts = Parts(
            core=self._core,
            outbound=self._outbound,
            sources=self._sources,
            poller=self._poller,
            board=self._board,
            reported=self._reported,
            beside=self._beside,
            decider=self._decider,
            telling=self._telling,
        )
        membership = Membership(
            self._fleet,
            parts,
            ranks=self._ranks,
            look=self._traffic.look,
            check=self._discovery.check,
            clock=self._clock,
        )
        self._discovery.start(membership, self._outbound)
        self._closers.append(self._discovery.stop)

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
            keys=self._keys,
            discovery=self._discovery,
            clock=self._clock,
            tenants=self._config.admission.shares,
            directions=self._telling.directions,
        )
        key = admin_key(self._config)
        self._admin = AdminPort(
            not_ready=self._not_ready,
            metrics_text=views.metrics_text,
            fleet=views.fleet,
            pushed=self._sources.pushed,
            edited=self._discovery.edited,
            page=Page(self._live, views.fleet, can_edit=key is not None).add_to,
            key=key,
        )
        self._closers.append(self._admin.stop)
        await self._admin.start(self._config.admin_host, self._config.admin_port)

    def _make_traffic_port(self) -> None:
        config = self._config
        self._decider = TimedDecider(
            self._core.dispatcher,
            took=self._metrics.decision.observe,
            answered=self._prompts.answered,
            placed=self._live.placed,
            ranks=self._ranks,
            asks_load=config.load.from_answers,
            fields=self._outbound.fields,
            directions=self._telling.directions,
            aside=self._telling.aside,
        )
        decider: Decider = self._decider
        read_prompt: PromptReader = self._edits.read if self._edits is not None else self._prompts.read
        drops = self._outbound.drops | self._telling.drops
        if self._tracing is not None:
            decider, read_prompt = self._tracing.decider(decider), self._tracing.reader(read_prompt)
            drops |= {TRACEPARENT}
        self._traffic = TrafficPort(
            decider,
            read_prompt=read_prompt,
            answer=self._answer,
            clock=self._clock,
            limits=config.limits,
            times=config.time_outs,
            heard=self._heard,
            upstream_tls=self._outbound.tls,
            upstream_tls_name=self._outbound.tls_name,
            allowed_address=self._outbound.addresses.refused,
            admit=self._gate.admit,
            admin=self._gate.admin,
            endpoints=self._outbound.endpoints,
            relay_unknown=config.relay_unknown,
            drops=drops,
            via=self._gate.via,
            resumable=self._resumable if config.resume.anywhere else None,
        )

    def _resumable(self, model: str) -> ResumeConfig | None:
        """How streams of a model go on when they break: by the settings of its pool, as those of its adapters do."""
        return self._config.resume.of(self._core.names.resolve(model)[0])

    async def _start_traffic(self) -> None:
        config = self._config
        self._closers.append(self._stop_traffic)
        try:
            await self._traffic.start(config.host, config.port, tls=self._tls)
        except OSError as exc:
            raise PortInUse(config.host, config.port, "traffic", exc.strerror or str(exc)) from exc
        self._serving = True

    async def _stop_traffic(self) -> None:
        if self._serving and self._config.stop_delay_s:
            log.info("stopping: requests are accepted for %g s more", self._config.stop_delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.stop_delay_s):
                    await self._hurried.wait()
        await self._traffic.stop(0.0 if self._hurried.is_set() else self._config.drain_s)

    def _open_receipts(self) -> None:
        settings = self._config.receipts
        if settings.path is None:
            return
        try:
            self._writer = ReceiptWriter(
                Path(settings.path),
                share=settings.share,
                others=settings.others,
                capacity=settings.most_waiting,
                max_bytes=settings.max_mib << 20,
                keep=settings.keep,
            )
        except OSError as exc:
            raise ConfigError(f"receipts cannot be written to {settings.path}: {exc.strerror}") from exc
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
        if not is_nobody(self._fleet.replicas[row].name):  # its last answers may come after it left
            self._reported.load(row, load, sent_s, received_s)

    def _on_up(self, row: int, models: tuple[str, ...]) -> None:
        url = (self._fleet.replicas[row].url or "").rstrip("/")
        listed = self._poller.endpoints[url]
        self._reported.up(row, models, listed.parents, listed.roots)

    # Prompts and answers

    def _answer(self, head: RequestHead) -> tuple[int, bytes]:
        """The router's own answers on the traffic port."""
        if head.path == "/v1/models":
            lists = [endpoint.cards for endpoint in self._poller.endpoints.values() if endpoint.up]
            cards = merged(lists, self._config.model_aliases)
            return 200, msgspec.json.encode({"object": "list", "data": cards})
        if head.path == "/version":
            return 200, msgspec.json.encode({"version": router.__version__})
        if head.path == "/ready" and (why := self._not_ready()):
            return 503, msgspec.json.encode({"status": why})
        return 200, b'{"status":"ok"}'

    def _not_ready(self) -> str | None:
        if not self._serving:
            return "the router is starting"
        is_up, is_drained = self._core.dispatcher.is_up, self._core.dispatcher.is_drained
        up = any(is_up(row) and not is_drained(row) for row in members(self._fleet))
        return self._readiness.why_not(up=up, unheard=lambda: self._sources.unheard(is_up), now_s=self._clock())

    def _ready(self) -> bool:
        return self._not_ready() is None

    def _finished(self, receipt: Receipt) -> None:
        self._metrics.count(receipt)
        log_request(receipt)
        if receipt.choice is not None and receipt.prompt_tokens:  # nothing else leaves blocks to tell of
            self._sources.served(receipt.choice.replica)

    def _keep(self, receipt: Receipt, request: RequestFacts | None, detail: Detail | None) -> None:
        """Keep a receipt for the page, and write it down; what there is of its decision is worked out by others."""
        try:
            self._show_and_write(receipt, request, detail)
        except Exception:  # others may end, or go, in the same call of the dispatcher, and would never hear of it
            log.exception("the receipt of request %s could not be kept", receipt.request_id)

    def _show_and_write(self, receipt: Receipt, request: RequestFacts | None, detail: Detail | None) -> None:
        self._live.ended(receipt, detail)
        if isinstance(detail, Notes):
            self._metrics.count_regret(receipt, detail)
        if self._writer is None:
            return
        if request is None:
            self._writer.write(receipt)
            return
        receipt.blocks, receipt.block_tokens = len(request.chain), request.block_tokens
        self._writer.write(receipt, detail, chain=request.chain, unit=self._core.experiments.unit(request))


def admin_key(config: RouterConfig) -> str | None:
    """What admin calls must carry, from the environment; None: nobody may make any."""
    return key_in("admin_key_env", config.admin_key_env)
