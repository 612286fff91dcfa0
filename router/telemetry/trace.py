"""One request that is followed: its open spans, and what they say of it. No text of a prompt or an answer is in there.

Source    OpenTelemetry semantic conventions for HTTP and for GenAI (names as of version 1.37)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from estimators.request import RequestFacts
from router.actions import Cause, Outcome, Refuse, Send
from router.http.head import RequestHead
from router.placing import Placement
from router.receipts import Receipt
from router.routes import template

Attributes = Mapping[str, AttributeValue | None]

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
PROVIDER = "tfirst"  # the engines behind it may be of several kinds
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})


@dataclass(slots=True, eq=False)
class Trace:
    """One sampled request. method : of it and of its attempts, in the conventions' words

    The spans that are open now; None where none of that kind is.
    """

    root: Span
    method: str
    queue: Span | None = None
    attempt: Span | None = None
    part: Span | None = None  # of the attempt: first_token or stream

    def end_attempt(self, cause: str) -> None:
        """It came to nothing."""
        for span in (self.part, self.attempt):
            if span is not None:
                span.set_attribute("error.type", cause)
                span.set_status(StatusCode.ERROR)
                span.end()
        self.attempt = self.part = None

    def close(self) -> None:
        """It is over, and so is all that is open of it."""
        for span in (self.part, self.attempt, self.queue, self.root):
            if span is not None:
                span.end()
        self.part = self.attempt = self.queue = None


@dataclass(slots=True, eq=False)
class Passing:
    """One that is not sampled. parent : its client's own context; b"" without one"""

    parent: bytes


def asked_of(head: RequestHead, *, scheme: str) -> dict[str, AttributeValue]:
    """What its head says of a request. Not its query, which may hold a key.

    scheme : of the port; what a proxy before it says of its own client's comes first
    """
    method = head.method.decode("latin-1")
    proxied = (head.get(b"x-forwarded-proto") or b"").lower()
    said: dict[str, AttributeValue] = {
        "http.request.method": method if method in METHODS else "_OTHER",
        "url.scheme": proxied.decode() if proxied in (b"http", b"https") else scheme,
        "url.path": head.path,
        "network.protocol.version": "1.0" if head.http10 else "1.1",
    }
    if method not in METHODS:
        said["http.request.method_original"] = method
    route = template(head.path)
    if route is not None:
        said["http.route"] = route
    return said


def facts_of(request: RequestFacts) -> Attributes:
    """What a request asks for."""
    return {
        "gen_ai.operation.name": operation_of(request),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model or None,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.stream": request.streams,
        "tfirst.request_id": request.request_id,
        "tfirst.prompt_tokens": request.prompt_tokens,
        "tfirst.prompt_exact": request.prompt_exact,
        "tfirst.blocks": len(request.chain),
    }


def server_of(base_url: str) -> Attributes:
    """Whom a request was sent to: host and port apart, as the conventions want them.

    >>> server_of("http://[::1]:8000")
    {'server.address': '::1', 'server.port': 8000}
    """
    url = urlsplit(base_url)
    return {"server.address": url.hostname, "server.port": url.port or (443 if url.scheme == "https" else 80)}


def attempt_of(send: Send, method: str) -> Attributes:
    """What an attempt is, as an HTTP request of the router's own."""
    return {
        "http.request.method": method,
        "http.request.resend_count": send.attempt - 1 or None,
        "url.full": f"{send.base_url}{send.request.path}",
        **server_of(send.base_url),
        "tfirst.attempt": send.attempt,
        **choice_of(send),
    }


def choice_of(send: Send) -> dict[str, AttributeValue | None]:
    """What was chosen, and what was expected of it: why this replica."""
    chosen: dict[str, AttributeValue | None] = {
        "tfirst.replica": send.replica,
        "tfirst.path": send.path.value if send.request.prompt_tokens else None,
        "tfirst.source": send.source,
    }
    placement = send.placement
    if isinstance(placement, Placement):
        chosen |= {"tfirst.policy": placement.receipt.policy, "tfirst.reason": placement.receipt.reason}
        if placement.notes is not None:
            one = placement.notes.chosen
            for name in ("queue_s", "fetch_s", "compute_s", "expected_s", "hit_probability", "first_token_p99_s"):
                chosen[f"tfirst.expected.{name}"] = getattr(one, name)
            chosen["tfirst.expected.reused_tokens"] = one.local_tokens + one.fetched_tokens
    return chosen


def ended(trace: Trace, receipt: Receipt, *, own_status: int | None = None) -> None:
    """A request ended, as its receipt says. own_status : of the router's own answer to it, if there is one"""
    set_known(
        trace.root,
        {
            "tfirst.outcome": receipt.outcome,
            "tfirst.cause": receipt.cause,
            "tfirst.attempts": receipt.attempts,
            "http.response.status_code": receipt.status if own_status is None else own_status,
            "gen_ai.usage.output_tokens": receipt.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": receipt.cached_tokens,
            "gen_ai.response.time_to_first_chunk": receipt.first_token_s,
        },
    )
    if receipt.status is not None and trace.attempt is not None:
        trace.attempt.set_attribute("http.response.status_code", receipt.status)
        if receipt.status >= 400:  # to who asked it is an error, whoever's fault
            trace.attempt.set_attribute("error.type", str(receipt.status))
            trace.attempt.set_status(StatusCode.ERROR)
    if receipt.outcome in ("failed", "server_error"):
        trace.root.set_attribute("error.type", receipt.cause or receipt.outcome)
        trace.root.set_status(StatusCode.ERROR)
    trace.close()


def refused(trace: Trace, refusal: Refuse) -> None:
    """It ended with an answer of the router's own."""
    if not trace.root.is_recording():  # ended before, with its last attempt
        return
    why = None if refusal.why is None else refusal.why.value
    outcome = Outcome.of_own_answer(refusal.status, refusal.why)
    set_known(
        trace.root,
        {"tfirst.outcome": outcome.value, "tfirst.cause": why, "http.response.status_code": refusal.status},
    )
    if refusal.status >= 500:
        trace.root.set_attribute("error.type", why or str(refusal.status))
        trace.root.set_status(StatusCode.ERROR)
    trace.close()


def given_up(trace: Trace, outcome: Outcome, cause: Cause | None = None) -> None:
    """It ended before it was placed, or placed anew, by no answer that was chosen for it. cause : of a failure"""
    set_known(trace.root, {"tfirst.outcome": outcome.value, "tfirst.cause": None if cause is None else cause.value})
    if cause is not None:
        trace.root.set_attribute("error.type", cause.value)
        trace.root.set_status(StatusCode.ERROR)
    trace.close()


def broken(trace: Trace, exc: BaseException) -> None:
    """The router failed at it. What the exception said is not noted, since it may quote a prompt."""
    trace.root.set_attribute("tfirst.outcome", Outcome.FAILED.value)
    trace.root.set_attribute("error.type", type(exc).__name__)
    trace.root.set_status(StatusCode.ERROR)
    trace.close()


def set_known(span: Span, attributes: Attributes) -> None:
    """Those that are known."""
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})


def operation_of(request: RequestFacts) -> str | None:
    """What kind of work it is, in the words of the convention; None where it has none for it."""
    return OPERATIONS.get(request.path, "text_completion" if request.generates else None)
