"""Every refusal the router makes by itself, on a real socket: its status, and the form of the API that was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from router.fleet import Fleet, ReplicaSpec
from router.gateway import Gateway
from router.http.contract import Limits, TimeOuts
from router.keys import key_line, new_key

KEY = new_key()
MODELS = b'{"data": [{"id": "m"}]}'
LIMITS = Limits(max_body_bytes=2000, max_head_bytes=2000, max_head_fields=20)
TIMES = TimeOuts(request_head_s=0.2, request_body_s=0.2)


@dataclass
class Answer:
    status: int
    fields: dict[str, str]
    body: Any


def a_request(
    path: str, body: bytes = b'{"model":"m","prompt":"hi"}', *, fields: bytes = b"", method: bytes = b"POST"
) -> bytes:
    key = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
    head = b"%s %s HTTP/1.1\r\nHost: gw\r\n" % (method, path.encode())
    return head + key + fields + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A replica that looks well and breaks on every request for work."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                break
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def a_router(folder: Path, *, up: bool = True) -> AsyncIterator[Gateway]:
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (folder / "keys").write_text(key_line("a", KEY))
    config = RouterConfig(
        host="127.0.0.1",
        port=0,
        admin_host="127.0.0.1",
        admin_port=0,
        client_keys=str(folder / "keys"),
        limits=LIMITS,
        time_outs=TIMES,
    )
    if not up:
        server.close()
        await server.wait_closed()
    gateway = Gateway(config, Fleet(replicas=[ReplicaSpec(name="a", url=f"http://127.0.0.1:{port}")]))
    await gateway.start()
    try:
        await answer_of(gateway, a_request("/v1/models", b"", method=b"GET"), until_model=up)
        yield gateway
    finally:
        await gateway.stop()
        server.close()
        await server.wait_closed()


async def answer_of(gateway: Gateway, request: bytes, *, until_model: bool = False) -> Answer:
    async with asyncio.timeout(10):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.traffic_port)
            writer.write(request)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
            body = json.loads(await reader.readexactly(int(fields["content-length"])))
            writer.close()
            if not until_model or body["data"]:
                return Answer(int(lines[0].split()[1]), fields, body)


def without_key(path: str) -> bytes:
    return b"\r\n".join(line for line in a_request(path).split(b"\r\n") if not line.startswith(b"Authorization"))


def loop_back(gateway: Gateway, path: str) -> bytes:
    return a_request(path, fields=b"Via: " + gateway._gate.via + b"\r\n")


# What is sent, by the path asked, and the statuses it may have.
CASES: dict[str, tuple[Any, int]] = {
    "no key": (without_key, 401),
    "a wrong key": (lambda path: a_request(path).replace(KEY.encode(), new_key().encode()), 401),
    "no key and a body to come": (lambda path: without_key(path)[:-5], 401),
    "no JSON": (lambda path: a_request(path, b"{"), 400),
    "another value": (lambda path: a_request(path, b"[]"), 400),
    "a model that is no text": (lambda path: a_request(path, b'{"model":7}'), 400),
    "an unknown model": (lambda path: a_request(path, b'{"model":"x","prompt":"hi"}'), 404),
    "malformed HTTP": (lambda path: a_request(path, fields=b"no colon\r\n"), 400),
    "two framings": (lambda path: a_request(path, fields=b"Transfer-Encoding: chunked\r\n"), 400),
    "no host": (lambda path: a_request(path).replace(b"Host: gw\r\n", b""), 400),
    "a body too large": (lambda path: a_request(path, bytes(2001)), 413),
    "a head too large": (lambda path: a_request(path, fields=b"X: " + b"x" * 2001 + b"\r\n"), 431),
    "too many fields": (lambda path: a_request(path, fields=b"X: x\r\n" * 30), 431),
    "a head that does not end": (lambda path: a_request(path)[:70], 408),
    "a body that does not end": (lambda path: a_request(path)[:-1], 408),
    "a replica that breaks": (a_request, 502),
}


def check_form(path: str, answer: Answer) -> None:
    error = answer.body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if path == "/v1/messages":
        assert answer.body.keys() == {"type", "error", "request_id"}
        assert (answer.body["type"], error.keys()) == ("error", {"type", "message"})
        assert error["type"] in {
            *("invalid_request_error", "authentication_error", "not_found_error", "request_too_large"),
            *("rate_limit_error", "overloaded_error", "api_error"),
        }
    else:
        assert (answer.body.keys(), error.keys()) == ({"error"}, {"message", "type", "param", "code"})
        assert error["code"] == answer.status
    assert answer.fields["content-type"] == "application/json"
    assert answer.fields["x-request-id"]
    assert (answer.fields.get("www-authenticate") == "Bearer") == (answer.status == 401)
    assert KEY not in json.dumps(answer.body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_every_refusal_has_its_status_and_the_form_of_the_api_that_was_asked(path: str, tmp_path: Path) -> None:
    async with a_router(tmp_path) as gateway:
        for what, (make, status) in CASES.items():
            answer = await answer_of(gateway, make(path))
            assert answer.status == status, (what, answer)
            check_form(path, answer)
        answer = await answer_of(gateway, loop_back(gateway, path))
        assert answer.status == 508
        check_form(path, answer)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_while_no_replica_is_up_the_refusal_says_when_to_come_again(path: str, tmp_path: Path) -> None:
    async with a_router(tmp_path, up=False) as gateway:
        answer = await answer_of(gateway, a_request(path))
        assert answer.status == 503
        assert int(answer.fields["retry-after"]) >= 1
        check_form(path, answer)


@pytest.mark.parametrize("path", ["/metrics", "/flush_cache", "/server_info"])
async def test_paths_that_are_not_for_clients_are_refused_in_form_too(path: str, tmp_path: Path) -> None:
    async with a_router(tmp_path) as gateway:
        answer = await answer_of(gateway, a_request(path))
        assert answer.status == 404
        check_form(path, answer)


async def test_a_protocol_of_another_version_is_refused_in_form(tmp_path: Path) -> None:
    async with a_router(tmp_path) as gateway:
        answer = await answer_of(gateway, a_request("/v1/completions").replace(b"HTTP/1.1", b"HTTP/2.0"))
        assert answer.status == 505
        check_form("/v1/completions", answer)
