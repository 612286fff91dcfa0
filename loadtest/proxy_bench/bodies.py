"""Prompts of several lengths, some of which share long beginnings, as conversations do.

Model     `VARIANTS` bodies of each length in families of `FAMILY`, of which the first three quarters are alike; words
          drawn by a seed of their own, so that the same bodies come out every time
"""

from __future__ import annotations

import json
import random

from loadtest.proxy_bench.load import request_of

SMALL, MEDIUM, LARGE, HUGE = 64, 32_000, 256_000, 1_000_000
VARIANTS, FAMILY = 48, 4
_SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprstw" for vowel in "aeiou"]


def text_of(length: int, rng: random.Random) -> str:
    """About `length` characters of made-up words."""
    words: list[str] = []
    size = 0
    while size < length:
        word = "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4)))
        words.append(word)
        size += len(word) + 1
    return " ".join(words)[:length].ljust(length, "a")


def texts(length: int, *, variants: int = VARIANTS) -> list[str]:
    """Texts of `length` characters in families."""
    found: list[str] = []
    for family in range(variants // FAMILY):
        rng = random.Random(f"{length}/{family}")
        start = text_of(length * 3 // 4, rng)
        found += [(start + " " + text_of(length - len(start) - 1, rng))[:length] for _ in range(FAMILY)]
    return found


def compact(fields: dict[str, object]) -> bytes:
    """JSON without blanks."""
    return json.dumps(fields, separators=(",", ":")).encode()


def chats(length: int, *, variants: int = VARIANTS) -> list[bytes]:
    """Requests of one message each, answered at once."""
    return [
        request_of(compact({"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": text}]}))
        for text in texts(length, variants=variants)
    ]


def second_turns(length: int) -> list[bytes]:
    """Requests of a message, an answer and another message."""
    found = []
    for text in texts(length):
        messages = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Well answered."},
            {"role": "user", "content": "and then " + text[-30:]},
        ]
        found.append(request_of(compact({"model": "m", "max_tokens": 16, "messages": messages})))
    return found


def token_ids(tokens: int) -> list[bytes]:
    """Completions whose prompts are token ids, in families too."""
    found = []
    for family in range(VARIANTS // FAMILY):
        rng = random.Random(f"ids/{tokens}/{family}")
        start = [rng.randrange(150_000) for _ in range(tokens * 3 // 4)]
        for _ in range(FAMILY):
            ids = start + [rng.randrange(150_000) for _ in range(tokens - len(start))]
            found.append(request_of(compact({"model": "m", "max_tokens": 16, "prompt": ids}), "/v1/completions"))
    return found


def a_stream(pieces: int) -> bytes:
    """A request answered by a stream of `pieces`. The message says so, since some proxies drop or rename fields."""
    message = {"role": "user", "content": f"pieces={pieces}; tell me more"}
    return request_of(compact({"model": "m", "stream": True, "max_tokens": pieces, "messages": [message]}))
