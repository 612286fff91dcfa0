"""TLS on either side: who is believed, what files may be, and renewal. Certificates are made here, with openssl."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.http.contract import TimeOuts
from router.http.tls import TlsConfig, UpstreamTlsConfig, read_again, server_context, upstream_context
from tests.router.http.stubs import (
    Client,
    Decisions,
    a_port,
    answer,
    ask,
    get,
    on_uvloop,
    post,
    until,
)

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def a_certificate(folder: Path, name: str, *, alt: str = "IP:127.0.0.1", encrypted: bool = False) -> None:
    """Self-signed, as `name.pem` with its key in `name.key`."""
    secret = ["-passout", "pass:secret"] if encrypted else ["-nodes"]
    paths: list[str | Path] = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={alt}", "-days", "2"]
    openssl("req", "-x509", *CURVE, *secret, *paths, *names)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    a_certificate(folder, "server")
    a_certificate(folder, "renewed")
    a_certificate(folder, "named", alt="DNS:engine.internal")
    a_certificate(folder, "client", alt="DNS:client")
    a_certificate(folder, "locked", encrypted=True)
    (folder / "both.pem").write_bytes((folder / "server.pem").read_bytes() + (folder / "server.key").read_bytes())
    (folder / "noise.pem").write_bytes(b"no certificate")
    return folder


def trusting(folder: Path, name: str, client: str | None = None) -> ssl.SSLContext:
    own = str(folder / f"{client}.pem") if client else None
    key = str(folder / f"{client}.key") if client else None
    return upstream_context(UpstreamTlsConfig(ca=str(folder / f"{name}.pem"), certificate=own, key=key))


def serving(folder: Path, name: str, client_ca: str | None = None) -> TlsConfig:
    ca = str(folder / f"{client_ca}.pem") if client_ca else None
    return TlsConfig(certificate=str(folder / f"{name}.pem"), key=str(folder / f"{name}.key"), client_ca=ca)


async def status_of(port: int, context: ssl.SSLContext) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return (await Client(reader, writer).ask(get(b"/health"))).status
    finally:
        writer.close()


@asynccontextmanager
async def a_tls_replica(context: ssl.SSLContext) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"{}")
            writer.write(answer())
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


# -- clients


def test_clients_speak_tls_to_the_port_and_only_with_its_own_certificate(made: Path) -> None:
    @on_uvloop
    async def run() -> None:
        async with a_port(Decisions(), tls=server_context(serving(made, "server"))) as port:
            assert await status_of(port.port, trusting(made, "server")) == 200
            with pytest.raises(ssl.SSLCertVerificationError):
                await status_of(port.port, trusting(made, "renewed"))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await ask(port, get(b"/health"))

    run()


def test_where_clients_must_show_a_certificate_others_get_no_answer(made: Path) -> None:
    @on_uvloop
    async def run() -> None:
        context = server_context(serving(made, "server", client_ca="client"))
        async with a_port(Decisions(), tls=context) as port:
            assert await status_of(port.port, trusting(made, "server", client="client")) == 200
            for stranger in (None, "renewed"):
                with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
                    await status_of(port.port, trusting(made, "server", client=stranger))

    run()


def test_renewed_files_are_taken_in_and_bad_ones_change_nothing(made: Path, tmp_path: Path) -> None:
    for kind in ("pem", "key"):
        shutil.copy(made / f"server.{kind}", tmp_path / f"mine.{kind}")
    config = serving(tmp_path, "mine")
    context = server_context(config)

    @on_uvloop
    async def run() -> None:
        async with a_port(Decisions(), tls=context) as port:
            shutil.copy(made / "renewed.pem", tmp_path / "mine.pem")  # half a renewal: the key is the old one
            with pytest.raises(ConfigError, match="another certificate"):
                read_again(context, config)
            assert await status_of(port.port, trusting(made, "server")) == 200
            shutil.copy(made / "renewed.key", tmp_path / "mine.key")
            read_again(context, config)
            assert await status_of(port.port, trusting(made, "renewed")) == 200

    run()


def test_a_client_that_never_shakes_hands_is_dropped_in_time(made: Path) -> None:
    @on_uvloop
    async def run() -> None:
        context = server_context(serving(made, "server"))
        async with a_port(Decisions(), tls=context, times=TimeOuts(request_head_s=0.2)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            assert await reader.read() == b""
            writer.close()

    run()


# -- replicas


def test_a_replica_is_believed_by_the_authority_and_the_name_that_were_configured(made: Path) -> None:
    @on_uvloop
    async def run() -> None:
        async with a_tls_replica(server_context(serving(made, "named"))) as url:
            for name, status in ((None, 502), ("engine.internal", 200), ("other.internal", 502)):
                context = trusting(made, "named")
                async with a_port(Decisions([url]), upstream_tls=context, upstream_tls_name=name) as port:
                    assert (await ask(port, post())).status == status
            async with a_port(Decisions([url]), upstream_tls=trusting(made, "server")) as port:
                assert (await ask(port, post())).status == 502
            blind = upstream_context(UpstreamTlsConfig(verify=False))
            async with a_port(Decisions([url]), upstream_tls=blind) as port:
                assert (await ask(port, post())).status == 200

    run()


def test_the_name_asked_for_is_the_one_configured(made: Path) -> None:
    asked: list[str | None] = []
    context = server_context(serving(made, "named"))
    context.sni_callback = lambda _, name, __: asked.append(name)

    @on_uvloop
    async def run() -> None:
        async with a_tls_replica(context) as url:
            own = trusting(made, "named")
            async with a_port(Decisions([url]), upstream_tls=own, upstream_tls_name="engine.internal") as port:
                assert (await ask(port, post())).status == 200

    run()
    assert asked == ["engine.internal"]


def test_a_replica_that_asks_for_a_certificate_is_shown_the_configured_one(made: Path) -> None:
    @on_uvloop
    async def run() -> None:
        async with a_tls_replica(server_context(serving(made, "server", client_ca="client"))) as url:
            for client, status in (("client", 200), (None, 502)):
                context = trusting(made, "server", client=client)
                async with a_port(Decisions([url]), upstream_tls=context) as port:
                    assert (await ask(port, post())).status == status

    run()


def test_an_endpoint_where_none_may_be_gets_no_byte() -> None:
    heard = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = await reader.read()
        writer.close()

    @on_uvloop
    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://localhost:{server.sockets[0].getsockname()[1]}"
        seen: list[tuple[str, int]] = []

        def allowed(address: str, port: int) -> str:
            seen.append((address, port))
            return "nobody may be there"

        async with a_port(Decisions([url]), allowed_address=allowed) as port:
            assert (await ask(port, post())).status == 502
            await until(lambda: port.pool.in_use == port.pool.idle == 0)
        server.close()
        assert [f"http://localhost:{number}" for _, number in seen] == [url]

    run()
    assert heard == b""


# -- files


def test_a_key_may_stand_in_the_certificates_file(made: Path) -> None:
    server_context(TlsConfig(certificate=str(made / "both.pem")))


@pytest.mark.parametrize(
    ("certificate", "key", "ca", "says"),
    [
        ("gone.pem", "server.key", None, r"tls.certificate \S*gone.pem: No such file"),
        ("server.pem", "gone.key", None, r"tls.key \S*gone.key: No such file"),
        (".", "server.key", None, r"tls.certificate \S*: Is a directory"),
        ("noise.pem", "server.key", None, r"tls.certificate \S*noise.pem: .* no usable PEM"),
        ("server.pem", "noise.pem", None, r"tls.certificate .*noise.pem, is no usable PEM"),
        ("server.pem", "renewed.key", None, r"the key \S*renewed.key belongs to another certificate"),
        ("server.pem", None, None, r"the key in it, is no usable PEM"),
        ("locked.pem", "locked.key", None, r"tls.key \S*locked.key is encrypted"),
        ("server.pem", "server.key", "gone.pem", r"tls.client_ca \S*gone.pem: No such file"),
        ("server.pem", "server.key", "noise.pem", r"tls.client_ca \S*noise.pem holds no usable PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_sentence(
    made: Path, certificate: str, key: str | None, ca: str | None, says: str
) -> None:
    config = TlsConfig(
        certificate=str(made / certificate),
        key=None if key is None else str(made / key),
        client_ca=None if ca is None else str(made / ca),
    )
    with pytest.raises(ConfigError, match=says) as caught:
        server_context(config)
    assert "\n" not in str(caught.value)


def test_settings_that_contradict_each_other_are_refused(made: Path) -> None:
    with pytest.raises(ConfigError, match="verify off"):
        upstream_context(UpstreamTlsConfig(ca=str(made / "server.pem"), verify=False))
    with pytest.raises(ConfigError, match="without a certificate"):
        upstream_context(UpstreamTlsConfig(key=str(made / "server.key")))
