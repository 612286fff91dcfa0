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


def told(stream: bytes) -> tuple[str, str, dict[str, int], int, int, int]:
    """What a client makes of a stream: text, reason, usage, names, end markers, roles."""
    text, reason, roles = "", "", 0
    usage: dict[str, int] = {}
    names: set[str] = set()
    for line in stream.split(b"\n\n"):
        if line in (b"", b"data: [DONE]"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        names.add(f"{event['id']} {event['created']} {event['model']}")
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            roles += "role" in choice.get("delta", {})
            reason += choice["finish_reason"] or ""
        usage = {key: value for key, value in (event.get("usage") or usage).items() if isinstance(value, int)}
    return text, reason, usage, len(names), stream.count(b"[DONE]"), roles
