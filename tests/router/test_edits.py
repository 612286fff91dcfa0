from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from estimators.request import RequestFacts
from router.actions import Refuse
from router.edits import BodyEdits
from router.http.contract import Read, Rewritten
from router.http.head import RequestHead
from router.routes import classify

STREAM = {"model": "fast", "stream": True, "prompt": "hi"}


class Inner:
    """Reads bodies as told, and keeps them. kind : how it answers."""

    def __init__(self, kind: str = "facts") -> None:
        self.bodies: list[bytes] = []
        self._kind = kind

    def __call__(self, head: RequestHead, body: bytes) -> Read | asyncio.Future[Read]:
        self.bodies.append(body)
        facts = RequestFacts("q", json.loads(body).get("model", ""))
        answers: dict[str, Read] = {
            "facts": facts,
            "refuse": Refuse(400, "BadRequestError", "No."),
            "rewritten": Rewritten(RequestFacts("q", "m", edited=("prompt",)), body + b" "),
        }
        if self._kind == "never":
            return asyncio.get_running_loop().create_future()
        if self._kind == "later":
            later: asyncio.Future[Read] = asyncio.get_running_loop().create_future()
            later.set_result(facts)
            return later
        return answers[self._kind]


def a_head(path: str = "/v1/completions", method: bytes = b"POST") -> RequestHead:
    return RequestHead(method, path.encode(), path, [], classify(method, path))


def an_editor(inner: Inner, *, asks_usage: bool = True) -> BodyEdits:
    return BodyEdits(inner, aliases={"fast": "org/model-8b"}, asks_usage=asks_usage)


async def read(editor: BodyEdits, body: Any, head: RequestHead | None = None) -> Read:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = editor.read(head or a_head(), data)
    return await found if isinstance(found, asyncio.Future) else found


@pytest.mark.parametrize("kind", ["facts", "later"])
async def test_what_reads_the_prompt_sees_the_body_the_replica_gets(kind: str) -> None:
    inner = Inner(kind)
    found = await read(an_editor(inner), STREAM)
    assert isinstance(found, Rewritten)
    assert (found.body, found.facts.model) == (inner.bodies[0], "org/model-8b")
    assert (set(found.facts.edited), found.swallows_usage) == ({"model", "stream_options"}, True)


async def test_a_body_that_needs_no_edit_is_the_clients_own() -> None:
    inner, body = Inner(), b'{ "model" : "other" }'
    found = await read(an_editor(inner), body)
    assert isinstance(found, RequestFacts)
    assert inner.bodies[0] is body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_is_asked_for_where_the_option_exists(path: str) -> None:
    found = await read(an_editor(Inner()), {"stream": True}, a_head(path))
    assert isinstance(found, Rewritten)
    assert found.facts.edited == ("stream_options",)


@pytest.mark.parametrize("path", ["/generate", "/v1/messages", "/v1/responses", "/v1/embeddings"])
async def test_elsewhere_names_change_and_nothing_else(path: str) -> None:
    found = await read(an_editor(Inner()), STREAM, a_head(path))
    assert isinstance(found, Rewritten)
    assert (found.facts.edited, found.swallows_usage) == (("model",), False)


async def test_clients_that_ask_for_usage_get_it() -> None:
    asking = {"stream": True, "stream_options": {"include_usage": True}}
    assert isinstance(await read(an_editor(Inner()), asking), RequestFacts)


async def test_edits_of_the_prompt_reader_are_told_too_and_its_body_goes_on() -> None:
    inner = Inner("rewritten")
    found = await read(an_editor(inner, asks_usage=False), STREAM)
    assert isinstance(found, Rewritten)
    assert (found.facts.edited, found.body) == (("model", "prompt"), inner.bodies[0] + b" ")


async def test_a_refusal_stays_one() -> None:
    assert isinstance(await read(an_editor(Inner("refuse")), STREAM), Refuse)


async def test_a_large_body_is_edited_beside_the_loop() -> None:
    inner = Inner()
    editor = an_editor(inner)
    large = {**STREAM, "prompt": "x" * (1 << 20)}
    found = editor.read(a_head(), json.dumps(large).encode())
    assert isinstance(found, asyncio.Future)
    done = await found
    assert isinstance(done, Rewritten)
    wanted = {**large, "model": "org/model-8b", "stream_options": {"include_usage": True}}
    assert json.loads(done.body) == wanted


@pytest.mark.parametrize("size", [10, 1 << 20])
async def test_a_client_that_leaves_ends_the_read_behind_it(size: int) -> None:
    editor = an_editor(Inner("never"))
    found = editor.read(a_head(), json.dumps({**STREAM, "prompt": "x" * size}).encode())
    assert isinstance(found, asyncio.Future)
    found.cancel()
    with pytest.raises(asyncio.CancelledError):
        await found
    await editor.stop()


async def test_stopping_gives_up_what_is_under_way() -> None:
    editor = an_editor(Inner("never"))
    found = editor.read(a_head(), json.dumps(STREAM).encode())
    await editor.stop()
    assert isinstance(found, asyncio.Future)
    assert found.cancelled()
