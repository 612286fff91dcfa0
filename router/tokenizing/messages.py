"""A conversation as an engine hands it to the chat template, whichever API it came by.

Model     the steps each engine takes before it renders: contents flattened to one text or wrapped in parts, arguments
          of tool calls decoded, tool definitions written out with all their fields in the engine's order
Valid     text; media, stored responses and tool calls of the Responses and Messages APIs are refused, not guessed
Source    vLLM 0.33 entrypoints/chat_utils.py; SGLang 0.5.23 entrypoints/openai/serving_chat.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from router.tokenizing.asked import Asked, Form, NoTokens, Unread

Engine = Literal["vllm", "sglang"]
_TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")
_MEDIA = ("image", "audio", "video", "embeds", "file", "document")
_anything = msgspec.json.Decoder()


@dataclass(slots=True)
class Conversation:
    """Messages and tools in chat form."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


def conversation_of(asked: Asked) -> Conversation:
    """The conversation of a chat, Responses or Messages request, still as the client wrote it.

    Raises
    ------
    NoTokens : it holds what the router does not turn into text
    """
    messages = _json(asked.messages)
    tools = _json(asked.tools) if asked.tools else None
    if asked.form is Form.RESPONSES:
        messages = _of_responses(messages, _json(asked.system) if asked.system else None, tools)
        tools = None
    elif asked.form is Form.MESSAGES:
        messages = _of_messages(messages, _json(asked.system) if asked.system else None)
        tools = [_tool_of_messages(tool) for tool in tools] if isinstance(tools, list) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise NoTokens(Unread.FORM, "no list of messages with roles")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise NoTokens(Unread.FORM, "tools that are no list of objects")
    return Conversation(messages, tools or None)


def as_engine_does(said: Conversation, engine: Engine, *, takes_parts: bool, tool_choice: Any) -> Conversation:
    """The conversation as `engine` hands it to a template.

    takes_parts : whether the template loops over content parts

    Raises
    ------
    NoTokens : a content is more than text
    """
    if engine == "sglang":
        messages = [_sglang_message(message, takes_parts) for message in said.messages]
        return Conversation(messages, _sglang_tools(said.tools, tool_choice))
    messages = [_vllm_message(message, takes_parts) for message in said.messages]
    return Conversation(messages, [_vllm_tool(tool) for tool in said.tools] if said.tools else None)


def _json(raw: bytes) -> Any:
    try:
        return _anything.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise NoTokens(Unread.FORM, str(exc)) from exc


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def texts_of(content: Any) -> list[str]:
    """The texts of one message's content; `NoTokens` when there is anything else."""
    if content is None:
        return []
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise NoTokens(Unread.FORM, "a content that is neither text nor parts")
    return [text for part in parts if (text := _text_of(part)) is not None]


def _text_of(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_TYPES:
        text = part.get("thinking" if kind == "thinking" else "refusal" if kind == "refusal" else "text")
        if text is None or isinstance(text, str):
            return text
    is_media = isinstance(kind, str) and any(name in kind for name in _MEDIA)
    raise NoTokens(Unread.MEDIA if is_media else Unread.FORM, f"a content part of type {kind!r}")


# vLLM


def _vllm_message(message: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    role, texts = message["role"], texts_of(message.get("content"))
    wrapped = takes_parts and role != "tool"
    content: Any = [{"type": "text", "text": text} for text in texts] if wrapped else "\n".join(texts)
    made: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if message.get("tool_calls"):
            made["tool_calls"] = [_with_decoded_arguments(call) for call in _calls(message)]
        if (reasoning := message.get("reasoning")) is not None:
            made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    if role == "developer":
        made["tools"] = message.get("tools")
    return made


def _vllm_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Both objects of a definition with their known fields first, and those that are missing as null."""
    function = tool.get("function")
    if not isinstance(function, dict):
        raise NoTokens(Unread.FORM, "a tool that is no function")
    known = {"name": None, "description": None, "parameters": None}
    return {"type": "function", **tool, "function": {**known, **function}}


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise NoTokens(Unread.FORM, "tool calls that are no list of functions")
    return calls


def _with_decoded_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object, as templates expect them; what is no JSON becomes an empty one."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    elif not isinstance(arguments, (dict, list)):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


# SGLang


def _sglang_message(message: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if not isinstance(content, list):
        texts_of(content)
        made["content"] = "" if content is None else content
    elif takes_parts and message["role"] != "tool":
        made["content"] = [{"type": "text", "text": text} for text in texts_of(content)]
    else:
        made["content"] = " ".join(texts_of(content))
    if message["role"] == "assistant" and message.get("tool_calls"):
        made["tool_calls"] = [_with_decoded_arguments(call) for call in _calls(message)]
    return made


def _sglang_tools(tools: list[Any] | None, tool_choice: Any) -> list[Any] | None:
    """The definitions a choice leaves: none for "none", one for a named function."""
    if tools is None or tool_choice == "none":
        return None
    made = [_sglang_tool(tool) for tool in tools]
    if isinstance(tool_choice, dict):
        named = tool_choice.get("function")
        wanted = named.get("name") if isinstance(named, dict) else None
        made = [tool for tool in made if tool["function"]["name"] == wanted]
    return made or None


def _sglang_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise NoTokens(Unread.FORM, "a tool that is no function")
    known = {"description": None, "name": None, "parameters": None, "strict": False}
    return {"type": tool.get("type", "function"), "function": {key: function.get(key, known[key]) for key in known}}


# Other APIs


def _of_responses(input_: Any, instructions: Any, tools: Any) -> list[Any]:
    """Chat messages of a Responses request; its tools and calls have another shape and are left to the engine."""
    if tools:
        raise NoTokens(Unread.FORM, "tools of the Responses API")
    items = [{"role": "user", "content": input_}] if isinstance(input_, str) else input_
    if not isinstance(items, list):
        raise NoTokens(Unread.FORM, "an input that is neither text nor items")
    for item in items:
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise NoTokens(Unread.FORM, "an input item that is no message")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    return system + [{"role": item.get("role"), "content": item.get("content")} for item in items]


def _of_messages(messages: Any, system: Any) -> Any:
    """Chat messages of a Messages request; a `system` of several blocks becomes one text."""
    if not isinstance(messages, list):
        return messages
    if system is None:
        return messages
    return [{"role": "system", "content": "".join(texts_of(system))}, *messages]


def _tool_of_messages(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise NoTokens(Unread.FORM, "a tool without a schema")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}
