"""The fields of a generation request that matter to its placement; the engine remains the judge of all others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

LONGEST_LIMIT_TOKENS = 2**31  # a larger `max_tokens` is no limit
LONGEST_NAME = 256  # of a conversation, in characters; a longer one is none

PROMPT_FIELDS = ("prompt", "messages", "input", "text", "system", "instructions")
ID_FIELDS = ("prompt", "input_ids", "token_ids")  # where APIs put token ids
RAW_FIELDS = (*PROMPT_FIELDS, "tools", "input_ids", "token_ids", "kv_transfer_params", "documents")
MEDIA_FIELDS = ("prompt_embeds", "image_data", "audio_data", "video_data", "input_embeds")
PLAIN_FIELDS = (
    *("model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "cache_salt", "extra_key"),
    *("session_id", "previous_response_id", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "reasoning_effort", "tool_choice"),
    *("echo", "rid", "request_id"),
)
ALL_FIELDS = frozenset({*RAW_FIELDS, *PLAIN_FIELDS, *MEDIA_FIELDS})


_ABSENT = msgspec.Raw()
_EMPTY = memoryview(b"")


class Body(msgspec.Struct):
    """Fields of a generation request, whatever their type; the rest is skipped."""

    model: Any = None
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    input_ids: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    kv_transfer_params: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    input_embeds: msgspec.Raw = _ABSENT
    image_data: msgspec.Raw = _ABSENT
    audio_data: msgspec.Raw = _ABSENT
    video_data: msgspec.Raw = _ABSENT
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    session_id: Any = None
    previous_response_id: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    reasoning_effort: Any = None
    tool_choice: Any = None
    echo: Any = None
    rid: Any = None
    request_id: Any = None

    def raw(self, name: str) -> memoryview:
        """JSON of a field kept as it came; empty when it is absent or null."""
        given = getattr(self, name)
        if given is _ABSENT:
            return _EMPTY
        view = memoryview(given)
        return view[:0] if view.nbytes == 4 and view.tobytes() == b"null" else view

    def given(self, names: Iterable[str]) -> dict[str, memoryview]:
        """JSON of those fields, kept as they came, that are there and not null."""
        return {name: view for name in names if getattr(self, name) is not _ABSENT and len(view := self.raw(name))}


class _Transfer(msgspec.Struct):
    """The part of `kv_transfer_params` that replaces a prompt."""

    prompt_token_ids: msgspec.Raw = msgspec.Raw()


_body = msgspec.json.Decoder(Body)
_ids = msgspec.json.Decoder(list[int])
_many_ids = msgspec.json.Decoder(list[list[int]])
_transfer = msgspec.json.Decoder(_Transfer)


def decoded(body: bytes) -> Body:
    """The fields of a body; `ValueError` when it is no JSON object.

    Engines take what Python's own reader takes, half surrogate pairs for one, so its word counts where the fast one
    refuses.
    """
    try:
        return _body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("it holds another value")
    found = Body()
    for key in ALL_FIELDS & fields.keys():
        value = fields[key]
        if key in PLAIN_FIELDS:
            # Halves of surrogate pairs are no text that could be hashed, shown or handed on.
            setattr(found, key, value.encode("utf-8", "backslashreplace").decode() if type(value) is str else value)
        elif value is not None:
            setattr(found, key, msgspec.Raw(json.dumps(value).encode()))
    return found


def ids_given(fields: Body) -> memoryview | None:
    """JSON of the token ids a body carries instead of text, if it does: one list or a list of lists."""
    view = ids_at_top(fields)
    if view is None and fields.kv_transfer_params is not _ABSENT and memoryview(fields.kv_transfer_params).nbytes:
        try:
            view = memoryview(_transfer.decode(fields.kv_transfer_params).prompt_token_ids)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return view if view.nbytes and _opens_with_a_number(view) else None
    return view


def ids_at_top(fields: Body) -> memoryview | None:
    """The same from the body's own fields alone, which takes no time however long they are."""
    for name in ID_FIELDS:
        given = getattr(fields, name)
        if given is _ABSENT:
            continue
        view = memoryview(given)
        if view.nbytes and view[0] == 0x5B and _opens_with_a_number(view):
            return view
    return None


def _opens_with_a_number(view: memoryview) -> bool:
    """Whether the first thing inside the brackets can be a number."""
    inside = view[:64].tobytes().lstrip(b"[ \t\r\n")
    return inside[:1].isdigit() or inside[:1] == b"-"


def prompts_in(raw: bytes | memoryview | msgspec.Raw) -> list[list[int]] | None:
    """Token ids of one prompt or several, None when it is anything else (text, mixed, an empty prompt)."""
    try:
        ids = _ids.decode(raw)
    except msgspec.DecodeError:
        pass
    else:
        return [ids] if ids else None
    try:
        many = _many_ids.decode(raw)
    except msgspec.DecodeError:
        return None
    return many if many and all(many) else None


def limit_of(fields: Body) -> int | None:
    """The client's limit on output tokens, whichever field says it; None when none is a usable number."""
    for value in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST_LIMIT_TOKENS:
            return value
    return None


def own_id_of(fields: Body) -> str:
    """Id that a body gives its request: SGLang's field, else vLLM's; "" when it gives none that can be one."""
    if fields.rid is None and fields.request_id is None:  # nearly always
        return ""
    for value in (fields.rid, fields.request_id):
        if isinstance(value, str) and 0 < len(value) <= LONGEST_NAME:
            return value
    return ""


def continued_by(fields: Body) -> str:
    """Id of the stored response that a request goes on from; "" for none."""
    previous = fields.previous_response_id
    return previous if isinstance(previous, str) and len(previous) <= LONGEST_NAME else ""


def salt_of(fields: Body) -> str:
    """What sets this request's cache apart from others, both fields that do so together."""
    salt = fields.cache_salt if isinstance(fields.cache_salt, str) else ""
    extra = fields.extra_key if isinstance(fields.extra_key, str) else ""
    return f"{salt}\0{extra}" if extra else salt


def model_of(body: bytes) -> str:
    """The model a non-generation request names, "" when it names none or is not JSON."""
    if body[:1] != b"{":
        return ""
    try:
        model = _body.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return model if isinstance(model, str) else ""
