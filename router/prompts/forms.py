"""Which text of a body an engine will tokenise, by the API that was asked.

Source    routes and body fields of vLLM 0.33 and SGLang 0.5.23
"""

from __future__ import annotations

from typing import Any

from router.prompts.body import MEDIA_FIELDS, Body
from router.tokenizing.asked import Asked, Form, Unread

_FORMS = {
    "/v1/completions": Form.TEXT,
    "/generate": Form.TEXT,
    "/v1/chat/completions": Form.CHAT,
    "/v1/responses": Form.RESPONSES,
    "/v1/messages": Form.MESSAGES,
}
_TEXT_FIELDS = ("tools", "instructions", "system", "messages", "input", "prompt", "text")
_CHAT_OPTIONS = (
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template_kwargs"),
    *("reasoning_effort", "tool_choice"),
)


def asked_of(path: str, fields: Body, *, model: str, name: str) -> Asked | Unread:
    """What to tokenise, or why the router does not.

    model : base model behind the name; name : as the client wrote it
    """
    form = _FORMS.get(path)
    if any(len(fields.raw(key)) for key in MEDIA_FIELDS):
        return Unread.MEDIA
    if fields.truncate_prompt_tokens is not None:
        return Unread.TRUNCATED
    if form is Form.TEXT:
        return _text(path, fields, model, name)
    if form is Form.CHAT and len(fields.raw("messages")):
        return _chat(fields, model, name)
    if form is Form.RESPONSES:
        return _responses(fields, model, name)
    if form is Form.MESSAGES and len(fields.raw("messages")):
        return Asked(
            Form.MESSAGES,
            model,
            name,
            messages=bytes(fields.raw("messages")),
            system=bytes(fields.raw("system")),
            tools=bytes(fields.raw("tools")),
        )
    return Unread.FORM


def text_parts(fields: Body) -> list[memoryview]:
    """Everything of a body that becomes prompt text, in the order engines put it together."""
    return list(fields.given(_TEXT_FIELDS).values())


def _text(path: str, fields: Body, model: str, name: str) -> Asked | Unread:
    raw = fields.raw("text" if path == "/generate" else "prompt")
    if not len(raw):
        return Unread.FORM
    return Asked(Form.TEXT, model, name, prompt=bytes(raw), options=_options(fields, ("add_special_tokens",)))


def _chat(fields: Body, model: str, name: str) -> Asked | Unread:
    if fields.chat_template is not None:
        return Unread.OWN_TEMPLATE
    if len(fields.raw("documents")):
        return Unread.FORM
    tools = bytes(fields.raw("tools"))
    form = Form.TOOLS if tools not in (b"", b"[]") else Form.CHAT
    messages = bytes(fields.raw("messages"))
    return Asked(form, model, name, messages=messages, tools=tools, options=_options(fields, _CHAT_OPTIONS))


def _responses(fields: Body, model: str, name: str) -> Asked | Unread:
    if fields.previous_response_id is not None:
        return Unread.STORED
    if not len(fields.raw("input")):
        return Unread.FORM
    return Asked(
        Form.RESPONSES,
        model,
        name,
        messages=bytes(fields.raw("input")),
        system=bytes(fields.raw("instructions")),
        tools=bytes(fields.raw("tools")),
        options=_options(fields, ("chat_template_kwargs",)),
    )


def _options(fields: Body, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key in keys if (value := getattr(fields, key)) is not None}
