"""Simulated engines die in the middle of streams, and clients of the whole router do not notice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest

from router.admission import AdmissionConfig
from router.config import PromptConfig
from router.http.contract import TimeOuts
from router.receipts import Receipt
from router.resume.log import ResumeConfig
from router.resume.pools import ResumePools
from router.retries import RetryConfig
from sim_backends.cluster import Cluster
from tests.router.field_bench import QUICK, Router, a_router, simulated, until, urls_of
from tests.router.resume.streams import told

ON = ResumePools(enabled=True, template_strips=False)  # the simulated engines speak ChatML
PATIENT = msgspec.structs.replace(QUICK, failures_to_open=10_000)
TOKENS = 12
COMPLETION = {"prompt": "Once upon a time"}
CHAT = {"messages": [{"role": "user", "content": "Once upon a time"}]}
PATHS: dict[str, dict[str, Any]] = {"completions": COMPLETION, "chat": CHAT}
DEATHS = ["cut", "reset", "hang"]


async def fault(router: Router, cluster: Cluster, replica: int, **values: Any) -> None:
    async with router.client.post(f"{urls_of(cluster)[replica]}/sim/faults", json=values) as said:
        assert said.status == 200


def asking(cluster: Cluster, prompt: dict[str, Any], **more: Any) -> dict[str, Any]:
    asked = {"model": cluster.fleet.model.name, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
    return asked | {"stream_options": {"include_usage": True}} | prompt | more


async def stream(router: Router, body: dict[str, Any], url: str | None = None) -> bytes:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with router.client.post((url or router.url) + path, json=body) as response:
        assert response.status == 200
        return await response.read()


async def broken(router: Router, body: dict[str, Any]) -> bytes:
    """What comes of a stream that is cut."""
    got = bytearray()

    async def read() -> None:
        async with router.client.post(f"{router.url}/v1/completions", json=body) as response:
            async for piece in response.content.iter_any():
                got.extend(piece)

    with pytest.raises(aiohttp.ClientError):
        await read()
    return bytes(got)


def why(stream: bytes) -> str | None:
    said = stream.rstrip(b"\n").rpartition(b"\n\n")[2]
    param: str | None = json.loads(said.removeprefix(b"data: "))["error"]["param"]
    return param


async def only_receipt(router: Router) -> Receipt:
    await until(lambda: len(router.receipts) == 1)
    return router.receipts[0]


def resumes(router: Router) -> dict[str, float]:
    lines = router.gateway._metrics.text().decode().splitlines()
    counted = [line.removeprefix("tfirst_resumes_total") for line in lines if line.startswith("tfirst_resumes_total")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in counted}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_sees_one_stream_when_its_replica_dies(path: str, death: str) -> None:
    async with (
        simulated("A100", "A100") as cluster,
        a_router(urls_of(cluster), resume=ON, times=TimeOuts(stall_s=0.3)) as router,
    ):
        body = asking(cluster, PATHS[path])
        unbroken = await stream(router, body, urls_of(cluster)[1])
        await fault(router, cluster, 0, **{f"{death}_next": 1, f"{death}_after_tokens": 5})
        assert told(await stream(router, body)) == told(unbroken)
        receipt = await only_receipt(router)
        assert (receipt.outcome, receipt.tried, receipt.output_tokens) == ("ok", ["a"], TOKENS)
        (resume,) = receipt.resumes
        assert (resume.replica, resume.sent_tokens) == ("a", 5)
        assert resume.went_on_s is not None
        assert resumes(router) == {"resumed": 1.0}


async def test_aliases_and_usage_that_the_router_asks_for_hold_for_the_rest_too() -> None:
    async with simulated("A100", "A100") as cluster:
        model = cluster.fleet.model.name
        edits: dict[str, Any] = {"model_aliases": {"fast": model}, "inject_usage": True}
        async with a_router(urls_of(cluster), resume=ON, **edits) as router:
            body = asking(cluster, COMPLETION, model="fast", stream_options=None)
            unbroken = await stream(router, body | {"model": model}, urls_of(cluster)[1])
            await fault(router, cluster, 0, cut_next=1, cut_after_tokens=5)
            assert told(await stream(router, body)) == told(unbroken)
            receipt = await only_receipt(router)
            assert (receipt.output_tokens, len(receipt.resumes)) == (TOKENS, 1)


async def test_two_deaths_in_one_stream_do_not_show_either() -> None:
    async with simulated("A100", "A100", "A100") as cluster, a_router(urls_of(cluster), resume=ON) as router:
        body = asking(cluster, COMPLETION)
        unbroken = await stream(router, body, urls_of(cluster)[2])
        await fault(router, cluster, 0, cut_next=1, cut_after_tokens=3)
        await fault(router, cluster, 1, reset_next=1, reset_after_tokens=4)
        assert told(await stream(router, body)) == told(unbroken)
        receipt = await only_receipt(router)
        assert [(resume.replica, resume.sent_tokens) for resume in receipt.resumes] == [("a", 3), ("b", 7)]
        assert receipt.outcome == "ok"
        assert resumes(router) == {"resumed": 2.0}


async def test_with_nobody_left_the_stream_ends_visibly_and_says_so() -> None:
    async with simulated("A100", "A100") as cluster, a_router(urls_of(cluster), resume=ON) as router:
        for replica in (0, 1):
            await fault(router, cluster, replica, cut_next=1, cut_after_tokens=2)
        seen = await broken(router, asking(cluster, COMPLETION))
        assert (seen.count(b'" tok"'), b"[DONE]" in seen, why(seen)) == (4, False, None)
        receipt = await only_receipt(router)
        assert (receipt.outcome, receipt.cause, receipt.not_resumed) == ("failed", "broken", "no_replica")
        assert resumes(router) == {"resumed": 1.0, "no_replica": 1.0}


async def test_a_prompt_of_ids_whose_output_has_none_says_so() -> None:
    async with simulated("A100", "A100") as cluster, a_router(urls_of(cluster), resume=ON) as router:
        await fault(router, cluster, 0, cut_next=1, cut_after_tokens=2)
        assert why(await broken(router, asking(cluster, {"prompt": [1, 2, 3]}))) == "ids_unknown"
        assert (await only_receipt(router)).not_resumed == "ids_unknown"


async def test_white_space_at_the_edge_stops_a_conversation_where_templates_strip_it() -> None:
    strips = ResumePools(enabled=True)
    async with simulated("A100", "A100") as cluster, a_router(urls_of(cluster), resume=strips) as router:
        await fault(router, cluster, 0, cut_next=1, cut_after_tokens=2)
        with pytest.raises(aiohttp.ClientError):
            await stream(router, asking(cluster, CHAT))
        assert (await only_receipt(router)).not_resumed == "space_at_edge"


@pytest.mark.parametrize("own", [True, False])
async def test_the_pool_decides_whether_streams_go_on(own: bool) -> None:
    async with simulated("A100", "A100") as cluster:
        model = cluster.fleet.model.name if own else "another"
        pools = ResumePools(models={model: ResumeConfig(enabled=True)})
        async with a_router(urls_of(cluster), resume=pools) as router:
            await fault(router, cluster, 0, cut_next=1, cut_after_tokens=2)
            body = asking(cluster, COMPLETION)
            if own:
                assert (await stream(router, body)).endswith(b"data: [DONE]\n\n")
            else:
                assert b"error" not in await broken(router, body)
            receipt = await only_receipt(router)
            assert (len(receipt.resumes), receipt.not_resumed) == (int(own), None)


async def test_deaths_at_once_take_no_more_than_the_budget() -> None:
    budget = RetryConfig(share=0.0, per_s=0.0, burst=3.0)
    async with (
        simulated("A100", "A100", "A100") as cluster,
        a_router(urls_of(cluster), resume=ON, retries=budget, health=PATIENT) as router,
    ):
        for replica in range(3):
            await fault(router, cluster, replica, cut_share=1.0, cut_after_tokens=2)
        seen = await asyncio.gather(*(broken(router, asking(cluster, COMPLETION)) for _ in range(8)))
        await until(lambda: len(router.receipts) == 8)
        assert sum(len(receipt.resumes) for receipt in router.receipts) == router.dispatcher.retries.made == 3
        assert {receipt.not_resumed for receipt in router.receipts} == {"no_budget"}
        assert all(why(stream) is None for stream in seen)


async def test_a_client_that_leaves_while_its_rest_is_awaited_frees_both_replicas() -> None:
    async with simulated("A100", "A100") as cluster, a_router(urls_of(cluster), resume=ON) as router:
        await fault(router, cluster, 0, cut_next=1, cut_after_tokens=2)
        await fault(router, cluster, 1, hang_next=1)
        async with router.client.post(f"{router.url}/v1/completions", json=asking(cluster, COMPLETION)) as response:
            await response.content.readuntil(b" tok")
            await until(lambda: list(router.dispatcher.view.booked) == [0, 1])
            response.close()
        receipt = await only_receipt(router)
        assert (receipt.outcome, receipt.resumes[0].went_on_s) == ("cancelled", None)
        await until(lambda: not any(engine.running for engine in cluster.world.engines))


async def test_where_the_others_are_full_the_rest_waits_for_room() -> None:
    full = AdmissionConfig(max_in_flight=1)
    async with (
        simulated("A100", "A100") as cluster,
        a_router(urls_of(cluster), resume=ON, admission=full) as router,
    ):
        await fault(router, cluster, 0, hang_next=1, hang_after_tokens=1)
        await fault(router, cluster, 1, cut_next=1, cut_after_tokens=2)
        body = asking(cluster, COMPLETION)
        async with router.client.post(f"{router.url}/v1/completions", json=body) as other:
            await other.content.readuntil(b" tok")
            dying = asyncio.ensure_future(stream(router, body))
            await until(lambda: sum(router.dispatcher.queued.values()) == 1)
            other.close()
        assert told(await dying)[4] == 1
        outcomes = sorted(str(receipt.outcome) for receipt in router.receipts)
        assert outcomes == ["cancelled", "ok"]


async def test_a_rest_that_finds_no_room_in_time_is_shown_as_a_broken_stream() -> None:
    full = AdmissionConfig(max_in_flight=1, queue_timeout_s=0.2)
    async with (
        simulated("A100", "A100") as cluster,
        a_router(urls_of(cluster), resume=ON, admission=full) as router,
    ):
        await fault(router, cluster, 0, hang_next=1, hang_after_tokens=1)
        await fault(router, cluster, 1, cut_next=1, cut_after_tokens=2)
        body = asking(cluster, COMPLETION)
        async with router.client.post(f"{router.url}/v1/completions", json=body) as other:
            await other.content.readuntil(b" tok")
            assert why(await broken(router, body)) is None
            receipt = await only_receipt(router)
            other.close()
        assert (receipt.outcome, receipt.cause, receipt.not_resumed) == ("failed", "broken", "no_replica")


async def test_hundreds_of_streams_over_replicas_that_die_have_one_outcome_each_and_leave_nothing() -> None:
    """A tenth of all attempts dies; every stream is whole, or ends with an event that says why and a cut."""
    budget = RetryConfig(share=1.0, burst=100.0)
    async with (
        simulated("A100", "A100", "A100", "A100") as cluster,
        a_router(urls_of(cluster), resume=ON, retries=budget) as router,
    ):
        body = asking(cluster, COMPLETION, max_tokens=6)
        unbroken = told(await stream(router, body, urls_of(cluster)[0]))
        deaths = {"cut_share": 0.1, "cut_after_tokens": 2, "reset_share": 0.05, "reset_after_tokens": 4}
        for replica in range(4):
            await fault(router, cluster, replica, **deaths)

        async def one() -> bool:
            try:
                got = await stream(router, body)
            except aiohttp.ClientError:
                return False
            assert told(got) == unbroken
            return True

        whole = [await asyncio.gather(*(one() for _ in range(20))) for _ in range(15)]
        await until(lambda: len(router.receipts) == 300)
        ok = sum(map(sum, whole))
        assert ok == sum(receipt.outcome == "ok" for receipt in router.receipts)
        assert ok > 280, "one in seven dies, and nearly all of these go on"
        assert sum(bool(receipt.resumes) for receipt in router.receipts) > 20


async def test_the_rest_goes_where_prompt_and_sent_text_are_cached() -> None:
    """Of three equal replicas two have answered the prompt before, the second of them as the rest of a stream."""
    counted = PromptConfig(source="tokenize")
    async with (
        simulated("A100", "A100", "A100") as cluster,
        a_router(urls_of(cluster), "e2e", resume=ON, prompts=counted) as router,
    ):
        body = asking(cluster, {"prompt": "Once upon a time. " * 1000})
        await stream(router, body)
        (holder,) = (receipt.choice.replica for receipt in router.receipts if receipt.choice is not None)
        for _ in range(2):
            await fault(router, cluster, "abc".index(holder), cut_next=1, cut_after_tokens=6)
            await stream(router, body)
            await until(lambda: router.dispatcher.in_flight == 0)
        _, first, second = router.receipts
        assert [receipt.resumes[0].replica for receipt in (first, second)] == [holder, holder]
        assert first.choice is not None
        assert second.choice is not None
        assert second.choice.replica == first.choice.replica
        assert first.choice.local_tokens == 0
        assert second.choice.local_tokens > 0.9 * second.prompt_tokens
