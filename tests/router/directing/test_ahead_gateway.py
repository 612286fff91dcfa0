"""State brought ahead of requests that queue, from a whole router to engines and LMCache, over real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from router.config import PolicyConfig
from router.fleet import load_fleet
from tests.router.directing.gateway_bench import HELD, LINKS, Bench, bench
from tests.router.test_gateway import running
from tests.sim_backends.builders import prompt


def prefetching(**more: Any) -> dict[str, Any]:
    """Engines that look into host memory at their turn, and a store that only LMCache's coordinator reads."""
    return {
        "fetch": {"by": "directed", "discipline": "serial", "minimum_tokens": 64},
        "tiers": {"host": {"capacity_gib": 8, "link": "pcie"}},
        "told": {"store": "prefetch"},
        "lmcache": {},
        **more,
    }


async def behind(use: Bench, tokens: int) -> asyncio.Task[Any]:
    """A long prompt on the one replica, so that the next one queues."""
    ahead = asyncio.create_task(use.ask(prompt(tokens, start=20_000)))
    await use.router.until(lambda shown: shown["in_flight"] == 1)
    return ahead


async def test_what_the_store_has_is_in_host_memory_when_a_queued_request_has_its_turn(tmp_path: Path) -> None:
    async with bench(tmp_path, {"card": "A100"}, speed=8.0, **prefetching()) as use:
        await use.only_in_store()
        ahead = await behind(use, 20_000)
        _, _, answer = await use.ask([*HELD, *prompt(100, start=60_000)])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(HELD)
        assert use.fetched(0) == {"host": len(HELD)}
        assert (await ahead)[0] == 200
        await use.hints(prefetch_worked=1)


async def test_what_a_peer_has_is_copied_while_the_request_queues(tmp_path: Path) -> None:
    told = {"peer": "move", "store": "never"}
    async with bench(tmp_path, {"card": "A100"}, {"card": "ANCIENT"}, **prefetching(told=told, store=None)) as use:
        await use.direct(1, HELD)
        await use.known("hbm")
        ahead = await behind(use, 100_000)
        _, replica, answer = await use.ask([*HELD, *prompt(3000, start=130_000)])
        assert replica == "r0"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(HELD)
        assert use.fetched(0) == {"host": len(HELD)}
        assert (await ahead)[0] == 200
        await use.hints(move_worked=1)
    receipts = map(json.loads, use.receipts.read_text().splitlines())
    assert [receipt["directed"] for receipt in receipts if receipt["prompt_tokens"] == 7000] == ["move"]


async def test_a_prefetch_stops_when_the_client_of_its_request_leaves(tmp_path: Path) -> None:
    links = {**LINKS, "store": {"gb_s": 0.15}}  # a second, half as long as computing takes such a card
    async with bench(tmp_path, {"card": "OLD"}, speed=8.0, **prefetching(links=links)) as use:
        await use.only_in_store()
        ahead = await behind(use, 10_000)
        asked = asyncio.create_task(use.ask([*HELD, *prompt(100, start=60_000)]))
        begun = await use.brought()
        asked.cancel()
        await use.hints(prefetch_withdrawn=1)
        assert begun.stopped
        assert begun.brought < begun.blocks
        ahead.cancel()


async def test_a_coordinator_that_is_down_costs_nothing_but_the_state(tmp_path: Path) -> None:
    async with bench(tmp_path, {"card": "A100"}, speed=8.0, **prefetching()) as use:
        path = tmp_path / "down.yaml"
        text = (tmp_path / "fleet.yaml").read_text()
        assert use.cluster.fleet.lmcache is not None
        path.write_text(text.replace(str(use.cluster.fleet.lmcache.coordinator), "http://127.0.0.1:1"))
        async with running(fleet=load_fleet(path), policy=PolicyConfig(name="ttft")) as router:
            use.router = router
            await use.only_in_store()
            ahead = await behind(use, 20_000)
            status, _, answer = await use.ask([*HELD, *prompt(100, start=60_000)])
            assert (status, answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
            assert (await ahead)[0] == 200
            await use.hints(prefetch_failed=1)
