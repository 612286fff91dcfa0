"""What recorded pages and answers say of a server."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.doctor.ask import Reply
from router.doctor.examine import Server, facts_of, named_sources
from router.doctor.judge import Level, findings_of
from router.doctor.pages import (
    cached_tokens_in,
    counters_moved,
    engine_of,
    load_names,
    page_size_in,
    prefix_caching,
    said_addresses,
    version_in,
)
from router.doctor.probe import probe_prompt
from router.doctor.tokenizing import first_difference
from router.signals.load import Load
from router.signals.subscriber import Source
from tests.router.doctor.servers import MODELS, SGLANG_MODELS
from tests.router.signals.events import VECTORS

ROUTES = ("/health", "/version", "/metrics", "/kv_event_sources", "/server_info", "/v1/loads", "/get_load")
WORDS = """data id parent owned_by version 0 1 endpoint publisher kv_events page_size endpoint_port_base dp_size loads
dp_rank num_running_reqs token_usage block_size"""
NAMES = st.sampled_from(WORDS.split())
ABSENT = Reply(404, trouble="answered 404")


def page(name: str) -> str:
    return (VECTORS / f"{name}.txt").read_text()


def recorded(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text())


def replies(**answers: Any) -> dict[str, Reply]:
    """Every route, absent unless named (with `_` for `/`); text as it is, else JSON."""
    given = {
        "/" + name.replace("__", "/"): Reply(200, (said if isinstance(said, str) else json.dumps(said)).encode())
        for name, said in answers.items()
    }
    return {**dict.fromkeys(ROUTES, ABSENT), **given}


SERVER = Server(url="http://10.0.0.5:8000")


def test_the_recorded_page_of_vllm_names_what_the_router_reads() -> None:
    assert load_names(page("metrics_vllm_0.33.0")) == (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    )
    assert "vllm:gpu_cache_usage_perc" in load_names(page("metrics_vllm_0.9.2_legacy"))
    assert load_names(page("metrics_sglang_0.5.23"))[0] == "sglang:num_running_reqs"
    assert load_names("# nothing\n") == ()
    assert load_names('vllm:num_requests_running{engine="0"} 1') == ("vllm:num_requests_running",)


def test_the_recorded_pages_give_whole_facts() -> None:
    facts = facts_of(SERVER, MODELS, replies(metrics=page("metrics_vllm_0.33.0"), version={"version": "0.33.0"}))
    assert (facts.engine, facts.version, facts.block_tokens, facts.caching) == ("vllm", "0.33.0", 16, True)
    assert facts.blocks == 2 * 27_521  # two ranks on the page
    assert facts.capacity_tokens == 16 * 2 * 27_521


def test_sglangs_answers_give_whole_facts() -> None:
    info = recorded("sglang_server_info_kv_events")
    loads = recorded("sglang_v1_loads")
    facts = facts_of(SERVER, SGLANG_MODELS, replies(server_info=info, v1__loads=loads))
    assert (facts.engine, facts.version) == ("sglang", "0.5.23")
    assert (facts.block_tokens, facts.block_tokens_from) == (16, "/server_info")
    assert facts.load.names == ("/v1/loads",)
    assert facts.load.total.running == 7
    assert facts.load.sockets == 2


def test_sources_are_those_the_engine_names_unless_they_are_off() -> None:
    said = recorded("vllm_kv_event_sources")
    sources, route = named_sources(SERVER.url, replies(kv_event_sources=said))
    assert route == "/kv_event_sources"
    assert sources[1] == Source("tcp://10.0.0.5:5558", "tcp://10.0.0.5:5568", rank=1)
    off = {rank: {**entry, "enable_kv_cache_events": False} for rank, entry in said.items()}
    assert named_sources(SERVER.url, replies(kv_event_sources=off)) == ((), None)
    facts = facts_of(SERVER, MODELS, replies(kv_event_sources=off))
    assert facts.switched_off


@pytest.mark.parametrize(
    ("answers", "off"),
    [
        ({"kv_event_sources": {}}, True),
        ({"server_info": {"kv_events": None}}, True),
        ({"server_info": {"model_path": "m1"}}, False),
        ({}, False),
    ],
)
def test_no_answer_about_events_is_not_the_answer_that_there_are_none(answers: dict[str, Any], off: bool) -> None:
    assert facts_of(SERVER, MODELS, replies(**answers)).switched_off is off


def test_the_engine_is_known_by_its_models_its_metrics_or_its_routes() -> None:
    no_owner: dict[str, Any] = {"data": [{"id": "m1"}]}
    assert engine_of(SGLANG_MODELS, "", has_version=True, has_server_info=False) == "sglang"
    assert engine_of(no_owner, "vllm:x 1\n", has_version=False, has_server_info=True) == "vllm"
    assert engine_of(no_owner, "", has_version=True, has_server_info=False) == "vllm"
    assert engine_of(no_owner, "", has_version=False, has_server_info=True) == "sglang"
    assert engine_of(no_owner, "my_vllm:x 1\n", has_version=False, has_server_info=False) is None


def test_prefix_caching_is_read_off_the_cache_config() -> None:
    text = page("metrics_vllm_0.33.0")
    assert prefix_caching(text) is True
    assert prefix_caching(text.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')) is False
    assert prefix_caching("") is None


def test_small_readers_take_only_what_is_there() -> None:
    assert version_in(None, {"version": ""}, {"version": "1.2.3"}) == "1.2.3"
    assert page_size_in({"page_size": 1, "kv_events": {"block_size": 64}}) == 64
    assert page_size_in({"page_size": True}) is None
    assert cached_tokens_in({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}) == 0
    assert cached_tokens_in({"usage": {"prompt_tokens_details": None}}) is None


def test_counters_that_nobody_has_prove_nothing() -> None:
    assert counters_moved(Load(prefix_queries=1), Load(prefix_queries=2)) is True
    assert counters_moved(Load(prefix_queries=1), Load(prefix_queries=1)) is False
    assert counters_moved(Load(), Load(prefix_queries=1)) is None


def test_figures_out_of_range_are_a_note() -> None:
    lines = page("metrics_vllm_0.33.0").splitlines()
    for place, line in enumerate(lines):
        if line.startswith("vllm:kv_cache_usage_perc{"):
            lines[place] = line.rpartition(" ")[0] + " 3.0"
    facts = facts_of(SERVER, MODELS, replies(metrics="\n".join(lines) + "\n"))
    notes = [finding for finding in findings_of(facts) if finding.about == "load" and finding.level is Level.NOTE]
    assert "out of range" in notes[0].sentence


@pytest.mark.parametrize("block_tokens", [1, 16, 64, 256])
def test_a_probe_has_two_whole_blocks_or_more_and_one_token_that_is_always_computed(block_tokens: int) -> None:
    prompt = probe_prompt(random.Random(1), block_tokens)
    assert (len(prompt) - 1) % block_tokens == 0
    assert len(prompt) - 1 >= max(32, 2 * block_tokens)
    assert prompt != probe_prompt(random.Random(2), block_tokens)


def test_the_first_difference_counts_a_missing_token() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


THINGS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(THINGS, st.fixed_dictionaries({}, optional=dict.fromkeys(ROUTES, THINGS)))
def test_whatever_a_server_answers_gives_findings(models: Any, answers: dict[str, Any]) -> None:
    said = {**replies(), **{route: Reply(200, json.dumps(answer).encode()) for route, answer in answers.items()}}
    facts = facts_of(SERVER, models, said)
    assert findings_of(facts)
    assert said_addresses(said["/kv_event_sources"].json()) is not None
    assert facts.block_tokens is None or 0 < facts.block_tokens <= 1 << 16


@pytest.mark.parametrize("owner", [["vllm"], {"a": 1}, 5, None])
def test_an_owner_that_is_no_text_is_nobody(owner: object) -> None:
    assert engine_of({"data": [{"id": "m", "owned_by": owner}]}, "", has_version=False, has_server_info=False) is None


def test_cached_tokens_below_zero_are_not_told() -> None:
    assert cached_tokens_in({"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}) is None


def test_a_block_no_engine_has_is_no_size_to_probe_with() -> None:
    assert page_size_in({"page_size": 10**9}) is None
    huge = 'vllm:cache_config_info{block_size="1000000000",num_gpu_blocks="10"} 1\n'
    assert facts_of(SERVER, MODELS, replies(metrics=huge)).block_tokens is None
