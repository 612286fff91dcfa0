"""A configuration's way of reading prompts, against an engine on a real socket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from estimators.request import RequestFacts
from router.actions import Ended
from router.config import PromptConfig
from router.errors import ConfigError
from router.prompts import PromptReader
from router.prompts import production as module
from router.prompts.production import Prompts
from router.tokenizing.asked import Asked, Form
from router.tokenizing.local import LocalTokenizer
from tests.router.prompts.test_reading import CHAT, COMPLETIONS, TEXT, FakeHead
from tests.router.tokenizing.small import CHATML, a_directory

Clock = Callable[[], float]


@asynccontextmanager
async def an_engine(folder: Path, **settings: Any) -> AsyncIterator[str]:
    """An engine whose /tokenize follows the tokenizer in a directory of its own."""
    tokenizer = LocalTokenizer(a_directory(folder, **settings), engine="vllm", defaults={}, limit_bytes=0)

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        raw: dict[str, Any] = {
            key: json.dumps(body[key]).encode() for key in ("prompt", "messages", "tools") if key in body
        }
        form = Form.TEXT if "prompt" in raw else Form.TOOLS if "tools" in raw else Form.CHAT
        ids = tokenizer.prompts_of(Asked(form, "m", "m", **raw))[0].tolist()
        return web.json_response({"count": len(ids), "max_model_len": 4096, "tokens": ids})

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def prompts(
    url: str | None = None, registry: CollectorRegistry | None = None, clock: Clock = lambda: 0.0, **settings: Any
) -> AsyncIterator[Prompts]:
    config = PromptConfig(timeout_s=30.0, **settings)
    async with aiohttp.ClientSession() as session:
        made = Prompts(
            config,
            PromptReader(16),
            session,
            url_of=lambda model: url,
            has_key=False,
            clock=clock,
            registry=registry or CollectorRegistry(),
        )
        try:
            await made.start()
            yield made
        finally:
            await made.stop()


async def facts(made: Prompts, body: dict[str, Any], head: FakeHead | None = None) -> RequestFacts:
    found = made.read(head or FakeHead(), json.dumps(body).encode())
    found = await found if isinstance(found, asyncio.Task) else found
    assert isinstance(found, RequestFacts)
    return found


async def compared(made: Prompts, url: str) -> dict[str, str]:
    """States after a replica came up."""
    assert made._check is not None
    await made._check.compare("r1", url, "m", "m")
    return dict(made.report().as_values()["tokens"].get("m", {}))


async def test_a_local_tokenizer_and_the_engine_agree_on_the_same_prompts(tmp_path: Path) -> None:
    directory = str(a_directory(tmp_path / "router"))
    async with (
        an_engine(tmp_path / "engine") as url,
        prompts(source="local", tokenizer=directory) as ours,
        prompts(url, source="tokenize") as theirs,
    ):
        assert await compared(ours, url) == {"text": "agrees", "chat": "agrees", "tools": "agrees"}
        for body, head in ((CHAT, None), (TEXT, COMPLETIONS), ({**CHAT, "messages": CHAT["messages"] * 40}, None)):
            one, other = await facts(ours, body, head), await facts(theirs, body, head)
            assert (one.chain, one.prompt_tokens) == (other.chain, other.prompt_tokens)
            assert one.prompt_exact
            assert other.prompt_exact


async def test_another_template_is_found_out_at_start_and_only_its_form_loses_credit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.prompts.checking")
    without_tools = CHATML.replace("# Tools", "# Other tools")
    directory = str(a_directory(tmp_path / "router", template=without_tools))
    tool = {"type": "function", "function": {"name": "f"}}
    with_tools = {**CHAT, "messages": [{"role": "user", "content": "the quick brown fox " * 40}], "tools": [tool]}
    async with an_engine(tmp_path / "engine") as url, prompts(source="local", tokenizer=directory) as made:
        assert (await facts(made, with_tools)).chain
        assert await compared(made, url) == {"text": "agrees", "chat": "agrees", "tools": "disagrees"}
        refused = await facts(made, with_tools)
        assert (refused.chain, refused.prompt_exact) == ([], False)
        assert (await facts(made, {**with_tools, "tools": None})).chain
        for _ in range(3):  # it comes up again and again
            await compared(made, url)
        assert made.report().as_values()["differing"] == {"r1": ["tools"]}
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert "r1 makes other tokens of the same prompts (tools)" in warned[0]


async def test_a_replica_that_differs_in_all_is_one_warning_and_one_more_when_it_differs_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = str(a_directory(tmp_path / "router", template="{{ messages[0].content }}"))
    settings = {"tokenizer_class": "LlamaTokenizerFast"}  # adds a beginning
    async with (
        an_engine(tmp_path / "wrong", **settings) as wrong,
        an_engine(tmp_path / "right", template="{{ messages[0].content }}") as right,
        prompts(source="local", tokenizer=directory) as made,
    ):
        assert set((await compared(made, wrong)).values()) == {"disagrees"}
        assert made.report().as_values()["differing"] == {"r1": ["text", "chat", "tools"]}
        assert set((await compared(made, right)).values()) == {"agrees"}
        assert made.report().as_values()["differing"] == {}
        await compared(made, wrong)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


async def test_an_engine_that_cannot_be_asked_leaves_the_question_open(tmp_path: Path) -> None:
    directory = str(a_directory(tmp_path))
    async with prompts(source="local", tokenizer=directory) as made:
        assert await compared(made, "http://127.0.0.1:1") == {}
        assert (await facts(made, {**CHAT, "messages": CHAT["messages"] * 40})).chain


async def test_answers_that_contradict_end_the_credit_warn_once_and_show(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.prompts.production")
    registry = CollectorRegistry()
    long = {**CHAT, "messages": CHAT["messages"] * 40}
    async with prompts(source="local", tokenizer=str(a_directory(tmp_path)), registry=registry) as made:
        request = await facts(made, long)
        assert request.chain
        for _ in range(8):
            made.answered(request, Ended(200, prompt_tokens=request.prompt_tokens + 1), 0.0)
        assert (await facts(made, long)).chain == []
        shown = generate_latest(registry).decode()
        assert 'tfirst_prompt_tokens_state{form="chat",state="disagrees"} 1.0' in shown
        assert 'tfirst_prompts_total{read="disagrees"} 1.0' in shown
        assert made.report().as_values()["tokens"] == {"m": {"chat": "disagrees"}}
        for _ in range(8):
            made.answered(request, Ended(200, prompt_tokens=request.prompt_tokens), 0.0)
        assert (await facts(made, long)).chain == request.chain
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.parametrize(
    "ended", [Ended(400, prompt_tokens=1), Ended(200, prompt_tokens=1, stream_error=True), Ended(200)]
)
async def test_answers_that_are_errors_or_say_nothing_prove_nothing(tmp_path: Path, ended: Ended) -> None:
    async with prompts(source="local", tokenizer=str(a_directory(tmp_path))) as made:
        request = await facts(made, CHAT)
        for _ in range(20):
            made.answered(request, ended, 0.0)
            made.answered(RequestFacts("r", "m"), Ended(200, prompt_tokens=1), 0.0)
        assert set(made.report().as_values()["tokens"].get("m", {}).values()) <= {"unknown"}


async def test_what_is_missing_is_one_sentence_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.tokenizer: .* has no tokenizer\.json"):
        async with prompts(source="local", tokenizer=str(tmp_path)):
            pass
    with pytest.raises(ConfigError, match=r"name the model's directory in prompts\.tokenizer"):
        async with prompts(source="local"):
            pass
    monkeypatch.setattr(module, "missing_packages", lambda: ["tokenizers", "jinja2"])
    with pytest.raises(ConfigError, match=r"needs tokenizers and jinja2: pip install 'tfirst\[tokenizers\]'"):
        async with prompts(source="local", tokenizer=str(a_directory(tmp_path))):
            pass


async def test_a_tokenizer_service_that_fails_shows_and_clears(tmp_path: Path) -> None:
    registry, now_s = CollectorRegistry(), [0.0]
    asked = {"url": "http://127.0.0.1:1"}

    async with (
        an_engine(tmp_path) as url,
        prompts(registry=registry, source="tokenize", clock=lambda: now_s[0]) as made,
    ):
        assert made._engine is not None
        made._engine._url_of = lambda model: asked["url"]
        served = [await facts(made, CHAT) for _ in range(100)]
        assert all(not request.prompt_exact for request in served)
        assert "tfirst_prompt_source_up 0.0" in generate_latest(registry).decode()
        assert made.report().as_values()["read"] == {"unavailable": 100}
        asked["url"] = url
        now_s[0] = 60.0
        assert (await facts(made, CHAT)).prompt_exact
        assert "tfirst_prompt_source_up 1.0" in generate_latest(registry).decode()
