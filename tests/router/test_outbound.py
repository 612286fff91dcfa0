from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from estimators.view import spare_name
from router.config import PromptConfig, RouterConfig
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec
from router.gate import CREDENTIALS
from router.http.tls import UpstreamTlsConfig
from router.outbound import Outbound

TLS = Path(__file__).parent / "http" / "tls"
A, B, RENDERER = "http://127.0.0.1:8001", "http://127.0.0.1:8002", "http://127.0.0.1:9000"


def an_outbound(*, fleet_key: str | None = None, b_key: str | None = None, **changes: Any) -> Outbound:
    replicas = [ReplicaSpec(name="a", url=A), ReplicaSpec(name="b", url=B, api_key_env=b_key)]
    return Outbound(RouterConfig(**changes), Fleet(replicas=replicas, api_key_env=fleet_key))


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONE", "TWO", "THREE"):
        monkeypatch.setenv(f"KEY_{name}", f"key-{name.lower()}")


def keys_of(outbound: Outbound) -> list[str]:
    """Key each replica gets with relayed requests."""
    return [b"".join(value for _, value in outbound.fields(row)).decode() for row in (0, 1)]


def test_the_nearest_setting_names_a_replicas_key() -> None:
    assert keys_of(an_outbound()) == ["", ""]
    assert keys_of(an_outbound(api_key_env="KEY_ONE")) == ["Bearer key-one"] * 2
    assert keys_of(an_outbound(api_key_env="KEY_ONE", fleet_key="KEY_TWO")) == ["Bearer key-two"] * 2
    mixed = an_outbound(api_key_env="KEY_ONE", b_key="KEY_THREE")
    assert keys_of(mixed) == ["Bearer key-one", "Bearer key-three"]
    assert mixed.headers(f"{B}/") == {"authorization": "Bearer key-three"}


def test_what_is_sent_to_all_goes_to_each_server_once_with_the_key_it_wants() -> None:
    ranks = [ReplicaSpec(name=f"r{rank}", url=f"{A}/") for rank in range(2)]
    fleet = Fleet(replicas=[*ranks, ReplicaSpec(name="b", url=B, api_key_env="KEY_TWO")])
    endpoints = Outbound(RouterConfig(forward_credentials=True), fleet).endpoints()
    assert [(endpoint.name, endpoint.base_url) for endpoint in endpoints] == [("r0", A), ("b", B)]
    assert [endpoint.fields for endpoint in endpoints] == [(), ((b"Authorization", b"Bearer key-two"),)]


def test_a_key_goes_to_its_own_origin_alone() -> None:
    outbound = an_outbound(b_key="KEY_TWO", prompts=PromptConfig(source="render", url=RENDERER))
    assert outbound.headers(A) == outbound.headers(RENDERER) == outbound.headers("https://127.0.0.1:8002") == {}
    renderer = an_outbound(api_key_env="KEY_ONE", prompts=PromptConfig(source="render", url=RENDERER))
    assert renderer.headers(RENDERER) == {"authorization": "Bearer key-one"}


@pytest.mark.parametrize(
    ("changes", "passes", "adds"),
    [
        ({}, True, False),
        ({"client_keys": "k"}, False, False),
        ({"api_key_env": "KEY_ONE"}, False, True),
        ({"b_key": "KEY_TWO"}, False, False),
        ({"forward_credentials": False}, False, False),
        ({"forward_credentials": True, "client_keys": "k"}, True, False),
        ({"forward_credentials": True, "api_key_env": "KEY_ONE"}, True, False),
    ],
)
def test_clients_credentials_pass_only_where_the_router_has_no_keys_or_is_told(
    changes: dict[str, Any], passes: bool, adds: bool
) -> None:
    outbound = an_outbound(**changes)
    assert outbound.drops == (frozenset() if passes else CREDENTIALS)
    assert bool(outbound.fields(0)) == adds


def test_clients_credentials_are_not_used_for_the_routers_own_calls_where_they_do_not_pass() -> None:
    assert not an_outbound().keeps_credentials
    assert an_outbound(client_keys="k").keeps_credentials
    assert an_outbound(forward_credentials=True, api_key_env="KEY_ONE").keeps_credentials


@pytest.mark.parametrize("value", [None, "", " ", "a\nb", "\u00e4"])
def test_a_variable_without_a_usable_key_is_named(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY_ONE")
    if value is not None:
        monkeypatch.setenv("KEY_ONE", value)
    with pytest.raises(ConfigError, match="KEY_ONE, which holds no usable key"):
        an_outbound(api_key_env="KEY_ONE")


class Engine:
    """A server that keeps the credentials it is shown, and may send callers elsewhere."""

    def __init__(self, elsewhere: str = "") -> None:
        self.shown: list[str | None] = []
        self.elsewhere = elsewhere

    @asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/{any:.*}", self._answer)
        server = TestServer(app, host="127.0.0.1", scheme="https" if tls else "http")
        await server.start_server(ssl=tls)
        try:
            yield f"{server.scheme}://127.0.0.1:{server.port}"
        finally:
            await server.close()

    async def _answer(self, request: web.Request) -> web.Response:
        self.shown.append(request.headers.get("authorization"))
        if self.elsewhere:
            raise web.HTTPFound(self.elsewhere)
        return web.json_response({})


async def test_a_redirect_takes_no_key_to_another_server() -> None:
    first, second = Engine(), Engine()
    async with second.serving() as there, first.serving() as here:
        first.elsewhere = f"{there}/x"
        fleet = Fleet(replicas=[ReplicaSpec(name="a", url=here, api_key_env="KEY_ONE")])
        async with Outbound(RouterConfig(), fleet).session() as session, session.get(f"{here}/x") as response:
            assert response.status == 200
    assert (first.shown, second.shown) == (["Bearer key-one"], [None])


async def test_the_routers_own_calls_are_not_led_to_itself_or_to_metadata() -> None:
    engine = Engine()
    async with engine.serving() as here:
        own = RouterConfig(host="127.0.0.1", port=int(here.rpartition(":")[2]))
        outbound = Outbound(own, Fleet(replicas=[ReplicaSpec(name="a", url=A)]))
        async with outbound.session() as session:
            for url, reason in ((here, "this router itself"), ("http://169.254.169.254/latest", "link-local")):
                with pytest.raises(aiohttp.ClientConnectorError, match=reason):
                    await session.get(url)
        fetcher = outbound.fetcher(here.replace("127.0.0.1", "localhost"), max_body_bytes=10)
        answer = await fetcher.get("/", timeout_s=5.0)
        fetcher.close()
        assert b"this router itself" in answer.body
    assert engine.shown == []


async def test_a_hundred_calls_that_hang_keep_no_other_from_being_made() -> None:
    """An aiohttp session of its own making has room for 100 connections over all servers together."""
    arrived, release = asyncio.Semaphore(0), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        arrived.release()
        await release.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/", hang)
    async with AsyncExitStack() as stack:
        hanging = await stack.enter_async_context(TestServer(app))
        quick = await stack.enter_async_context(Engine().serving())
        session = await stack.enter_async_context(an_outbound().session())
        calls = [asyncio.ensure_future(session.get(hanging.make_url("/"))) for _ in range(110)]
        async with asyncio.timeout(10):
            for _ in calls:
                await arrived.acquire()
            async with session.get(quick) as response:
                assert response.status == 200
            release.set()
            for call in calls:
                (await call).release()


@pytest.mark.parametrize(
    ("tls", "trusted"),
    [
        (UpstreamTlsConfig(ca=str(TLS / "cert.pem"), server_name="127.0.0.1"), True),
        (UpstreamTlsConfig(verify=False), True),
        (UpstreamTlsConfig(ca=str(TLS / "cert.pem")), False),  # the certificate names the address, not localhost
        (None, False),
    ],
)
async def test_every_way_to_a_replica_trusts_the_same_certificates(
    tls: UpstreamTlsConfig | None, trusted: bool
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    engine = Engine()
    async with engine.serving(context) as served:
        url = served.replace("127.0.0.1", "localhost")
        outbound = Outbound(RouterConfig(upstream_tls=tls), Fleet(replicas=[ReplicaSpec(name="a", url=url)]))
        fetcher = outbound.fetcher(url, max_body_bytes=10)
        answer = await fetcher.get("/", timeout_s=5.0)
        fetcher.close()
        async with outbound.session() as session:
            try:
                async with session.get(url) as response:
                    status = response.status
            except aiohttp.ClientConnectorError:
                status = 0
    assert (answer.status, status) == ((200, 200) if trusted else (0, 0))
    assert len(engine.shown) == (2 if trusted else 0)


def test_a_configuration_keeps_no_key_only_the_name_of_its_variable() -> None:
    config = RouterConfig(api_key_env="KEY_ONE")
    Outbound(config, Fleet(replicas=[ReplicaSpec(name="a", url=A)]))
    assert b"key-one" not in msgspec.json.encode(config)


# Replicas that come and go


def test_a_key_that_a_newcomer_wants_is_used_once_it_is_a_member() -> None:
    replicas = [ReplicaSpec(name="a", url=A), ReplicaSpec(name=spare_name(1))]
    outbound = Outbound(RouterConfig(api_key_env="KEY_ONE"), Fleet(replicas=replicas))
    newcomer = ReplicaSpec(name="b", url=B, api_key_env="KEY_TWO")
    outbound.check(newcomer)
    replicas[1] = newcomer
    outbound.members_changed()
    assert keys_of(outbound) == ["Bearer key-one", "Bearer key-two"]
    assert outbound.headers(B) == {"authorization": "Bearer key-two"}
    replicas[1] = ReplicaSpec(name=spare_name(1))
    outbound.members_changed()
    assert outbound.headers(B) == {}
    assert [endpoint.name for endpoint in outbound.endpoints()] == ["a"]


@pytest.mark.parametrize(
    ("replica", "says"),
    [
        (ReplicaSpec(name="b", url=B, api_key_env="KEY_NONE"), "KEY_NONE"),
        (ReplicaSpec(name="b", url="http://169.254.169.254"), "link-local"),
    ],
)
def test_a_newcomer_that_cannot_be_reached_or_proved_to_is_refused(replica: ReplicaSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        an_outbound(api_key_env="KEY_ONE").check(replica)


def test_a_newcomer_with_a_key_is_refused_where_clients_own_keys_are_passed_on() -> None:
    """Else those keys would reach a replica that has one, beside it."""
    with pytest.raises(ConfigError, match="started without one"):
        an_outbound().check(ReplicaSpec(name="c", url=A, api_key_env="KEY_ONE"))
