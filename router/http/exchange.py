"""One request and its relays, driven by two protocols; no clock and no rule of its own.

Model     read the prompt, which may take a while, ask the decider, send, relay, report. A `Send` is closed once: it is
          put away before the decider hears of its end
Valid     until the first byte has gone to the client the decider may name another replica; after it a failure is
          shown to the client as a cut connection, never as an end
Blind to  what is in the bytes: a side reader looks at a copy, and may fail
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from router.actions import Action, Cause, Ended, Refuse, Send
from router.errors import ReplicaUnreachable
from router.http.contract import Heard, Read, Rewritten
from router.http.head import RequestHead, ResponseHead, client_head, field_value, upstream_head
from router.http.pool import origin_of
from router.http.replies import refusal, request_id_of
from router.http.shared import Shared
from router.http.side_reader import JsonReader, Learned, SideReader, StreamReader
from router.http.upstream import UpstreamConnection

if TYPE_CHECKING:
    from router.http.client import ClientConnection

_log = logging.getLogger(__name__)
_OVERLOADED = (429, 503)


class Exchange:
    """A request from its last byte to its end. Its client calls `start` once, and `client_lost` at any time."""

    __slots__ = (
        "_attempt",
        "_body",
        "_client",
        "_closing",
        "_connecting",
        "_head",
        "_held_head",
        "_over",
        "_reader",
        "_reading",
        "_relayed",
        "_request_id",
        "_reused",
        "_sent",
        "_shared",
        "_status",
        "_streams",
        "_unchunking",
        "_unframed",
        "_upstream",
        "_write",
    )

    def __init__(self, client: ClientConnection, shared: Shared, head: RequestHead, body: bytes) -> None:
        self._client = client
        self._shared = shared
        self._head = head
        self._body = body
        self._request_id = b""
        self._reading: asyncio.Future[Read] | None = None  # its prompt, when that takes a while
        self._streams = False  # the client asked for a stream
        self._sent: Send | None = None  # open towards the decider
        self._attempt: Send | None = None  # the same, kept while its answer is relayed
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: UpstreamConnection | None = None
        self._reused = False  # that connection had carried another request before
        self._reader: SideReader | None = None
        self._write: Callable[[bytes], None] = client.write
        self._held_head = b""  # the client's head, waiting for the first bytes of the body
        self._status = 0
        self._closing = False  # the client's connection ends with this answer
        self._unchunking = False  # chunk framing is taken off, for HTTP/1.0
        self._unframed = False  # the answer ends with the connection
        self._relayed = False  # the client has seen bytes
        self._over = False

    # -- called by the client's connection

    def start(self) -> None:
        try:
            read = self._shared.read_prompt(self._head, self._body)
        except Exception:
            self._internal_error("the prompt reader")
            return
        if isinstance(read, asyncio.Future):
            self._reading = read
            read.add_done_callback(self._prompt_read)
        else:
            self._place(read)

    def _prompt_read(self, reading: asyncio.Future[Read]) -> None:
        self._reading = None
        try:
            read = reading.result()
        except asyncio.CancelledError:
            if not self._over:
                self._refuse(_STOPPING)
        except Exception:
            if not self._over:
                self._internal_error("the prompt reader")
        else:
            if not self._over:
                self._place(read)

    def _place(self, read: Read) -> None:
        if isinstance(read, Refuse):
            self._shared.counts.reject(read.status)
            self._refuse(read)
            return
        if isinstance(read, Rewritten):
            self._body = read.body
        facts = read.facts if isinstance(read, Rewritten) else read
        self._request_id = self._head.get(b"x-request-id") or field_value(facts.request_id)
        self._streams = facts.streams
        self._obey(self._ask(self._shared.decider.arrived, facts))

    def client_lost(self) -> None:
        """In any phase: the replica is told by closing its connection, the decider once."""
        if self._over:
            return
        self._over = True
        if self._reading is not None:
            self._reading.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()
        sent = self._put_away()
        if sent is not None:
            self._ask(self._shared.decider.cancelled, sent)

    def client_paused(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def client_resumed(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # -- called by the connection to the replica

    def response_started(self, response: ResponseHead) -> None:
        if self._shared.heard is not None:
            self._show_head(self._shared.heard, response)
        if response.status in _OVERLOADED and (sent := self._put_away()) is not None:
            actions = self._ask(self._shared.decider.failed, sent, Cause.OVERLOADED)
            if actions != []:
                self._drop_upstream()
                self._obey(actions)
                return
            self._sent = sent  # still open: its own answer is relayed, and `finished` will close it
        self._status = response.status
        self._unframed = response.until_close or self._head.http10
        self._unchunking = response.chunked and self._head.http10
        self._closing = self._unframed or self._client.closing or not self._head.keep_alive
        self._reader = self._side_reader(response)
        self._held_head = self._client_head(response)
        if self._unchunking:
            self.relay(b"")

    def body(self, piece: bytes) -> None:
        if self._reader is not None:
            self._read_along(self._reader, piece)
        if self._unchunking:
            self._write(piece)

    def relay(self, data: bytes) -> None:
        if self._relayed:
            if not self._unchunking:
                self._write(data)
        else:
            self._relayed = True
            self._body = b""  # it cannot be needed again
            self._write(self._held_head if self._unchunking else self._held_head + data)
            self._held_head = b""

    def response_ended(self) -> None:
        self._upstream = None
        sent = self._put_away()
        if sent is not None:
            learned = self._learned()
            ended = Ended(
                self._status,
                output_tokens=learned.output_tokens,
                cached_tokens=learned.cached_tokens,
                prompt_tokens=learned.prompt_tokens,
                stream_error=learned.stream_error,
                events=learned.events,
            )
            self._ask(self._shared.decider.finished, sent, ended)
        self._end(closing=self._closing)

    def response_lost(self, cause: Cause, *, silent: bool) -> None:
        self._upstream = None
        if silent and self._client.paused:  # the replica was not read because the client does not read
            self.client_lost()
            self._client.abort()
        elif self._relayed:
            self._break_off()
        elif cause is Cause.NO_ANSWER and self._reused and not silent:
            self._shared.counts.repeats += 1
            self._connect()
        else:
            self._fail(Cause.BAD_ANSWER if cause is Cause.BROKEN else cause)

    # -- one attempt

    def _send(self, send: Send) -> None:
        assert self._sent is None, "one attempt at a time"
        self._sent = self._attempt = send
        connection = self._shared.pool.take(send.base_url)
        self._reused = connection is not None
        if connection is not None:
            self._transmit(connection)
        else:
            self._connect()

    def _connect(self) -> None:
        assert self._attempt is not None, "a replica was chosen"
        self._reused = False
        self._connecting = self._shared.pool.connect(self._attempt.base_url, self._connected, self._connect_failed)

    def _connected(self, connection: UpstreamConnection) -> None:
        self._connecting = None
        if self._over or not connection.usable:
            connection.close()
            self._fail(Cause.CONNECT)
        else:
            self._transmit(connection)

    def _connect_failed(self, error: ReplicaUnreachable) -> None:
        self._connecting = None
        _log.info("%s", error)
        self._fail(Cause.CONNECT)

    def _transmit(self, connection: UpstreamConnection) -> None:
        assert self._attempt is not None, "a replica was chosen"
        self._upstream = connection
        origin = origin_of(self._attempt.base_url)
        head = upstream_head(
            self._head,
            host=origin.host_field,
            prefix=origin.prefix,
            body_bytes=len(self._body),
            request_id=self._request_id,
            forwarded=self._client.forwarded,
            extra=self._attempt.extra_headers,
        )
        connection.request(head, self._body, self, bodiless=self._head.method == b"HEAD")
        if self._client.paused:  # still full of the answer before
            connection.pause()

    def _fail(self, cause: Cause) -> None:
        """This attempt failed before the client saw anything of it."""
        if self._over:
            return
        sent = self._put_away()
        actions = [] if sent is None else self._ask(self._shared.decider.failed, sent, cause)
        if actions == []:
            name = self._attempt.replica if self._attempt is not None else "?"
            message = f"Replica {name} gave no usable answer ({cause.value})."
            self._refuse(Refuse(502, "BadGatewayError", message))
        else:
            self._obey(actions)

    def _break_off(self) -> None:
        """The answer broke under way: the client gets all that came, and then a visible cut."""
        self._over = True
        sent = self._put_away()
        if sent is not None:
            self._ask(self._shared.decider.failed, sent, Cause.BROKEN)
        self._client.cut(reset=self._unframed)

    # -- the decider

    def _ask(self, rule: Callable[..., list[Action]], *facts: object) -> list[Action] | None:
        """Put a question to the decider; None when it raised."""
        try:
            return rule(*facts, self._shared.clock())
        except Exception:
            self._shared.counts.internal_errors += 1
            _log.exception("the decider raised")
            return None

    def _obey(self, actions: list[Action] | None) -> None:
        """Do what was decided for a request that waits for a decision."""
        if not actions:
            self._refuse(_INTERNAL)
            return
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            else:
                assert isinstance(action, Refuse), "nothing waits without limits"
                self._refuse(action)

    def _put_away(self) -> Send | None:
        """Take the open `Send`, so that nothing can close it twice."""
        sent, self._sent = self._sent, None
        return sent

    def _internal_error(self, who: str) -> None:
        self._shared.counts.internal_errors += 1
        _log.exception("%s raised", who)
        self._refuse(_INTERNAL)

    # -- the client

    def _refuse(self, refuse: Refuse) -> None:
        assert not self._relayed, "a refusal is a whole answer"
        closing = self._client.closing or not self._head.keep_alive
        request_id = self._request_id or request_id_of(self._head)
        self._write(refusal(refuse, self._head, request_id=request_id, closing=closing))
        self._end(closing=closing)

    def _end(self, *, closing: bool) -> None:
        self._over = True
        self._reader = None
        self._client.exchange_over(closing=closing)

    def _client_head(self, response: ResponseHead) -> bytes:
        attempt = self._attempt
        assert attempt is not None, "an answer follows an attempt"
        return client_head(
            response,
            request_id=self._request_id,
            replica=field_value(attempt.replica),
            explain=None if attempt.explain is None else field_value(attempt.explain),
            closing=self._closing,
            unchunked=self._unchunking,
        )

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    # -- reading along

    def _side_reader(self, response: ResponseHead) -> SideReader | None:
        if not 200 <= response.status < 300 or response.get(b"content-encoding") is not None:
            return None
        kind = response.get(b"content-type") or b""
        if self._streams and kind.startswith(b"text/event-stream"):
            return StreamReader()
        return JsonReader() if kind.startswith(b"application/json") else None

    def _show_head(self, heard: Heard, response: ResponseHead) -> None:
        assert self._attempt is not None, "an answer follows an attempt"
        try:
            heard(self._attempt, response)
        except Exception:
            self._shared.counts.reader_failures += 1
            _log.exception("the head of an answer of %s could not be read along", self._attempt.replica)

    def _read_along(self, reader: SideReader, piece: bytes) -> None:
        try:
            is_first = reader.feed(piece)
        except Exception:
            self._lose_reader()
            return
        if is_first and self._sent is not None:
            self._ask(self._shared.decider.first_token, self._sent)

    def _learned(self) -> Learned:
        if self._reader is not None:
            try:
                return self._reader.learned()
            except Exception:
                self._lose_reader()
        return Learned()

    def _lose_reader(self) -> None:
        self._shared.counts.reader_failures += 1
        self._reader = None
        _log.warning("an answer of %s could not be read along", self._attempt and self._attempt.replica)


_STOPPING = Refuse(503, "ServiceUnavailable", "The router is stopping.")
_INTERNAL = Refuse(500, "InternalServerError", "The router failed to place this request.")
