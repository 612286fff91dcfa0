"""All simulated replicas of one process: their world, faces and event streams, started and stopped together."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from urllib.parse import urlsplit

import msgspec
import zmq.asyncio
from aiohttp import web

from sim_backends import event_wire, generations
from sim_backends import fleet as fleet_file
from sim_backends.driver import Driver
from sim_backends.event_stream import EventStream
from sim_backends.event_wire import EventEncoder, VllmEncoder
from sim_backends.faults import NONE, FaultPlan, Faults, re_rate
from sim_backends.fleet import Fleet
from sim_backends.generations import Generation
from sim_backends.lmcache_face import LmcacheFace
from sim_backends.openai_face import Face, FaceSettings
from sim_backends.planned_restart import PlannedRestart
from sim_backends.publisher import PortTaken, Publisher, ReplayingPublisher
from sim_backends.rank_publishers import open_all
from sim_backends.sglang_wire import SglangEncoder
from sim_backends.sim_face import SimFace
from sim_backends.world import World, build

_SHUTDOWN_S = 0.1  # requests under way get nothing more once the driver is closed: no use in waiting for them


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How a fleet is played.

    port : of the first replica, the next ones count up; 0 lets the system choose each
    seed : of all streams of chance; None takes the fleet file's
    generation : which engine and release the replicas speak as
    raw_hashes : events carry whole digests as bytes, where the generation can
    faults : by replica name, from the start; absent is none
    """

    host: str = "127.0.0.1"
    port: int = 0
    seed: int | None = None
    use_store: bool = True
    use_events: bool = True
    prompt_tokens_details: bool = True
    generation: Generation = generations.DEFAULT
    raw_hashes: bool = False
    faults: Mapping[str, Faults] = field(default_factory=dict)


class Cluster:
    """`start` once, `stop` once, both on the same loop."""

    def __init__(self, fleet: Fleet, settings: ClusterSettings) -> None:
        self._settings = settings
        self.fleet = fleet  # with the real addresses after `start`
        self.world: World = build(
            fleet,
            seed=settings.seed,
            use_store=settings.use_store,
            record_events=settings.use_events,
            started_s=time.monotonic(),
        )
        self._unix_offset_s = time.time() - time.monotonic()
        self._context: zmq.asyncio.Context | None = None
        self._driver: Driver | None = None
        extra = fleet.engine or fleet_file.Engine()
        seed = extra.seed if settings.seed is None else settings.seed
        self._plans = [
            FaultPlan(settings.faults.get(replica.name, NONE), seed=seed, replica=replica.name)
            for replica in fleet.replicas
        ]
        self._link_rates = {link: link.rate_bytes_per_s for link in self.world.links}  # without faults
        self._streams: list[EventStream] = []  # by row of the world
        self._faces: list[Face] = []
        self._addresses: dict[str, str] = {}  # name of the engine that is read at each host:port
        self.lmcache: LmcacheFace | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._one_restart = asyncio.Lock()
        self._planned = [
            PlannedRestart(plan, partial(self._restart_by_itself, index)) for index, plan in enumerate(self._plans)
        ]
        self._store_publisher: Publisher | None = None
        numbers = count(1)
        self._masters = {
            model: event_wire.MasterEncoder(
                model=model, block_tokens=fleet.block_tokens, backend_id="sim-store", numbers=numbers
            )
            for model in self.world.stores
        }
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        """Listen everywhere. Raises PortTaken, and then nothing listens any more."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    @property
    def broken(self) -> asyncio.Future[None]:
        """Ends only if the simulation itself fails, with the exception. After `start`."""
        assert self._driver is not None, "started"
        return self._driver.broken

    async def stop(self) -> None:
        """End requests under way, close all sockets."""
        if self._driver is not None:
            self._driver.close()
        for planned in self._planned:
            planned.close()
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        await asyncio.gather(*(stream.close() for stream in self._streams))
        if self._store_publisher is not None:
            self._store_publisher.close()
        if self._context is not None:
            self._context.term()
        self._runners, self._streams, self._store_publisher, self._context = [], [], None, None

    async def restart(self, index: int, *, spared: asyncio.BaseTransport | None = None, down_s: float = 0.0) -> None:
        """Make one replica a new process on the same addresses: empty, counting from 0, all connections dropped.

        index : of the replica in the fleet file
        spared : the one connection that stays. A restart goes on when it is cancelled with its caller
        down_s : from its end to its answering again, >= 0
        """
        await asyncio.shield(self._begin_restart(index, spared, down_s))

    def _restart_by_itself(self, index: int, down_s: float) -> None:
        """As the replica's faults ask for it. Nobody waits for it, so if it fails the simulation has failed."""
        self._begin_restart(index, None, down_s).add_done_callback(self._break_if_failed)

    def _begin_restart(self, index: int, spared: asyncio.BaseTransport | None, down_s: float) -> asyncio.Task[None]:
        task = asyncio.create_task(self._restart(index, spared, down_s))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        return task

    def _break_if_failed(self, restart: asyncio.Task[None]) -> None:
        failure = None if restart.cancelled() else restart.exception()
        if failure is not None and not self.broken.done():
            self.broken.set_exception(failure)

    async def _restart(self, index: int, spared: asyncio.BaseTransport | None, down_s: float) -> None:
        async with self._one_restart:
            await self._become_new(index, spared, down_s)

    async def _become_new(self, index: int, spared: asyncio.BaseTransport | None, down_s: float) -> None:
        assert self._driver is not None, "started"
        self._faces[index].restarted()
        server = self._runners[index].server
        for connection in server.connections if server is not None else ():
            if connection.transport is not None and connection.transport is not spared:
                connection.transport.abort()
        for row in self.world.rows[index]:
            self._driver.change(partial(self.world.crash, row, back_after_s=down_s))
            self.world.engines[row].take_event_batches()
        if self._streams:
            now_s = self._driver.clock()
            await asyncio.gather(*(self._streams[row].restart(now_s) for row in self.world.rows[index]))

    async def _start(self) -> None:
        self._driver = Driver(self.world, after_wake=self._publish)
        self._rate_links()
        for index in range(len(self._plans)):
            self._pace_steps(index)
        if self._settings.use_events:
            await self._open_publishers(self._driver.clock())
        rows = []
        for index, replica in enumerate(self.fleet.replicas):
            url = await self._open_face(index)
            more: dict[str, str] = {"url": url}
            if self._streams:
                publisher = self._streams[self.world.rows[index][0]].publisher
                more |= {"events": publisher.address, "replay": publisher.replay_address}
            rows.append(msgspec.structs.replace(replica, **more))
            told = self.fleet.told_of(replica)
            at = told.read_at if told is not None and told.read_at is not None else urlsplit(url).netloc
            self._addresses[at] = self.world.engines[self.world.rows[index][0]].settings.name
        store = self.fleet.store
        if store is not None and self._store_publisher is not None:
            store = msgspec.structs.replace(store, events=self._store_publisher.address)
        lmcache = await self._open_lmcache()
        self.fleet = msgspec.structs.replace(self.fleet, replicas=rows, store=store, lmcache=lmcache)
        for planned in self._planned:  # from now on: a restart before all is there would be none
            planned.look()

    def _faults_changed(self, index: int) -> None:
        """Faults that act on more than the requests and events of their replica."""
        self._rate_links()
        self._pace_steps(index)
        self._planned[index].look()

    def _pace_steps(self, index: int) -> None:
        """Steps as slow as the replica's faults want them."""
        for row in self.world.rows[index]:
            self.world.engines[row].slow_down(self._plans[index].faults.step_factor)

    def _rate_links(self) -> None:
        """Links as slow as the faults want them: the one to the store, and those into the replicas."""
        if self._driver is None:
            return
        factors = {self.world.network: min(plan.faults.store_link_factor for plan in self._plans)}
        for rows, plan in zip(self.world.rows, self._plans, strict=True):
            factors |= {self.world.hosts[row]: plan.faults.host_link_factor for row in rows}
        for link, factor in factors.items():
            if link is not None and link.rate_bytes_per_s != self._link_rates[link] * factor:
                self._driver.change(partial(re_rate, link, self._link_rates[link] * factor))

    async def _open_publishers(self, now_s: float) -> None:
        self._context = context = zmq.asyncio.Context()
        free = f"tcp://{self._settings.host}:*"
        generation = self._settings.generation

        def open_one(address: str, replay_address: str) -> ReplayingPublisher:
            return ReplayingPublisher(
                context, address=address, replay_address=replay_address, topic_in_replay=generation.topic_in_replay
            )

        for replica, plan in zip(self.fleet.replicas, self._plans, strict=True):
            publishers = await open_all(
                open_one, events=replica.events or free, replay=replica.replay or free, ranks=replica.ranks
            )
            for rank, publisher in enumerate(publishers):
                stream = EventStream(
                    publisher,
                    plan,
                    new_encoder=partial(self._new_encoder, rank),
                    unix_offset_s=self._unix_offset_s,
                    announces_start=generation.is_sglang,
                )
                self._streams.append(stream)
                stream.start(now_s)
        if self.world.stores and self.fleet.store is not None:
            self._store_publisher = Publisher(context, address=self.fleet.store.events or free, first_seq=1)

    def _new_encoder(self, rank: int) -> EventEncoder:
        generation, size = self._settings.generation, self.fleet.block_tokens
        if generation.is_sglang:
            return SglangEncoder(generation.version, block_tokens=size, rank=rank)
        return VllmEncoder(generation.version, block_tokens=size, raw_hashes=self._settings.raw_hashes, rank=rank)

    async def _open_face(self, index: int) -> str:
        extra = self.fleet.engine or fleet_file.Engine()
        replica, rows = self.fleet.replicas[index], self.world.rows[index]
        model, told = self.fleet.model_of(replica), self.fleet.told_of(replica)
        assert self._driver is not None, "the driver is there before the faces"
        face = Face(
            FaceSettings(
                row=rows[0],
                model=model.name,
                vocab=model.vocab,
                prompt_tokens_details=self._settings.prompt_tokens_details,
                memory_share=extra.memory_share,
                generation=self._settings.generation,
                ranks=len(rows),
                listens=None if told is None else told.peer,
            ),
            self._driver,
            self._plans[index],
            [self._streams[row].publisher for row in rows] if self._streams else [],
            addresses=self._addresses,
        )
        self._faces.append(face)
        app = face.application()
        SimFace(
            replica.name,
            self._plans[index],
            restart=lambda spared, down_s: self.restart(index, spared=spared, down_s=down_s),
            drain=lambda on: self._drain(index, on=on),
            changed=partial(self._faults_changed, index),
        ).add_to(app)
        return await self._serve(app, *self._wanted_address(index))

    async def _open_lmcache(self) -> fleet_file.Lmcache | None:
        """Controller and coordinator on one port, where the file has such a section; one with its real addresses."""
        section, fleet = self.fleet.lmcache, self.fleet
        if section is None:
            return None
        assert self._driver is not None, "the driver is there before the faces"
        instances: dict[str, int] = {}
        for replica, rows in zip(fleet.replicas, self.world.rows, strict=True):
            told = fleet.told_of(replica)
            instances[told.instance if told is not None and told.instance is not None else replica.name] = rows[0]
        self.lmcache = LmcacheFace(self._driver, instances, block_tokens=fleet.block_tokens, vocab=fleet.model.vocab)
        wanted = section.controller or section.coordinator
        parts = urlsplit(wanted or f"http://{self._settings.host}:0")
        assert parts.hostname is not None, "checked when the fleet was read"
        url = await self._serve(self.lmcache.application(), parts.hostname, parts.port or 0)
        return msgspec.structs.replace(section, controller=url, coordinator=url)

    async def _serve(self, app: web.Application, host: str, port: int) -> str:
        """Listen there, and the URL."""
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        self._runners.append(runner)
        listener = listen(host, port)
        await web.SockSite(runner, listener).start()
        return f"http://{host}:{listener.getsockname()[1]}"

    def _drain(self, index: int, *, on: bool) -> None:
        """Have a replica take nothing new, or take requests again."""
        assert self._driver is not None, "started"
        for row in self.world.rows[index]:
            self._driver.change(partial(self.world.drain if on else self.world.resume, row))

    def _wanted_address(self, index: int) -> tuple[str, int]:
        url = self.fleet.replicas[index].url
        if url is not None:
            parts = urlsplit(url)
            assert parts.hostname is not None, "checked when the fleet was read"
            assert parts.port is not None, "checked when the fleet was read"
            return parts.hostname, parts.port
        base = self._settings.port
        return self._settings.host, base + index if base else 0

    def _publish(self) -> None:
        """Send what the last advance made known. Times are those of the steps, not of this call."""
        if not self._streams:
            return
        for engine, stream in zip(self.world.engines, self._streams, strict=True):
            batches = engine.take_event_batches()
            if batches:
                stream.publish(batches)
        if self._store_publisher is None:
            return
        for model, store in self.world.stores.items():
            for payload in self._masters[model].messages(store.take_changes(), unix_offset_s=self._unix_offset_s):
                self._store_publisher.publish(payload)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket, IPv4. Raises PortTaken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as exc:
        listener.close()
        number = exc.errno if isinstance(exc, OSError) else None
        reason = "the port is in use" if number == errno.EADDRINUSE else str(exc)
        raise PortTaken(f"{host}:{port}", reason) from exc
    listener.setblocking(False)
    return listener
