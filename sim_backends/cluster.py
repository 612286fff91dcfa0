"""All simulated replicas of one process: their world, faces and publishers, started and stopped together."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import zmq.asyncio
from aiohttp import web

from sim_backends import event_wire
from sim_backends import fleet as fleet_file
from sim_backends.driver import Driver
from sim_backends.fleet import Fleet
from sim_backends.openai_face import Face, FaceSettings
from sim_backends.publisher import PortTaken, Publisher, ReplayingPublisher
from sim_backends.world import World, build

_SHUTDOWN_S = 0.1  # requests under way get nothing more once the driver is closed: no use in waiting for them


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How a fleet is played.

    port : of the first replica, the next ones count up; 0 lets the system choose each
    seed : of all streams of chance; None takes the fleet file's
    """

    host: str = "127.0.0.1"
    port: int = 0
    seed: int | None = None
    use_store: bool = True
    use_events: bool = True
    prompt_tokens_details: bool = True


class Cluster:
    """`start` once, `stop` once, both on the same loop."""

    def __init__(self, fleet: Fleet, settings: ClusterSettings) -> None:
        self._settings = settings
        self.fleet = fleet  # with the real addresses after `start`
        self.world: World = build(
            fleet, seed=settings.seed, use_store=settings.use_store, record_events=settings.use_events
        )
        self._unix_offset_s = time.time() - time.monotonic()
        self._context: zmq.asyncio.Context | None = None
        self._driver: Driver | None = None
        self._publishers: list[ReplayingPublisher] = []
        self._store_publisher: Publisher | None = None
        self._master = event_wire.MasterEncoder(
            model=fleet.model.name, block_tokens=fleet.block_tokens, backend_id="sim-store"
        )
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
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        await asyncio.gather(*(publisher.close() for publisher in self._publishers))
        if self._store_publisher is not None:
            self._store_publisher.close()
        if self._context is not None:
            self._context.term()
        self._runners, self._publishers, self._store_publisher, self._context = [], [], None, None

    async def _start(self) -> None:
        self._driver = Driver(self.world, after_wake=self._publish)
        if self._settings.use_events:
            self._open_publishers()
        rows = []
        for row, replica in enumerate(self.fleet.replicas):
            url = await self._open_face(row)
            more: dict[str, str] = {"url": url}
            if self._publishers:
                publisher = self._publishers[row]
                more |= {"events": publisher.address, "replay": publisher.replay_address}
            rows.append(msgspec.structs.replace(replica, **more))
        store = self.fleet.store
        if store is not None and self._store_publisher is not None:
            store = msgspec.structs.replace(store, events=self._store_publisher.address)
        self.fleet = msgspec.structs.replace(self.fleet, replicas=rows, store=store)

    def _open_publishers(self) -> None:
        self._context = context = zmq.asyncio.Context()
        free = f"tcp://{self._settings.host}:*"
        for replica in self.fleet.replicas:
            publisher = ReplayingPublisher(
                context, address=replica.events or free, replay_address=replica.replay or free
            )
            self._publishers.append(publisher)
            publisher.start()
        if self.world.store is not None and self.fleet.store is not None:
            self._store_publisher = Publisher(context, address=self.fleet.store.events or free, first_seq=1)

    async def _open_face(self, row: int) -> str:
        extra = self.fleet.engine or fleet_file.Engine()
        assert self._driver is not None, "the driver is there before the faces"
        face = Face(
            FaceSettings(
                row=row,
                model=self.fleet.model.name,
                vocab=self.fleet.model.vocab,
                prompt_tokens_details=self._settings.prompt_tokens_details,
                memory_share=extra.memory_share,
            ),
            self._driver,
            self._publishers[row] if self._publishers else None,
        )
        runner = web.AppRunner(
            face.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await runner.setup()
        self._runners.append(runner)
        host, port = self._wanted_address(row)
        listener = listen(host, port)
        await web.SockSite(runner, listener).start()
        return f"http://{host}:{listener.getsockname()[1]}"

    def _wanted_address(self, row: int) -> tuple[str, int]:
        url = self.fleet.replicas[row].url
        if url is not None:
            parts = urlsplit(url)
            assert parts.hostname is not None, "checked when the fleet was read"
            assert parts.port is not None, "checked when the fleet was read"
            return parts.hostname, parts.port
        base = self._settings.port
        return self._settings.host, base + row if base else 0

    def _publish(self) -> None:
        """Send what the last advance made known. Times are those of the steps, not of this call."""
        if not self._publishers:
            return
        size, offset_s = self.fleet.block_tokens, self._unix_offset_s
        for engine, publisher in zip(self.world.engines, self._publishers, strict=True):
            for batch in engine.take_event_batches():
                publisher.publish(
                    event_wire.encode_batch(batch.events, unix_s=batch.at_s + offset_s, block_tokens=size)
                )
        if self.world.store is not None and self._store_publisher is not None:
            for payload in self._master.messages(self.world.store.take_changes(), unix_offset_s=offset_s):
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
