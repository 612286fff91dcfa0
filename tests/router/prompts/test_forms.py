from __future__ import annotations

import json
from typing import Any

import pytest

from router.prompts.body import decoded
from router.prompts.forms import asked_of, text_parts
from router.tokenizing.asked import Asked, Form, Unread

MESSAGES = [{"role": "user", "content": "hi"}]


def asked(path: str, body: dict[str, Any]) -> Asked | Unread:
    return asked_of(path, decoded(json.dumps(body).encode()), model="base", name="alias")


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        ("/v1/completions", {"prompt": "x"}, Form.TEXT),
        ("/v1/completions", {"prompt": ["x", "y"]}, Form.TEXT),
        ("/generate", {"text": "x"}, Form.TEXT),
        ("/v1/chat/completions", {"messages": MESSAGES}, Form.CHAT),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": []}, Form.CHAT),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": None}, Form.CHAT),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{}]}, Form.TOOLS),
        ("/v1/responses", {"input": "x"}, Form.RESPONSES),
        ("/v1/messages", {"messages": MESSAGES, "system": "s"}, Form.MESSAGES),
    ],
)
def test_each_api_keeps_its_prompt_where_it_does(path: str, body: dict[str, Any], form: Form) -> None:
    made = asked(path, body)
    assert isinstance(made, Asked)
    assert (made.form, made.model, made.name) == (form, "base", "alias")


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/chat/completions", {}, Unread.FORM),
        ("/v1/completions", {}, Unread.FORM),
        ("/v1/responses", {}, Unread.FORM),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES]}, Unread.FORM),
        ("/v1/chat/completions", {"messages": MESSAGES, "documents": [{}]}, Unread.FORM),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template": "{{ x }}"}, Unread.OWN_TEMPLATE),
        ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 5}, Unread.TRUNCATED),
        ("/v1/completions", {"prompt": "x", "prompt_embeds": "AAAA"}, Unread.MEDIA),
        ("/generate", {"text": "x", "image_data": ["AAAA"]}, Unread.MEDIA),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, Unread.STORED),
    ],
)
def test_what_the_router_cannot_know_is_named(path: str, body: dict[str, Any], why: Unread) -> None:
    assert asked(path, body) is why


def test_only_fields_that_change_the_tokens_are_passed_on() -> None:
    made = asked(
        "/v1/chat/completions",
        {"messages": MESSAGES, "temperature": 0.3, "seed": 1, "tool_choice": "none", "reasoning_effort": "low"},
    )
    assert isinstance(made, Asked)
    assert made.options == {"tool_choice": "none", "reasoning_effort": "low"}


def test_the_parts_of_a_text_come_in_the_order_engines_put_them() -> None:
    body = {"messages": MESSAGES, "system": "s", "tools": [1]}
    assert [bytes(part) for part in text_parts(decoded(json.dumps(body).encode()))][:2] == [b"[1]", b'"s"']
