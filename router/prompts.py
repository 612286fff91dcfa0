"""Reads just enough of a request to place it: model, prompt, limits. The body itself is never changed.

Token ids give an exact chain. Text gives a length guessed from its bytes and no chain: the router says "unknown"
rather than guess blocks, and the engine remains the judge of every field this module does not need.
"""

from __future__ import annotations

import secrets
from typing import Any, Protocol

import msgspec

from estimators.request import RequestFacts
from router.actions import Refuse
from router.identity import Identity, chain
from router.routes import Route, classify

BYTES_PER_TOKEN = 4.0  # English text under common tokenizers; only sizes the work, never matches blocks


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
    input_ids: msgspec.Raw = msgspec.Raw()
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    cache_salt: Any = None


_body = msgspec.json.Decoder(Body)
_token_ids = msgspec.json.Decoder(list[int])


class PromptReader:
    """Turns a request into facts. block_tokens : tokens in one block of the pool, >= 1."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    def facts_of(self, head: Head, body: bytes) -> RequestFacts | Refuse:
        """Facts of one request, or the refusal of a body that is not JSON where only JSON makes sense."""
        request_id = text_of(head.get(b"x-request-id")) or f"{secrets.token_hex(16)}"
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
            fields = _body.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            return Refuse(400, "BadRequestError", f"The request body is not a JSON object: {exc}")
        if fields.model is not None and not isinstance(fields.model, str):
            return Refuse(400, "BadRequestError", "`model` must be a string", param="model")
        model = fields.model or ""
        tokens = token_ids_of(fields.prompt) or token_ids_of(fields.input_ids)
        if tokens is None:
            size = sum(memoryview(raw).nbytes for raw in (fields.prompt, fields.messages, fields.input, fields.text))
            blocks, length = [], int(size / BYTES_PER_TOKEN)
        else:
            salt = fields.cache_salt if isinstance(fields.cache_salt, str) else ""
            length = len(tokens)
            root = Identity(model=model, salt=salt, block_tokens=self.block_tokens).root()
            try:
                # An engine always computes the last token, so a block that ends with it is never reused.
                blocks = chain(root, tokens[: length - 1], self.block_tokens)
            except ValueError as exc:
                return Refuse(400, "BadRequestError", f"`prompt`: {exc}", param="prompt")
        return RequestFacts(
            request_id=request_id,
            model=model,
            chain=blocks,
            prompt_tokens=length,
            prompt_exact=tokens is not None,
            max_tokens=limit_of(fields),
            streams=fields.stream is True,
            explain=explain,
            path=head.path,
            block_tokens=self.block_tokens,
        )


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
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
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
