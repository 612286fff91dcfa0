"""What is known beside events: whose prompts are looked up, and what a silent store is believed to hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from estimators.request import RequestFacts
from estimators.shapes import QWEN3_8B
from router.beside_events import LONGEST_IDS_BYTES, BesideEvents, beginning_of, silent_store
from router.config import LookUpConfig, OtherTiersConfig, WrittenStoreConfig
from router.errors import ConfigError
from router.fleet import Fleet, LinkSpec, ReplicaSpec, StoreSpec
from router.identity import Identity, chain

IDS = list(range(1, 1026))  # four chunks of 256, and the token every engine computes
CHAIN = chain(Identity("m").root(), IDS[:-1], 16)
STORE = StoreSpec(network="net", host="pcie", capacity_gib=1.0)


def a_fleet(store: StoreSpec | None = STORE, **changes: Any) -> Fleet:
    links = {"net": LinkSpec(gb_s=10.0), "pcie": LinkSpec(gb_s=25.0)}
    replicas = [ReplicaSpec(name="a", url="http://h:1"), ReplicaSpec(name="b", url="http://h:2")]
    return Fleet(replicas=replicas, links=links, store=store, **{"model": QWEN3_8B, **changes})


def a_look_up(url: str = "http://h:9000", **changes: Any) -> LookUpConfig:
    return LookUpConfig(**{"service": "controller", "url": url, "model": "m", "instances": {"one": "b"}, **changes})


def a_request(**changes: Any) -> RequestFacts:
    facts = {"model": "m", "base_model": "m", "chain": CHAIN, "prompt_tokens": len(IDS)}
    return RequestFacts(**{"request_id": "r-1", **facts, **changes})


def ids(prompt: Any = IDS) -> bytes:
    return json.dumps(prompt).encode()


class Service:
    """A controller that knows an instance with three chunks of everything."""

    def __init__(self) -> None:
        self.questions: list[Any] = []
        self.headers: list[Any] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.questions.append(await request.json())
        self.headers.append(dict(request.headers))
        return web.json_response({"layout_info": {"one": ["LocalCPUBackend", 768]}})


@asynccontextmanager
async def looking_up(**changes: Any) -> AsyncIterator[tuple[BesideEvents, Service]]:
    service, app = Service(), web.Application()
    app.router.add_post("/lookup", service.answer)
    async with TestServer(app) as server:
        config = OtherTiersConfig(look_up=a_look_up(str(server.make_url("")).rstrip("/"), deadline_s=5.0, **changes))
        beside = BesideEvents(
            config,
            a_fleet(),
            block_tokens=16,
            adapter_of=lambda name: name if name == "tuned" else "",
            clock=lambda: 0.0,
        )
        beside.start()
        try:
            yield beside, service
        finally:
            await beside.stop()


async def test_a_prompt_given_as_ids_is_looked_up_and_the_answer_serves_the_next_one() -> None:
    async with looking_up() as (beside, service):
        assert beside.answers is not None
        beside.read(a_request(), ids(), "")
        async with asyncio.timeout(10):
            while not len(beside.answers):  # noqa: ASYNC110  an answer kept has no event to await
                await asyncio.sleep(0.002)
        assert service.questions == [{"tokens": IDS[:1024]}]
        assert beside.answers.held(CHAIN, 0.0).host_blocks.tolist() == [0, 48]
        beside.read(a_request(), ids(), "")
        assert beside.counted()["recent"] == 1


@pytest.mark.parametrize(
    "changed",
    [{"base_model": "other", "model": "other"}, {"model": "tuned"}, {"chain_of_text": True}, {"chain": []}],
)
async def test_prompts_the_service_cannot_know_are_left_alone(changed: dict[str, Any]) -> None:
    async with looking_up() as (beside, _):
        beside.read(a_request(**changed), ids(), "")
        assert set(beside.counted().values()) == {0}


async def test_a_salted_prompt_is_not_looked_up_where_the_service_knows_tokens_only() -> None:
    async with looking_up() as (beside, _):
        beside.read(a_request(), ids(), "s")
        assert (beside.counted()["unaskable"], beside.counted()["asked"]) == (1, 0)


async def test_of_several_prompts_the_one_whose_blocks_are_matched_is_looked_up() -> None:
    async with looking_up() as (beside, service):
        beside.read(a_request(), ids([[7] * 300, IDS, [8] * 20]), "")
        async with asyncio.timeout(10):
            while not service.questions:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert service.questions == [{"tokens": IDS[:1024]}]


async def test_of_a_very_long_prompt_the_beginning_is_looked_up() -> None:
    long = [100_000 + at for at in range(60_000)]
    request = a_request(chain=chain(Identity("m").root(), long[:-1], 16), prompt_tokens=len(long), block_tokens=16)
    async with looking_up() as (beside, service):
        assert beside.answers is not None
        beside.read(request, memoryview(ids(long)), "")
        async with asyncio.timeout(10):
            while not len(beside.answers):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        (question,) = service.questions
        asked = len(question["tokens"])
        assert question["tokens"] == long[:asked]
        assert 30_000 < asked < 40_000
        assert asked % 256 == 0
        assert beside.answers.held(request.chain, 0.0).host_blocks.tolist() == [0, 48]


@pytest.mark.parametrize("spaces", [(",", ":"), (", ", ": "), (" ,\n", ":")])
def test_the_beginning_of_ids_is_a_list_of_as_many_as_it_says(spaces: tuple[str, str]) -> None:
    whole = json.dumps(list(range(100_000)), separators=spaces).encode()
    beginning, tokens = beginning_of(whole)
    assert beginning is not None
    assert len(beginning) <= LONGEST_IDS_BYTES
    assert json.loads(bytes(beginning)) == list(range(tokens or 0))
    assert beginning_of(ids()) == (ids(), None)
    assert beginning_of(json.dumps([[1] * 100_000, [2]]).encode()) == (None, None)


# A store that says nothing


async def test_a_silent_store_is_shown_with_what_it_is_believed_to_hold() -> None:
    config = OtherTiersConfig(written_store=WrittenStoreConfig())
    beside = BesideEvents(config, a_fleet(), block_tokens=16, adapter_of=lambda name: "", clock=lambda: 0.0)
    assert beside.written is not None
    beside.written.written(CHAIN, 5.0)
    assert beside.report() == {"written_store": {"blocks": len(CHAIN), "evicted": 0, "misses": 0}}


def test_the_stores_size_in_blocks_follows_from_the_model() -> None:
    """A token of Qwen3-8B is 36 layers of 8 heads of 128 values of 2 bytes, K and V: 147,456 bytes."""
    store = silent_store(WrittenStoreConfig(), a_fleet(), block_tokens=16)
    blocks = 2**30 // (147_456 * 16)
    store.written(list(range(1000)), 0.0)
    assert len(store) == blocks


# Sections that do not fit


@pytest.mark.parametrize(
    ("config", "fleet", "sentence"),
    [
        (OtherTiersConfig(written_store=WrittenStoreConfig()), a_fleet(store=None), "no `store`"),
        (
            OtherTiersConfig(written_store=WrittenStoreConfig()),
            a_fleet(store=msgspec.structs.replace(STORE, events="tcp://h:1")),
            "the store has events",
        ),
        (OtherTiersConfig(written_store=WrittenStoreConfig()), a_fleet(model=None), "capacity_gib"),
        (OtherTiersConfig(look_up=a_look_up(instances={"one": "c"})), a_fleet(), "'c', which is no replica"),
        (OtherTiersConfig(look_up=a_look_up(chunk_tokens=100)), a_fleet(), "no multiple of a block"),
    ],
)
async def test_a_section_that_does_not_fit_the_fleet_stops_the_start(
    config: OtherTiersConfig, fleet: Fleet, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        BesideEvents(config, fleet, block_tokens=16, adapter_of=lambda name: "", clock=lambda: 0.0)


async def test_with_nothing_configured_nothing_is_asked_or_believed() -> None:
    beside = BesideEvents(OtherTiersConfig(), a_fleet(), block_tokens=16, adapter_of=lambda name: "", clock=lambda: 0.0)
    beside.start()
    beside.read(a_request(), ids(), "")
    assert (beside.asks, beside.answers, beside.written, beside.report()) == (False, None, None, {})
    await beside.stop()
