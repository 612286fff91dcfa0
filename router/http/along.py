"""Reads an answer along as it passes, and may fail at it without the answer being touched.

Model     what kind of answer it is says who reads it: nobody, a reader of streams or one of JSON. A reader that raises
          is let go and counted; from then on nothing is learned
Valid     whole answers of class 2xx without a content encoding
Blind to  everything else
"""

from __future__ import annotations

import logging

from router.actions import Cause, Ended, Send
from router.http.contract import Heard
from router.http.head import RequestHead, ResponseHead
from router.http.shared import Counts
from router.http.side_reader import HeardId, JsonReader, Learned, SideReader, StreamReader
from router.routes import Route

_OVERLOADED = (429, 502, 503)  # 502: a proxy before the engine could not reach it

_log = logging.getLogger(__name__)


class Along:
    """One answer that is read along. who : replica that gives it"""

    __slots__ = ("_counts", "_reader", "_who", "is_stream")

    def __init__(self, reader: SideReader, counts: Counts, who: str) -> None:
        self.is_stream = isinstance(reader, StreamReader)
        self._reader: SideReader | None = reader
        self._counts = counts
        self._who = who

    def feed(self, piece: bytes) -> bool:
        """Take the next bytes of the body. True once, when the first token has arrived."""
        if self._reader is None:
            return False
        try:
            return self._reader.feed(piece)
        except Exception:
            self._give_up()
            return False

    def learned(self) -> Learned:
        """What the whole answer said; asked for once, after its last byte."""
        if self._reader is not None:
            try:
                return self._reader.learned()
            except Exception:
                self._give_up()
        return Learned()

    def _give_up(self) -> None:
        self._counts.reader_failures += 1
        self._reader = None
        _log.warning("an answer of %s could not be read along", self._who)


def along(
    response: ResponseHead, sent: Send, counts: Counts, *, stream_id: HeardId, json_id: HeardId | None
) -> Along | None:
    """Who reads this answer along, if anybody can.

    stream_id, json_id : told the id of a stream, or of a JSON answer
    """
    if not 200 <= response.status < 300 or response.get(b"content-encoding") is not None:
        return None
    kind = response.get(b"content-type") or b""
    if sent.request.streams and kind.startswith(b"text/event-stream"):
        return Along(StreamReader(stream_id), counts, sent.replica)
    if kind.startswith(b"application/json"):
        return Along(JsonReader(json_id), counts, sent.replica)
    return None


def cause_for_another(head: RequestHead, sent: Send, response: ResponseHead) -> Cause | None:
    """Why another replica may have a better answer than this one; None when it is the answer."""
    if response.status in _OVERLOADED:
        return Cause.OVERLOADED
    asks_around = head.route is Route.STORED and not sent.request.only
    return Cause.ELSEWHERE if asks_around and response.status == 404 else None


def ended_as(status: int, reader: Along | None) -> Ended:
    """A complete answer, with what it said to who read it along."""
    learned = Learned() if reader is None else reader.learned()
    return Ended(
        status,
        output_tokens=learned.output_tokens,
        cached_tokens=learned.cached_tokens,
        prompt_tokens=learned.prompt_tokens,
        stream_error=learned.stream_error,
        events=learned.events,
    )


def show_head(heard: Heard, sent: Send, response: ResponseHead, counts: Counts) -> None:
    """Show an answer's head to whoever wants to see it."""
    try:
        heard(sent, response)
    except Exception:
        counts.reader_failures += 1
        _log.exception("the head of an answer of %s could not be read along", sent.replica)
