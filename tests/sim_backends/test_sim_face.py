"""Faults and restarts as clients and routers meet them, over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from sim_backends.faults import Faults
from tests.sim_backends.builders import prompt
from tests.sim_backends.serving import TIMEOUT_S, Client, serving

BODY = {"prompt": prompt(40), "max_tokens": 9, "ignore_eos": True}
END = b"0\r\n\r\n"


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as made:
        yield made


class Raw:
    """One request on a connection of its own, down to how it ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def ask(cls, client: Client, *, stream: bool) -> Raw:
        host, port = client.url.removeprefix("http://").split(":")
        raw = cls(*await asyncio.open_connection(host, int(port)))
        body = json.dumps({**BODY, "stream": stream}).encode()
        raw._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        return raw

    async def end(self, expected: str) -> tuple[bytes, str]:
        """Everything received, and how it ended: `fin`, `rst`, or `open` with nothing coming for half a second."""
        patience_s = 0.5 if expected == "open" else TIMEOUT_S
        got, how = b"", "open"
        try:
            while piece := await asyncio.wait_for(self._reader.read(2**16), patience_s):
                got += piece
            how = "fin"
        except ConnectionResetError:
            how = "rst"
        except TimeoutError:
            pass
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)
        return got, how


WAYS = [("hang", "open"), ("cut", "fin"), ("reset", "rst")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("fault", "how"), WAYS)
async def test_a_request_can_break_before_its_head(client: Client, fault: str, how: str, stream: bool) -> None:
    await client.set_faults(**{f"{fault}_next": 1})
    raw = await Raw.ask(client, stream=stream)
    assert await raw.end(how) == (b"", how)
    assert client.engine.counters.generation == 0
    assert (await client.post("/v1/completions", BODY))[0] == 200


@pytest.mark.parametrize("tokens", [0, 4, 8])
@pytest.mark.parametrize(("fault", "how"), WAYS)
async def test_a_stream_can_break_after_n_tokens_and_never_ends_cleanly(
    client: Client, fault: str, how: str, tokens: int
) -> None:
    await client.set_faults(**{f"{fault}_next": 1, f"{fault}_after_tokens": tokens})
    got, ended = await (await Raw.ask(client, stream=True)).end(how)
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (got.count(b'"text":" tok"'), ended) == (tokens, how)
    assert b"[DONE]" not in got
    assert not got.endswith(END)


async def test_a_stream_shorter_than_the_fault_is_spared(client: Client) -> None:
    await client.set_faults(cut_next=1, cut_after_tokens=9)
    assert len(await client.stream("/v1/completions", {**BODY, "max_tokens": 8})) == 8


@pytest.mark.parametrize(("fault", "how"), WAYS)
async def test_a_whole_answer_breaks_off_in_the_middle_of_its_body(client: Client, fault: str, how: str) -> None:
    await client.set_faults(**{f"{fault}_next": 1, f"{fault}_after_tokens": 1})
    got, ended = await (await Raw.ask(client, stream=False)).end(how)
    head, _, body = got.partition(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
    assert (len(body), ended) == (length // 2, how)


async def test_a_client_that_leaves_a_hanging_stream_frees_the_engine() -> None:
    async with serving(speed=1.0) as client:
        await client.set_faults(hang_next=1, hang_after_tokens=2)
        data = json.dumps({**BODY, "max_tokens": 20_000, "stream": True})
        async with client.session.post(client.url + "/v1/completions", data=data) as response:
            await response.content.readuntil(b"data: ")
        await client.until(lambda: client.engine.running == 0)
        assert client.engine.counters.finished["abort"] == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "InternalServerError"), (503, "Service Unavailable"), (429, "TooManyRequestsError")],
)
async def test_the_next_requests_are_refused_with_retry_after(client: Client, status: int, kind: str) -> None:
    await client.set_faults(error_next=2, error_status=status, retry_after_s=7)
    for _ in range(2):
        async with client.session.post(client.url + "/v1/completions", data=json.dumps(BODY)) as response:
            answer = await response.json()
            assert (response.status, response.headers["Retry-After"]) == (status, "7")
            assert (answer["error"]["type"], answer["error"]["code"]) == (kind, status)
    assert (await client.post("/v1/completions", BODY))[0] == 200


async def test_without_retry_after_the_header_is_absent(client: Client) -> None:
    await client.set_faults(error_share=1.0)
    async with client.session.post(client.url + "/v1/completions", data=json.dumps(BODY)) as response:
        assert response.status == 503
        assert "Retry-After" not in response.headers


async def gauges(client: Client) -> dict[str, float]:
    status, text = await client.get("/metrics")
    assert status == 200
    return {sample.name: sample.value for f in text_string_to_metric_families(text) for sample in f.samples}


async def test_metrics_can_be_wrong_frozen_or_without_load() -> None:
    async with serving(speed=1.0) as client:
        running = asyncio.create_task(client.post("/v1/completions", {**BODY, "max_tokens": 20_000}))
        await client.until(lambda: client.engine.running == 1)
        await client.set_faults(metrics_factor=5.0)
        assert (await gauges(client))["vllm:num_requests_running"] == 5.0
        await client.set_faults(metrics_frozen=True)
        assert (await gauges(client))["vllm:num_requests_running"] == 5.0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.until(lambda: client.engine.running == 0)
        assert (await gauges(client))["vllm:num_requests_running"] == 5.0
        await client.set_faults(metrics_frozen=False, metrics_factor=1.0)
        assert (await gauges(client))["vllm:num_requests_running"] == 0.0
        await client.set_faults(metrics_missing="load")
        assert {name for name in await gauges(client) if "num_requests_" in name} == set()


async def test_metrics_can_be_missing_or_slow_while_requests_are_served(client: Client) -> None:
    await client.set_faults(metrics_missing="page")
    assert (await client.get("/metrics"))[0] == 404
    await client.set_faults(metrics_missing="no", metrics_delay_s=60.0)
    waiting = asyncio.create_task(client.get("/metrics"))
    assert (await client.post("/v1/completions", BODY))[0] == 200
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_skewed_clock_shows_in_created_and_in_events(client: Client) -> None:
    await client.set_faults(clock_skew_s=-86400.0)
    _status, answer = await client.post("/v1/completions", BODY)
    assert answer["created"] == pytest.approx(time.time() - 86400.0, abs=60.0)
    context = zmq.asyncio.Context()
    frames = (await client.replayed(context))[0]
    context.destroy(linger=0)
    assert msgspec.msgpack.decode(frames[-1])[0] == pytest.approx(time.time() - 86400.0, abs=60.0)


async def test_usage_details_go_off_and_on_again(client: Client) -> None:
    await client.set_faults(usage_details=False)
    assert "prompt_tokens_details" not in (await client.post("/v1/completions", BODY))[1]["usage"]
    async with client.session.delete(client.url + "/sim/faults") as response:
        assert (await response.json())["faults"]["usage_details"] is True
    assert "prompt_tokens_details" in (await client.post("/v1/completions", BODY))[1]["usage"]


async def test_every_sim_answer_says_that_it_is_a_simulation(client: Client) -> None:
    for method, path in (("get", "/sim/faults"), ("delete", "/sim/faults"), ("post", "/sim/restart")):
        async with client.session.request(method, client.url + path) as response:
            answer = await response.json()
            assert (answer["simulated"], answer["replica"]) == (True, "a100-0")
            assert response.headers["x-tfirst-simulated"] == "a100-0"


async def test_faults_are_told_with_what_they_did_and_what_is_left(client: Client) -> None:
    await client.set_faults(error_next=3)
    await client.post("/v1/completions", BODY)
    await client.set_faults(clock_skew_s=1.0)
    told = json.loads((await client.get("/sim/faults"))[1])
    assert (told["faults"]["error_next"], told["faults"]["clock_skew_s"], told["struck"]) == (2, 1.0, {"error": 1})
    assert set(told["faults"]) == set(Faults.__struct_fields__)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"explode":1}', "there is no fault 'explode'"),
        (b'{"error_share":1.5}', "fault error_share is 1.5"),
        (b'{"error_share"', "truncated"),
        (b"[]", "Expected `object`"),
    ],
)
async def test_a_bad_fault_is_refused_and_changes_nothing(client: Client, body: bytes, told: str) -> None:
    status, answer = await client.post("/sim/faults", body)
    assert (status, answer["simulated"]) == (400, True)
    assert told in answer["problem"]
    assert (await client.post("/v1/completions", BODY))[0] == 200


async def test_faults_given_at_the_start_are_on_from_the_first_request() -> None:
    async with serving(faults={"a100-0": Faults(error_next=1)}) as client:
        assert [(await client.post("/v1/completions", BODY))[0] for _ in range(2)] == [503, 200]


async def test_a_restart_cuts_streams_and_comes_back_empty_with_a_new_start_time() -> None:
    async with serving(speed=1.0) as client:
        await client.post("/v1/completions", BODY)
        before = await gauges(client)
        data = json.dumps({**BODY, "max_tokens": 20_000, "stream": True})
        async with client.session.post(client.url + "/v1/completions", data=data) as response:
            await response.content.readuntil(b"data: ")
            assert (await client.post("/sim/restart", b""))[1]["restarted"] is True
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        after = await gauges(client)
        assert after["process_start_time_seconds"] > before["process_start_time_seconds"]
        assert (before["vllm:generation_tokens_total"], after["vllm:generation_tokens_total"]) == (9.0, 0.0)
        assert (client.engine.running, client.engine.waiting) == (0, 0)
        _status, again = await client.post("/v1/completions", BODY)
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def restarted(client: Client) -> dict[str, Any]:
    """What /sim/faults says once a planned restart has come; that may drop any connection."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                told: dict[str, Any] = json.loads((await client.get("/sim/faults"))[1])
            except aiohttp.ClientError:
                continue
            if told["struck"].get("restart"):
                return told


async def test_a_restart_set_as_a_fault_comes_once_and_the_replica_is_empty(client: Client) -> None:
    await client.post("/v1/completions", BODY)
    before = await gauges(client)
    with suppress(aiohttp.ClientError):  # it may come before the answer is out
        await client.post("/sim/faults", {"restart_after_s": 0.0, "error_next": 1})
    told = await restarted(client)
    assert told["struck"] == {"restart": 1}
    assert (told["faults"]["restart_after_s"], told["faults"]["error_next"]) == (None, 1)
    async with asyncio.timeout(TIMEOUT_S):
        while (await gauges(client))["process_start_time_seconds"] == before["process_start_time_seconds"]:
            pass
    assert [(await client.post("/v1/completions", BODY))[0] for _ in range(2)] == [503, 200]
    assert client.engine.counters.prefix_hits == 0


async def test_a_restart_asked_for_at_the_start_takes_the_replica_away_for_as_long_as_said() -> None:
    away = Faults(restart_after_s=0.0, restart_down_s=3600.0)
    async with serving("A100", "H20", faults={"a100-0": away}) as client:
        await restarted(client)
        async with asyncio.timeout(TIMEOUT_S):
            while await status_of(client, client.url) != 503:
                pass
        assert await status_of(client, client.cluster.fleet.replicas[1].url or "") == 200


async def status_of(client: Client, url: str) -> int:
    """Status of one completion; 0 where the connection was dropped."""
    try:
        async with client.session.post(url + "/v1/completions", data=json.dumps(BODY)) as response:
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return 0


async def subscribed(context: zmq.asyncio.Context, client: Client) -> zmq.asyncio.Socket:
    """A subscriber whose subscription has arrived: it has read one batch, of a prompt of its own."""
    reader = context.socket(zmq.SUB)
    reader.connect(client.events)
    reader.subscribe(b"")
    start = 50_000
    while not await reader.poll(20):
        start += 100
        await client.post("/v1/completions", {"prompt": prompt(32, start=start), "max_tokens": 1})
    while await reader.poll(20):
        await reader.recv_multipart()
    return reader


async def received(reader: zmq.asyncio.Socket, batches: int) -> list[int]:
    """Sequence numbers of the next batches."""
    frames = [await asyncio.wait_for(reader.recv_multipart(), TIMEOUT_S) for _ in range(batches)]
    return [int.from_bytes(seq, "big") for _topic, seq, _payload in frames]


async def announce(client: Client, times: int) -> None:
    """Make batches, one a prompt."""
    for number in range(times):
        await client.post("/v1/completions", {"prompt": prompt(32, start=1000 + 100 * number), "max_tokens": 1})


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def test_lost_batches_leave_gaps_that_a_replay_fills(client: Client, context: zmq.asyncio.Context) -> None:
    reader = await subscribed(context, client)
    await client.set_faults(event_loss_share=1.0)
    await announce(client, 3)
    await client.set_faults(event_loss_share=0.0)
    await client.post("/v1/completions", {"prompt": prompt(32, start=9000), "max_tokens": 1})
    (seq,) = await received(reader, 1)
    replayed = [int.from_bytes(frames[-2], "big") for frames in (await client.replayed(context))[:-1]]
    assert replayed == list(range(seq + 1))
    assert json.loads((await client.get("/sim/faults"))[1])["struck"]["event_loss"] == 3
    reader.close()


async def test_batches_lost_for_good_are_missing_from_replays_too(client: Client, context: zmq.asyncio.Context) -> None:
    await client.set_faults(event_loss_share=1.0, event_loss_for_good=True)
    await announce(client, 2)
    await client.set_faults(event_loss_share=0.0)
    await client.post("/v1/completions", {"prompt": prompt(32, start=9000), "max_tokens": 1})
    assert [frames[-2] for frames in (await client.replayed(context))[:-1]] == [(2).to_bytes(8, "big")]


async def test_delayed_batches_come_later_in_order_and_are_in_replays_at_once(
    client: Client, context: zmq.asyncio.Context
) -> None:
    reader = await subscribed(context, client)
    await client.set_faults(event_delay_s=0.5)
    asked_s = time.monotonic()
    await announce(client, 3)
    last = int.from_bytes((await client.replayed(context))[-2][-2], "big")
    assert await received(reader, 3) == [last - 2, last - 1, last]
    assert time.monotonic() - asked_s >= 0.45  # the loop's timers have a grain
    reader.close()


async def test_reordered_batches_are_overtaken_by_later_ones(client: Client, context: zmq.asyncio.Context) -> None:
    reader = await subscribed(context, client)
    await client.set_faults(event_reorder_share=1.0, event_reorder_s=0.4)
    await announce(client, 1)
    await client.set_faults(event_reorder_share=0.0)
    await client.post("/v1/completions", {"prompt": prompt(32, start=9000), "max_tokens": 1})
    first, second = await received(reader, 2)
    assert first == second + 1
    reader.close()


async def test_after_a_restart_sequences_start_again_and_the_past_is_not_replayed(
    client: Client, context: zmq.asyncio.Context
) -> None:
    reader = await subscribed(context, client)
    await announce(client, 2)
    await received(reader, 2)
    await client.post("/sim/restart", b"")
    await client.post("/v1/completions", {"prompt": prompt(32, start=9000), "max_tokens": 1})
    frames = (await client.replayed(context))[:-1]
    events = [event for *_frames, payload in frames for event in msgspec.msgpack.decode(payload)[1]]
    assert [frame[-2] for frame in frames] == [bytes(8)]
    assert [(event["type"], event["token_ids"]) for event in events] == [("BlockStored", prompt(32, start=9000))]
    reader.close()


async def test_restarts_that_meet_or_lose_their_caller_leave_a_replica_that_publishes(
    client: Client, context: zmq.asyncio.Context
) -> None:
    for _ in range(3):
        left = asyncio.create_task(client.post("/sim/restart", b""))
        await asyncio.sleep(0)
        both = asyncio.gather(*(client.post("/sim/restart", b"") for _ in range(2)), return_exceptions=True)
        left.cancel()
        await asyncio.gather(left, both, return_exceptions=True)
    async with asyncio.timeout(TIMEOUT_S):
        while await attempt(client):
            pass
        while not (frames := (await client.replayed(context))[:-1]):
            await client.post("/v1/completions", {"prompt": prompt(32, start=9000), "max_tokens": 1})
    assert frames[0][-2] == bytes(8)


async def attempt(client: Client) -> bool:
    """Whether a restart still failed because another one dropped its connection."""
    try:
        return (await client.post("/sim/restart", b""))[0] != 200
    except aiohttp.ClientError:
        return True


async def test_a_subscriber_comes_back_by_itself_after_a_restart(client: Client, context: zmq.asyncio.Context) -> None:
    reader = await subscribed(context, client)
    await client.post("/sim/restart", b"")
    async with asyncio.timeout(TIMEOUT_S):
        number = 0
        while not await reader.poll(20):
            number += 1
            body: dict[str, Any] = {"prompt": prompt(32, start=1000 + 100 * number), "max_tokens": 1}
            await client.post("/v1/completions", body)
    assert (await received(reader, 1))[0] < number
    reader.close()


async def test_links_get_slower_and_the_slowest_word_on_the_shared_one_holds() -> None:
    async with serving("A100", "H20") as client:
        links = client.cluster.world.links
        store, first, second = (link.rate_bytes_per_s for link in links)
        await client.set_faults(store_link_factor=0.5, host_link_factor=0.1)
        other = client.cluster.fleet.replicas[1].url or ""
        async with client.session.post(other + "/sim/faults", data=b'{"store_link_factor":0.25}') as response:
            assert response.status == 200
        assert [link.rate_bytes_per_s for link in links] == [store * 0.25, first * 0.1, second]
        for url in (client.url, other):
            async with client.session.delete(url + "/sim/faults") as response:
                assert response.status == 200
        assert [link.rate_bytes_per_s for link in links] == [store, first, second]


async def test_steps_get_slower_and_are_well_again_once_the_fault_is_off() -> None:
    async with serving("A100") as client:
        await client.set_faults(step_factor=1e5)
        asked = asyncio.ensure_future(client.post("/v1/completions", BODY))
        await client.until(lambda: client.engine.running)
        assert client.engine.due_s - time.monotonic() > 5.0  # a step of such a prompt takes a millisecond
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
        await client.post("/sim/restart", {})
        async with client.session.delete(client.url + "/sim/faults") as response:
            assert response.status == 200
        status, _ = await client.post("/v1/completions", BODY)
        assert status == 200
