"""What an engine is told, what it gives out, and its own book-keeping for one request."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum

from sim_backends.store import Fetch


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of one engine. `seed` starts its streams of chance, one for each purpose."""

    name: str
    vocab: int
    kv_blocks: int
    block_tokens: int = 16
    token_budget: int = 2048
    max_running: int = 256
    max_model_len: int = 131072
    median_output_tokens: float = 200.0
    sigma_output_tokens: float = 0.8
    seed: int = 0


class RequestRefused(ValueError):
    """The engine cannot ever run this request; the client is told with status 400."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as an engine sees it.

    request_id : unique among requests in the engine
    prompt : token ids, at least one, each in 0..vocab-1
    max_tokens : the client's limit on output tokens, >= 1
    output_tokens : after how many the model would end by itself, >= 1; None draws. Nothing outside the engine
        is told before the end
    ignore_eos : run to max_tokens whatever the model would do
    cache_salt : part of the first block's hash
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    output_tokens: int | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None


@dataclass(slots=True)
class Output:
    """One generated token at virtual time `at_s`.

    index : 0 for the first token
    finish_reason : `stop` or `length` on the last token, else None
    cached_tokens : prompt tokens that were not computed here, from HBM or the store, 0..prompt - 1
    """

    request_id: str
    at_s: float
    index: int
    token_id: int
    finish_reason: str | None
    cached_tokens: int


class Phase(Enum):
    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    OVER = "over"


@dataclass(slots=True, eq=False)
class LiveRequest:
    """An engine's own state of one request. Blocks are whole, tokens are counted from the start of the prompt."""

    request_id: str
    tokens: list[int]  # prompt and output so far
    prompt_tokens: int
    planned: int  # output tokens it will make
    finish_reason: str
    arrival_s: float
    rank: int  # place in the waiting queue; smaller goes first
    digests: list[bytes]
    salt: str | None
    token_base: int
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)  # held; empty unless running or reserved
    computed: int = 0  # tokens whose KV is here
    registered: int = 0  # blocks that can be found in the cache
    step_tokens: int = 0  # computed by the step under way
    output: int = 0
    cached_tokens: int = -1  # not known before it first gets its blocks
    fetch: Fetch | None = None  # under way; layerwise runs beside it
    fetched_to: int = 0  # blocks, from the start, that are here once the fetch is done


# Upper bounds of vllm:time_to_first_token_seconds in vLLM 0.33.
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made. Tokens unless the name says otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt: int = 0  # of requests that have emitted their first token
    computed: int = 0  # prompt tokens computed here, repeats after preemption included
    generation: int = 0
    preemptions: int = 0  # requests
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})  # requests
    first_token_buckets: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_BOUNDS_S) + 1))
    first_token_sum_s: float = 0.0

    def saw_first_token(self, wait_s: float) -> None:
        self.first_token_buckets[bisect_left(FIRST_TOKEN_BOUNDS_S, wait_s)] += 1
        self.first_token_sum_s += wait_s
