"""Spans of requests: what the traffic port asks and is told, noted beside it.

Model     a prompt reader and a decider that note what passes through them and change nothing but one field of the head:
          `traceparent` names the attempt as the parent of what the engine does. One request is a server span with
          children: receive, tokenise, decide (with match, estimate, choose and book), queue, and one client span for
          each attempt, in which first_token reaches to the first token and stream from there to the end
Valid     one loop. What is not sampled passes through with its client's own context
Blind to  requests that are turned away by their head alone. Prompts and answers: no span holds any text of either
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from time import monotonic, perf_counter, time_ns

from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Hold, Outcome, Refuse, Send
from router.http.contract import Decider, PromptReader, Read, Rewritten
from router.http.head import RequestHead
from router.laps import Lap, TimedLaps
from router.placing import Placement
from router.receipts import Receipt
from router.resume.reasons import WhyNot
from router.telemetry.context import TRACEPARENT, parent_of, traceparent
from router.telemetry.trace import (
    Attributes,
    Passing,
    Trace,
    asked_of,
    attempt_of,
    broken,
    choice_of,
    ended,
    facts_of,
    given_up,
    operation_of,
    refused,
    set_known,
)


class Tracing:
    """Makes spans. share : of requests whose clients do not say, 0..1; rng : draws which

    laps : of decisions, if anybody keeps them; clock, scheme : the traffic port's
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        share: float,
        rng: Random,
        laps: TimedLaps | None = None,
        clock: Callable[[], float] = monotonic,
        scheme: str = "http",
    ) -> None:
        self._clock = clock
        self._scheme = scheme
        self._tracer = tracer
        self._share = share
        self._rng = rng
        self.laps = laps

    def reader(self, read: PromptReader) -> PromptReader:
        """The same reader, noting when it began and ended."""

        def traced(head: RequestHead, body: bytes) -> Read | asyncio.Future[Read]:
            follows, again = head.trace, head.trace is not None  # it reads the rest of a stream
            if not again:
                follows = head.trace = self._begin(head)
            if not isinstance(follows, Trace):
                answer = read(head, body)
                return _mark_later(answer, follows) if isinstance(answer, asyncio.Future) else _marked(answer, follows)
            reading = Reading(head, follows, self._child(follows, "router.tokenise"), again=again)
            try:
                answer = read(head, body)
            except BaseException as exc:
                reading.broke(exc)
                raise
            return reading.later(answer) if isinstance(answer, asyncio.Future) else reading.over(answer)

        return traced

    def decider(self, decider: Decider) -> Decider:
        """The same decider, noting what it is told and what it says."""
        return _TracedDecider(decider, self)

    def _begin(self, head: RequestHead) -> Trace | Passing:
        """Whether a request is followed, and as whose part."""
        said = head.get(TRACEPARENT)
        parent = parent_of(said)
        if not (self._rng.random() < self._share if parent is None else parent.sampled):
            return Passing(b"" if said is None or parent is None else said)
        context = None
        if parent is not None:
            flags = TraceFlags(TraceFlags.SAMPLED)
            remote = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(remote))
        attributes = asked_of(head, scheme=self._scheme)
        method, route = str(attributes["http.request.method"]), attributes.get("http.route")
        name = "HTTP" if method == "_OTHER" else method
        now_ns = time_ns()
        begun_ns = now_ns if head.began_s is None else now_ns - int(1e9 * (self._clock() - head.began_s))
        root = self._tracer.start_span(
            name if route is None else f"{name} {route!s}",
            context=context,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=begun_ns,
        )
        trace = Trace(root, method)
        self._child(trace, "router.receive", start_ns=begun_ns).end(now_ns)
        return trace

    def _child(
        self,
        trace: Trace,
        name: str,
        attributes: Attributes | None = None,
        *,
        of: Span | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        start_ns: int | None = None,
    ) -> Span:
        context = set_span_in_context(of or trace.root)
        span = self._tracer.start_span(name, context=context, kind=kind, start_time=start_ns)
        set_known(span, attributes or {})
        return span

    def decided(self, trace: Trace, begun_ns: int, ended_ns: int, laps: list[Lap], actions: list[Action]) -> None:
        """A decision was made, in these phases."""
        span = self._child(trace, "router.decide", start_ns=begun_ns)
        to_ns = ended_ns - int(perf_counter() * 1e9)
        for lap in laps:
            part = self._child(trace, f"router.{lap.phase.value}", of=span, start_ns=int(lap.begun_s * 1e9) + to_ns)
            part.end(int(lap.ended_s * 1e9) + to_ns)
        for action in actions:
            if isinstance(action, Send) and action.request.trace is trace:
                set_known(span, choice_of(action))
        span.end(ended_ns)

    def acted(self, actions: list[Action]) -> None:
        """What was said of requests, whoever asked."""
        for action in actions:
            request = action.held.request if isinstance(action, Refuse) and action.held else None
            request = action.request if isinstance(action, Send | Hold) else request
            trace = None if request is None else request.trace
            if isinstance(trace, Passing):
                if isinstance(action, Send) and trace.parent:
                    action.extra_headers.append((TRACEPARENT, trace.parent))
            elif isinstance(trace, Trace):
                self._acted(trace, action)

    def _acted(self, trace: Trace, action: Action) -> None:
        if isinstance(action, Hold):
            trace.queue = self._child(trace, "router.queue")
            return
        if trace.queue is not None:
            trace.queue.end()
            trace.queue = None
        if isinstance(action, Send):
            self._sent(trace, action)
        elif action.held is not None and action.held.request.sent_tokens is not None:
            given_up(trace, Outcome.FAILED, Cause.BROKEN)  # the rest of a stream: its client sees no answer of ours
        else:
            refused(trace, action)

    def _sent(self, trace: Trace, send: Send) -> None:
        trace.attempt = self._child(trace, "router.attempt", attempt_of(send, trace.method), kind=SpanKind.CLIENT)
        trace.part = self._child(trace, "router.first_token", of=trace.attempt)
        context = trace.attempt.get_span_context()
        send.extra_headers.append((TRACEPARENT, traceparent(context.trace_id, context.span_id, sampled=True)))

    def first_token(self, trace: Trace) -> None:
        """The first token came: the stream begins."""
        if trace.part is not None and trace.attempt is not None:
            trace.part.end()
            trace.part = self._child(trace, "router.stream", of=trace.attempt)


class _TracedDecider:
    """See `Tracing.decider`."""

    def __init__(self, decider: Decider, tracing: Tracing) -> None:
        self._decider = decider
        self._tracing = tracing

    @property
    def next_due_s(self) -> float | None:
        return self._decider.next_due_s

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        trace = request.trace
        if not isinstance(trace, Trace):
            return self._told(self._decider.arrived(request, now_s))
        set_known(trace.root, facts_of(request))
        operation = operation_of(request)
        if operation is not None:
            trace.root.update_name(f"{operation} {request.model}")
        actions = self._decided(trace, lambda: self._decider.arrived(request, now_s))
        for action in actions:
            if isinstance(action, Refuse) and action.held is None:
                refused(trace, action)
        return self._told(actions)

    def failed(self, sent: Send, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]:
        return self._again(sent, cause.value, lambda: self._decider.failed(sent, cause, now_s, retry_after_s))

    def broke(self, sent: Send, rest: RequestFacts | WhyNot, now_s: float) -> list[Action]:
        return self._again(sent, Cause.BROKEN.value, lambda: self._decider.broke(sent, rest, now_s))

    def _again(self, sent: Send, cause: str, decide: Callable[[], list[Action]]) -> list[Action]:
        """An attempt came to nothing, and another may follow."""
        trace, receipt = sent.request.trace, _receipt(sent)
        if not isinstance(trace, Trace) or receipt is None:
            return self._told(decide())
        actions = self._decided(trace, decide)
        if receipt.outcome is None and not any(_is_for(action, trace) for action in actions):
            return self._told(actions)  # still open: its own answer is relayed
        trace.end_attempt(cause)
        if receipt.outcome is not None:
            own = [action.status for action in actions if isinstance(action, Refuse) and action.held is None]
            ended(trace, receipt, own_status=own[0] if own and not receipt.resumes else None)
        return self._told(actions)

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        if isinstance(sent.request.trace, Trace):
            self._tracing.first_token(sent.request.trace)
        return self._told(self._decider.first_token(sent, now_s))

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        trace = sent.request.trace
        if isinstance(trace, Trace):
            set_known(trace.root, {"gen_ai.usage.input_tokens": ended.prompt_tokens})
        return self._over(sent, self._decider.finished(sent, ended, now_s))

    def cancelled(self, sent: Send, now_s: float) -> list[Action]:
        return self._over(sent, self._decider.cancelled(sent, now_s))

    def left(self, hold: Hold, now_s: float, *, cause: Cause | None = None) -> list[Action]:
        actions = self._decider.left(hold, now_s, cause=cause)
        trace = hold.request.trace
        if isinstance(trace, Trace):
            given_up(trace, Outcome.CANCELLED if cause is None else Outcome.FAILED, cause)
        return self._told(actions)

    def due(self, now_s: float) -> list[Action]:
        return self._told(self._decider.due(now_s))

    def _decided(self, trace: Trace, decide: Callable[[], list[Action]]) -> list[Action]:
        laps, begun_ns = self._tracing.laps, time_ns()
        noted: list[Lap] = []
        if laps is not None:
            laps.last = noted
        try:
            actions = decide()
        except BaseException as exc:
            broken(trace, exc)
            raise
        finally:
            if laps is not None:
                laps.last = None
        self._tracing.decided(trace, begun_ns, time_ns(), noted, actions)
        return actions

    def _over(self, sent: Send, actions: list[Action]) -> list[Action]:
        trace, receipt = sent.request.trace, _receipt(sent)
        if isinstance(trace, Trace) and receipt is not None:
            ended(trace, receipt)
        return self._told(actions)

    def _told(self, actions: list[Action]) -> list[Action]:
        if actions:
            self._tracing.acted(actions)
        return actions


class Reading:
    """One reading of a prompt. again : it reads the rest of a stream, whose request goes on whatever becomes of it"""

    def __init__(self, head: RequestHead, trace: Trace, span: Span, *, again: bool) -> None:
        self._head = head
        self._trace = trace
        self._span = span
        self._again = again

    def over(self, answer: Read) -> Read:
        """It was read, or refused."""
        self._span.end()
        if isinstance(answer, Refuse) and not self._again:
            refused(self._trace, answer)
        return _marked(answer, self._trace)

    def later(self, answer: asyncio.Future[Read]) -> asyncio.Future[Read]:
        """The same once it is there; this callback comes before that of who waits for it."""
        answer.add_done_callback(self._done)
        return answer

    def broke(self, exc: BaseException) -> None:
        """The reader raised."""
        self._span.end()
        if not self._again:
            broken(self._trace, exc)

    def _done(self, answer: asyncio.Future[Read]) -> None:
        if answer.cancelled():
            self._span.end()
            if not self._again:
                given_up(self._trace, self._head.given_up or Outcome.REFUSED)  # else by who reads: the router stops
        elif (exc := answer.exception()) is not None:
            self.broke(exc)
        else:
            self.over(answer.result())


def _marked(answer: Read, follows: object) -> Read:
    """The answer of a reader, with whose it is."""
    if not isinstance(answer, Refuse):
        (answer.facts if isinstance(answer, Rewritten) else answer).trace = follows
    return answer


def _mark_later(answer: asyncio.Future[Read], follows: object) -> asyncio.Future[Read]:
    def done(read: asyncio.Future[Read]) -> None:
        if not read.cancelled() and read.exception() is None:
            _marked(read.result(), follows)

    answer.add_done_callback(done)
    return answer


def _receipt(sent: Send) -> Receipt | None:
    return sent.placement.receipt if isinstance(sent.placement, Placement) else None


def _is_for(action: Action, trace: Trace) -> bool:
    """Whether it says how the request that was asked about goes on."""
    return not isinstance(action, Refuse) and action.request.trace is trace
