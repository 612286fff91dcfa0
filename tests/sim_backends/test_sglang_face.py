"""What a router reads from an SGLang server, over real sockets and from the text itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from sim_backends import sglang_text
from sim_backends.engine import Engine
from sim_backends.generations import GENERATIONS
from sim_backends.metrics_text import About, Load
from tests.sim_backends.builders import VECTORS, a_request, an_engine, prompt, run_out, vector
from tests.sim_backends.serving import Client, serving

NEWEST = GENERATIONS["sglang-0.5.23"]
ABOUT = About("m", NEWEST, started_s=1767225600.5, memory_share=0.9)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving(generation=NEWEST) as made:
        yield made


def series(text: str) -> dict[str, set[frozenset[str]]]:
    """Names of labels by name of series."""
    found: dict[str, set[frozenset[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).add(frozenset(sample.labels))
    return found


def values(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_every_metric_is_one_that_sglang_has_with_the_labels_that_it_has() -> None:
    recorded = series((VECTORS / "metrics_sglang_0.5.23.txt").read_text())
    ours = series(sglang_text.metrics(an_engine(), ABOUT, Load(1.0, 2.0, 0.5)))
    del ours["process_start_time_seconds"]
    # A simulated replica does not tell streams apart.
    recorded = {name: {labels - {"is_streaming"} for labels in sets} for name, sets in recorded.items()}
    assert set(ours) <= set(recorded)
    assert all(sets <= recorded[name] for name, sets in ours.items())


def test_metrics_tell_load_capacity_and_hits() -> None:
    engine = an_engine(kv_blocks=100)
    for at_s in (0.0, 5.0):
        engine.submit(a_request(prompt(100), output=4), at_s)
        run_out(engine)
    page = values(sglang_text.metrics(engine, ABOUT, Load(7.0, 3.0, 0.44)))
    wanted = {
        "num_running_reqs": 7.0,
        "num_queue_reqs": 3.0,
        "token_usage": 0.44,
        "num_used_tokens": 704.0,
        "max_total_num_tokens": 1600.0,
        "page_size": 16.0,
        "num_pages": 100.0,
        "cache_hit_rate": 0.48,
        "prompt_tokens_total": 200.0,
    }
    assert {name: page[f"sglang:{name}"] for name in wanted} == wanted
    assert page["process_start_time_seconds"] == 1767225600.5


def test_metrics_without_load_leave_only_load_out() -> None:
    engine = an_engine()
    with_load, without = (set(values(sglang_text.metrics(engine, ABOUT, load))) for load in (Load(1, 1, 0.5), None))
    gone = {name.removeprefix("sglang:") for name in with_load - without}
    assert gone == {"num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens", "kv_used_tokens"}


def test_older_releases_do_not_tell_page_figures() -> None:
    about = About("m", GENERATIONS["sglang-0.5.9"], started_s=0.0, memory_share=0.9)
    page = values(sglang_text.metrics(an_engine(), about, Load(1.0, 1.0, 0.5)))
    assert "sglang:max_total_num_tokens" in page
    assert not {"sglang:page_size", "sglang:num_pages", "sglang:context_len", "sglang:kv_used_tokens"} & set(page)


def an_answer(engine: Engine) -> dict[str, Any]:
    return sglang_text.loads(engine, ABOUT, Load(2.0, 1.0, 0.5), now_s=1767225610.5)


def test_loads_have_the_recorded_fields_and_types() -> None:
    recorded = vector("sglang_v1_loads.json")
    ours = an_answer(an_engine(kv_blocks=100))
    assert set(ours) == set(recorded)
    (row,), (recorded_row,) = ours["loads"], recorded["loads"]
    assert set(row) <= set(recorded_row)
    assert {name: type(value) for name, value in row.items()} == {name: type(recorded_row[name]) for name in row}
    assert (row["num_running_reqs"], row["num_waiting_reqs"], row["num_used_tokens"]) == (2, 1, 800)


def test_throughput_is_the_mean_since_the_start() -> None:
    engine = an_engine()
    engine.submit(a_request(output=16), 0.0)
    run_out(engine)
    assert an_answer(engine)["loads"][0]["gen_throughput"] == 1.6


def test_the_older_load_answer_counts_running_and_waiting_together() -> None:
    (recorded,) = vector("sglang_get_load_legacy.json")
    (row,) = sglang_text.legacy_loads(an_engine(kv_blocks=100), Load(7.0, 3.0, 0.5))
    assert set(row) == set(recorded)
    assert (row["num_reqs"], row["num_waiting_reqs"], row["num_tokens"]) == (10, 3, 800)


async def test_server_info_leads_to_the_event_and_replay_sockets(client: Client) -> None:
    info = json.loads((await client.get("/server_info"))[1])["kv_events"]
    recorded = vector("sglang_server_info_kv_events.json")["kv_events"]
    assert set(info) == set(recorded) - {"load_endpoint_port_base", "load_topic"}  # no load socket here
    host = info["endpoint_host"]
    assert f"tcp://{host}:{info['endpoint_port_base']}" == client.events
    assert f"tcp://{host}:{info['replay_endpoint_port_base']}" == client.replay
    assert (info["publisher"], info["block_size"], info["dp_size"]) == ("zmq", 16, 1)


async def test_server_info_has_no_sources_without_events_or_in_old_releases() -> None:
    async with serving(generation=NEWEST, use_events=False, use_store=False) as client:
        assert json.loads((await client.get("/server_info"))[1])["kv_events"] is None
    async with serving(generation=GENERATIONS["sglang-0.5.9"]) as client:
        assert "kv_events" not in json.loads((await client.get("/server_info"))[1])


async def test_errors_are_flat_and_the_503_is_the_recorded_one(client: Client) -> None:
    status, answer = await client.post("/v1/completions", {"model": "nope", "prompt": "x"})
    assert (status, answer["object"], answer["code"]) == (404, "error", 404)
    await client.set_faults(error_next=1)
    assert await client.post("/v1/completions", {"prompt": "x"}) == (503, vector("http_error_sglang.json"))


async def test_an_answer_has_the_id_of_its_body_and_not_of_its_header(client: Client) -> None:
    _status, answer = await client.post("/v1/completions", {"prompt": "x", "rid": "abc"}, **{"x-request-id": "other"})
    assert (answer["id"], answer["usage"]["reasoning_tokens"]) == ("abc", 0)
    assert json.loads((await client.get("/v1/models"))[1])["data"][0]["owned_by"] == "sglang"


async def test_load_faults_reach_the_loads_answer(client: Client) -> None:
    await client.set_faults(metrics_missing="page")
    assert (await client.get("/v1/loads"))[0] == 404
    await client.set_faults(metrics_missing="load")
    assert "num_running_reqs" not in json.loads((await client.get("/v1/loads"))[1])["loads"][0]


async def test_a_flush_is_announced_with_the_next_step(client: Client) -> None:
    body = {"prompt": prompt(32), "max_tokens": 1}
    await client.post("/v1/completions", body)
    assert (await client.post("/flush_cache", b""))[0] == 200
    await client.post("/v1/completions", body)
    assert await kinds(client) == ["AllBlocksCleared", "BlockStored", "AllBlocksCleared", "BlockStored"]


async def test_a_restart_in_the_middle_of_a_stream_begins_again_from_cleared() -> None:
    async with serving(speed=1.0, generation=NEWEST) as client:
        body = {"prompt": prompt(64), "max_tokens": 20_000, "ignore_eos": True}
        running = asyncio.create_task(client.post("/v1/completions", body))
        await client.until(lambda: client.engine.running == 1)
        await client.post("/sim/restart", b"")
        await asyncio.gather(running, return_exceptions=True)
        await client.post("/v1/completions", {"prompt": prompt(64), "max_tokens": 1})
        assert await kinds(client) == ["AllBlocksCleared", "BlockStored"]


async def kinds(client: Client) -> list[str]:
    """Types of all events published by this process of the replica."""
    context = zmq.asyncio.Context()
    frames = await client.replayed(context)
    context.destroy(linger=0)
    return [event["type"] for *_head, payload in frames[:-1] for event in msgspec.msgpack.decode(payload)[1]]
