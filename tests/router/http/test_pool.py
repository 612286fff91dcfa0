"""Connections to endpoints."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from router.http.contract import Limits, TimeOuts
from router.http.pool import origin_of
from tests.router.http.stubs import (
    Decisions,
    Received,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    on_uvloop,
    post,
    says,
    until,
)

CERTIFICATE = Path(__file__).parent / "tls" / "cert.pem"
KEY = Path(__file__).parent / "tls" / "key.pem"


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "field", "prefix"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7", 8000, False, b"10.0.0.7:8000", b""),
        ("https://engine.example/a/b/", "engine.example", 443, True, b"engine.example", b"/a/b"),
        ("http://[::1]:8000", "::1", 8000, False, b"[::1]:8000", b""),
        ("http://user:pw@host", "host", 80, False, b"host", b""),
    ],
)
def test_a_base_url_is_taken_apart(url: str, host: str, port: int, tls: bool, field: bytes, prefix: bytes) -> None:
    origin = origin_of(url)
    assert (origin.host, origin.port, origin.tls) == (host, port, tls)
    assert (origin.host_field, origin.prefix) == (field, prefix)


@pytest.mark.parametrize("url", ["10.0.0.7:8000", "ftp://h", "http://", "http://h:port"])
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        origin_of(url)


async def _slow(_: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.02)
    writer.write(answer())


@on_uvloop
async def test_concurrent_requests_have_connections_of_their_own_and_then_share_the_latest() -> None:
    async with a_replica(_slow) as replica, a_port(Decisions([replica.url])) as port:
        await asyncio.gather(*(ask(port, post()) for _ in range(5)))
        assert (replica.opened, port.pool.idle) == (5, 5)
        for _ in range(10):
            await ask(port, post())
        assert (replica.opened, port.pool.idle) == (5, 5)


@on_uvloop
async def test_idle_connections_are_limited_in_number_and_in_time() -> None:
    limits = Limits(max_idle_per_endpoint=2)
    async with (
        a_replica(_slow) as replica,
        a_port(Decisions([replica.url]), limits=limits, times=TimeOuts(pool_idle_s=0.2)) as port,
    ):
        await asyncio.gather(*(ask(port, post()) for _ in range(5)))
        assert port.pool.idle == 2
        await until(lambda: port.pool.idle == 0)
        await until(lambda: replica.open == 0)
        assert port.pool._idle == {}, "an endpoint without connections leaves nothing behind"


@on_uvloop
async def test_a_connection_its_endpoint_closed_is_dropped_while_idle() -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url])) as port:
        await ask(port, post())
        for writer in list(replica.writers):
            writer.close()
        await until(lambda: port.pool.idle == 0)
        assert (await ask(port, post())).status == 200
        assert port.counts.repeats == 0


@pytest.mark.parametrize("said", [b"Connection: close", b"connection: Close"])
@on_uvloop
async def test_a_connection_its_endpoint_will_close_is_not_kept(said: bytes) -> None:
    async with a_replica(says(answer(b"{}", b"200 OK", said))) as replica, a_port(Decisions([replica.url])) as port:
        async with a_client(port) as client:
            for _ in range(2):
                got = await client.ask(post())
                assert got.values(b"connection") == []
            assert port.pool.idle == 0
        assert replica.opened == 2


@on_uvloop
async def test_an_https_endpoint_is_verified_and_served() -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(CERTIFICATE, KEY)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"{}")
            writer.write(answer())
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=serving)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    async with a_port(Decisions([url]), upstream_tls=trusting) as port:
        assert (await ask(port, post())).body == b'{"ok":true}'
    async with a_port(Decisions([url])) as port:
        assert (await ask(port, post())).status == 502, "the certificate is not in the system's store"
    server.close()
