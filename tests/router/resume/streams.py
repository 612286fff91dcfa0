"""Streams as engines send them, made by hand: text is a function of prompt and place, as greedy decoding's is."""

from __future__ import annotations

import json
from typing import Any


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(choices: list[Any], *, name: str = "one", chat: bool = False, **more: Any) -> bytes:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return event({"id": name, "object": kind, "created": len(name), "model": f"m-{name}", "choices": choices} | more)


def text(piece: str, *, finish: str | None = None, name: str = "one", **more: Any) -> bytes:
    choice = {"index": 0, "text": piece, "logprobs": None, "finish_reason": finish} | more
    return chunk([choice], name=name)


def delta(content: dict[str, Any], *, finish: str | None = None, name: str = "one") -> bytes:
    choice = {"index": 0, "delta": content, "logprobs": None, "finish_reason": finish}
    return chunk([choice], name=name, chat=True)


DONE = b"data: [DONE]\n\n"
