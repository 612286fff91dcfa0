"""One stream on its way to a client, from however many replicas: in whole events, and with what going on takes.

Model     whole events pass, so that whatever is said last stands by itself. While the stream could go on elsewhere, its
          events are noted on the way; those of a further replica are rewritten to fit behind them
Valid     answers of class 2xx in server-sent events, of the `PATHS`; `begin` for each answer until one byte was relayed
Blind to  sockets, and whether anybody takes the rest: the exchange's and the decider's part
"""

from __future__ import annotations

from router.http.splice import UsageSwallower
from router.resume.continuation import (
    CHAT,
    COMPLETIONS,
    Continuation,
    Rest,
    continuation,
    why_not_of_request,
    why_not_of_sent,
)
from router.resume.events import DONE_EVENT, EventSplitter
from router.resume.log import ResumeConfig, StreamLog
from router.resume.reasons import WhyNot
from router.resume.stitcher import Stitcher, broken_event

PATHS = frozenset({COMPLETIONS, CHAT})


class Resuming:
    """What a `Reframer` sends a body through. Feed it the answer, and behind `goes_on` the next replica's."""

    __slots__ = (
        *("_body", "_config", "_done", "_last", "_log", "_path", "_prompt_tokens", "_splitter", "_stitcher"),
        *("_swallower", "_why_not"),
    )

    def __init__(self, config: ResumeConfig, path: str, body: bytes, *, prompt_tokens: int | None) -> None:
        """body : as the client sent it; prompt_tokens : of it, where they were counted"""
        self._config = config
        self._path = path
        self._body = body
        self._prompt_tokens = prompt_tokens
        self._why_not = why_not_of_request(path, body)
        if self._why_not is not None:
            self._body = b""
        self.begin(None)

    def begin(self, swallower: UsageSwallower | None) -> None:
        """An answer begins from its start. swallower : keeps usage from a client that did not ask for it"""
        self._swallower = swallower
        self._log = None if self._why_not is not None else StreamLog(self._config)
        self._stitcher: Stitcher | None = None
        self._splitter: EventSplitter | None = EventSplitter()  # of what passes the log in pieces
        self._done = False  # the end marker passed, seen outside the log
        self._last: bytes | None = None  # what the client gets at the end, in place of a half event

    @property
    def ended(self) -> bool:
        """Whether the stream is over, so that the end of a replica's answer is its end; if it can be told at all."""
        log = self._log
        return self._last is not None or log is None or log.why_not is not None or log.done or log.finished

    @property
    def sent_tokens(self) -> int:
        """Output tokens that the client has; the least it can be where the engine tells no ids."""
        return 0 if self._log is None else self._log.tokens

    # -- what a `Reframer` sends a body through

    def feed(self, piece: bytes) -> bytes:
        """The next bytes of the body; returns what passes on now."""
        if self._stitcher is not None:
            piece = self._stitcher.feed(piece)
        return self._passed(self._noted(piece))

    def end(self) -> bytes:
        """What was still held, or what `complete` and `give_up` put in its place."""
        if self._last is not None:
            return self._passed(self._last)
        tail = b"" if self._stitcher is None else self._noted(self._stitcher.end())
        if self._log is not None:
            tail += self._whole(self._log.end())
        if self._splitter is not None:
            tail += self._splitter.held
            self._splitter.held = b""
        passed = self._passed(tail)
        return passed if self._swallower is None else passed + self._swallower.end()

    # -- a replica failed

    def rest(self) -> Continuation | WhyNot:
        """What the client still lacks, and what another replica is to be asked for it; or why nobody can be."""
        log = self._log
        if self._done:
            return Continuation(b"", Rest.NOTHING)
        if log is None:
            assert self._why_not is not None, "without a log there is a reason"
            return self._why_not
        why_not = why_not_of_sent(self._path, self._body, log, template_strips=self._config.template_strips)
        if why_not is not None and not log.done:
            return why_not
        rest = continuation(self._path, self._body, log)
        if rest.body and log.resumes >= self._config.max_resumes:
            return WhyNot.TOO_OFTEN
        log.broke()
        return rest

    def goes_on(self, rest: Rest) -> None:
        """Another replica begins to answer: what is fed from now on is its."""
        assert self._log is not None, "there is a rest"
        self._stitcher = Stitcher(self._log, rest, prompt_tokens=self._prompt_tokens)

    def complete(self, rest: Rest) -> None:
        """The client has all but perhaps the end marker: `end` gives that."""
        self._last = DONE_EVENT if rest is Rest.DONE else b""

    def give_up(self, why_not: WhyNot | None) -> None:
        """The stream does not go on: `end` says so, if the client is between two events. None: nobody takes it"""
        if self._splitter is not None:
            self._last = broken_event(why_not)

    # -- inside

    def _noted(self, piece: bytes) -> bytes:
        """Whole events, noted in the log as long as it notes any."""
        log = self._log
        if log is None or log.why_not is not None:
            return self._whole(piece)
        passed = log.feed(piece)
        return passed if log.why_not is None else self._whole(passed)

    def _whole(self, piece: bytes) -> bytes:
        """Whole events, until one is too large to be held."""
        splitter = self._splitter
        if splitter is None or not piece:
            return piece
        passed = b"".join(splitter.feed(piece))
        self._done = self._done or passed.endswith(DONE_EVENT)
        if len(splitter.held) <= self._config.max_event_bytes:
            return passed
        self._splitter = None
        return passed + splitter.held

    def _passed(self, events: bytes) -> bytes:
        return events if self._swallower is None else self._swallower.feed(events)
