"""Requests that go to every replica, over real sockets: who may send them, who gets them, what is reported."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.actions import Refuse
from router.http.contract import Endpoint, TimeOuts
from router.http.head import RequestHead
from router.http.server import TrafficPort
from tests.router.http.stubs import (
    Decisions,
    Replica,
    a_client,
    a_port,
    a_replica,
    answer,
    ask,
    get,
    on_uvloop,
    post,
    says,
    says_and_closes,
    silence,
    until,
)

LOAD = b"/v1/load_lora_adapter"
KEY = b"Authorization: Bearer admin"
ADAPTER = b'{"lora_name":"ad-1","lora_path":"/a"}'


def admin(head: RequestHead) -> Refuse | None:
    return None if head.get(b"authorization") == b"Bearer admin" else Refuse(401, "AuthenticationError", "No.")


@contextlib.asynccontextmanager
async def a_port_to(*replicas: Replica, times: TimeOuts | None = None, **parts: Any) -> AsyncIterator[TrafficPort]:
    """A port whose requests to all go to these, with a field of its own for each."""
    endpoints = [
        Endpoint(f"r{number}", replica.url, ((b"Authorization", b"Bearer out-%d" % number),))
        for number, replica in enumerate(replicas)
    ]
    async with a_port(Decisions(), times=times, **({"admin": admin, "endpoints": lambda: endpoints} | parts)) as port:
        yield port


def by_replica(body: bytes) -> dict[str, tuple[int | None, str]]:
    return {one["replica"]: (one["status"], one["body"]) for one in json.loads(body)["replicas"]}


@on_uvloop
async def test_an_adapter_is_loaded_by_every_replica_and_each_is_reported() -> None:
    async with (
        a_replica(says(answer(b"Success: a"))) as one,
        a_replica(says(answer(b"Success: b"))) as two,
        a_port_to(one, two) as port,
    ):
        got = await ask(port, post(ADAPTER, KEY, b"x-request-id: q1", target=LOAD + b"?x=1"))
    assert got.status == 200
    assert by_replica(got.body) == {"r0": (200, "Success: a"), "r1": (200, "Success: b")}
    assert (json.loads(got.body)["succeeded"], json.loads(got.body)["failed"]) == (2, 0)
    assert got.values(b"x-request-id") == [b"q1"]
    for number, replica in enumerate((one, two)):
        (seen,) = replica.received
        assert seen.body == ADAPTER
        assert seen.head.startswith(b"POST " + LOAD + b"?x=1 HTTP/1.1\r\n")
        assert seen.values(b"authorization") == [b"Bearer out-%d" % number], "the admin's own key goes no further"


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (says(answer(b"no such file", b"400 Bad Request")), 400),
        (says_and_closes(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), None),
        (silence, None),
        (says(b"SSH-2.0\r\n"), None),
    ],
    ids=["refuses", "breaks", "is silent", "is something else"],
)
@on_uvloop
async def test_one_replica_that_fails_makes_the_whole_a_failure_and_is_named(script: Any, status: int | None) -> None:
    async with (
        a_replica(says(answer(b"Success"))) as well,
        a_replica(script) as ill,
        a_port_to(well, ill, times=TimeOuts(first_byte_s=0.2)) as port,
    ):
        got = await ask(port, post(ADAPTER, KEY, target=LOAD))
    assert got.status == 502
    reports = by_replica(got.body)
    assert reports["r0"] == (200, "Success")
    assert reports["r1"][0] == status
    assert reports["r1"][1] != ""


@on_uvloop
async def test_a_replica_that_cannot_be_reached_is_reported_too() -> None:
    async with a_replica(says(answer(b"Success"))) as well:
        gone = Replica(silence, url="http://127.0.0.1:1")
        async with a_port_to(well, gone) as port:
            got = await ask(port, post(ADAPTER, KEY, target=LOAD))
    assert (got.status, by_replica(got.body)["r1"]) == (502, (None, "no connection"))


@on_uvloop
async def test_of_a_long_answer_the_beginning_is_reported() -> None:
    async with a_replica(says(answer("北".encode() * 100_000))) as replica, a_port_to(replica) as port:
        got = await ask(port, post(ADAPTER, KEY, target=LOAD))
    (said,) = by_replica(got.body).values()
    assert said[1].startswith("北北")
    assert len(said[1]) < 2000


@pytest.mark.parametrize(
    ("fields", "parts", "status"), [((), {}, 401), ((KEY,), {"admin": None}, 404)], ids=["no key sent", "no admin"]
)
@on_uvloop
async def test_without_the_admin_key_no_replica_is_touched(fields: Any, parts: Any, status: int) -> None:
    async with a_replica(says(answer())) as replica, a_port_to(replica, **parts) as port, a_client(port) as client:
        for path in (LOAD, b"/v1/unload_lora_adapter", b"//load_lora_adapter/", b"/%75nload_lora_adapter"):
            got = await client.ask(post(ADAPTER, *fields, target=path))
            assert got.status == status
            assert json.loads(got.body)["error"]["code"] == status
        assert (await client.ask(get(LOAD, *fields))).status == 404
    assert replica.opened == 0


@on_uvloop
async def test_a_fleet_without_replicas_is_no_success() -> None:
    async with a_port_to() as port:
        assert (await ask(port, post(ADAPTER, KEY, target=LOAD))).status == 503


@pytest.mark.parametrize("how", ["end", "reset"])
@on_uvloop
async def test_an_admin_who_leaves_leaves_no_connection_behind(how: str) -> None:
    async with a_replica(silence) as one, a_replica(silence) as two, a_port_to(one, two) as port:
        for _ in range(3):
            async with a_client(port) as client:
                client.writer.write(post(ADAPTER, KEY, target=LOAD))
                await until(lambda: one.open == two.open == 1)
                client.leave(how)
                await until(lambda: one.open == two.open == port.open_exchanges == 0)


@on_uvloop
async def test_an_admin_who_leaves_while_connections_are_made_stops_the_attempts() -> None:
    async with a_replica(silence) as replica, a_port_to(replica) as port, a_client(port) as client:
        client.writer.write(post(ADAPTER, KEY, target=LOAD))
        await until(lambda: port.open_exchanges == 1)
        client.leave("reset")
        await until(lambda: port.open_connections == 0)
        await until(lambda: replica.open == port.pool.connecting == 0)


@on_uvloop
async def test_requests_behind_it_are_answered_in_order() -> None:
    async with a_replica(says(answer(b"Success"))) as replica, a_port_to(replica) as port, a_client(port) as client:
        client.writer.write(post(ADAPTER, KEY, target=LOAD) + get(b"/health"))
        assert (await client.read()).status == 200
        assert json.loads((await client.read()).body) == {"path": "/health"}


@pytest.mark.parametrize("relays", [True, False])
@on_uvloop
async def test_a_path_in_no_row_is_relayed_unless_that_is_switched_off(relays: bool) -> None:
    async with a_replica(says(answer())) as replica, a_port(Decisions([replica.url]), relay_unknown=relays) as port:
        got = await ask(port, post(b"not json", target=b"/v1/new-thing"))
        known = await ask(port, post(target=b"/v1/embeddings"))
    assert (got.status, known.status) == (200 if relays else 404, 200)
    if not relays:
        assert json.loads(got.body)["error"]["type"] == "NotFoundError"
