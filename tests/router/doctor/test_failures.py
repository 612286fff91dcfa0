"""A server that cannot be examined: one clear sentence for each way in which that happens."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.cli.doctor import examine_all
from router.doctor.examine import Plan, Server
from router.doctor.judge import Level
from tests.router.doctor.servers import MODELS, a_server, about, only, problems, raw_bytes, report_on

TLS = Path(__file__).parents[1] / "http" / "tls"


async def sentence_about(url: str, **options: Any) -> str:
    report = await report_on(url, **options)
    assert not report.works
    assert len(report.findings) == 1, "a server nobody can ask gets one sentence, not ten"
    sentence = only(report, "server").sentence
    assert not sentence[0].islower()
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert "Error" not in sentence, "no name of an exception"
    return sentence


async def test_a_refused_connection_says_that_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert await sentence_about(f"http://127.0.0.1:{port}") == (
        f"Nothing listens at 127.0.0.1:{port} (connection refused)."
    )


async def test_a_server_that_hangs_is_told_from_one_that_is_not_there() -> None:
    async with raw_bytes(None) as url:
        assert "gave no answer within 0.2 s: the server hangs" in await sentence_about(url, timeout_s=0.2)


async def test_https_to_a_plain_server_advises_http() -> None:
    async with a_server({"/v1/models": MODELS}) as url:
        assert "does not speak TLS: try http://" in await sentence_about(url.replace("http://", "https://"))


@asynccontextmanager
async def a_tls_server() -> AsyncIterator[str]:
    """Its host and port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    server = TestServer(web.Application(), scheme="https")
    await server.start_server(ssl=context)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.close()


async def test_http_to_a_tls_server_advises_https() -> None:
    async with a_tls_server() as at:
        assert "use https://" in await sentence_about(f"http://{at}")


async def test_a_certificate_nobody_signed_is_named_as_such() -> None:
    async with a_tls_server() as at:
        assert "certificate is not trusted: self" in await sentence_about(f"https://{at}")


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x15\x03\x01\x00\x02\x02\x50"])
async def test_what_is_no_http_is_named_as_such(answer: bytes) -> None:
    async with raw_bytes(answer) as url:
        assert "does not answer in HTTP" in await sentence_about(url)


async def test_a_connection_closed_without_an_answer_is_named_as_such() -> None:
    async with raw_bytes(b"") as url:
        assert "closed the connection without an answer" in await sentence_about(url)


async def test_half_an_answer_is_named_as_such() -> None:
    async with raw_bytes(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{") as url:
        assert "broke off in the middle of its answer" in await sentence_about(url)


@pytest.mark.parametrize("page", ["<!doctype html><title>Welcome</title>", "  <html></html>"])
async def test_an_html_page_is_another_program(page: str) -> None:
    async with a_server({"/v1/models": page}) as url:
        assert "answered with an HTML page: another program" in await sentence_about(url)


async def test_text_that_is_not_json_is_another_program() -> None:
    async with a_server({"/v1/models": "hello"}) as url:
        assert "not JSON: another program" in await sentence_about(url)


async def test_a_server_without_the_route_says_which_one() -> None:
    async with a_server({}) as url:
        assert await sentence_about(url) == "/v1/models answered 404."


async def test_an_engines_own_words_are_passed_on() -> None:
    async def starting(request: web.Request) -> web.Response:
        return web.json_response({"object": "error", "message": "still\nloading"}, status=503)

    async with a_server({"/v1/models": starting}) as url:
        assert await sentence_about(url) == "/v1/models answered 503 (still loading)."


async def test_a_wanted_key_names_the_flag_and_a_wrong_one_is_told_from_a_missing_one() -> None:
    async with a_server({"/v1/models": MODELS}, key="right") as url:
        without, wrong, right = [await report_on(url, key=key) for key in (None, "wrong", "right")]
    assert "wants a key" in only(without, "server").sentence
    assert "--api-key-env" in (only(without, "server").fix or "")
    assert "refuses the key" in only(wrong, "server").sentence
    assert only(right, "model").level is Level.FINE


async def test_an_unhealthy_engine_that_still_names_its_model_is_a_problem() -> None:
    async def dead(request: web.Request) -> web.Response:
        return web.Response(status=503)

    async with a_server({"/v1/models": MODELS, "/health": dead}) as url:
        report = await report_on(url)
    assert "/health answered 503" in only(report, "health").sentence
    assert "health" in problems(report)


@pytest.mark.parametrize("answer", [[], {}, {"data": None}, {"data": [{"id": 7}]}, 3, "x"])
async def test_answers_of_any_shape_are_examined_without_a_crash(answer: object) -> None:
    routes = ("/version", "/metrics", "/kv_event_sources", "/server_info", "/v1/loads", "/get_load", "/tokenize")
    async with a_server({"/v1/models": MODELS, **dict.fromkeys(routes, answer), "/v1/completions": answer}) as url:
        report = await report_on(url, use_probe=True)
    assert not report.works
    assert len(about(report, "cache events")) == 1


def says_blocks_of(tokens: int) -> dict[str, Any]:
    page = f'vllm:cache_config_info{{block_size="{tokens}",num_gpu_blocks="100"}} 1.0\nvllm:num_requests_running 0.0\n'
    return {"/v1/models": MODELS, "/metrics": page, "/health": {}, "/version": {"version": "0.33.0"}}


async def test_servers_of_sizes_that_do_not_fit_are_judged_by_the_one_the_router_takes() -> None:
    async with a_server(says_blocks_of(16)) as first, a_server(says_blocks_of(24)) as second:
        for configured, sizes_wrong in ((None, [False, True]), (8, [False, False])):
            servers = [Server(url=url, block_tokens=configured) for url in (first, second)]
            reports = await examine_all(servers, Plan(wait_s=0.1), timeout_s=5.0, key=None, rng=random.Random(7))
            assert [report.facts.block_tokens for report in reports] == [16, 24]
            assert ["blocks" in problems(report) for report in reports] == sizes_wrong
