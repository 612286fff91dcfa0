"""What the `Dispatcher` asks its shell to do, and what the shell tells it about the end of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from estimators.paths import Path
from estimators.request import RequestFacts


class Cause(Enum):
    """Why an attempt failed. A closed set: each becomes a metric label."""

    CONNECT = "connect"  # no connection within the limit, or refused
    NO_ANSWER = "no_answer"  # connection lost, or silent past the limit, before any response byte
    BAD_ANSWER = "bad_answer"  # bytes that are not HTTP, before anything was relayed
    OVERLOADED = "overloaded"  # 429, 502 or 503 head: meant for retry elsewhere, else relayed
    ELSEWHERE = "elsewhere"  # it does not keep the response asked for: another may, else its answer is relayed
    TOO_LONG = "too_long"  # longer than the router allows in all, which is nobody's failure: never retried
    STOPPING = "stopping"  # the router stopped before it ended, which is nobody's failure: never retried
    BROKEN = "broken"  # lost or malformed after response bytes were relayed: at most the rest is asked for elsewhere
    REST_REFUSED = "rest_refused"  # it would not go on with a stream that broke elsewhere, which is no failure of its


class Why(Enum):
    """Why the dispatcher refused a request. A closed set: each becomes a metric label."""

    UNKNOWN_MODEL = "unknown_model"  # nobody has ever served it
    NOBODY_UP = "nobody_up"  # no replica that could take it answers
    KEEPER_LEFT = "keeper_left"  # the replica that kept what it goes on from has left
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    TOO_LATE = "too_late"  # its deadline would be missed
    RULE = "rule"  # no replica is good enough by the routing rule's own limit
    OVERRIDE = "override"  # its client may not choose the policy, or asked for none that exists
    INTERNAL = "internal"  # the router's own mistake


class Means(Enum):
    """How an engine is told where a prompt's state is to come from. A closed set: each becomes a metric label."""

    HEADER = "header"  # a field of the request names the peer to read
    BODY = "body"  # a member of its body does
    MOVE = "move"  # LMCache's controller copies it from the peer, ahead of the request
    PIN = "pin"  # the controller keeps it where it is
    PREFETCH = "prefetch"  # LMCache's coordinator loads it from the store, ahead of the request


class Outcome(Enum):
    """How a request ended, once, by one name in receipts, metrics, logs, spans. A closed set: each becomes a label."""

    OK = "ok"  # a complete 2xx answer
    CLIENT_ERROR = "client_error"  # the replica answered 3xx or 4xx, or no replica could have: neutral for health
    SERVER_ERROR = "server_error"  # the replica answered 5xx
    FAILED = "failed"  # no complete answer: see Cause
    CANCELLED = "cancelled"  # the client left
    REFUSED = "refused"  # the router answered by itself: full, late, nobody up

    @classmethod
    def of_own_answer(cls, status: int, why: Why | None = None) -> Outcome:
        """How a request ended that the router answered by itself with that error status, before it was placed."""
        if why is Why.INTERNAL:
            return cls.FAILED
        return cls.CLIENT_ERROR if 400 <= status < 500 and status != 429 else cls.REFUSED


@dataclass(slots=True)
class Ended:
    """What the relay saw of a complete answer. Unknown stays None."""

    status: int
    output_tokens: int | None = None  # from the answer's usage
    cached_tokens: int | None = None  # from usage.prompt_tokens_details; off by default in engines
    prompt_tokens: int | None = None  # from usage
    stream_error: bool = False  # an error object arrived inside a 200 stream
    events: int = field(default=0, compare=False)  # of a stream, from its first token on: about one a token


@dataclass(slots=True, eq=False)
class Hold:
    """Keep the request waiting: every replica that could take it is full.

    Followed, from any later call, by one `Send` or `Refuse` that has it as `held`; or given up with `left`.
    """

    request: RequestFacts
    owner: Any = None  # the shell's: who is to hear of it
    ticket: object = None  # the dispatcher's own record; opaque to the shell
    row: int = -1  # the full replica it waits for although it could go; -1: for any
    path: Path = Path.RECOMPUTE  # how its prompt state would get there
    source: str | None = None  # replica to read from then, on path PEER


@dataclass(slots=True, eq=False)
class Send:
    """Send the request, byte for byte, to `base_url`. Closed by one of finished, failed and cancelled."""

    request: RequestFacts
    row: int  # replica, a row of the fleet view
    replica: str  # its name, for messages and response headers
    base_url: str  # http://host:port of its endpoint
    path: Path = Path.RECOMPUTE  # how its prompt state is expected, or directed, to get there
    source: str | None = None  # replica to read from, on path PEER
    attempt: int = 1
    extra_headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # added to the upstream request
    members: dict[str, bytes] = field(default_factory=dict)  # added to objects of its body, by the object's name
    explain: str | None = None  # JSON for the response header x-tfirst-explain, when asked for
    placement: object = None  # the dispatcher's own record; opaque to the shell
    held: Hold | None = None  # it waited, and this is for its owner; None: for who asked


@dataclass(slots=True)
class Refuse:
    """Answer the client with an error in the API's form."""

    status: int
    kind: str  # the error's `type`, for example "NotFoundError"
    message: str  # one sentence an operator can act on
    retry_after_s: int | None = None
    param: str | None = None
    held: Hold | None = None  # it waited, and this is for its owner; None: for who asked
    why: Why | None = None  # what it is counted as; None: it ends nothing that is counted as refused


@dataclass(slots=True, eq=False)
class Hint:
    """Have a prompt's state brought to, or kept on, the replica where its request is or will be; it does not wait."""

    means: Means
    request: RequestFacts
    row: int  # of that replica
    source: int = -1  # row of the replica that has it, for MOVE
    call: Any = None  # the shell's: what came of it so far


@dataclass(slots=True, eq=False)
class Withdraw:
    """Stop what `hint` asked for, as far as that can be stopped: the request will not need it."""

    hint: Hint


Action = Send | Hold | Refuse
Aside = Hint | Withdraw  # told beside the request, to others
