"""Requests that come between two load reports do not all go where the last one was lowest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from tests.router.field_bench import MODEL, Router, Stub, a_page, a_router, answers, until

PROMPT = list(range(1, 1025))


class Crowd:
    """Replicas that answer nobody before all have come. loads : (running, waiting) that each goes on saying"""

    def __init__(self, *loads: tuple[int, int]) -> None:
        self.all_here = asyncio.Event()
        self.stubs = [Stub(self._script, page=a_page(*load)) for load in loads]

    async def _script(self, request: web.Request, body: bytes) -> web.StreamResponse:
        await self.all_here.wait()
        return await answers(request, body)

    @asynccontextmanager
    async def behind_a_router(self, policy: str) -> AsyncIterator[Router]:
        async with AsyncExitStack() as stack:
            for stub in self.stubs:
                await stack.enter_async_context(stub.serving())
            router = await stack.enter_async_context(a_router([stub.url for stub in self.stubs], policy=policy))
            rows = range(len(self.stubs))
            await until(lambda: all(router.dispatcher.view.sampled_at_s[row] > 0 for row in rows))
            yield router

    async def burst(self, router: Router, prompts: list[list[int]]) -> list[int]:
        """How many of these requests, all at once, each replica gets."""
        before = [len(stub.received) for stub in self.stubs]
        asked = [asyncio.ensure_future(router.ask(MODEL, prompt=prompt)) for prompt in prompts]
        await until(lambda: sum(len(stub.received) for stub in self.stubs) - sum(before) == len(prompts))
        self.all_here.set()
        assert Counter(answer.status for answer in await asyncio.gather(*asked)) == {200: len(prompts)}
        return [len(stub.received) - known for stub, known in zip(self.stubs, before, strict=True)]

    async def warm(self, router: Router) -> None:
        """Let every replica compute the prompt once."""
        self.all_here.set()
        rows = range(len(self.stubs))
        for row in rows:
            while not self.stubs[row].received:
                for other in set(rows) - {row}:  # until its next probe
                    router.dispatcher.replica_down(other)
                await router.ask(MODEL, prompt=PROMPT)
        await router.until_up(*rows)
        view = router.dispatcher.view
        view.coefficients[:] = view.coefficients[0]  # how soon each answered is chance; they are meant to be equal
        self.all_here.clear()


@pytest.mark.parametrize("policy", ["e2e", "ttft", "least_request"])
async def test_a_report_that_stands_still_does_not_draw_a_whole_burst(policy: str) -> None:
    crowd = Crowd((0, 0), (0, 1))
    async with crowd.behind_a_router(policy) as router:
        got = await crowd.burst(router, [[1000 * n + token for token in range(512)] for n in range(8)])
    assert max(got) <= 5


async def test_equal_replicas_that_all_hold_the_prompt_share_a_burst() -> None:
    crowd = Crowd(*[(0, 0)] * 4)
    async with crowd.behind_a_router("e2e") as router:
        await crowd.warm(router)
        got = await crowd.burst(router, [PROMPT] * 100)
    assert all(15 <= count <= 35 for count in got), got


@pytest.mark.parametrize("policy", ["e2e", "ttft"])
async def test_one_that_reports_more_gets_less_and_not_nothing(policy: str) -> None:
    crowd = Crowd((0, 0), (0, 0), (0, 0), (0, 1))
    async with crowd.behind_a_router(policy) as router:
        got = await crowd.burst(router, [[1000 * n + token for token in range(512)] for n in range(98)])
    assert 0 < got[3] < sum(got) / 4, got
