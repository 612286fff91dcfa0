"""An engine's tokenizer over real sockets, answering well, badly and not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.identity import chain
from router.tokenizing import engine as engine_module
from router.tokenizing.asked import Asked, Form, NoTokens, Tokenised, Unread, Wanted
from router.tokenizing.engine import LONGEST_TRIAL_BYTES, EngineTokens, Way
from router.tokenizing.messages import Engine
from router.tokenizing.worker import Load
from router.tokenizing.workers import LARGE_BYTES, Workers

WANTED = Wanted(root=7, block_tokens=4)
IDS = list(range(100, 140))
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class T:
    """The tokenizer service: notes what it is asked, and answers as it is told."""

    answering: Answering
    asked: list[tuple[str, Any, str | None]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, await request.json(), request.headers.get("authorization")))
        return await self.answering(request)


def says(reply: Any, status: int = 200) -> Answering:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(reply, status=status)

    return answer


TOKENS = says({"count": len(IDS), "max_model_len": 4096, "tokens": IDS})


@asynccontextmanager
async def a_service(answering: Answering) -> AsyncIterator[tuple[T, str]]:
    service = T(answering)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{tail:.*}", service.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield service, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(
    url: str | None,
    *,
    way: Way = "tokenize",
    engine: Engine = "vllm",
    key: str = "",
    timeout_s: float = 20.0,
    clock: Clock | None = None,
    most_waiting: int = 8,
) -> AsyncIterator[EngineTokens]:
    workers = Workers(Load(), timeout_s=timeout_s, most_waiting=8)
    headers = {"authorization": key} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield EngineTokens(
            session,
            lambda model: url,
            workers,
            way=way,
            engine=engine,
            has_key=bool(key),
            clock=clock or Clock(),
            most_waiting=most_waiting,
        )
    await workers.stop()


def chat(messages: Any = MESSAGES, tools: Any = None, form: Form = Form.CHAT, **options: Any) -> Asked:
    raw = b"" if tools is None else json.dumps(tools).encode()
    return Asked(form, "base", "alias", messages=json.dumps(messages).encode(), tools=raw, options=options)


def text(prompt: Any, **options: Any) -> Asked:
    return Asked(Form.TEXT, "base", "alias", prompt=json.dumps(prompt).encode(), options=options)


async def why(engine: EngineTokens, asked: Asked | None = None, wanted: Wanted = WANTED) -> Unread:
    with pytest.raises(NoTokens) as caught:
        await engine.tokens_of(asked or chat(), b"{}", wanted)
    return caught.value.why


async def test_the_engines_tokens_become_blocks() -> None:
    async with a_service(TOKENS) as (_, url), asking(url) as engine:
        assert await engine.tokens_of(chat(), b"{}", WANTED) == Tokenised(40, chain(7, IDS[:-1], 4))
        assert engine.up


@pytest.mark.parametrize(
    ("asked", "question"),
    [
        (text("x"), {"prompt": "x"}),
        (text("x", add_special_tokens=False), {"prompt": "x", "add_special_tokens": False}),
        (chat(), {"messages": MESSAGES}),
        (chat(tools=TOOLS, form=Form.TOOLS, tool_choice="none"), {"messages": MESSAGES, "tools": TOOLS}),
        (
            chat(chat_template_kwargs={"a": 1}, reasoning_effort="low", add_generation_prompt=False),
            {
                "messages": MESSAGES,
                "chat_template_kwargs": {"a": 1, "reasoning_effort": "low"},
                "add_generation_prompt": False,
            },
        ),
        (chat("hi", form=Form.RESPONSES), {"messages": MESSAGES}),
        (chat(form=Form.MESSAGES), {"messages": MESSAGES}),
    ],
)
async def test_each_form_is_asked_for_in_the_engines_terms(asked: Asked, question: dict[str, Any]) -> None:
    async with a_service(TOKENS) as (service, url), asking(url) as engine:
        await engine.tokens_of(asked, b"{}", WANTED)
    assert service.asked == [("/tokenize", {"model": "alias", **question}, None)]


async def test_a_request_that_names_no_model_is_asked_for_without_one() -> None:
    async with a_service(TOKENS) as (service, url), asking(url) as engine:
        await engine.tokens_of(Asked(Form.TEXT, "base", "", prompt=b'"x"'), b"{}", WANTED)
    assert service.asked == [("/tokenize", {"prompt": "x"}, None)]


async def test_sglang_is_not_shown_tools_it_would_leave_out() -> None:
    async with a_service(TOKENS) as (service, url), asking(url, engine="sglang") as engine:
        await engine.tokens_of(chat(tools=TOOLS, form=Form.TOOLS, tool_choice="none"), b"{}", WANTED)
        assert "tools" not in service.asked[0][1]
        named = {"type": "function", "function": {"name": "f"}}
        assert await why(engine, chat(tools=TOOLS, form=Form.TOOLS, tool_choice=named)) is Unread.FORM


async def test_several_texts_are_as_many_questions_and_too_many_none() -> None:
    async with a_service(TOKENS) as (service, url), asking(url) as engine:
        made = await engine.tokens_of(text(["one", "two"]), b"{}", WANTED)
        assert (made.tokens, made.prompts) == (80, 2)
        assert sorted(question["prompt"] for _, question, _ in service.asked) == ["one", "two"]
        assert await why(engine, text(["x"] * 9)) is Unread.FORM


@pytest.mark.parametrize(
    ("form", "path", "reply"),
    [
        (Form.TEXT, "/v1/completions/render", [{"token_ids": IDS, "features": None}]),
        (Form.CHAT, "/v1/chat/completions/render", {"token_ids": IDS}),
        (Form.RESPONSES, "/v1/responses/render", {"token_ids": IDS}),
        (Form.MESSAGES, "/v1/messages/render", {"token_ids": IDS}),
    ],
)
async def test_a_renderer_gets_the_clients_own_body(form: Form, path: str, reply: Any) -> None:
    async with a_service(says(reply)) as (service, url), asking(url, way="render") as engine:
        made = await engine.tokens_of(Asked(form, "base", "alias"), b'{"anything":1}', WANTED)
    assert made.blocks == chain(7, IDS[:-1], 4)
    assert service.asked == [(path, {"anything": 1}, None)]


async def test_a_rendered_prompt_with_media_has_no_tokens_of_its_own() -> None:
    reply = {"token_ids": IDS, "features": {"mm_hashes": {"image": ["abc"]}}}
    async with a_service(says(reply)) as (_, url), asking(url, way="render") as engine:
        assert await why(engine) is Unread.MEDIA
        assert engine.up


async def test_a_long_answer_is_read_by_another_process() -> None:
    ids = list(range(60_000))
    reply = {"count": len(ids), "tokens": ids}
    assert len(json.dumps(reply)) > LARGE_BYTES
    async with a_service(says(reply)) as (_, url), asking(url) as engine:
        assert (await engine.tokens_of(chat(), b"{}", WANTED)).blocks == chain(7, ids[:-1], 4)


@pytest.mark.parametrize(("key", "sent"), [("", "Bearer client"), ("Bearer router", "Bearer router")])
async def test_a_clients_key_is_passed_on_where_the_router_has_none(key: str, sent: str) -> None:
    wanted = Wanted(root=7, block_tokens=4, authorization="Bearer client")
    async with a_service(TOKENS) as (service, url), asking(url, key=key) as engine:
        await engine.tokens_of(chat(), b"{}", wanted)
    assert service.asked[0][2] == sent


async def test_clients_without_a_key_do_not_cut_off_those_with_one() -> None:
    async def guarded(request: web.Request) -> web.StreamResponse:
        allowed = request.headers.get("authorization") == "Bearer right"
        return await (TOKENS if allowed else says({"error": "no"}, 401))(request)

    right = Wanted(root=7, block_tokens=4, authorization="Bearer right")
    async with a_service(guarded) as (_, url), asking(url) as engine:
        assert {await why(engine) for _ in range(10)} == {Unread.UNAUTHORISED}
        assert engine.up
        assert (await engine.tokens_of(chat(), b"{}", right)).tokens == 40


@pytest.mark.parametrize(
    ("answering", "reason"),
    [
        (says({"error": "x"}, 500), Unread.FAILED),
        (says({"error": "x"}, 503), Unread.UNAVAILABLE),
        (says({"detail": "Not Found"}, 404), Unread.UNAVAILABLE),
        (says({"tokens": None}), Unread.UNAVAILABLE),
        (says({"tokens": ["a"]}), Unread.UNAVAILABLE),
        (says({"tokens": [-5, 1]}), Unread.UNAVAILABLE),
        (says([1, 2]), Unread.UNAVAILABLE),
        (says({"error": "too long"}, 400), Unread.FORM),
    ],
)
async def test_a_useless_answer_is_no_tokens(answering: Answering, reason: Unread) -> None:
    async with a_service(answering) as (_, url), asking(url) as engine:
        assert await why(engine) is reason


async def test_a_service_that_fails_is_left_alone_named_once_and_used_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.tokenizing.engine")
    clock = Clock()
    async with a_service(says({}, 503)) as (service, url), asking(url, clock=clock) as engine:
        reasons = [await why(engine) for _ in range(100)]
        assert set(reasons) == {Unread.UNAVAILABLE}
        assert len(service.asked) == 3
        assert not engine.up
        service.answering = TOKENS
        assert await why(engine) is Unread.UNAVAILABLE, "it rests"
        clock.now_s = 60.0
        assert (await engine.tokens_of(chat(), b"{}", WANTED)).tokens == 40
        assert engine.up
    said = [(record.levelname, record.message) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert "does not answer" in said[0][1]


async def test_a_service_that_hangs_costs_three_requests_their_time_and_the_others_nothing() -> None:
    async def hangs(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with a_service(hangs) as (service, url), asking(url, timeout_s=0.01) as engine:
        reasons = [await why(engine) for _ in range(20)]
    assert reasons == [Unread.LATE] * 3 + [Unread.UNAVAILABLE] * 17
    assert len(service.asked) <= 3


ODD, SLOW = "odd", "slow"  # prompts of a client that means ill, or is just unlucky
LONG = Wanted(root=7, block_tokens=4, size_bytes=LONGEST_TRIAL_BYTES + 1)


async def some_fail(request: web.Request) -> web.StreamResponse:
    """Fails at one prompt, never answers another, and tokenises the rest."""
    prompt = (await request.json()).get("prompt")
    if prompt == SLOW:
        await asyncio.Event().wait()
    return await (says({"error": "x"}, 500) if prompt == ODD else TOKENS)(request)


async def test_a_prompt_the_engine_fails_at_costs_nobody_else_the_tokenizer() -> None:
    async with a_service(some_fail) as (_, url), asking(url) as engine:
        assert [await why(engine, text(ODD)) for _ in range(10)] == [Unread.FAILED] * 10
        assert engine.up
        assert (await engine.tokens_of(text("x"), b"{}", WANTED)).tokens == 40


async def test_a_long_prompt_that_is_late_costs_nobody_else_the_tokenizer() -> None:
    async with a_service(some_fail) as (_, url), asking(url, timeout_s=0.01) as engine:
        assert [await why(engine, text(SLOW), LONG) for _ in range(5)] == [Unread.LATE] * 5
        assert engine.up


async def test_late_prompts_cost_nobody_else_the_tokenizer_while_it_answers_them() -> None:
    async with a_service(some_fail) as (_, url), asking(url, timeout_s=0.2) as engine:
        late = [asyncio.ensure_future(why(engine, text(SLOW))) for _ in range(5)]
        await asyncio.sleep(0)
        assert (await engine.tokens_of(text("x"), b"{}", WANTED)).tokens == 40
        assert await asyncio.gather(*late) == [Unread.LATE] * 5
        assert engine.up


async def test_a_long_prompt_is_never_the_trial_others_wait_for() -> None:
    clock = Clock()
    async with a_service(says({}, 503)) as (service, url), asking(url, clock=clock) as engine:
        assert [await why(engine) for _ in range(3)] == [Unread.UNAVAILABLE] * 3
        service.answering = some_fail
        clock.now_s = 60.0
        assert await why(engine, text(SLOW), LONG) is Unread.UNAVAILABLE
        assert len(service.asked) == 3
        assert (await engine.tokens_of(text("x"), b"{}", WANTED)).tokens == 40


@pytest.mark.parametrize(
    "asked",
    [
        chat(chat_template_kwargs={"a": "\ud83d"}),
        Asked(Form.TEXT, "base", "\ud83d", prompt=b'"x"'),
        Asked(Form.MESSAGES, "base", "alias", messages=rb'[{"role":"user","content":"\ud83d"}]', system=b'"s"'),
        Asked(Form.TEXT, "base", "alias", prompt=b'["x",5]'),
        Asked(Form.TEXT, "base", "alias", prompt=b'{"x":"y"}'),
        Asked(Form.TEXT, "base", "alias", prompt=b"[]"),
    ],
)
async def test_what_cannot_be_asked_about_is_a_form_and_asks_nobody(asked: Asked) -> None:
    async with a_service(TOKENS) as (service, url), asking(url) as engine:
        assert await why(engine, asked) is Unread.FORM
        assert (service.asked, engine.up, engine.waiting) == ([], True, 0)


async def test_a_text_is_asked_about_as_the_client_wrote_it() -> None:
    """Not decoded and written anew: half a surrogate pair is the engine's to judge, and a long text takes no time."""
    seen: list[bytes] = []

    async def note(request: web.Request) -> web.StreamResponse:
        seen.append(await request.read())
        return await TOKENS(request)

    async with a_service(note) as (_, url), asking(url) as engine:
        await engine.tokens_of(Asked(Form.TEXT, "base", "", prompt=rb'"\ud83d \/ \u0041"'), b"{}", WANTED)
    assert seen == [rb'{"prompt":"\ud83d \/ \u0041"}']


async def test_an_answer_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def goes_on(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"1," * 4096)
        return response

    monkeypatch.setattr(engine_module, "LONGEST_ANSWER_BYTES", 1 << 20)
    async with a_service(goes_on) as (_, url), asking(url) as engine:
        assert await why(engine) is Unread.UNAVAILABLE


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:1", "http://no-such-host.invalid:1"])
async def test_nobody_to_ask_is_no_tokens(url: str | None) -> None:
    async with asking(url) as engine:
        assert await why(engine) is Unread.UNAVAILABLE


async def test_more_questions_than_may_wait_are_not_asked() -> None:
    async def hangs(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with a_service(hangs) as (_, url), asking(url, most_waiting=1) as engine:
        first = asyncio.ensure_future(engine.tokens_of(chat(), b"{}", WANTED))
        await asyncio.sleep(0)
        assert await why(engine) is Unread.BUSY
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert engine.waiting == 0
