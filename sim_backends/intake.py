"""What becomes of a request when it reaches an engine: checked, hashed, and given its fate.

How many tokens a request will make is decided here and stays in the engine: a router that could see it would
know the future.

Model     output length log-normal around a median unless the request says it; token ids spread over the vocabulary
Blind to  sampling parameters, stop strings, content
"""

from __future__ import annotations

import random
from itertools import count
from math import exp

from sim_backends.block_hash import BlockHasher
from sim_backends.requests import EngineRequest, EngineSettings, LiveRequest, RequestRefused


class Intake:
    """Owns an engine's streams of chance for requests, one for each purpose, and its count of arrivals."""

    def __init__(self, settings: EngineSettings, hasher: BlockHasher) -> None:
        self._settings = settings
        self._hasher = hasher
        self.max_model_len = min(settings.max_model_len, settings.kv_blocks * settings.block_tokens)
        self._lengths = random.Random(f"{settings.seed}/{settings.name}/output_tokens")
        self._token_ids = random.Random(f"{settings.seed}/{settings.name}/token_ids")
        self._arrivals = count()

    def accept(self, request: EngineRequest, now_s: float) -> LiveRequest:
        """The request as the engine keeps it. Raises RequestRefused for one that can never run."""
        self._check(request)
        wanted = request.output_tokens or self._draw_length()
        planned = request.max_tokens if request.ignore_eos else min(wanted, request.max_tokens)
        return LiveRequest(
            request_id=request.request_id,
            tokens=list(request.prompt),
            prompt_tokens=len(request.prompt),
            planned=planned,
            finish_reason="length" if planned == request.max_tokens else "stop",
            arrival_s=now_s,
            rank=next(self._arrivals),
            digests=self._hasher.chain(request.prompt, salt=request.cache_salt),
            salt=request.cache_salt,
            token_base=self._token_ids.randrange(self._settings.vocab),
        )

    def _check(self, request: EngineRequest) -> None:
        prompt, limit, vocab = request.prompt, self.max_model_len, self._settings.vocab
        if not prompt:
            raise RequestRefused("The prompt must contain at least one token.")
        if len(prompt) + request.max_tokens > limit:
            raise RequestRefused(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{request.max_tokens} output tokens and your prompt contains {len(prompt)} input tokens. "
                "Please reduce the length of the input prompt or the number of requested output tokens."
            )
        if max(prompt) >= vocab or min(prompt) < 0:
            raise RequestRefused(f"Token ids must be in 0..{vocab - 1}.")

    def _draw_length(self) -> int:
        settings = self._settings
        factor = exp(settings.sigma_output_tokens * self._lengths.gauss(0.0, 1.0))
        return max(1, round(settings.median_output_tokens * factor))
