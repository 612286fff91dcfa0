"""A toy tokenizer: four bytes of UTF-8 make a token.

Model     deterministic, and stable under prefixes: the tokens of a text's full groups of four bytes are the first
          tokens of every longer text that starts with it, so conversations share their history as real ones do
Blind to  everything a vocabulary is about; two different groups can share an id (1 in 150,000)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BYTES_PER_TOKEN = 4
_RESERVED = 1000  # ids below are left out, as special tokens would be
_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)  # MurmurHash3's finaliser: near texts get far ids


def encode(text: str, *, vocab: int) -> list[int]:
    """Token ids in 1000..vocab-1; `vocab` > 1000. The last token covers 1 to 4 bytes."""
    data = text.encode("utf-8", errors="surrogatepass")
    padded = data + b"\0" * (-len(data) % BYTES_PER_TOKEN)
    mixed = np.frombuffer(padded, dtype="<u4").copy()
    for multiplier in _MULTIPLIERS:
        mixed ^= mixed >> np.uint32(16)
        mixed *= np.uint32(multiplier)  # wraps, as it is meant to
    ids: list[int] = (mixed % np.uint32(vocab - _RESERVED) + np.uint32(_RESERVED)).tolist()
    return ids


def count_bound(text: str) -> int:
    """At least this many tokens; cheap enough to refuse a huge text before it is encoded."""
    return -(-len(text) // BYTES_PER_TOKEN)


def render_chat(turns: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True, goes_on: bool = False) -> str:
    """The text of (role, content) turns in ChatML, which is Qwen's template without tools.

    goes_on : the last turn is not over: the text ends with its content, and no other turn is opened
    """
    if goes_on and turns:
        role, content = turns[-1]
        return f"{render_chat(turns[:-1], add_generation_prompt=False)}<|im_start|>{role}\n{content}"
    parts = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns]
    if add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)
