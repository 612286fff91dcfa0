"""Several data-parallel ranks behind one URL: the one that is asked for must be the one that runs, and tells."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.doctor.show import Report
from tests.router.doctor.servers import MODELS, a_server, only, problems, report_on
from tests.router.signals.events import BLOCK, stored_map
from tests.router.signals.publisher import Publisher, payload_of_rank


class Ranks:
    """An engine whose ranks announce what they ran, each on a socket of its own.

    runs_on : the rank that runs whatever is asked; None: the one the header names, in its absence the next in turn
    """

    def __init__(self, publishers: list[Publisher], runs_on: int | None) -> None:
        self.asked_for: list[str | None] = []
        self._publishers = publishers
        self._runs_on = runs_on
        self._held: list[set[tuple[int, ...]]] = [set() for _ in publishers]
        self._turns = 0

    def answers(self) -> dict[str, Any]:
        sources = {
            str(rank): {"publisher": "zmq", "endpoint": one.events, "replay_endpoint": one.replay, "topic": ""}
            for rank, one in enumerate(self._publishers)
        }
        page = 'vllm:num_requests_running 0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
        return {
            "/v1/models": MODELS,
            "/health": "",
            "/metrics": page,
            "/kv_event_sources": sources,
            "/v1/completions": self._complete,
        }

    async def _complete(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["prompt"]
        named = request.headers.get("X-data-parallel-rank")
        self.asked_for.append(named)
        rank = self._runs_on
        if rank is None:
            self._turns += 1
            rank = self._turns % len(self._publishers) if named is None else int(named)
        held, publisher = self._held[rank], self._publishers[rank]
        cached = (len(tokens) - 1) // BLOCK * BLOCK if tuple(tokens) in held else 0
        if not cached:
            held.add(tuple(tokens))
            event = stored_map(tokens[: len(tokens) // BLOCK * BLOCK], 1 + 1000 * len(publisher.history))
            await publisher.publish(len(publisher.history), payload_of_rank(rank, event))
        return web.json_response({"usage": {"prompt_tokens_details": {"cached_tokens": cached}}})


@asynccontextmanager
async def several(ranks: int, runs_on: int | None = None) -> AsyncIterator[tuple[str, Ranks]]:
    async with AsyncExitStack() as stack:
        publishers = [await stack.enter_async_context(Publisher()) for _ in range(ranks)]
        engine = Ranks(publishers, runs_on)
        yield await stack.enter_async_context(a_server(engine.answers())), engine


async def examined(url: str, listed: int) -> Report:
    return await report_on(url, use_probe=True, listed=listed)


async def test_a_rank_is_asked_for_by_name_both_times_and_answers_for_itself() -> None:
    async with several(3) as (url, engine):
        report = await examined(url, 3)
    assert report.works, report.findings
    assert engine.asked_for == ["0", "0"]
    probed = report.facts.probe
    assert probed is not None
    assert (probed.seen_blocks, probed.elsewhere_blocks, probed.cached_tokens) == (probed.blocks, 0, 32)


async def test_an_engine_that_picks_a_rank_itself_is_found_out() -> None:
    async with several(2, runs_on=1) as (url, _):
        report = await examined(url, 2)
    assert problems(report) == ["ranks"]
    assert "Rank 0 was asked for and another one announced the blocks" in only(report, "ranks").sentence


@pytest.mark.parametrize("listed", [1, 2])
async def test_a_server_that_is_one_replica_is_asked_for_no_rank(listed: int) -> None:
    async with several(1) as (url, engine):
        await examined(url, listed)
    assert engine.asked_for == ([None, None] if listed == 1 else ["0", "0"])
