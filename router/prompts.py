"""Reads just enough of a request to place it: model, prompt, limits. The body itself is never changed.

Token ids give an exact chain. Text gives a length guessed from its characters and no chain: the router says "unknown"
rather than guess blocks, and the engine remains the judge of every field this module does not need.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Protocol

import msgspec

from estimators.ranges import require
from estimators.request import RequestFacts
from router.actions import Refuse
from router.identity import Identity, chain
from router.names import ModelNames
from router.routes import Route, classify

LONGEST_GUESS_TOKENS = 131_072  # a longer guess says more about the guess than about the prompt
FEWEST_CHARACTERS, MOST_CHARACTERS = 0.5, 16.0  # per token, in any script under any current tokenizer
LARGEST_WALK = 4 * 1024 * 1024  # bytes of JSON that are looked into; above, its length stands for its text
LONGEST_LIMIT_TOKENS = 2**31  # a larger `max_tokens` is no limit


PROMPT_FIELDS = ("prompt", "messages", "input", "text", "system", "instructions")
PLAIN_FIELDS = ("model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "cache_salt")
TEXT_KEYS = ("content", "text", "input", "tool_calls", "function", "arguments", "output")
TEXT_TYPES = ("text", "input_text", "output_text", "message", "function", "function_call", "function_call_output")


class Head(Protocol):
    """What is read of a request's head."""

    @property
    def path(self) -> str: ...
    @property
    def method(self) -> bytes: ...
    def get(self, name: bytes) -> bytes | None: ...


class Body(msgspec.Struct):
    """The fields of a generation request that matter here, whatever their type; the rest is skipped."""

    model: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    cache_salt: Any = None


_body = msgspec.json.Decoder(Body)
_token_ids = msgspec.json.Decoder(list[int])
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


class PromptReader:
    """Turns a request into facts.

    block_tokens : tokens in one block of the pool, >= 1
    names : whose cache a model name means
    characters_per_token : how text is sized; somebody else teaches it
    """

    def __init__(
        self, block_tokens: int, names: ModelNames | None = None, characters_per_token: CharactersPerToken | None = None
    ) -> None:
        self.block_tokens = block_tokens
        self._names = names or ModelNames()
        self._characters_per_token = characters_per_token or CharactersPerToken()

    def facts_of(self, head: Head, body: bytes) -> RequestFacts | Refuse:
        """Facts of one request, or the refusal of a body that is not JSON where only JSON makes sense."""
        request_id = text_of(head.get(b"x-request-id")) or secrets.token_hex(16)
        explain = head.get(b"x-tfirst-explain") == b"1"
        if classify(head.method, head.path) is not Route.GENERATE:
            return RequestFacts(
                request_id=request_id,
                model=model_of(body),
                generates=False,
                explain=explain,
                path=head.path,
                block_tokens=self.block_tokens,
            )
        try:
            fields = decoded(body)
        except (ValueError, RecursionError) as exc:
            return Refuse(400, "BadRequestError", f"The request body is not a JSON object: {exc}")
        if fields.model is not None and not isinstance(fields.model, str):
            return Refuse(400, "BadRequestError", "`model` must be a string", param="model")
        model = fields.model or ""
        identity = self._names.resolve(model)
        tokens = token_ids_of(fields.prompt) or token_ids_of(fields.input_ids)
        try:
            # An engine always computes the last token, so a block that ends with it is never reused.
            blocks = chain(self._root(identity, fields), tokens[:-1], self.block_tokens) if tokens else []
        except ValueError as exc:
            return Refuse(400, "BadRequestError", f"`prompt`: {exc}", param="prompt")
        size, pure = (0, True) if tokens else characters_of(fields)
        return RequestFacts(
            request_id=request_id,
            model=model,
            base_model=identity[0],
            chain=blocks,
            prompt_tokens=len(tokens) if tokens else self._characters_per_token.tokens_in(size),
            prompt_exact=tokens is not None,
            prompt_characters=size if pure else 0,
            max_tokens=limit_of(fields),
            streams=fields.stream is True,
            explain=explain,
            path=head.path,
            block_tokens=self.block_tokens,
        )

    def _root(self, identity: tuple[str, str], fields: Body) -> int:
        base, adapter = identity
        salt = fields.cache_salt if isinstance(fields.cache_salt, str) else ""
        return Identity(base, adapter=adapter, salt=salt, block_tokens=self.block_tokens).root()


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
    raw = {
        key: msgspec.Raw(json.dumps(fields[key]).encode())
        for key in (*PROMPT_FIELDS, "tools", "input_ids")
        if fields.get(key) is not None
    }
    found = Body(**raw)
    for key in PLAIN_FIELDS:
        setattr(found, key, fields.get(key))
    return found


def characters_of(fields: Body) -> tuple[int, bool]:
    """Characters of text in a prompt, and whether text is all there is. Encoded images and sound are not counted."""
    size, pure = memoryview(fields.tools).nbytes, True
    for raw in (getattr(fields, name) for name in PROMPT_FIELDS):
        length = memoryview(raw).nbytes
        if not length:
            continue
        try:
            found, only_text = texts_in(_anything.decode(raw)) if length <= LARGEST_WALK else (length, True)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found, only_text = length, False  # the engine may still understand it
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
            size += 4
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            pure = pure and value.get("type", "text") in TEXT_TYPES
            left += [value[key] for key in TEXT_KEYS if key in value]
    return size, pure


def token_ids_of(raw: msgspec.Raw) -> list[int] | None:
    """The list of token ids in `raw`, or None when it is anything else (text, several prompts, nothing)."""
    if memoryview(raw)[:1].tobytes() != b"[":  # a string or nothing: no need to try
        return None
    try:
        return _token_ids.decode(raw) or None
    except msgspec.DecodeError:
        return None


def limit_of(fields: Body) -> int | None:
    """The client's limit on output tokens, whichever field says it; None when none is a usable number."""
    for value in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST_LIMIT_TOKENS:
            return value
    return None


def model_of(body: bytes) -> str:
    """The model a non-generation request names, "" when it names none or is not JSON."""
    if body[:1] != b"{":
        return ""
    try:
        model = _body.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return model if isinstance(model, str) else ""


def text_of(value: bytes | None) -> str:
    """A header value as text; bytes outside ASCII are kept one to one."""
    return "" if value is None else value.decode("latin-1").strip()
