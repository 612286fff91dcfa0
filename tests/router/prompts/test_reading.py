"""How each request's prompt is read: what is done at once, what beside the loop, and what when that fails."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from estimators.request import RequestFacts
from router.actions import Refuse
from router.http.contract import Rewritten
from router.identity import Identity, chain
from router.prompts import PromptReader
from router.prompts.agreement import Agreement
from router.prompts.reading import PromptReading, Read, Told
from router.tokenizing.asked import Asked, Form, NoTokens, Tokenised, TokenSource, Unread, Wanted, tokenised
from router.tokenizing.worker import Load
from router.tokenizing.workers import LARGE_BYTES, Workers

IDS = list(range(1, 101))
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
BLOCKS = chain(Identity("m").root(), IDS[:-1], 16)


@dataclass
class FakeHead:
    path: str = "/v1/chat/completions"
    method: bytes = b"POST"
    fields: dict[bytes, bytes] = field(default_factory=dict)
    client: str = ""

    def get(self, name: bytes) -> bytes | None:
        return self.fields.get(name)


COMPLETIONS = FakeHead("/v1/completions")


@dataclass
class Source:
    """Makes `IDS` of everything, or fails as it is told."""

    fails: NoTokens | None = None
    asked: list[tuple[Asked, Wanted]] = field(default_factory=list)

    async def tokens_of(self, asked: Asked, body: bytes, wanted: Wanted) -> Tokenised:
        self.asked.append((asked, wanted))
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return tokenised([IDS], wanted)


@asynccontextmanager
async def reading(
    source: TokenSource | None = None,
    *,
    chunks: bool = False,
    agreement: Agreement | None = None,
    forwards: bool = False,
    told: Told | None = None,
) -> AsyncIterator[PromptReading]:
    workers = Workers(Load(), timeout_s=60.0, most_waiting=64)
    made = PromptReading(
        PromptReader(16, chunks=chunks),
        workers,
        source=source,
        agreement=agreement or Agreement(),
        clock=lambda: 0.0,
        forwards=forwards,
        told=told,
    )
    try:
        yield made
    finally:
        await made.stop()
        await workers.stop()


async def read(made: PromptReading, body: Any, head: FakeHead | None = None) -> Read:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = made.read(head or FakeHead(), data)
    return await found if isinstance(found, asyncio.Task) else found


async def facts(made: PromptReading, body: Any, head: FakeHead | None = None) -> RequestFacts:
    found = await read(made, body, head)
    assert isinstance(found, RequestFacts), found
    return found


async def test_token_ids_in_a_small_body_are_read_at_once_and_ask_nobody() -> None:
    source = Source()
    async with reading(source) as made:
        found = made.read(COMPLETIONS, json.dumps({"model": "m", "prompt": IDS}).encode())
        assert isinstance(found, RequestFacts)
        assert (found.chain, found.tokenised) == (BLOCKS, "")
        assert made.under_way == 0
    assert source.asked == []
    assert made.counts == {"ids": 1}


@pytest.mark.parametrize(
    ("head", "body", "form"),
    [
        (COMPLETIONS, TEXT, Form.TEXT),
        (FakeHead(), CHAT, Form.CHAT),
        (FakeHead(), {**CHAT, "tools": [{}]}, Form.TOOLS),
        (FakeHead("/v1/responses"), {"model": "m", "input": "hi"}, Form.RESPONSES),
        (FakeHead("/v1/messages"), CHAT, Form.MESSAGES),
        (FakeHead("/generate"), {"model": "m", "text": "hi"}, Form.TEXT),
    ],
)
async def test_text_of_every_api_is_credited_by_its_tokens(head: FakeHead, body: dict[str, Any], form: Form) -> None:
    source = Source()
    async with reading(source) as made:
        found = await facts(made, body, head)
    assert (found.chain, found.prompt_tokens, found.prompt_exact) == (BLOCKS, 100, True)
    assert (found.tokenised, found.prompt_characters) == (form.value, 0)
    assert source.asked[0][0].form is form
    assert made.counts == {"tokenised": 1}


@pytest.mark.parametrize("changed", [{"temperature": 0.1}, {"seed": 5}, {"top_p": 0.5}, {"stream": True}])
async def test_sampling_parameters_are_no_part_of_what_is_tokenised(changed: dict[str, Any]) -> None:
    source = Source()
    async with reading(source) as made:
        plain, sampled = await facts(made, CHAT), await facts(made, {**CHAT, **changed})
    assert plain.chain == sampled.chain
    (one, wanted), (other, other_wanted) = source.asked
    assert (one, wanted.root) == (other, other_wanted.root)


async def test_tools_reach_the_tokenizer_and_so_do_the_clients_credentials() -> None:
    source = Source()
    async with reading(source) as made:
        await facts(made, {**CHAT, "tools": [{"a": 1}]}, FakeHead(fields={b"authorization": b"Bearer x"}))
    asked, wanted = source.asked[0]
    assert (asked.tools, wanted.authorization) == (b'[{"a": 1}]', "Bearer x")


@pytest.mark.parametrize("why", [Unread.LATE, Unread.UNAVAILABLE, Unread.BUSY, Unread.MEDIA])
async def test_a_prompt_without_tokens_is_placed_by_its_length_and_counted_by_its_reason(why: Unread) -> None:
    async with reading(Source(NoTokens(why))) as made:
        found = await facts(made, {"model": "m", "prompt": "x" * 400}, COMPLETIONS)
    assert (found.chain, found.prompt_tokens, found.prompt_exact, found.tokenised) == ([], 100, False, "")
    assert made.counts == {why.value: 1}


async def test_a_tokenizer_that_fails_as_nobody_foresaw_costs_the_tokens_and_not_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with reading(Source(RuntimeError("unforeseen"))) as made:  # type: ignore[arg-type]
        found = await facts(made, {"model": "m", "prompt": "x" * 400}, COMPLETIONS)
    assert (found.prompt_tokens, made.counts) == (100, {"failed": 1})
    assert "unforeseen" in caplog.text


@pytest.mark.parametrize("key", ["model", "cache_salt", "extra_key", "session_id", "previous_response_id", "user"])
@pytest.mark.parametrize("prompt", [IDS, "hi"], ids=["ids", "text"])
async def test_half_a_surrogate_pair_in_any_name_is_placed_and_can_be_written_down(key: str, prompt: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, key: "a\ud83d"}).encode()
    async with reading(Source()) as made:
        found = await facts(made, body, COMPLETIONS)
    assert found.prompt_tokens == 100
    assert msgspec.json.encode([found.model, found.base_model, found.session])
    if key in ("cache_salt", "extra_key", "model"):
        assert found.chain != BLOCKS, "another salt, another cache"


async def test_what_the_router_cannot_know_is_not_asked_for() -> None:
    source = Source()
    async with reading(source) as made:
        await facts(made, {**CHAT, "chat_template": "{{ x }}"})
    assert source.asked == []
    assert made.counts == {"own_template": 1}


async def test_a_cause_is_logged_once_however_often_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.prompts")
    async with reading(Source(NoTokens(Unread.UNAUTHORISED))) as made:
        for _ in range(50):
            await facts(made, CHAT)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_without_a_tokenizer_text_has_blocks_of_text_or_none() -> None:
    body = {"model": "m", "prompt": "x" * 4000}
    async with reading(chunks=True) as made:
        found = await facts(made, body, COMPLETIONS)
        assert found.chain_of_text
        assert found.chain
        assert made.counts == {"chunks": 1}
    async with reading() as made:
        assert (await facts(made, body, COMPLETIONS)).chain == []
        assert made.counts == {"length": 1}


async def test_tokens_the_engine_disagrees_with_are_a_length_and_no_blocks() -> None:
    agreement = Agreement()
    agreement.checked("m", Form.CHAT, "r1", False)
    async with reading(Source(), agreement=agreement) as made:
        chat, text = await facts(made, CHAT), await facts(made, TEXT, COMPLETIONS)
    assert (chat.chain, chat.prompt_tokens, chat.prompt_exact) == ([], 100, False)
    assert chat.tokenised == "chat", "answers go on being compared"
    assert text.chain == BLOCKS
    assert made.counts == {"disagrees": 1, "tokenised": 1}


# Large bodies


def large(**fields: Any) -> bytes:
    body = json.dumps({"padding": "x" * LARGE_BYTES, **fields}).encode()
    assert len(body) > LARGE_BYTES
    return body


async def test_a_large_list_of_ids_is_read_elsewhere_and_gives_the_same_blocks() -> None:
    ids = list(range(60_000))
    async with reading() as made:
        found = await facts(made, large(model="m", prompt=ids, stream=True, max_tokens=7), COMPLETIONS)
        several = await facts(made, large(model="m", prompt=[IDS, [1, 2]]), COMPLETIONS)
    assert found.chain == chain(Identity("m").root(), ids[:-1], 16)
    assert (found.prompt_tokens, found.prompt_exact, found.streams, found.max_tokens) == (60_000, True, True, 7)
    assert (several.chain, several.prompt_tokens) == (BLOCKS, 102)
    assert made.counts == {"ids": 2}


async def test_a_large_text_is_tokenised_or_measured_without_its_images() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * LARGE_BYTES}}
    content = [{"type": "text", "text": "x" * 400}, image]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    async with reading(Source()) as made:
        assert (await facts(made, body)).chain == BLOCKS
    async with reading(Source(NoTokens(Unread.MEDIA))) as made:
        found = await facts(made, body)
        assert (found.prompt_tokens, found.prompt_characters, found.prompt_exact) == (100, 0, False)
        assert made.counts == {"media": 1}


async def test_a_body_over_the_limit_is_placed_by_length_and_counted() -> None:
    source = Source()
    ids, text = [10_000 + 7 * n % 90_000 for n in range(700_000)], "x" * 5_000_000
    async with reading(source, chunks=True) as made:
        by_ids = await facts(made, {"model": "m", "prompt": ids, "max_tokens": 3}, COMPLETIONS)
        by_text = await facts(made, {"model": "m", "prompt": text, "session_id": "s"}, COMPLETIONS)
    assert by_ids.prompt_tokens == pytest.approx(700_000, rel=0.01)
    assert by_text.prompt_tokens == 131_072
    for found in (by_ids, by_text):
        assert (found.model, found.chain, found.prompt_exact) == ("m", [], False)
    assert (by_ids.max_tokens, by_text.session) == (3, "s")
    assert source.asked == []
    assert made.counts == {"too_large": 2}


async def test_others_get_the_loop_while_a_large_body_is_scanned() -> None:
    turns = 0
    async with reading() as made:
        task = made.read(COMPLETIONS, json.dumps({"model": "m", "prompt": list(range(700_000))}).encode())
        assert isinstance(task, asyncio.Task)
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
    assert turns > 50


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chat_template_kwargs", {"a": [1] * 40_000}),
        ("session_id", "s" * 70_000),
        ("cache_salt", "s" * 70_000),
        ("model", "m" * 70_000),
        ("tool_choice", {"function": {"name": "f" * 70_000}}),
        ("echo", [True] * 20_000),
    ],
)
@pytest.mark.parametrize("prompt", [IDS, "x" * 4000], ids=["ids", "text"])
async def test_a_large_body_with_an_odd_field_is_placed_by_length_and_counted(
    key: str, value: Any, prompt: Any
) -> None:
    source = Source()
    async with reading(source, agreement=agreeing(), forwards=True, chunks=True) as made:
        found = await facts(made, large(**{"model": "m", "prompt": prompt, "max_tokens": 3, key: value}), COMPLETIONS)
    assert (found.chain, found.prompt_exact, found.max_tokens) == ([], False, 3)
    assert found.prompt_tokens > 50
    assert source.asked == []
    assert made.counts == {"too_large": 1}


async def test_of_ids_deep_in_a_body_over_the_limit_nothing_is_looked_at() -> None:
    parameters = {"prompt_token_ids": [100_000] * 700_000}
    async with reading() as made:
        found = await facts(made, {"model": "m", "prompt": "x" * 400, "kv_transfer_params": parameters}, COMPLETIONS)
    assert (found.prompt_tokens, made.counts) == (100, {"too_large": 1})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'["' + b"x" * LARGE_BYTES + b'"]', None),
        (large(model=5), "model"),
        (large(model="m", prompt=[-1, 1]), "prompt"),
    ],
    ids=["no object", "model", "ids"],
)
async def test_a_large_body_is_refused_for_the_same_reasons_as_a_small_one(body: bytes, param: str | None) -> None:
    async with reading() as made:
        refusal = await read(made, body, COMPLETIONS)
    assert isinstance(refusal, Refuse)
    assert (refusal.status, refusal.param) == (400, param)


async def test_a_large_request_without_a_prefill_needs_only_its_model() -> None:
    async with reading() as made:
        named = await facts(made, large(model="m"), FakeHead("/v1/embeddings"))
        other = await facts(made, b"\0" * (LARGE_BYTES + 1), FakeHead("/v1/audio/transcriptions"))
    assert (named.model, named.generates) == ("m", False)
    assert (other.model, other.generates) == ("", False)


async def test_a_read_nobody_waits_for_ends() -> None:
    class Never:
        async def tokens_of(self, asked: Asked, body: bytes, wanted: Wanted) -> Tokenised:
            await asyncio.Event().wait()
            raise AssertionError("never")

    async with reading(Never()) as made:
        task = made.read(FakeHead(), json.dumps(CHAT).encode())
        assert isinstance(task, asyncio.Task)
        await asyncio.sleep(0)
        assert made.under_way == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert made.under_way == 0


# Forwarding


def agreeing() -> Agreement:
    agreement = Agreement()
    for form in Form:
        agreement.checked("m", form, "r1", True)
    return agreement


async def test_text_of_a_completion_goes_on_as_ids_and_not_a_byte_else_changes() -> None:
    body = b'{ "user":"\\"prompt\\":", "prompt" : "hi" ,"x":1E-1, "model":"m"}'
    async with reading(Source(), agreement=agreeing(), forwards=True) as made:
        found = await read(made, body, COMPLETIONS)
    assert isinstance(found, Rewritten)
    written = json.dumps(IDS, separators=(",", ":")).encode()
    assert found.body == b'{ "user":"\\"prompt\\":", "prompt" : ' + written + b' ,"x":1E-1, "model":"m"}'
    assert found.facts.chain == BLOCKS


async def test_others_get_the_loop_while_ids_are_put_in_place_of_a_text_full_of_escapes() -> None:
    """The body is cut up in slices, a small one too; the ids come as the bytes they go on as."""
    for quotes, is_large in ((120_000, False), (600_000, True)):
        body = b'{"model":"m","prompt":"' + b'\\"' * quotes + b'"}'
        assert (len(body) > LARGE_BYTES) is is_large
        turns = 0
        async with reading(Source(), agreement=agreeing(), forwards=True) as made:
            task = made.read(COMPLETIONS, body)
            assert isinstance(task, asyncio.Task)
            while not task.done():
                turns += 1
                await asyncio.sleep(0)
        found = task.result()
        assert isinstance(found, Rewritten)
        assert found.body == b'{"model":"m","prompt":' + json.dumps(IDS, separators=(",", ":")).encode() + b"}"
        assert turns >= len(body) // (128 * 1024)


async def test_of_equal_keys_the_one_the_engine_reads_is_replaced() -> None:
    body = b'{"prompt":"first","model":"m","prompt":"hi"}'
    source = Source()
    async with reading(source, agreement=agreeing(), forwards=True) as made:
        found = await read(made, body, COMPLETIONS)
    assert isinstance(found, Rewritten)
    assert source.asked[0][0].prompt == b'"hi"'
    assert found.body.startswith(b'{"prompt":"first","model":"m","prompt":[1,')


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
async def test_json_in_an_encoding_only_python_knows_is_read_and_goes_on_as_it_is_or_right(encoding: str) -> None:
    body = json.dumps(TEXT).encode(encoding)
    async with reading(Source(), agreement=agreeing(), forwards=True) as made:
        found = await read(made, body, COMPLETIONS)
    assert isinstance(found, RequestFacts | Rewritten)
    if isinstance(found, Rewritten):
        assert json.loads(found.body) == {**TEXT, "prompt": IDS}


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (COMPLETIONS, {**TEXT, "echo": True}),
        (COMPLETIONS, {"model": "m", "prompt": ["hi"]}),
        (FakeHead("/generate"), {"model": "m", "text": "hi"}),
        (FakeHead(), CHAT),
    ],
)
async def test_nothing_else_is_rewritten(head: FakeHead, body: dict[str, Any]) -> None:
    async with reading(Source(), agreement=agreeing(), forwards=True) as made:
        assert isinstance(await read(made, body, head), RequestFacts)


async def test_ids_go_on_only_when_the_engine_is_known_to_agree_and_when_asked_for() -> None:
    async with reading(Source(), forwards=True) as made:
        assert isinstance(await read(made, TEXT, COMPLETIONS), RequestFacts)
    async with reading(Source(), agreement=agreeing()) as made:
        assert isinstance(await read(made, TEXT, COMPLETIONS), RequestFacts)


# Tokens handed on


async def test_the_tokens_of_every_prompt_that_are_known_are_told_with_its_facts_and_salt() -> None:
    told: list[tuple[RequestFacts, Any, str]] = []

    def note(facts: RequestFacts, ids: bytes | memoryview, salt: str) -> None:
        told.append((facts, json.loads(bytes(ids)), salt))

    async with reading(Source(), told=note) as made:
        found = [
            await facts(made, {"model": "m", "prompt": IDS, "cache_salt": "s"}, COMPLETIONS),
            await facts(made, CHAT),
            await facts(made, large(model="m", prompt="hi"), COMPLETIONS),
            await facts(made, large(model="m", prompt=IDS), COMPLETIONS),
            await facts(made, {"model": "m", "prompt": [IDS, [1]]}, COMPLETIONS),
        ]
    assert [entry[0] for entry in told] == found
    assert [entry[1:] for entry in told] == [(IDS, "s"), *[(IDS, "")] * 3, ([IDS, [1]], "")]


async def test_nothing_is_told_of_a_prompt_whose_tokens_are_unknown_or_refused_and_a_text_is_not_rewritten() -> None:
    told: list[RequestFacts] = []
    async with reading(Source(NoTokens(Unread.LATE)), told=lambda facts, ids, salt: told.append(facts)) as made:
        await facts(made, CHAT)
        await read(made, {"model": "m", "prompt": [-1, 1]}, COMPLETIONS)
    async with reading(Source(), agreement=agreeing(), told=lambda facts, ids, salt: None) as made:
        assert isinstance(await read(made, TEXT, COMPLETIONS), RequestFacts)
    assert told == []


async def test_a_small_body_that_goes_on_as_ids_waits_for_no_scan_of_large_ones() -> None:
    brackets = 2 * LARGE_BYTES
    large = b'{"model":"m","messages":' + b"[" * brackets + b"]" * brackets + b"}"
    async with reading(Source(), agreement=agreeing(), forwards=True) as made:
        others = [made.read(FakeHead(), large) for _ in range(4)]
        await asyncio.sleep(0)  # all of them scan
        assert isinstance(await read(made, TEXT, COMPLETIONS), Rewritten)
        assert not any(other.done() for other in others if isinstance(other, asyncio.Task))
        assert all(isinstance(other, asyncio.Task) for other in others)
