"""The doctor before simulated replicas of every generation, over real sockets, faults included."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from router.doctor.judge import Level
from router.signals.subscriber import Source
from sim_backends.generations import GENERATIONS
from sim_backends.tokenizer import encode
from tests.router.doctor.servers import about, only, problems, report_on
from tests.sim_backends.serving import Client, serving

VOCAB = 151_936  # of the model the simulator plays
NAMES_NO_SOURCE = ["vllm-0.9", "vllm-0.12", "vllm-0.17", "vllm-0.23", "vllm-0.24", "sglang-0.5.6", "sglang-0.5.9"]
NAMES_ITS_SOURCE = ["vllm-0.33", "sglang-0.5.18", "sglang-0.5.23"]


def given(client: Client) -> Source:
    return Source(client.events, client.replay)


@pytest.mark.parametrize("name", NAMES_ITS_SOURCE)
async def test_a_release_that_names_its_source_works_as_it_is(name: str) -> None:
    async with serving(generation=GENERATIONS[name]) as client:
        report = await report_on(client.url, use_probe=True)
    assert report.works, report.findings
    assert report.facts.version == GENERATIONS[name].release
    assert report.facts.engine == GENERATIONS[name].engine
    assert report.facts.models == ("Qwen/Qwen3-8B",)
    assert report.facts.block_tokens == 16
    assert report.facts.capacity_tokens == client.engine.settings.kv_blocks * 16
    assert only(report, "probe").level is Level.FINE


@pytest.mark.parametrize("name", NAMES_NO_SOURCE)
async def test_an_older_release_is_told_the_flag_and_works_once_its_address_is_given(name: str) -> None:
    async with serving(generation=GENERATIONS[name]) as client:
        alone = await report_on(client.url)
        helped = await report_on(client.url, given(client), use_probe=True)
    assert problems(alone) == ["cache events"]
    finding = only(alone, "cache events")
    assert "cannot say where" in finding.sentence
    assert "--kv-events-config '{" in (finding.fix or "")
    assert helped.works, helped.findings
    assert only(helped, "replay").level is Level.FINE


async def test_the_flag_is_each_engines_own() -> None:
    for name, wanted in (("vllm-0.33", '"enable_kv_cache_events":true'), ("sglang-0.5.23", "--page-size")):
        async with serving(generation=GENERATIONS[name], use_events=False) as client:
            finding = only(await report_on(client.url), "cache events")
        assert finding.level is Level.PROBLEM
        assert finding.sentence == "They are switched off."
        assert wanted in (finding.fix or "")


async def test_without_a_probe_a_silent_source_is_a_note_and_costs_no_request() -> None:
    async with serving(generation=GENERATIONS["vllm-0.33"]) as client:
        report = await report_on(client.url)
        assert client.engine.counters.prompt == 0
    assert report.works
    assert "--probe" in (only(report, "cache events").fix or "")


@pytest.mark.parametrize(("block_tokens", "works"), [(16, True), (4, True), (64, True), (24, False)])
async def test_the_probe_is_judged_by_the_routers_blocks(block_tokens: int, works: bool) -> None:
    async with serving() as client:
        report = await report_on(client.url, use_probe=True, block_tokens=block_tokens, wait_s=5.0 if works else 0.3)
    assert report.works is works, report.findings
    assert ("blocks" in problems(report)) is not works
    assert report.facts.probe is not None
    assert (report.facts.probe.seen_blocks == report.facts.probe.blocks) is works


async def test_events_that_never_arrive_are_found_by_the_probe() -> None:
    async with serving() as client:
        await client.set_faults(event_loss_share=1.0, event_loss_for_good=True)
        report = await report_on(client.url, use_probe=True, wait_s=0.3)
    assert problems(report) == ["probe"]
    assert "Its prefix cache works" in only(report, "probe").sentence


async def test_late_events_are_waited_for() -> None:
    async with serving() as client:
        await client.set_faults(event_delay_s=0.2)
        report = await report_on(client.url, use_probe=True)
    assert report.works


async def test_a_probe_is_new_to_the_cache_each_time() -> None:
    async with serving() as client:
        for _ in range(2):
            assert (await report_on(client.url, use_probe=True)).works


async def test_cached_tokens_left_out_of_usage_name_the_flag() -> None:
    async with serving(prompt_tokens_details=False) as client:
        report = await report_on(client.url, use_probe=True)
    finding = only(report, "usage")
    assert (finding.level, finding.fix) == (Level.NOTE, "--enable-prompt-tokens-details")
    assert report.works


async def test_figures_that_stand_still_are_noticed() -> None:
    async with serving() as client:
        await client.set_faults(metrics_frozen=True)
        report = await report_on(client.url, use_probe=True)
    assert any("did not move" in finding.sentence for finding in about(report, "load"))


async def test_a_page_without_load_and_no_page_at_all_are_told_apart() -> None:
    async with serving() as client:
        await client.set_faults(metrics_missing="load")
        without = await report_on(client.url)
        await client.set_faults(metrics_missing="page")
        absent = await report_on(client.url)
    assert "no figures of load" in only(without, "load").sentence
    assert "--disable-log-stats" in (only(without, "load").fix or "")
    assert "/metrics answered 404" in only(absent, "load").sentence
    assert only(absent, "blocks").level is Level.NOTE


async def test_the_metric_names_are_those_of_the_page() -> None:
    async with serving(generation=GENERATIONS["vllm-0.9"]) as client:
        report = await report_on(client.url)
    assert "vllm:gpu_cache_usage_perc" in only(report, "load").sentence
    async with serving(generation=GENERATIONS["sglang-0.5.23"]) as client:
        report = await report_on(client.url)
    assert "/v1/loads" in about(report, "load")[0].sentence


async def test_an_address_where_nobody_publishes_is_a_problem() -> None:
    async with serving(use_events=False) as client:
        port = urlsplit(client.url).port  # an HTTP server is no publisher
        report = await report_on(client.url, Source(f"tcp://127.0.0.1:{port}"), wait_s=0.3)
    assert problems(report) == ["cache events"]
    assert "Nothing accepts subscribers" in only(report, "cache events").sentence


async def test_a_local_tokenizer_is_compared_with_the_engines() -> None:
    async with serving() as client:
        right = await report_on(client.url, encode=lambda text: encode(text, vocab=VOCAB))
        wrong = await report_on(client.url, encode=lambda text: [1, *encode(text, vocab=VOCAB)])
        none = await report_on(client.url)
    assert only(right, "tokenizer").level is Level.FINE
    assert "agrees" in only(right, "tokenizer").sentence
    assert "token 0 differs" in only(wrong, "tokenizer").sentence
    assert "tokenizer" in problems(wrong)
    assert only(none, "tokenizer").level is Level.FINE


def test_every_generation_is_covered() -> None:
    assert {*NAMES_NO_SOURCE, *NAMES_ITS_SOURCE} == set(GENERATIONS)
