"""A router process from its start to its end: when it says it is ready, and what becomes of requests when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from router.config import LoadConfig, RouterConfig
from router.fleet import Fleet, ReplicaSpec
from router.gateway import Gateway
from router.readiness import StartConfig
from tests.router.http.stubs import (
    LAST_CHUNK,
    STREAM_HEAD,
    Client,
    Received,
    a_replica,
    answer,
    chunk,
    get,
    on_uvloop,
    post,
    until,
)
from tests.router.receipts.builders import a_receipt

TOKEN = chunk(b'data: {"choices":[{"text":"x"}]}\n\n')
STREAMED = post(b'{"model":"m1","prompt":[1,2],"stream":true}')
WHOLE = post(b'{"model":"m1","prompt":[1,2]}')


class Engine:
    """A replica's script: it is well, and a stream of it ends when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, received: Received, writer: asyncio.StreamWriter) -> None:
        path = received.head.split(b" ")[1]
        if path == b"/v1/models":
            writer.write(answer(b'{"data":[{"id":"m1"}]}'))
        elif b'"stream":true' in received.body:
            writer.write(STREAM_HEAD + TOKEN)
            await self.may_end.wait()
            writer.write(LAST_CHUNK)
        else:
            writer.write(answer(b"{}"))


@dataclass
class Router:
    process: asyncio.subprocess.Process
    traffic: int
    admin: int

    @contextlib.asynccontextmanager
    async def a_client(self, port: int | None = None) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.traffic)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ready(self, port: int) -> tuple[int, str]:
        """What /ready says: status, and why."""
        async with self.a_client(port) as client:
            said = await client.ask(get(b"/ready"))
        return said.status, str(json.loads(said.body)["status"])

    async def until_ready(self, status: int) -> str:
        """Until both ports say so; why it is so."""
        while True:
            (one, why), (other, _) = await self.ready(self.traffic), await self.ready(self.admin)
            if one == other == status:
                return why
            await asyncio.sleep(0.01)

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def a_router(folder: Path, *replicas: str, **config: object) -> AsyncIterator[Router]:
    settings = {
        "worker_urls": list(replicas),
        "host": "127.0.0.1",
        "port": 0,
        "admin_host": "127.0.0.1",
        "admin_port": 0,
        "load": {"period_s": 0.05},
        **config,
    }
    (folder / "tfirst.yaml").write_text(json.dumps(settings))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.cli.main", "serve", "--config", str(folder / "tfirst.yaml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        ports: dict[str, int] = {}
        while len(ports) < 2:
            line = (await process.stdout.readline()).decode()
            assert line, "the router ended"
            if "http://" in line:
                ports[line.split()[0]] = int(line.rsplit(":", 1)[1])
        yield Router(process, ports["traffic"], ports["admin"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def a_stream(router: Router) -> AsyncIterator[Client]:
    """The client of a stream that has begun."""
    async with router.a_client() as client:
        client.writer.write(STREAMED)
        status, _ = await client.read_head()
        assert status == 200
        yield client


async def _refuses_connections(router: Router) -> None:
    while True:
        try:
            async with router.a_client():
                await asyncio.sleep(0.01)
        except OSError:
            return


@on_uvloop
async def test_a_router_is_ready_once_a_replica_is_up_and_stops_without_losing_anybody() -> None:
    loaded = asyncio.Event()
    engine = Engine()

    async def loading(received: Received, writer: asyncio.StreamWriter) -> None:
        if loaded.is_set():
            await engine(received, writer)
        else:
            writer.write(answer(b"", b"503 Service Unavailable"))

    with tempfile.TemporaryDirectory() as folder:
        async with a_replica(loading) as replica, a_router(Path(folder), replica.url, stop_delay_s=1.0) as router:
            assert await router.until_ready(503) == "no replica is up"
            loaded.set()
            await router.until_ready(200)
            async with a_stream(router) as client:
                router.tell(signal.SIGTERM)
                assert await router.until_ready(503) == "the router is stopping"
                async with router.a_client() as late:
                    assert (await late.ask(WHOLE)).status == 200
                await _refuses_connections(router)
                assert router.process.returncode is None, "a stream is not over"
                engine.may_end.set()
                await client.reader.readuntil(LAST_CHUNK)
                assert await router.process.wait() == 0


@on_uvloop
async def test_a_stream_that_outlasts_the_limit_is_cut_visibly_and_its_replica_told() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with a_replica(Engine()) as replica, a_router(Path(folder), replica.url, drain_s=0.2) as router:
            await router.until_ready(200)
            async with a_stream(router) as client:
                router.tell(signal.SIGTERM)
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await client.reader.readuntil(LAST_CHUNK)
                assert await router.process.wait() == 0
            await until(lambda: replica.open == 0)


@pytest.mark.parametrize("config", [{"stop_delay_s": 60.0}, {"drain_s": 60.0}], ids=["delay", "drain"])
@on_uvloop
async def test_a_second_signal_ends_the_router_now(config: dict[str, float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with a_replica(Engine()) as replica, a_router(Path(folder), replica.url, **config) as router:
            await router.until_ready(200)
            async with a_stream(router) as client:
                router.tell(signal.SIGTERM)
                if "stop_delay_s" in config:
                    await router.until_ready(503)
                else:
                    await _refuses_connections(router)
                router.tell(signal.SIGTERM)
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await client.reader.readuntil(LAST_CHUNK)
                assert await router.process.wait() == 130


@on_uvloop
async def test_by_option_a_router_waits_for_events_and_no_longer_than_its_grace_time() -> None:
    """The replica is up, and where its events should come from nobody listens."""
    async with a_replica(Engine()) as replica:
        fleet = Fleet(replicas=[ReplicaSpec(name="a", url=replica.url, events="tcp://127.0.0.1:1")])
        config = RouterConfig(
            host="127.0.0.1",
            port=0,
            admin_host="127.0.0.1",
            admin_port=0,
            load=LoadConfig(period_s=0.05),
            start=StartConfig(wait_for_events=True, grace_s=0.5),
        )
        gateway = Gateway(config, fleet)
        await gateway.start()
        try:
            said = set()
            while (why := gateway._not_ready()) is not None:
                said.add(why)
                await asyncio.sleep(0.01)
            assert "cache events are not followed yet: a" in said
        finally:
            await gateway.stop()


async def test_a_part_that_cannot_stop_keeps_nothing_else_open() -> None:
    closed: list[str] = []

    async def closes() -> None:
        closed.append("closed")

    async def fails() -> None:
        raise OSError("no space left on device")

    gateway = Gateway(RouterConfig(), Fleet(replicas=[ReplicaSpec(name="a", url="http://127.0.0.1:1")]))
    gateway._closers += [closes, fails, closes]
    await gateway.stop()
    assert closed == ["closed", "closed"]


async def test_a_receipt_that_cannot_be_kept_is_no_matter_of_the_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(RouterConfig(), Fleet(replicas=[ReplicaSpec(name="a", url="http://127.0.0.1:1")]))

    def ended(*facts: object) -> None:
        raise ValueError("somebody who shows it")

    monkeypatch.setattr(gateway._live, "ended", ended)
    gateway._keep(a_receipt(request_id="r-7"), None, None)
    assert "r-7 could not be kept" in caplog.text
