"""An engine without sockets whose next character is a function of all text before it, as greedy decoding's is.

Blind to  everything the code under test decides: it reads bodies with the standard library and knows nothing of logs
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from tests.router.resume.streams import DONE, chunk

END = "\0"
_LETTERS = 'abcdeé世😀"\\'


def rendered(body: dict[str, Any]) -> str:
    """The prompt as text: one character is one token."""
    if "messages" not in body:
        prompt = body["prompt"]
        return prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
    turns = [f"<{turn['role']}>{turn['content']}" for turn in body["messages"]]
    goes_on = body.get("continue_final_message") is True
    assert not (goes_on and body.get("add_generation_prompt", True)), "vLLM refuses both"
    return "</>".join(turns) + ("" if goes_on else "</><assistant>")


def output(prompt: str, limit: int) -> tuple[str, str]:
    """Text and finish reason; it ends by itself about every fifteenth time."""
    text = ""
    while len(text) < limit:
        drawn = sha256((prompt + text).encode()).digest()[0]
        if drawn % 15 == 0:
            return text + END, "stop"
        text += _LETTERS[drawn % len(_LETTERS)]
    return text, "length"


def stream(raw: bytes, *, name: str, joined: int = 1, tells_ids: bool = False, cached: int = 0) -> bytes:
    """The whole answer's body. joined : tokens in one event"""
    body = json.loads(raw)
    chat = "messages" in body
    prompt = rendered(body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or (500 if chat else 16)
    made, reason = output(prompt, limit)
    events = [] if not chat else [_event({"role": "assistant", "content": ""}, None, chat=chat, name=name)]
    for at in range(0, len(made), joined):
        part = made[at : at + joined]
        is_last = at + joined >= len(made)
        value: Any = {"content": part.strip(END)} if chat else part.strip(END)
        more: dict[str, Any] = {"token_ids": list(map(ord, part))} if tells_ids else {}
        if tells_ids:
            more["prompt_token_ids"] = list(map(ord, prompt)) if at == 0 else None
        events.append(_event(value, reason if is_last else None, chat=chat, name=name, **more))
    if (body.get("stream_options") or {}).get("include_usage"):
        counts: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(made),
            "total_tokens": len(prompt) + len(made),
        }
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
        events.append(chunk([], name=name, chat=chat, usage=counts))
    return b"".join(events) + DONE


def _event(value: Any, finish: str | None, *, chat: bool, name: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta" if chat else "text": value, "logprobs": None, "finish_reason": finish} | more
    return chunk([choice], name=name, chat=chat)
