from __future__ import annotations

import json
from typing import Any

import pytest

from router.tokenizing.asked import Asked, Form, NoTokens, Unread
from router.tokenizing.messages import Conversation, Engine, as_engine_does, conversation_of

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
TOOL = {"function": {"strict": True, "name": "f", "parameters": {"type": "object"}}}


def asked(form: Form, messages: Any, **fields: Any) -> Asked:
    raw = {key: json.dumps(value).encode() for key, value in fields.items()}
    return Asked(form, "m", "m", messages=json.dumps(messages).encode(), **raw)  # type: ignore[arg-type]


def made(engine: Engine, message: dict[str, Any], *, takes_parts: bool = False) -> dict[str, Any]:
    said = Conversation([message], None)
    return as_engine_does(said, engine, takes_parts=takes_parts, tool_choice=None).messages[0]


def refused(form: Form, messages: Any, **fields: Any) -> Unread:
    with pytest.raises(NoTokens) as caught:
        as_engine_does(conversation_of(asked(form, messages, **fields)), "vllm", takes_parts=False, tool_choice=None)
    return caught.value.why


@pytest.mark.parametrize(
    ("engine", "role", "takes_parts", "content", "text"),
    [
        ("vllm", "user", False, PARTS, "one\ntwo"),
        ("sglang", "user", False, PARTS, "one two"),
        ("vllm", "user", True, PARTS, PARTS),
        ("sglang", "user", True, PARTS, PARTS),
        ("vllm", "user", True, "one", PARTS[:1]),
        ("sglang", "user", True, "one", "one"),
        ("vllm", "tool", True, PARTS, "one\ntwo"),
        ("sglang", "tool", True, PARTS, "one two"),
        ("vllm", "assistant", False, None, ""),
        ("sglang", "assistant", False, None, ""),
    ],
)
def test_a_content_is_flattened_or_wrapped_as_each_engine_does(
    engine: Engine, role: str, takes_parts: bool, content: Any, text: Any
) -> None:
    assert made(engine, {"role": role, "content": content}, takes_parts=takes_parts)["content"] == text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("arguments", "decoded"), [('{"b": 1, "a": 2}', {"b": 1, "a": 2}), ("", {}), ("{", {}), (None, {}), ([1], [1])]
)
def test_arguments_of_tool_calls_are_decoded(engine: Engine, arguments: Any, decoded: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    said = made(engine, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert said["tool_calls"] == [{**CALL, "function": {"name": "f", "arguments": decoded}}]
    assert call["function"]["arguments"] == arguments, "the client's message is not changed"  # type: ignore[index]


def test_vllm_passes_on_only_the_fields_it_knows() -> None:
    said = made(
        "vllm", {"role": "assistant", "content": "x", "reasoning": "r", "name": "n", "odd": 1, "tool_calls": []}
    )
    assert said == {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r", "name": "n"}
    said = made("vllm", {"role": "tool", "content": "x", "tool_call_id": "c1"})
    assert said == {"role": "tool", "content": "x", "tool_call_id": "c1"}


def test_tools_are_written_out_with_every_field_in_the_engines_order() -> None:
    said = Conversation([{"role": "user", "content": "x"}], [TOOL])
    vllm = as_engine_does(said, "vllm", takes_parts=False, tool_choice="none").tools
    assert json.dumps(vllm) == (
        '[{"type": "function", "function": {"name": "f", "description": null,'
        ' "parameters": {"type": "object"}, "strict": true}}]'
    )
    sglang = as_engine_does(said, "sglang", takes_parts=False, tool_choice=None).tools
    assert json.dumps(sglang) == (
        '[{"type": "function", "function": {"description": null, "name": "f",'
        ' "parameters": {"type": "object"}, "strict": true}}]'
    )


@pytest.mark.parametrize(
    ("choice", "names"), [("none", []), ("auto", ["f", "g"]), ({"function": {"name": "g"}}, ["g"]), ({"odd": 1}, [])]
)
def test_sglang_leaves_out_tools_the_choice_excludes(choice: Any, names: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    said = Conversation([{"role": "user", "content": "x"}], tools)
    left = as_engine_does(said, "sglang", takes_parts=False, tool_choice=choice).tools
    assert [tool["function"]["name"] for tool in left or []] == names


def test_a_responses_request_is_a_conversation_with_its_instructions_first() -> None:
    said = conversation_of(asked(Form.RESPONSES, "hello", system="Be brief."))
    assert said.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    assert made("vllm", conversation_of(asked(Form.RESPONSES, items)).messages[0])["content"] == "hello"


def test_a_messages_request_is_a_conversation_with_its_system_text_first_and_tools_as_functions() -> None:
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    tool = {"name": "f", "input_schema": {"type": "object"}}
    said = conversation_of(asked(Form.MESSAGES, [{"role": "user", "content": "hi"}], system=system, tools=[tool]))
    assert said.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert said.tools == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}
    ]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "image", "input_image", "file"])
def test_media_are_refused_whatever_the_api_calls_them(kind: str) -> None:
    message = {"role": "user", "content": [{"type": kind, kind: {}}]}
    for form in (Form.CHAT, Form.RESPONSES, Form.MESSAGES):
        assert refused(form, [message]) is Unread.MEDIA


@pytest.mark.parametrize(
    ("form", "messages", "fields"),
    [
        (Form.CHAT, [], {}),
        (Form.CHAT, "text", {}),
        (Form.CHAT, [{"content": "no role"}], {}),
        (Form.CHAT, [{"role": "user", "content": 5}], {}),
        (Form.CHAT, [{"role": "user", "content": [{"type": "odd"}]}], {}),
        (Form.CHAT, [{"role": "user", "content": [7]}], {}),
        (Form.CHAT, [{"role": "user", "content": "x"}], {"tools": {"a": 1}}),
        (Form.CHAT, [{"role": "user", "content": "x"}], {"tools": [{"type": "odd"}]}),
        (Form.CHAT, [{"role": "assistant", "content": "x", "tool_calls": [{"id": "no function"}]}], {}),
        (Form.RESPONSES, "x", {"tools": [{"type": "function", "name": "f"}]}),
        (Form.RESPONSES, [{"type": "function_call_output", "output": "x"}], {}),
        (Form.RESPONSES, 5, {}),
        (Form.MESSAGES, [{"role": "user", "content": [{"type": "tool_result"}]}], {}),
        (Form.MESSAGES, [{"role": "user", "content": "x"}], {"tools": [{"name": "no schema"}]}),
    ],
)
def test_what_the_router_does_not_turn_into_text_is_refused(form: Form, messages: Any, fields: dict[str, Any]) -> None:
    assert refused(form, messages, **fields) is Unread.FORM
