"""An exchange whose stream goes on from another replica when its own fails under way.

Model     the stream passes a `Resuming`. When it breaks, that says what is lacking; this is read and placed like a
          request, sent, and answered behind what the client has. While the rest is awaited an attempt can be replaced,
          as one before the first byte can. What cannot go on is shown: an event that says why, then a visible cut
Valid     generations of pools whose streams go on. The head is the first answer's, with the name of its replica
Blind to  what is in the events, and who takes the rest
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from estimators.request import RequestFacts
from router.actions import Cause, Refuse, Send
from router.http.along import along, cause_for_another, show_head
from router.http.contract import Read, Rewritten
from router.http.exchange import Exchange
from router.http.head import RequestHead, ResponseHead
from router.http.reframing import Filter
from router.http.resuming import PATHS, Resuming
from router.http.retry_after import retry_after_s
from router.http.shared import Shared
from router.http.splice import UsageSwallower
from router.resume.continuation import Continuation
from router.resume.placement import rest_as_request
from router.resume.reasons import WhyNot

if TYPE_CHECKING:
    from router.http.client import ClientConnection


class ResumedExchange(Exchange):
    """An `Exchange` of a generation, where streams of some pools go on."""

    __slots__ = ("_first_id", "_rest", "_resumable", "_stream")

    def __init__(self, client: ClientConnection, shared: Shared, head: RequestHead, body: bytes) -> None:
        super().__init__(client, shared, head, body)
        self._first_id = b""  # of the first answer, once another engine is at work
        self._resumable: Resuming | None = None  # what its answer could become
        self._stream: Resuming | None = None  # that answer, once it is one
        self._rest: Continuation | None = None  # what another replica is to be asked, until one begins to answer

    def has_id(self, wanted: str) -> bool:
        return super().has_id(wanted) or (wanted != "" and wanted == self._first_id.decode("latin-1"))

    # -- the first answer

    def _place(self, read: Read) -> None:
        if self._rest is not None:
            self._place_rest(read, self._rest)
            return
        if not isinstance(read, Refuse):
            self._resumable = self._could_become(_facts(read))
        super()._place(read)

    def _could_become(self, facts: RequestFacts) -> Resuming | None:
        """What its stream could become; None where it is none, or its pool's do not go on."""
        resumable, path = self._shared.resumable, self._head.path
        if resumable is None or not facts.streams or path not in PATHS:
            return None
        config = resumable(facts.model)
        if config is None:
            return None
        counted = facts.prompt_exact and facts.prompt_tokens > 0
        return Resuming(config, path, self._body, prompt_tokens=facts.prompt_tokens if counted else None)

    def _filter(self) -> Filter | None:
        self._stream = self._resumable
        if self._stream is None:
            return super()._filter()
        self._stream.begin(UsageSwallower() if self._swallows_usage else None)
        return self._stream

    # -- a replica fails

    @property
    def _is_seen(self) -> bool:
        return self._rest is None and super()._is_seen

    def response_ended(self) -> None:
        if self._stream is not None and self._is_seen and not self._stream.ended:
            self._upstream = None  # it ended well, and its stream did not
            self._broke()
        else:
            super().response_ended()

    def _broke(self) -> None:
        stream = self._stream
        if stream is None:
            super()._broke()
            return
        rest = stream.rest()
        if isinstance(rest, WhyNot):
            self._show_break(rest)
        elif rest.body:
            self._rest = rest
            self._read(rest.body)
        else:
            stream.complete(rest.rest)
            super().response_ended()

    def _refuse(self, refuse: Refuse) -> None:
        if self._outlet.relayed:
            self._show_break(None)
        else:
            super()._refuse(refuse)

    def _show_break(self, why_not: WhyNot | None) -> None:
        """The stream does not go on, which the client is shown. None: nobody takes the rest"""
        assert self._stream is not None, "a stream broke"
        sent = None if why_not is None else self._put_away()
        if sent is not None:
            self._ask(self._shared.decider.broke, sent, why_not)
        self._stream.give_up(why_not)
        self._break_off()

    # -- the rest

    def _place_rest(self, read: Read, rest: Continuation) -> None:
        if isinstance(read, Refuse):
            self._show_break(WhyNot.BODY)
            return
        sent = self._put_away()
        assert self._stream is not None, "a stream broke"
        assert sent is not None, "the decider does not know yet that it broke"
        self._first_id, self._answer_id = self._first_id or self._answer_id, b""
        self._body = read.body if isinstance(read, Rewritten) else rest.body
        request = rest_as_request(sent.request, _facts(read), rest.rest, sent_tokens=self._stream.sent_tokens)
        self._obey(self._ask(self._shared.decider.broke, sent, request))

    def response_started(self, response: ResponseHead) -> None:
        if self._rest is None:
            super().response_started(response)
            return
        attempt = self._attempt
        assert attempt is not None, "an answer follows an attempt"
        if self._shared.heard is not None:
            show_head(self._shared.heard, attempt, response, self._shared.counts)
        self._along = along(response, attempt, self._shared.counts, stream_id=self._note_id, json_id=None)
        if self._along is not None and self._along.is_stream:
            assert self._stream is not None, "a stream broke"
            self._stream.goes_on(self._rest.rest)
            self._rest = None
        else:
            self._drop_upstream()
            self._rest_refused(attempt, response)

    def _rest_refused(self, attempt: Send, response: ResponseHead) -> None:
        """Something else than a stream came."""
        cause = cause_for_another(self._head, attempt, response)
        if cause is None and response.status < 500:  # so would any other
            self._show_break(WhyNot.REFUSED)
        else:
            self._fail(cause or Cause.BAD_ANSWER, retry_after_s=retry_after_s(response))


def _facts(read: RequestFacts | Rewritten) -> RequestFacts:
    return read.facts if isinstance(read, Rewritten) else read
