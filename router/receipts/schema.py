"""What a receipt says: everything that went into one decision, and later what really happened. One JSON line each.

Valid     schema 1. A receipt holds no prompt text and no credentials; what is derived from a prompt (`marks`) or names
          a client's session (`unit`) is hashed with a key that only the writing process has
"""

from __future__ import annotations

from typing import Annotated

import msgspec

SCHEMA = 1  # raised when a field changes its meaning or leaves; new fields alone do not raise it

# What can be true of a request. A line beyond it was damaged and is no receipt, so that no reader has to reckon with
# numbers that overflow. Checked where lines are read; making a receipt costs nothing more.
MOST_S = 1e12  # thirty thousand years; either way, since some times are differences
MOST_TOKENS = 2**31
Seconds = Annotated[float, msgspec.Meta(ge=-MOST_S, le=MOST_S)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Money = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Bytes = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
MeanTokens = Annotated[float, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Blocks = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Share = Annotated[float, msgspec.Meta(ge=-1e-9, le=1 + 1e-9)]  # sums of shares are that much off
Chance = Annotated[float, msgspec.Meta(gt=1e-12, le=1 + 1e-9)]  # of what did happen


class Candidate(msgspec.Struct):
    """One (replica, path) that was possible. Seconds from the choice; tokens of the prompt.

    `evidence` to `discipline` are worked out for the chosen candidate, and for all of a receipt that names them all.
    """

    replica: str
    path: str
    queue_s: Seconds
    fetch_s: Seconds
    compute_s: Seconds
    first_token_s: Seconds  # if all believed blocks are there
    expected_s: Seconds  # mean first token, over where the blocks then really are
    hit_probability: Share  # that all believed blocks are there
    local_tokens: Tokens  # reusable from the replica's own memory
    fetched_tokens: Tokens  # to come from the store
    pace_s: Seconds  # per output token
    queue_price_s: Seconds  # delay caused to later requests; a policy weights it
    decode_price_s: Seconds  # delay caused to running decodes; a policy weights it
    signal_age_s: Seconds | None = None  # of the replica's load report; None: never seen
    calibration: str = "uncalibrated"  # or "calibrated": whether the replica's times rest on observed first tokens
    first_token_p90_s: Seconds | None = None
    first_token_p99_s: Seconds | None = None
    evidence: str | None = None  # what the hit probability rests on; None where nothing is reused
    discipline: str | None = None  # what the replica is believed to do about the fetch; None without one
    approximate: bool = False  # what is reused is a guess from what was sent there, or written, for want of events
    blocks_age_s: Seconds | None = None  # since the oldest of the blocks it reuses was heard of; None: not known
    ready_s: Seconds | None = None  # earliest start the fetch allows; first_token_s: max(queue_s, ready_s) + compute_s
    levelling_price_s: Seconds | None = None  # delay caused to whoever would take a short queue; None: one was free


class Shadow(msgspec.Struct):
    """What another rule would have taken for the same request, at the same moment, had it been asked."""

    arm: str
    replica: str
    path: str


class Resume(msgspec.Struct):
    """A stream that lost its replica and was placed anew for the rest. Seconds from the request's arrival."""

    replica: str  # that failed
    broke_s: Seconds
    sent_tokens: Tokens  # that the client had by then; the least it can be, where the engine tells no ids
    went_on_s: Seconds | None = None  # first token of the next replica; None: it brought none


class Receipt(msgspec.Struct, kw_only=True):
    """One request. `None` is unknown. Times in seconds from arrival, except arrived_at (Unix time)."""

    schema: int = SCHEMA
    request_id: str
    arrived_at: Seconds
    endpoint: str
    model: str
    prompt_tokens: Tokens
    prompt_exact: bool
    streamed: bool
    policy: str
    client: str | None = None  # name of the key that let it in
    edited: tuple[str, ...] = ()  # fields of the body that the router changed or added
    directed: str | None = None  # how the engine was told where the prompt's state is; None: it was not
    candidates: list[Candidate] = []
    chosen: int | None = None  # index into candidates
    possible: int | None = None  # how many candidates there were; more than are named: only the chosen and the best are
    reason: str | None = None
    probability: Chance | None = None
    placed_s: Seconds | None = None  # when the last choice was made; what its candidates expect counts from here
    expected_output_tokens: MeanTokens | None = None
    arrival_rps: Rate | None = None  # at one replica
    mean_compute_s: Seconds | None = None
    attempts: int = 0
    tried: list[str] = []  # replicas of failed attempts
    outcome: str | None = None
    cause: str | None = None  # of a failure or a refusal
    status: int | None = None
    first_token_s: Seconds | None = None  # that the client saw, whatever became of its stream then
    ended_s: Seconds | None = None
    output_tokens: Tokens | None = None
    events: Tokens | None = None  # of a stream, from its first token on: about one for each output token
    cached_tokens: Tokens | None = None  # as the engine reported
    usd: Money | None = None  # its part of the busy time of the replicas it was at; None: one of them has no price
    arm: str | None = None  # of the experiment it was part of
    arm_share: Share | None = None  # of all units that this arm was meant to get
    unit: str | None = None  # hash of what it was assigned by: requests of one session share it
    override: bool = False  # the client asked for the policy
    explained: bool = False  # the client asked why
    shadows: list[Shadow] = []
    deadline_s: float | None = None  # of the first token, from arrival, as the client asked
    pace_deadline_s: float | None = None  # of each further output token, on average, as the client asked
    fetched_bytes: Bytes | None = None  # expected to move for the last choice; None: nothing was estimated
    late: bool | None = None  # its first token came after that, or after the p99 expected of it; None: nobody saw it
    regret_s: Seconds | None = None  # first token, from the choice, less what was expected of the best other candidate
    sampled: bool = True  # it would have left a line whatever became of it; only such lines stand for all requests
    marks: list[str] = []  # of its first 1, 2, 3, 4, 6, 8, 12, ... blocks and of all; the same for the same tokens
    blocks: Blocks | None = None  # of its chain: reusable blocks of the prompt, of block_tokens each
    block_tokens: BlockTokens | None = None
    resumes: list[Resume] = []  # in order; the last choice is that of the last one
    not_resumed: str | None = None  # why a stream that broke did not go on; None where that was not asked

    @property
    def choice(self) -> Candidate | None:
        """The chosen candidate; None when nothing was chosen."""
        return None if self.chosen is None else self.candidates[self.chosen]

    @property
    def path(self) -> str | None:
        """How its prompt's state was to get there; None where nothing was estimated, or there is no prompt."""
        choice = self.choice
        return None if choice is None or not self.prompt_tokens else choice.path

    @property
    def waited_s(self) -> float | None:
        """First token as the last choice forecast it: from that choice on. None where nobody saw it."""
        seen_s = self.resumes[-1].went_on_s if self.resumes else self.first_token_s
        return None if seen_s is None or self.placed_s is None else seen_s - self.placed_s

    def summary(self) -> str:
        """The decision as one line of JSON, for the response header `x-tfirst-explain`."""
        return msgspec.json.encode(
            {
                "policy": self.policy,
                "reason": self.reason,
                "candidates": len(self.candidates),
                "chosen": self.choice,
            }
        ).decode()
