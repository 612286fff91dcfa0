"""Look-ups over real sockets: nothing waits for them, and a service that fails is left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.identity import Identity, chain
from router.signals.lmcache import Controller, Coordinator
from router.signals.looked_up import Answers
from router.signals.lookups import LookupClient

TOKENS = list(range(1, 1025))  # four chunks
CHAIN = chain(Identity("m").root(), TOKENS, 16)


class Service:
    """A look-up service that answers what it is told to, and the client that asks it."""

    def __init__(self) -> None:
        self.questions: list[Any] = []
        self.answer: Any = {"layout_info": {"a": ["LocalCPUBackend", 768]}}
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.now_s = 0.0
        self.answers = Answers(1, {"a": 0, "mp-0": 0}, block_tokens=16, chunk_tokens=256)
        self.client: LookupClient

    async def serve(self, request: web.Request) -> web.Response:
        self.questions.append((request.path, await request.json()))
        await self.gate.wait()
        body = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        return web.Response(body=body, status=self.status)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  counters of the client have no event to await
                await asyncio.sleep(0.002)

    async def failed(self, times: int) -> None:
        await self.until(lambda: self.client.counts.failed == times)

    def host_blocks(self) -> int:
        return int(self.answers.held(CHAIN, self.now_s).host_blocks[0])


@asynccontextmanager
async def a_service(exchange: Controller | Coordinator | None = None, **settings: Any) -> AsyncIterator[Service]:
    service = Service()
    app = web.Application()
    app.router.add_post("/{path:.*}", service.serve)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        service.client = LookupClient(
            session,
            str(server.make_url("")),
            exchange or Controller(),
            service.answers,
            clock=lambda: service.now_s,
            **{"deadline_s": 5.0, **settings},
        )
        service.client.start()
        try:
            yield service
        finally:
            service.gate.set()
            await service.client.stop()


async def test_an_answer_of_the_controller_serves_the_next_prompt() -> None:
    async with a_service() as service:
        assert service.host_blocks() == 0
        assert service.client.want(CHAIN, TOKENS)
        await service.until(lambda: service.host_blocks() > 0)
        assert service.host_blocks() == 48
        assert service.questions == [("/lookup", {"tokens": TOKENS})]


async def test_an_answer_of_the_coordinator_serves_the_next_prompt() -> None:
    key = {"model_name": "m", "kv_rank": 0, "object_group_id": 0, "cache_salt": "s"}
    placed = {
        "instance_id": "mp-0",
        "incarnation": 1,
        "tier": "l1",
        "backend": "dram",
        "size_bytes": 1,
        "shared": False,
    }
    async with a_service(Coordinator("m")) as service:
        service.answer = {
            "chunks": 4,
            "results": [
                {"key": {**key, "chunk_hash_hex": str(number)}, "placements": [placed] if number < 3 else []}
                for number in range(4)
            ],
        }
        assert service.client.want(CHAIN, TOKENS, salt="s")
        await service.until(lambda: service.host_blocks() > 0)
        assert service.host_blocks() == 48
        ((path, question),) = service.questions
        assert path == "/directory/lookup"
        assert (question["model_name"], question["cache_salt"], question["world_size"]) == ("m", "s", 1)


async def test_only_whole_chunks_are_asked_about_and_a_short_prompt_is_not() -> None:
    async with a_service() as service:
        assert not service.client.want(CHAIN[:15], TOKENS[:240])
        assert service.client.counts.unaskable == 1
        assert service.client.want(CHAIN[:31], TOKENS[:511])
        await service.until(lambda: len(service.questions) == 1)
        assert len(service.questions[0][1]["tokens"]) == 256


async def test_a_prompt_is_asked_about_once_in_a_while_and_again_later() -> None:
    async with a_service(again_s=2.0) as service:
        assert service.client.want(CHAIN, TOKENS)
        assert not service.client.want(CHAIN, TOKENS)
        assert service.client.counts.recent == 1
        service.now_s = 2.0
        assert service.client.want(CHAIN, TOKENS)
        await service.until(lambda: len(service.questions) == 2)


async def test_a_slow_service_costs_no_wait_and_a_bounded_queue() -> None:
    async with a_service(workers=1, waiting=2) as service:
        service.gate.clear()
        chains = [chain(Identity(f"m{number}").root(), TOKENS, 16) for number in range(8)]
        assert service.client.want(chains[0], TOKENS)
        await service.until(lambda: len(service.questions) == 1)  # under way, so the queue is empty
        taken = [service.client.want(each, TOKENS) for each in chains[1:]]
        assert taken == [True, True, False, False, False, False, False]
        assert service.client.counts.dropped == 5


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_a_service_that_fails_is_left_alone_for_a_while_longer_each_time(status: int) -> None:
    async with a_service() as service:
        service.status = status
        for times, rest_s in enumerate((1.0, 2.0, 4.0), 1):
            assert service.client.want(CHAIN, TOKENS)
            await service.failed(times)
            assert not service.client.want(CHAIN, TOKENS)
            assert service.client.counts.resting == times
            service.now_s += max(rest_s, 2.0)
        service.status = 200
        service.now_s += 30.0
        assert service.client.want(CHAIN, TOKENS)
        await service.until(lambda: service.host_blocks() > 0)


async def test_a_service_that_hangs_is_given_up_at_the_deadline() -> None:
    async with a_service(deadline_s=0.05) as service:
        service.gate.clear()
        assert service.client.want(CHAIN, TOKENS)
        await service.until(lambda: service.client.counts.failed == 1)


@pytest.mark.parametrize("answer", [b"<html>", b"{}", {"layout_info": {"a": ["LocalCPUBackend", 99999]}}])
async def test_an_answer_that_is_none_is_counted_and_teaches_nothing(answer: Any) -> None:
    async with a_service() as service:
        service.answer = answer
        assert service.client.want(CHAIN, TOKENS)
        await service.until(lambda: service.client.counts.bad_answers == 1)
        assert service.host_blocks() == 0
        service.now_s = 3.0
        assert service.client.want(CHAIN, TOKENS), "a service that answers oddly is not one that is down"


async def test_an_answer_is_as_old_as_its_question() -> None:
    async with a_service() as service:
        service.gate.clear()
        service.client.want(CHAIN, TOKENS)
        await service.until(lambda: len(service.questions) == 1)
        service.now_s = 4.0
        service.gate.set()
        await service.until(lambda: service.host_blocks() > 0)
        assert service.answers.held(CHAIN, 4.0).age_s == 4.0


async def test_settings_that_make_no_sense_are_refused() -> None:
    async with aiohttp.ClientSession() as session:
        for wrong in ({"deadline_s": 0.0}, {"again_s": -1.0}, {"workers": 0}, {"waiting": 0}):
            with pytest.raises(ValueError, match="must be positive"):
                LookupClient(session, "http://h", Controller(), Service().answers, **wrong)
