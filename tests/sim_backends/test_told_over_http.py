"""Replicas that are told where a prompt's state is, over real sockets: in the head, in the body, ahead by LMCache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sim_backends.fleet import BadFleet
from sim_backends.lmcache_face import LmcacheFace
from tests.sim_backends.builders import a_fleet, prompt
from tests.sim_backends.serving import TIMEOUT_S, Client
from tests.sim_backends.test_fleets_over_http import LINKS, cached, complete, playing

DIRECTED = {"by": "directed", "minimum_tokens": 16}
PEERS = {"link": "nic"}
HOSTS = {"host": {"capacity_gib": 8, "link": "pcie"}}
SLOW = {**LINKS, "nic": {"gb_s": 0.0001, "start_ms": 0}, "store": {"gb_s": 0.0001, "start_ms": 0}}
LOCATION = "LocalCPUBackend"


def source_of(client: Client, port: int | None = None) -> dict[str, Any]:
    host, _, own = client.url.removeprefix("http://").partition(":")
    source = {"kv_request_id": "x", "remote_host": host, "remote_port": port or int(own)}
    return {"remote_kv_source": source}


def fetched(client: Client) -> dict[str, int]:
    assert client.engine.fetcher is not None
    return dict(client.engine.fetcher.fetched_tokens)


@pytest.mark.parametrize("told", ["header", "body"])
async def test_a_replica_reads_the_peer_it_is_told_in_the_way_it_listens_to(told: str) -> None:
    sections: dict[str, Any] = {"links": LINKS, "fetch": DIRECTED, "peers": PEERS, "told": {"peer": told}}
    async with playing({}, {}, store=None, **sections) as [first, second]:
        await complete(second, tokens=640)
        header = {"x-kv-cache-source-host-port": second.url.removeprefix("http://")}
        both: list[dict[str, Any]] = [{"headers": header}, {"kv_transfer_params": source_of(second)}]
        right, wrong = both if told == "header" else both[::-1]
        assert cached(await complete(first, tokens=640, **wrong)) == 0
        await complete(second, prompt=prompt(640, start=50_000))
        assert cached(await complete(first, prompt=prompt(640, start=50_000), **right)) == 624
        assert fetched(first)["peer"] == 624


async def test_a_replica_is_read_under_the_address_the_file_gives_it() -> None:
    rows: list[dict[str, Any]] = [{}, {"told": {"peer": "body", "read_at": "127.0.0.1:7777"}}]
    sections: dict[str, Any] = {"links": LINKS, "fetch": DIRECTED, "peers": PEERS, "told": {"peer": "body"}}
    async with playing(*rows, store=None, **sections) as [first, second]:
        await complete(second, tokens=640)
        assert cached(await complete(first, tokens=640, kv_transfer_params=source_of(second, 7777))) == 624


@pytest.mark.parametrize("named", ["127.0.0.1:1", "rubbish", ""])
async def test_a_peer_nobody_knows_is_ignored(named: str) -> None:
    sections: dict[str, Any] = {"links": LINKS, "fetch": DIRECTED, "peers": PEERS, "told": {"peer": "header"}}
    async with playing({}, {}, store=None, **sections) as [first, second]:
        await complete(second, tokens=640)
        answer = await complete(first, tokens=640, headers={"x-kv-cache-source-host-port": named})
        assert cached(answer) == 0


async def test_a_source_of_the_wrong_form_is_a_bad_request() -> None:
    async with playing({}) as [client]:
        body = {"prompt": prompt(8), "kv_transfer_params": {"remote_kv_source": {"remote_host": 7}}}
        assert (await client.post("/v1/completions", body))[0] == 400


@pytest.mark.parametrize(("told", "from_store"), [({}, 624), ({"store": "never"}, 0), ({"peer": "body"}, 624)])
async def test_the_store_is_looked_up_unasked_unless_the_file_says_otherwise(told: Any, from_store: int) -> None:
    sections: dict[str, Any] = {"links": LINKS, "fetch": DIRECTED, "peers": PEERS, "told": told}
    async with playing({}, {}, **sections) as [first, second]:
        await complete(second, tokens=640)
        assert cached(await complete(first, tokens=640)) == from_store


# LMCache


def ahead(links: Any = LINKS, **told: Any) -> dict[str, Any]:
    return {
        "links": links,
        "fetch": {**DIRECTED, "discipline": "serial"},
        "peers": PEERS,
        "tiers": HOSTS,
        "told": {"store": "never", **told},
        "lmcache": {},
    }


async def post(client: Client, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    lmcache = client.cluster.fleet.lmcache
    assert lmcache is not None
    async with client.session.request(method, f"{lmcache.controller}{path}", json=body) as response:
        return response.status, await response.json()


def face_of(client: Client) -> LmcacheFace:
    assert client.cluster.lmcache is not None
    return client.cluster.lmcache


async def brought(client: Client) -> None:
    """Until all that was begun has come."""
    async with asyncio.timeout(TIMEOUT_S):
        while not all(one.over for one in face_of(client).brings):  # noqa: ASYNC110  virtual time has no event
            await asyncio.sleep(0.005)


def a_move(old: str = "r1", new: str = "r0", **changes: Any) -> dict[str, Any]:
    where = {"old_position": [old, LOCATION], "new_position": [new, LOCATION], "copy": True}
    return {**where, "tokens": prompt(640), **changes}


async def test_a_moved_prompt_is_found_in_host_memory_by_the_next_request() -> None:
    async with playing({}, {}, **ahead(peer="move")) as [first, second]:
        await complete(second, tokens=640)
        status, answer = await post(first, "/move", a_move())
        assert (status, answer["num_tokens"]) == (200, 640)
        await brought(first)
        assert cached(await complete(first, tokens=640)) == 624
        assert fetched(first) == {"host": 624}
        assert (await post(first, "/move", a_move()))[1]["num_tokens"] == 0  # it is there


def a_prefetch(instance: str = "r0", **changes: Any) -> dict[str, Any]:
    return {"instance_id": instance, "model_name": "m", "world_size": 1, "token_ids": prompt(640), **changes}


async def test_a_prefetch_loads_from_the_store_and_tells_how_far_it_is() -> None:
    async with playing({}, {}, **ahead(store="prefetch")) as [first, second]:
        await complete(second, tokens=640)
        status, answer = await post(first, "/cache/prefetches", a_prefetch())
        assert (status, answer["chunks"], answer["status"]) == (200, 40, "submitted")
        await brought(first)
        _, progress = await post(first, f"/cache/prefetches/r0/{answer['request_id']}", None, "GET")
        assert progress == {"status": "completed", "found_keys": 40, "total_keys": 40}
        assert cached(await complete(first, tokens=640)) == 624


async def test_a_prefetch_that_is_taken_back_brings_nothing_more() -> None:
    async with playing({}, {}, **ahead(SLOW, store="prefetch")) as [first, second]:
        await complete(second, tokens=640)
        name = (await post(first, "/cache/prefetches", a_prefetch()))[1]["request_id"]
        status, answer = await post(first, f"/cache/prefetches/r0/{name}", None, "DELETE")
        assert (status, answer["status"]) == (200, "cancelled")
        (begun,) = face_of(first).brings
        assert (begun.stopped, begun.brought) == (True, 0)
        assert first.cluster.world.network is not None
        assert first.cluster.world.network.active_transfers == 0
        assert (await post(first, f"/cache/prefetches/r0/{name}", None, "DELETE"))[0] == 404


async def test_pinned_blocks_stay_when_others_have_to_go() -> None:
    async with playing({}, {}, **ahead(own="pin")) as [first, second]:
        await complete(second, tokens=640)
        await post(first, "/move", a_move())
        await brought(first)
        pinned = {"instance_id": "r0", "location": LOCATION, "tokens": prompt(640)}
        assert (await post(first, "/pin", pinned))[1]["num_tokens"] == 640
        assert first.engine.fetcher is not None
        tier = first.engine.fetcher.tiers.tiers["host"]
        for number in range(tier.capacity_blocks):
            tier.put(b"%d" % number)
        assert (await post(first, "/pin", pinned))[1]["num_tokens"] == 640
        assert len(tier) == tier.capacity_blocks


@pytest.mark.parametrize("dies", [0, 1])
async def test_a_replica_that_dies_gets_and_gives_nothing_more(dies: int) -> None:
    async with playing({}, {}, **ahead(SLOW, peer="move")) as clients:
        await complete(clients[1], tokens=640)
        await post(clients[0], "/move", a_move())
        await clients[dies].post("/sim/restart", {})
        (begun,) = face_of(clients[0]).brings
        assert begun.stopped


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/move", {}, 422),
        ("/move", a_move(old="nobody"), 404),
        ("/move", a_move(tokens=[5]), 200),  # no whole block
        ("/move", a_move(tokens=[10**9] * 16), 422),
        ("/move", a_move(new_position=["r0", "Moon"]), 422),
        ("/pin", {"instance_id": "nobody", "location": LOCATION}, 404),
        ("/cache/prefetches", {"instance_id": "r0"}, 422),
        ("/cache/prefetches", a_prefetch(token_ids=[1]), 200),
    ],
)
async def test_what_lmcache_cannot_do_is_refused(path: str, body: Any, status: int) -> None:
    async with playing({}, {}, **ahead(peer="move")) as [first, _]:
        assert (await post(first, path, body))[0] == status
        assert face_of(first).brings == []


@pytest.mark.parametrize("told", [{"peer": "shout"}, {"store": "sometimes"}, {"own": "glue"}, {"peers": "header"}])
def test_a_way_of_telling_that_does_not_exist_is_refused(told: dict[str, str]) -> None:
    with pytest.raises(BadFleet, match="told"):
        a_fleet(told=told)
