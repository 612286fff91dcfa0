"""What clients say and what proves who they are stays out of everything a router writes or shows."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.keys import key_line, new_key

PROMPT = "canary-prompt-7d1f"
CLIENT, WRONG, ADMIN, REPLICA = new_key(), new_key(), new_key(), new_key()
SECRETS = {"prompt": PROMPT, "client key": CLIENT, "wrong key": WRONG, "admin key": ADMIN, "replica key": REPLICA}
EVENT = b'data: {"choices":[{"text":"%b"}]}\n\n' % PROMPT.encode()


class Engine:
    """A replica that repeats what it was told, and fails as the request's `user` field says."""

    def __init__(self) -> None:
        self.shown: list[str | None] = []
        self.cookies: list[str | None] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._empty)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        said = await request.text()
        if "tokenizer" in said:
            return web.json_response({"error": {"message": f"cannot tokenize {said}"}}, status=500)
        return web.json_response({"tokens": [1, 2, 3], "prompt": said})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        said = await request.json()
        self.shown.append(request.headers.get("authorization"))
        self.cookies.append(request.headers.get("cookie"))
        match said["user"]:
            case "refused":
                return web.json_response({"error": {"message": f"no {said['prompt']}"}}, status=422)
            case "lost":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case "rubbish":
                assert request.transport is not None
                request.transport.write(b"HTTP/9 %b\r\n\r\n" % PROMPT.encode())
                return web.Response()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENT)
        if said["user"] == "cut":
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response


@dataclass
class Running:
    """A router in a process of its own, and what it has written."""

    traffic: str
    admin: str
    log: Path
    receipts: Path


@asynccontextmanager
async def a_router(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    (folder / "keys").write_text(key_line("alice", CLIENT))
    monkeypatch.setenv("REPLICA_KEY", REPLICA)
    monkeypatch.setenv("ADMIN_KEY", ADMIN)
    places = {"host": "127.0.0.1", "port": 0, "admin_host": "127.0.0.1", "admin_port": 0, "worker_urls": [url]}
    keys = {"client_keys": "keys", "api_key_env": "REPLICA_KEY", "admin_key_env": "ADMIN_KEY"}
    config = places | keys
    config |= {"receipts": {"path": str(folder / "receipts.jsonl")}, "prompts": {"source": "tokenize"}}
    config |= {"model_aliases": {"fast": "m"}, "inject_usage": True, "limits": {"max_body_bytes": 100_000}}
    (folder / "tfirst.yaml").write_text(json.dumps(config))  # JSON is YAML
    log = folder / "log"
    command = ["-m", "router.cli.main", "serve", "--config", str(folder / "tfirst.yaml"), "--log-level", "debug"]
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                lines = [(await process.stdout.readline()).decode() for _ in range(3)]
            traffic, admin = (line.split()[-1] for line in lines[1:])
            yield Running(traffic, admin, log, folder / "receipts.jsonl")
        finally:
            process.terminate()
            await process.wait()


async def until_up(session: aiohttp.ClientSession, router: Running) -> None:
    async with asyncio.timeout(30):
        while True:
            async with session.get(f"{router.traffic}/v1/models", headers=bearer(CLIENT)) as response:
                if (await response.json())["data"]:
                    return
            await asyncio.sleep(0.02)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def complete(session: aiohttp.ClientSession, router: Running, user: str, **changes: object) -> tuple[int, str]:
    """Status (0: cut off) and the header that explains the decision."""
    body = {"model": "fast", "prompt": f"{PROMPT} {user}", "user": user, "stream": True, **changes}
    headers = {**bearer(CLIENT), "x-tfirst-explain": "1", "cookie": f"session={WRONG}"}
    url = f"{router.traffic}/v1/completions?prompt={PROMPT}"
    try:
        async with session.post(url, json=body, headers=headers) as response:
            await response.read()
            return response.status, response.headers.get("x-tfirst-explain", "")
    except aiohttp.ClientError:
        return 0, ""


async def raw(url: str, data: bytes) -> None:
    """Bytes a client library would not send."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.write_eof()
    await reader.read()
    writer.close()


async def test_no_prompt_and_no_key_is_in_any_log_metric_receipt_or_explanation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    async with TestServer(engine.app()) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        async with a_router(tmp_path, url, monkeypatch) as router:
            await until_up(session, router)
            shown: list[str] = []
            for user, status in [
                *(("fine", 200), ("tokenizer", 200), ("refused", 422), ("cut", 0), ("lost", 502), ("rubbish", 502)),
            ]:
                got, explained = await complete(session, router, user)
                assert got == status, user
                shown.append(explained)
            assert shown[0]
            assert (await complete(session, router, "fine", model="no-such-model"))[0] == 404
            assert (await complete(session, router, "fine", prompt=PROMPT * 10_000))[0] == 413
            key, wrong = f"Authorization: Bearer {CLIENT}\r\n", f"x-api-key: {WRONG}\r\n"
            for head, body in (
                (f"POST /v1/completions?{PROMPT} HTTP/1.1\r\nHost: h\r\n{key}", f'{{"prompt": "{PROMPT}'),
                (f"POST /v1/completions HTTP/1.1\r\nHost: h\r\n{key}", f'{{"prompt": [1, "{PROMPT}"]}}'),
                (f"POST /v1/completions HTTP/1.1\r\nHost: h\r\n{wrong}", f'{{"prompt": "{PROMPT}"}}'),
                (f"POST /v1/completions HTTP/1.1\r\nHost: h\r\n{key}{PROMPT}\r\n", PROMPT),
            ):
                await raw(router.traffic, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            await raw(router.admin, f"{PROMPT} {CLIENT} HTTP/1.1\r\n{PROMPT}\r\n\r\n".encode())
            for admin_key in (WRONG, ADMIN):
                for data in (PROMPT.encode(), json.dumps({"source": PROMPT, "batches": PROMPT}).encode()):
                    async with session.post(f"{router.admin}/events", data=data, headers=bearer(admin_key)) as response:
                        assert response.status >= 400
            for page in ("metrics", "fleet"):
                async with session.get(f"{router.admin}/{page}") as response:
                    shown.append(await response.text())
    everything = {
        "log": router.log.read_text(),
        "receipts": router.receipts.read_text(),
        **{f"shown {at}": text for at, text in enumerate(shown)},
    }
    assert "is up and serves m" in everything["log"]
    assert everything["receipts"].count("\n") >= 7
    assert '"client":"alice"' in everything["receipts"]
    for where, text in everything.items():
        for what, secret in SECRETS.items():
            assert secret not in text, f"the {what} is in the {where}"
    assert set(engine.shown) == {f"Bearer {REPLICA}"}
    assert set(engine.cookies) == {None}
