"""What the traffic port needs from the rest of the router, and the limits it keeps.

Everything that decides is behind `Decider`; everything that reads a prompt is behind `PromptReader`. The
traffic port itself holds every byte and no rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Hold, Refuse, Send
from router.http.head import RequestHead, ResponseHead
from router.resume.log import ResumeConfig
from router.resume.reasons import WhyNot

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Bytes = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Decider(Protocol):
    """Owns choice and retry. Each `Send` is closed by exactly one of finished, failed, broke and cancelled; an empty
    answer to `failed` for an overloaded replica leaves it open, its answer is relayed, and `finished` closes it, unless
    it was the rest of a stream: that is closed. Each `Hold`
    is followed by one action that names it, from any later call, or closed by `left`.

    next_due_s : while any request is held, when `due` is wanted. Changes with every call, and may have passed already;
        None: nothing is due
    `now_s` is the clock's value, in seconds. None of these raises in normal operation; if one does, the client
    gets a 500 and the relay lets go of everything.
    """

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]: ...
    def first_token(self, sent: Send, now_s: float) -> list[Action]: ...
    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]: ...
    def failed(self, sent: Send, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]: ...
    def broke(self, sent: Send, rest: RequestFacts | WhyNot, now_s: float) -> list[Action]: ...
    def cancelled(self, sent: Send, now_s: float) -> list[Action]: ...
    def left(self, hold: Hold, now_s: float, *, cause: Cause | None = None) -> list[Action]: ...
    def due(self, now_s: float) -> list[Action]: ...
    @property
    def next_due_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Facts of a request, and the body that goes on in place of the client's.

    swallows_usage : the body asks for usage that the client did not ask for, so the event of usage alone is cut out
    """

    facts: RequestFacts
    body: bytes
    swallows_usage: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Whom a request to all is sent to. name : of its replicas, for reports; fields : every request to it gets them"""

    name: str
    base_url: str
    fields: tuple[tuple[bytes, bytes], ...] = ()


Read = RequestFacts | Refuse | Rewritten
PromptReader = Callable[[RequestHead, bytes], Read | asyncio.Future[Read]]  # cancelled when the client leaves
Answer = Callable[[RequestHead], tuple[int, bytes]]  # status and a JSON body
Admit = Callable[[RequestHead], Refuse | None]  # of every request, by its head alone
Resumable = Callable[[str], ResumeConfig | None]  # how streams of a model go on when they break; None: not at all
Heard = Callable[[Send, ResponseHead], object]  # the head of an answer, before anything is made of it
Clock = Callable[[], float]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one client may make the router hold."""

    max_body_bytes: Bytes = 64 * 1024 * 1024  # beyond: 413. Images and long contexts need tens of MiB
    max_head_bytes: Bytes = 64 * 1024  # request line and all fields; beyond: 431
    max_head_fields: Count = 100  # beyond: 431
    max_waiting_requests: Count = 16  # pipelined behind the one in progress; then the client is not read
    max_waiting_bytes: Bytes = 1024 * 1024  # their bodies; the same consequence
    # of one address; more get 429 and are closed. 0: no limit, because behind another proxy all clients share one
    max_connections_per_client: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_idle_per_endpoint: Count = 1024  # pooled connections; more are closed, in-use ones are not limited


class TimeOuts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long the router waits for a peer. Only `total_s`, where it is set, ends a stream that progresses."""

    connect_s: Seconds = 5.0  # to a replica; then another is tried
    response_head_s: Seconds = 600.0  # from the request to the head of its answer: that of a whole one comes at its end
    first_byte_s: Seconds = 600.0  # from the request to the first byte of the body: holds queue wait and prefill
    stall_s: Seconds = 300.0  # between two pieces of a response, and for a client that does not read
    request_head_s: Seconds = 60.0  # from the first byte of a request to the end of its head
    request_body_s: Seconds = 60.0  # from there to its end: a slow sender holds no replica, but memory
    keep_alive_s: Seconds = 75.0  # a client's connection without a request
    pool_idle_s: Seconds = 60.0  # an endpoint's; engines often close after 5 s, which costs one new connection
    total_s: Seconds | None = None  # from a whole request to the end of its answer; passed, it is cut all the same
    linger_s: Seconds = 5.0  # reading on after a rejected request, so that the client can see the answer
