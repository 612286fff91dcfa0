"""What an engine is told, what it gives out, and its own book-keeping for one request."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum

from sim_backends.alarms import Alarm
from sim_backends.content import Content
from sim_backends.directives import Directive
from sim_backends.fetch import Fetch


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
    """One request as an engine sees it: a prompt of tokens, or of block ids where tokens do not matter.

    request_id : unique among requests in the engine
    prompt : token ids, at least one, each in 0..vocab-1; None when `block_ids` are given
    max_tokens : the client's limit on output tokens, >= 1; vLLM's default
    output_tokens : after how many the model would end by itself, >= 1; None draws. Nothing outside the engine
        is told before the end
    ignore_eos : run to max_tokens whatever the model would do
    cache_salt : part of the first block's hash
    block_ids : one for each full block of the prompt, 0..2**31-1, more are cut. Two prompts share a block exactly
        when their ids are equal up to it
    prompt_tokens : length of the prompt; given with `block_ids`, filled in from `prompt`
    directive : how the prompt's state gets here, where the engine does not decide that itself
    given_tokens : at least so many from the start of the prompt are at hand without a look-up or a fetch,
        0..prompt_tokens - 1; for bounds with a perfect cache. No engine can be told so over HTTP

    Raises
    ------
    ValueError : not exactly one of `prompt` and `block_ids`, or `given_tokens` out of range
    """

    request_id: str
    prompt: list[int] | None = None
    max_tokens: int = 16
    output_tokens: int | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    block_ids: list[int] | None = field(default=None, kw_only=True)
    prompt_tokens: int = field(default=0, kw_only=True)
    directive: Directive | None = field(default=None, kw_only=True)
    given_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.block_ids is None):
            raise ValueError("a request has either a prompt or block_ids with prompt_tokens")
        if self.prompt is not None:
            object.__setattr__(self, "prompt_tokens", len(self.prompt))
        if self.given_tokens and not 0 < self.given_tokens < self.prompt_tokens:
            raise ValueError(f"given_tokens is {self.given_tokens}, but the prompt has {self.prompt_tokens} tokens")


@dataclass(slots=True)
class Output:
    """One generated token at virtual time `at_s`, or the end of a request whose replica was lost.

    index : 0 for the first token; -1 where no token comes with it
    finish_reason : `stop` or `length` on the last token, `error` without a token, else None
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
    content: Content
    digests: list[bytes]  # the content's own list: of the full blocks known so far
    prompt_tokens: int
    known: int  # tokens of the prompt and of the output so far
    planned: int  # output tokens it will make
    finish_reason: str
    arrival_s: float
    rank: int  # place in the waiting queue; smaller goes first
    salt: str | None
    given_tokens: int = 0  # from the start, at hand whatever the cache has
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)  # held; empty unless running or reserved
    computed: int = 0  # tokens whose KV is here
    registered: int = 0  # blocks that can be found in the cache
    step_tokens: int = 0  # computed by the step under way
    output: int = 0
    cached_tokens: int = -1  # not known before it first gets its blocks
    directive: Directive | None = None
    keep_as: str | None = None  # once it is over its state is kept under this id
    fetch: Fetch | None = None  # under way; the layered and the two-ended one run beside it
    fetch_counts: bool = False  # its gain is told as cached tokens: not after a preemption
    no_room: bool = False  # for what it would have fetched on arrival
    patience: Alarm | None = None  # of a time-limited fetch at the request's turn


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

    def reset(self) -> None:
        """Begin again at zero, as a process that was started anew does."""
        fresh = Counters()
        for name in Counters.__slots__:
            setattr(self, name, getattr(fresh, name))

    def saw_first_token(self, wait_s: float) -> None:
        self.first_token_buckets[bisect_left(FIRST_TOKEN_BOUNDS_S, wait_s)] += 1
        self.first_token_sum_s += wait_s
