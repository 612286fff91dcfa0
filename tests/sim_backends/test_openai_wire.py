from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sim_backends import openai_wire
from sim_backends.openai_wire import ApiError, ChatBody, CompletionBody, Shape, StreamText
from tests.sim_backends.builders import VECTORS

CHAT_SHAPE = Shape(answer_id="chatcmpl-req-1", created=1767225600, model="Qwen/Qwen3-8B", chat=True)


def recorded_events() -> list[bytes]:
    text = (VECTORS / "sse_chat_stream.txt").read_bytes()
    return [event + b"\n\n" for event in text.split(b"\n\n") if event.startswith(b"data: ")]


def test_a_chat_stream_is_the_recorded_one_but_for_its_text() -> None:
    opening, hel, _lo, last, usage, done = recorded_events()
    text = StreamText(CHAT_SHAPE)
    counts = openai_wire.usage(prompt=2048, completion=3, cached=1984)
    assert text.opening == opening
    assert text.token == hel.replace(b'"Hel"', b'" tok"')
    assert text.last("stop") == last
    assert text.usage(counts) == usage
    assert done == openai_wire.DONE


def test_a_token_that_ended_by_length_has_text_and_one_that_stopped_has_none() -> None:
    def choice(reason: str) -> Any:
        return json.loads(StreamText(CHAT_SHAPE).last(reason)[6:])["choices"][0]

    assert (choice("length")["delta"]["content"], choice("stop")["delta"]["content"]) == (openai_wire.FILLER, "")


def test_a_whole_answer_and_a_stream_carry_the_same_text() -> None:
    counts = openai_wire.usage(prompt=1, completion=3, cached=None)
    assert "prompt_tokens_details" not in counts
    stop = json.loads(openai_wire.whole(CHAT_SHAPE, tokens=3, reason="stop", counts=counts))
    length = json.loads(openai_wire.whole(CHAT_SHAPE, tokens=3, reason="length", counts=counts))
    assert stop["choices"][0]["message"]["content"] == openai_wire.FILLER * 2
    assert length["choices"][0]["message"]["content"] == openai_wire.FILLER * 3


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(b'"hi \\u00e9"', "hi é"), (b"[1,2,3]", [1, 2, 3]), (b'["one"]', "one"), (b"[[4,5]]", [4, 5])],
)
def test_every_form_of_one_prompt_is_read(raw: bytes, expected: object) -> None:
    assert openai_wire.decode_prompt(msgspec.Raw(raw)) == expected


@pytest.mark.parametrize("raw", [b'["a","b"]', b"[[1],[2]]", b"[-1]", b"[1.5]", b"null", b"{}", b'[1,"a"]', b"[[],[]]"])
def test_other_prompts_are_refused_with_400(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        openai_wire.decode_prompt(msgspec.Raw(raw))
    assert (caught.value.status, caught.value.kind) == (400, "BadRequestError")


def test_limits_default_by_route() -> None:
    completion = CompletionBody(prompt=msgspec.Raw(b'"x"'))
    chat = ChatBody(messages=[])
    assert openai_wire.output_limit(completion, room_tokens=500) == 16
    assert openai_wire.output_limit(chat, room_tokens=500) == 500
    newer = ChatBody(messages=[], max_tokens=3, max_completion_tokens=5)
    assert openai_wire.output_limit(newer, room_tokens=500) == 5


def test_errors_have_the_nested_form() -> None:
    assert json.loads(ApiError(404, "NotFoundError", "no", param="model").body()) == {
        "error": {"message": "no", "type": "NotFoundError", "param": "model", "code": 404}
    }
