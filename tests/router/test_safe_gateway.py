"""A whole router with keys, certificates and aliases, in front of servers that note what they are shown."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from router.config import ReceiptConfig, RouterConfig
from router.fleet import Fleet, ReplicaSpec
from router.gateway import Gateway
from router.http.tls import TlsConfig, UpstreamTlsConfig
from router.keys import key_line, new_key
from tests.router.http.stubs import until

TLS = Path(__file__).parent / "http" / "tls"
CERTIFICATE, PRIVATE_KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")
ALICE, BOB = new_key(), new_key()


class Engine:
    """A server with the routes of vLLM that the router needs. shown : fields and body of each completion"""

    def __init__(self) -> None:
        self.shown: list[tuple[dict[str, str], Any]] = []
        self.asked_with: set[str | None] = set()  # credentials of everything else
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        return app

    @asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        server = TestServer(self.app(), host="127.0.0.1", scheme="https" if tls else "http")
        await server.start_server(ssl=tls)
        self.url = f"{server.scheme}://127.0.0.1:{server.port}"
        try:
            yield self.url
        finally:
            await server.close()

    async def _health(self, request: web.Request) -> web.Response:
        self.asked_with.add(request.headers.get("authorization"))
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        self.asked_with.add(request.headers.get("authorization"))
        return web.json_response({"data": [{"id": "m"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.shown.append(({name.lower(): value for name, value in request.headers.items()}, body))
        return web.json_response({"model": body["model"], "choices": []})


class Running:
    """A started router and a client of it."""

    def __init__(self, gateway: Gateway, client: aiohttp.ClientSession, scheme: str) -> None:
        self.gateway = gateway
        self.traffic = f"{scheme}://127.0.0.1:{gateway.traffic_port}"
        self._client = client

    async def ask(self, key: str | None = None, *, path: str = "/v1/completions", **fields: str) -> tuple[int, Any]:
        headers = {name.replace("_", "-"): value for name, value in fields.items()}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        url = self.traffic + path
        if path == "/v1/completions":
            call = self._client.post(url, json={"model": "m", "prompt": "hi"}, headers=headers)
        else:
            call = self._client.get(url, headers=headers)
        async with call as response:
            return response.status, await response.json()

    async def admin(self, page: str) -> str:
        async with self._client.get(f"http://127.0.0.1:{self.gateway.admin_port}/{page}") as response:
            return await response.text()

    async def until_up(self, key: str | None = None) -> None:
        async with asyncio.timeout(10):
            while True:
                if (await self.ask(key, path="/v1/models"))[1]["data"]:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(url: str, *, key: str | None = None, up: bool = True, **changes: Any) -> AsyncIterator[Running]:
    places = {"host": "127.0.0.1", "port": 0, "admin_host": "127.0.0.1", "admin_port": 0}
    gateway = Gateway(RouterConfig(**{**places, **changes}), Fleet(replicas=[ReplicaSpec(name="a", url=url)]))
    trusts = ssl.create_default_context(cafile=CERTIFICATE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusts)) as client:
        await gateway.start()
        try:
            router = Running(gateway, client, "https" if "tls" in changes else "http")
            if up:
                await router.until_up(key)
            yield router
        finally:
            await gateway.stop()


def keys_file(folder: Path, **keys: str) -> str:
    path = folder / "keys"
    path.write_text("\n".join(key_line(name, key) for name, key in keys.items()))
    return str(path)


async def test_a_clients_key_opens_the_door_and_goes_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICA_KEY", "s3cret")
    engine, keys = Engine(), keys_file(tmp_path, alice=ALICE)
    async with (
        engine.serving() as url,
        running(url, key=ALICE, client_keys=keys, api_key_env="REPLICA_KEY") as router,
    ):
        assert (await router.ask())[0] == 401
        assert (await router.ask(BOB))[0] == 401
        assert (await router.ask(path="/health"))[0] == 200
        assert (await router.ask(ALICE, cookie="session=1", x_api_key=ALICE))[0] == 200
        assert (await router.ask(x_api_key=ALICE))[0] == 200
    assert len(engine.shown) == 2
    for fields, _ in engine.shown:
        assert fields["authorization"] == "Bearer s3cret"
        assert not fields.keys() & {"cookie", "x-api-key"}
        assert ALICE not in json.dumps(fields)
    assert engine.asked_with == {"Bearer s3cret"}


async def test_without_keys_of_its_own_the_router_stands_between_client_and_replica_unseen() -> None:
    engine = Engine()
    async with engine.serving() as url, running(url) as router:
        await router.ask("known-to-the-replica", cookie="session=1")
    ((fields, _),) = engine.shown
    assert (fields["authorization"], fields["cookie"]) == ("Bearer known-to-the-replica", "session=1")
    assert engine.asked_with == {None}


async def test_forwarded_credentials_take_the_place_of_the_routers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICA_KEY", "s3cret")
    engine = Engine()
    async with (
        engine.serving() as url,
        running(url, api_key_env="REPLICA_KEY", forward_credentials=True) as router,
    ):
        await router.ask("the-clients-own")
    ((fields, _),) = engine.shown
    assert (fields["authorization"], engine.asked_with) == ("Bearer the-clients-own", {"Bearer s3cret"})


async def test_keys_are_exchanged_without_a_restart(tmp_path: Path) -> None:
    engine, keys = Engine(), keys_file(tmp_path, alice=ALICE)
    async with engine.serving() as url, running(url, key=ALICE, client_keys=keys) as router:
        keys_file(tmp_path, bob=BOB)
        router.gateway.reload()
        assert [(await router.ask(key))[0] for key in (ALICE, BOB)] == [401, 200]
        (tmp_path / "keys").write_text("half a line")
        router.gateway.reload()
        assert (await router.ask(BOB))[0] == 200
        shown = await router.admin("fleet")
        assert json.loads(shown)["client_keys"]["names"] == ["bob"]
        assert "not of the form" in json.loads(shown)["client_keys"]["rejected"]
        assert "tfirst_client_keys_rejected 1.0" in await router.admin("metrics")
        assert 'tfirst_client_requests_total{client="bob"} 2.0' in await router.admin("metrics")


async def test_receipts_say_whose_key_a_request_carried_and_what_was_edited(tmp_path: Path) -> None:
    engine, keys, receipts = Engine(), keys_file(tmp_path, alice=ALICE), tmp_path / "receipts.jsonl"
    async with (
        engine.serving() as url,
        running(
            url,
            key=ALICE,
            client_keys=keys,
            receipts=ReceiptConfig(path=str(receipts)),
            model_aliases={"m": "org/model-8b"},
            up=False,
        ) as router,
    ):
        async with asyncio.timeout(10):
            await until(router.gateway._ready)
        await router.ask(ALICE)
    (line,) = receipts.read_text().splitlines()
    receipt = json.loads(line)
    assert (receipt["client"], receipt["edited"], receipt["model"]) == ("alice", ["model"], "org/model-8b")


async def test_an_alias_is_listed_and_served_under_the_replicas_name() -> None:
    engine = Engine()
    async with engine.serving() as url, running(url, model_aliases={"fast": "m", "gone": "nowhere"}) as router:
        _, listed = await router.ask(path="/v1/models")
        assert [card["id"] for card in listed["data"]] == ["m", "fast"]
        async with router._client.post(
            f"{router.traffic}/v1/completions", data=b'{ "model":"fast", "x": 1.00, "prompt":"hi"}'
        ) as response:
            assert (await response.json())["model"] == "m"
    ((fields, body),) = engine.shown
    assert (body["model"], fields["content-length"]) == ("m", str(len(b'{ "model":"m", "x": 1.00, "prompt":"hi"}')))


async def test_a_replica_that_is_this_router_by_another_name_is_not_connected_to() -> None:
    port = unused_port()
    async with running(f"http://localhost:{port}", port=port, up=False) as router:
        connection = asyncio.get_running_loop().create_future()
        router.gateway._traffic.pool.connect(
            f"http://localhost:{port}", connection.set_result, connection.set_exception
        )
        with pytest.raises(Exception, match="this router itself"):
            await asyncio.wait_for(connection, 10)
        assert not router.gateway._ready()


async def test_a_request_that_comes_back_through_somebody_else_is_refused() -> None:
    """The replica's URL is a plain forwarder, as a load balancer before the router would be."""
    port = unused_port()
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        for pair in ((reader, back), (there, writer)):
            tasks.add(asyncio.ensure_future(pump(*pair)))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with running(url, port=port, up=False) as router:
        async with asyncio.timeout(10):
            await until(router.gateway._ready)
        status, answer = await router.ask()
    server.close()
    await asyncio.gather(*tasks)
    assert (status, answer["error"]["type"]) == (508, "LoopDetected")


async def test_certificates_on_both_sides_are_the_configured_ones() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, PRIVATE_KEY)
    engine = Engine()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(engine.serving(context))
        router = await stack.enter_async_context(
            running(
                url,
                tls=TlsConfig(certificate=CERTIFICATE, key=PRIVATE_KEY),
                upstream_tls=UpstreamTlsConfig(ca=CERTIFICATE),
            )
        )
        assert router.traffic.startswith("https")
        assert (await router.ask())[0] == 200
        router.gateway.reload()
        assert (await router.ask())[0] == 200
    assert engine.shown[0][0]["x-forwarded-proto"] == "https"


class Streamer(Engine):
    """An engine that streams, and tells the usage to those that ask for it; and takes adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: list[str | None] = []  # credentials they came with

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/v1/load_lora_adapter", self._load)
        return app

    async def _load(self, request: web.Request) -> web.Response:
        self.adapters.append(request.headers.get("authorization"))
        return web.Response(text="Success")

    async def _complete(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        body = await request.json()
        self.shown.append(({}, body))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"text":"a"}]}\n\n')
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response


async def test_usage_that_the_router_asked_for_is_learned_and_not_shown(tmp_path: Path) -> None:
    engine, receipts = Streamer(), tmp_path / "receipts.jsonl"
    asking = {"model": "m", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
    silent = {"model": "m", "prompt": "hi", "stream": True}
    got: list[str] = []
    async with (
        engine.serving() as url,
        running(url, inject_usage=True, receipts=ReceiptConfig(path=str(receipts))) as router,
    ):
        for body in (asking, silent):
            async with router._client.post(f"{router.traffic}/v1/completions", json=body) as response:
                got.append(await response.text())
    assert [body["stream_options"] for _, body in engine.shown] == [{"include_usage": True}] * 2
    assert ['"usage"' in text for text in got] == [True, False]
    assert got[1] == 'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
    told = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert [receipt["output_tokens"] for receipt in told] == [1, 1]
    assert [receipt["edited"] for receipt in told] == [[], ["stream_options"]]


async def test_adapters_are_loaded_with_the_admin_key_which_no_replica_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = new_key()
    monkeypatch.setenv("ADMIN_KEY", admin)
    path = "/v1/load_lora_adapter"
    for keys in (None, keys_file(tmp_path, alice=ALICE)):
        engine = Streamer()
        async with (
            engine.serving() as url,
            running(url, key=ALICE, admin_key_env="ADMIN_KEY", client_keys=keys) as router,
        ):
            statuses = []
            for key in (ALICE, admin):
                headers = {"authorization": f"Bearer {key}"}
                async with router._client.post(router.traffic + path, json={}, headers=headers) as response:
                    statuses.append(response.status)
        assert (statuses, engine.adapters) == ([401, 200], [None])


async def test_without_an_admin_key_nobody_changes_replicas() -> None:
    engine = Streamer()
    async with (
        engine.serving() as url,
        running(url) as router,
        router._client.post(f"{router.traffic}/v1/load_lora_adapter", json={}) as response,
    ):
        assert response.status == 404
    assert engine.adapters == []


@pytest.mark.parametrize(("relays", "status"), [(True, 200), (False, 404)])
async def test_paths_of_no_known_engine_are_relayed_unless_switched_off(relays: bool, status: int) -> None:
    engine = Engine()
    app = engine.app()
    app.router.add_get("/newest/route", engine._models)
    async with TestServer(app) as server, running(str(server.make_url("")), relay_unknown=relays) as router:
        assert (await router.ask(path="/newest/route"))[0] == status
