"""What becomes of a request when it reaches an engine: checked, hashed, and given its fate.

How many tokens a request will make is decided here and stays in the engine: a router that could see it would
know the future.

Model     output length log-normal around a median unless the request says it; token ids spread over the vocabulary
Blind to  sampling parameters, stop strings, content
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from math import exp

from sim_backends import content
from sim_backends.block_hash import BlockHasher
from sim_backends.content import FIRST_FRESH_ID, Content, IdContent, TokenContent
from sim_backends.requests import EngineRequest, EngineSettings, LiveRequest, RequestRefused


class Intake:
    """Owns an engine's streams of chance for requests, one for each purpose, and its count of arrivals."""

    def __init__(
        self, settings: EngineSettings, hasher: BlockHasher, *, fresh_ids: Iterator[int] | None = None
    ) -> None:
        """`fresh_ids` are for generated blocks of requests made of block ids; None makes the engine's own."""
        self._settings = settings
        self._hasher = hasher
        self._fresh_ids = fresh_ids or content.fresh_ids()
        self.max_model_len = min(settings.max_model_len, settings.kv_blocks * settings.block_tokens)
        self._lengths = random.Random(f"{settings.seed}/{settings.name}/output_tokens")
        self._token_ids = random.Random(f"{settings.seed}/{settings.name}/token_ids")
        self._arrivals = count()

    def accept(self, request: EngineRequest, now_s: float) -> LiveRequest:
        """The request as the engine keeps it. Raises RequestRefused for one that can never run."""
        self._check(request)
        wanted = request.output_tokens or self._draw_length()
        planned = request.max_tokens if request.ignore_eos else min(wanted, request.max_tokens)
        holds = self._content(request)
        return LiveRequest(
            request_id=request.request_id,
            content=holds,
            digests=holds.digests,
            prompt_tokens=request.prompt_tokens,
            known=request.prompt_tokens,
            planned=planned,
            finish_reason="length" if planned == request.max_tokens else "stop",
            arrival_s=now_s,
            rank=next(self._arrivals),
            salt=request.cache_salt,
            directive=request.directive,
            given_tokens=request.given_tokens,
        )

    def _content(self, request: EngineRequest) -> Content:
        size, vocab, salt = self._settings.block_tokens, self._settings.vocab, request.cache_salt
        base = self._token_ids.randrange(vocab)
        if request.block_ids is not None:
            ids = request.block_ids[: request.prompt_tokens // size]
            return IdContent(ids, salt=salt, fresh_ids=self._fresh_ids, vocab=vocab, base=base)
        assert request.prompt is not None, "a request has one of prompt and block_ids"
        return TokenContent(self._hasher, request.prompt, salt=salt, block_tokens=size, vocab=vocab, base=base)

    def _check(self, request: EngineRequest) -> None:
        limit, length = self.max_model_len, request.prompt_tokens
        if length < 1:
            raise RequestRefused("The prompt must contain at least one token.")
        if length + request.max_tokens > limit:
            raise RequestRefused(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{request.max_tokens} output tokens and your prompt contains {length} input tokens. "
                "Please reduce the length of the input prompt or the number of requested output tokens."
            )
        self._check_ids(request)

    def _check_ids(self, request: EngineRequest) -> None:
        ids, last, what = request.prompt, self._settings.vocab - 1, "Token ids"
        if ids is None:
            ids, last, what = request.block_ids or [], FIRST_FRESH_ID - 1, "Block ids"
            if len(ids) < request.prompt_tokens // self._settings.block_tokens:
                raise RequestRefused("There must be a block id for each full block of the prompt.")
        if ids and (max(ids) > last or min(ids) < 0):
            raise RequestRefused(f"{what} must be in 0..{last}.")

    def _draw_length(self) -> int:
        settings = self._settings
        factor = exp(settings.sigma_output_tokens * self._lengths.gauss(0.0, 1.0))
        return max(1, round(settings.median_output_tokens * factor))
