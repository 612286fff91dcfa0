"""How long a prompt is when nobody counts its tokens: its characters, by a ratio learned from answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from estimators.ranges import require

LONGEST_GUESS_TOKENS = 131_072  # a longer guess says more about the guess than about the prompt
FEWEST_CHARACTERS, MOST_CHARACTERS = 0.5, 16.0  # per token, in any script under any current tokenizer
CHARACTERS_OF_AN_ID = 4  # what a token id counts among text
TEXT_KEYS = ("content", "text", "input", "tool_calls", "function", "arguments", "output")
TEXT_TYPES = ("text", "input_text", "output_text", "message", "function", "function_call", "function_call_output")

_anything = msgspec.json.Decoder()


class CharactersPerToken:
    """Characters of prompt text per token, learned from answers that reported their prompt tokens.

    mean : > 0; from a start of 4, about right for English under common tokenizers
    """

    def __init__(self, memory: int = 100) -> None:
        require(memory >= 1, "memory", memory)
        self._gain = 1.0 / memory
        self._seen = 0
        self.mean = 4.0

    def observe(self, characters: int, tokens: int) -> None:
        """A prompt of `characters` had `tokens` tokens; one without either teaches nothing."""
        if characters < 1 or tokens < 1:
            return
        self._seen += 1
        ratio = min(max(characters / tokens, self.mean / 4.0), 4.0 * self.mean)  # one odd answer moves little
        mean = self.mean + max(self._gain, 1.0 / (10 + self._seen)) * (ratio - self.mean)
        self.mean = min(max(mean, FEWEST_CHARACTERS), MOST_CHARACTERS)

    def tokens_in(self, characters: int) -> int:
        """Guessed tokens of a prompt with that many `characters` (>= 0)."""
        return min(LONGEST_GUESS_TOKENS, int(characters / self.mean))


def characters_of(prompt_fields: Mapping[str, bytes | memoryview], tools_bytes: int = 0) -> tuple[int, bool]:
    """Characters of text in a prompt, and whether text is all there is. Encoded images and sound are not counted.

    prompt_fields : JSON of each field that holds a part of the prompt
    tools_bytes : size of the tool definitions, which count as they are
    """
    size, pure = tools_bytes, True
    for raw in prompt_fields.values():
        try:
            found, only_text = texts_in(_anything.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found, only_text = len(raw), False  # the engine may still understand it
        size, pure = size + found, pure and only_text
    return size, pure


def texts_in(prompt: Any) -> tuple[int, bool]:
    """Characters in a prompt, a message list or content parts, and whether there was nothing but text.

    Token ids, in lists of several prompts, count as a usual token's characters each.
    """
    size, pure = 0, True
    left = [prompt]
    while left:  # no recursion: a client chooses how deep it nests
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, int):
            size += CHARACTERS_OF_AN_ID
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            pure = pure and value.get("type", "text") in TEXT_TYPES
            left += [value[key] for key in TEXT_KEYS if key in value]
    return size, pure
