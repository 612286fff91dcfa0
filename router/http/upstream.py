"""One connection to an endpoint: sends a request, follows the answer's framing, hands the bytes on as they came.

Model     llhttp reads every byte and tells where the head, the pieces of the body and the end are; the bytes
          themselves go to the sink in the slices they arrived in, cut only where the answer ends
Valid     one answer at a time; the sink hears response_started once, relay any number of times, and then exactly
          one of response_ended, response_lost and response_switched. After `close` it hears nothing. Interim answers
          (1xx) are swallowed: the router asks for bodies itself, and what other ones hint at is not worth the risk
          that a client takes one for its answer
Blind to  a whole answer nobody asked for that comes behind another one only once its connection carries the next
          request. Other bytes there, or a late 408, are no answer to that request: it is as if none had come

The parser does not say at which byte a chunked body ended. Bytes after the end must not reach a client, where they
would be read as the answer to its next request. Only a chunk whose size starts with 0 can be the last, so data
that may hold one is fed line by line, and the end is then the end of a line.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

from router.actions import Cause
from router.errors import AnswerUnacceptable
from router.http.contract import TimeOuts
from router.http.deadline import Deadline
from router.http.head import Field, ResponseHead, named_by_connection

_MAX_HEAD_BYTES = 64 * 1024
_JOIN_BYTES = 64 * 1024  # a body up to this size is copied behind its head, to leave in one segment
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_NONE: frozenset[bytes] = frozenset()
_WATCHED = _FRAMING | {b"connection", b"upgrade"}


class Sink(Protocol):
    """Who an answer is for."""

    def response_started(self, response: ResponseHead) -> None:
        """The final head is here; nothing was relayed yet. The sink may close the connection."""

    def body(self, piece: bytes) -> None:
        """The next bytes of the body without their framing, for reading along."""

    def relay(self, data: bytes) -> None:
        """The next bytes as they came, framing included; b"" when a head came alone."""

    def response_ended(self) -> None:
        """The answer is complete, and the connection is in other hands."""

    def response_switched(self, response: ResponseHead, rest: bytes) -> None:
        """The endpoint agreed to switch protocols; `rest` is what it said in the new one. The sink takes it over."""

    def response_lost(self, cause: Cause, *, silent: bool) -> None:
        """There will be no (more) answer. silent : a limit passed; otherwise the connection or its bytes broke."""


class Owner(Protocol):
    """Who keeps connections."""

    def opened(self, connection: UpstreamConnection) -> None:
        """It is open, and will be reported gone."""

    def settled(self, connection: UpstreamConnection) -> None:
        """An answer has ended, and the connection may carry another."""

    def gone(self, connection: UpstreamConnection) -> None:
        """It is closed for good."""


class UpstreamConnection(asyncio.Protocol):
    """Protocol of one connection; idle while it has no sink. base_url : the endpoint's, by which it is filed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, base_url: str, times: TimeOuts, owner: Owner) -> None:
        self.base_url = base_url
        self._clock = loop.time
        self._times = times
        self._owner = owner
        self._deadline = Deadline(loop, self._expired)
        self._transport: asyncio.Transport | None = None
        self._plain: asyncio.Transport | None = None  # the same, or what TLS runs over
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._paused = False
        self._carried = False  # an answer before this one
        self._eof = False  # the endpoint ended the connection itself; over TLS, by saying so
        self._asked_s = 0.0  # when the request was sent
        self._begin(bodiless=False, upgrade=b"")

    def _begin(self, *, bodiless: bool, upgrade: bytes) -> None:
        self._bodiless = bodiless
        self._upgrade = upgrade
        self._switched = False
        self._heard = False  # any byte of an answer
        self._head_done = False
        self._head_tail = b""  # last bytes before, where the end of the head may have started
        self._head_bytes = 0
        self._status = 0
        self._reason = b""
        self._fields: list[Field] = []
        self._noted: dict[bytes, bytes] = {}
        self._chunked = False
        self._until_close = False
        self._begun = False  # a byte of the body has come
        self._left_bytes = -1  # of a body of declared length; -1 when it has none
        self._line_by_line = False  # a last chunk may have begun
        self._bare_bytes = 0  # read line by line since the last byte of a body
        self._complete = False
        self._malformed = False
        self._keep = False  # the endpoint lets the connection carry another request

    # -- used by the pool and by the sink

    @property
    def busy(self) -> bool:
        return self._sink is not None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._eof and not self._transport.is_closing()

    def request(self, head: bytes, body: bytes, sink: Sink, *, bodiless: bool, upgrade: bytes = b"") -> None:
        """Send a request and follow its answer.

        bodiless : the answer to HEAD has no body, whatever it declares
        upgrade : protocol it asks to switch to; b"" when it does not
        """
        assert self._sink is None, "a connection carries one request at a time"
        transport = self._open_transport()
        self._begin(bodiless=bodiless, upgrade=upgrade)
        self._sink = sink
        self._asked_s = self._clock()
        self._deadline.set(self._asked_s + min(self._times.response_head_s, self._times.first_byte_s))
        if len(body) <= _JOIN_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def rest(self, limit_s: float) -> None:
        """Stay open without a request, for at most that long."""
        self._deadline.set(self._clock() + limit_s)

    def pause(self) -> None:
        """Read no more until `resume`; the endpoint feels it once the socket's buffer is full."""
        if self.usable and not self._paused:
            self._paused = True
            self._open_plain().pause_reading()

    def resume(self) -> None:
        if self.usable and self._paused:
            self._paused = False
            self._deadline.at_s = max(self._deadline.at_s, self._clock() + self._times.stall_s)
            self._open_plain().resume_reading()

    def hand_over(self) -> asyncio.Transport:
        """The transport, for a tunnel; `let_go` ends that."""
        self._deadline.clear()
        return self._open_transport()

    def let_go(self) -> None:
        """Close after what was written; an endpoint that does not take it has `stall_s`."""
        self._sink = None
        self._deadline.set(self._clock() + self._times.stall_s)
        self._open_transport().close()

    def close(self) -> None:
        """At once, without a word to the sink: for an engine this is the signal to stop working."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._plain = cast(asyncio.Transport, transport)
        self._owner.opened(self)

    def secured(self, transport: asyncio.Transport, plain: asyncio.Transport) -> None:
        """In place of `connection_made`: TLS was begun on `plain`, which is the one that pauses.

        uvloop's TLS reads ahead while it is paused, and drops what it has when the endpoint then closes.
        """
        self.connection_made(transport)
        self._plain = plain

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            self.close()  # nobody asked: whatever it is, the next answer must not start with it
            return
        self._heard = True
        if self._head_done:
            if self._begun:
                self._deadline.set(self._clock() + self._times.stall_s)
            self._body_received(data)
        else:
            self._head_received(data)

    def eof_received(self) -> None:
        self._eof = True  # the transport closes

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        self._parser = None  # it refers to this object
        self._owner.gone(self)
        sink = self._sink
        if sink is None:
            return
        if self._until_close and self._eof and exc is None:
            self._sink = None
            sink.response_ended()
        else:
            self._lose(self._cause(), silent=False)

    # -- httptools

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer, which passes as bytes
        lower = name.lower()
        self._fields.append((lower, name, value))
        if lower in _WATCHED:
            known = self._noted.get(lower)
            self._noted[lower] = value if known is None else known + b"," + value

    def on_headers_complete(self) -> None:
        status = self._reader().get_status_code()
        self._status = status
        if status < 200:
            self._interim_head(status)
            return
        self._check_framing()
        self._head_done = True
        self._keep = self._bodiless and self._reader().should_keep_alive()

    def _interim_head(self, status: int) -> None:
        if status == 101:
            if not self._upgrade or self._noted.get(b"upgrade", b"").strip().lower() != self._upgrade:
                raise AnswerUnacceptable("a switch of protocols that was not asked for")
            self._switched = True
        elif status < 100:
            raise AnswerUnacceptable("a status below 100")
        else:
            self._reason, self._fields, self._noted = b"", [], {}

    def _check_framing(self) -> None:
        """Refuse what another reader could take for another framing."""
        version = self._reader().get_http_version()
        if version not in ("1.1", "1.0"):
            raise AnswerUnacceptable("neither HTTP/1.1 nor HTTP/1.0")
        encoding = self._noted.get(b"transfer-encoding")
        if encoding is not None and (encoding.strip().lower() != b"chunked" or version == "1.0"):
            raise AnswerUnacceptable("a transfer encoding that is not chunked")

    def on_body(self, piece: bytes) -> None:
        self._bare_bytes = 0
        if not self._begun:
            self._begun = True
            self._deadline.set(self._clock() + self._times.stall_s)
        if self._sink is not None and not self._bodiless:
            self._sink.body(piece)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True
            self._keep = self._reader().should_keep_alive()

    # -- following one answer

    def _head_received(self, data: bytes) -> None:
        while data:
            joined = self._head_tail + data
            end = joined.find(b"\r\n\r\n")
            own = data if end < 0 else data[: end + 4 - len(self._head_tail)]
            self._head_tail = joined[-3:] if end < 0 else b""
            self._head_bytes += len(own)
            try:
                self._reader().feed_data(own)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                if self._switched:
                    self._switch(data[len(own) :])
                else:
                    self._lose(self._cause(), silent=False)
                return
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._lose(self._cause(), silent=False)
                return
            data = data[len(own) :]
            if self._head_done:
                self._start_body(data)
                return

    def _switch(self, rest: bytes) -> None:
        assert self._sink is not None, "an answer is followed for somebody"
        response = ResponseHead(self._status, self._reason, self._fields, named=self._named())
        self._sink.response_switched(response, rest)

    def _start_body(self, data: bytes) -> None:
        sink = self._sink
        assert sink is not None, "an answer is followed for somebody"
        if self._status == 408 and self._carried and not self._reader().should_keep_alive():
            self._lose(Cause.NO_ANSWER, silent=False)  # it waited for a request that was on its way
            return
        response = ResponseHead(self._status, self._reason, self._fields)
        self._find_framing(response)
        sink.response_started(response)
        if self._sink is sink:  # until the body starts, whatever its framing says, the limit for its first byte holds
            self._deadline.set(self._asked_s + self._times.first_byte_s)
            self._body_received(data)

    def _find_framing(self, response: ResponseHead) -> None:
        noted = self._noted
        response.named = self._named()
        if self._bodiless or self._complete:
            self._left_bytes = 0
        elif b"content-length" in noted:
            self._left_bytes = int(noted[b"content-length"])
        else:
            response.chunked = self._chunked = b"transfer-encoding" in noted
            response.until_close = self._until_close = not self._chunked

    def _named(self) -> frozenset[bytes]:
        said = self._noted.get(b"connection")
        return _NONE if said is None else named_by_connection(said) - _FRAMING

    def _body_received(self, data: bytes) -> None:
        sink = self._sink
        assert sink is not None, "an answer is followed for somebody"
        own = self._chunks(data) if self._chunked else self._plain_body(data)
        if self._sink is sink:
            sink.relay(own)
        if self._sink is sink:
            if self._complete:
                self._end(surplus=len(own) < len(data))
            elif self._malformed:
                self._lose(Cause.BROKEN, silent=False)

    def _plain_body(self, data: bytes) -> bytes:
        """Follow a body without chunks; returns its part of `data`."""
        if self._left_bytes >= 0:
            data = data[: self._left_bytes]
            self._left_bytes -= len(data)
        if data:
            self._reader().feed_data(data)
        if self._bodiless:
            self._complete = True
        return data

    def _chunks(self, data: bytes) -> bytes:
        """Follow chunks; returns what may be relayed: up to the end, and of malformed data nothing like an end."""
        feed = self._reader().feed_data
        start = 0
        try:
            if not self._line_by_line and b"\n0" not in data and data[:1] != b"0":
                start = len(data)
                feed(data)
            while start < len(data) and not self._complete:
                self._line_by_line = True  # to the end: what follows the last chunk's size may come in any pieces
                end = data.find(b"\n", start) + 1 or len(data)
                self._bare_bytes += end - start
                feed(data[start:end])  # a byte of the body in there, and none of them were bare
                if self._bare_bytes > _MAX_HEAD_BYTES and not self._complete:  # trailers, or size lines, without end
                    self._malformed = True
                    break
                start = end
        except httptools.HttpParserError:
            self._malformed = True
        return data[:start]

    def _end(self, surplus: bool) -> None:
        sink, self._sink = self._sink, None
        if self._bodiless:  # the parser still waits for the body that was declared
            self._parser = httptools.HttpResponseParser(self)
        all_sent = not self._open_plain().get_write_buffer_size()
        if self._keep and all_sent and not surplus:
            self._carried = True
            self.resume()  # paused or not, an idle connection must notice its end
            self._owner.settled(self)
        else:
            self.close()
        if sink is not None:
            sink.response_ended()

    def _cause(self) -> Cause:
        """What the loss of the connection, or of its framing, means now."""
        if self._head_done:
            return Cause.BROKEN
        return Cause.BAD_ANSWER if self._heard and not self._carried else Cause.NO_ANSWER

    def _expired(self) -> None:
        if self._sink is None:
            self.close()
        else:
            self._lose(self._cause(), silent=True)

    def _lose(self, cause: Cause, *, silent: bool) -> None:
        sink = self._sink
        self.close()
        if sink is not None:
            sink.response_lost(cause, silent=silent)

    def _reader(self) -> httptools.HttpResponseParser:
        assert self._parser is not None, "a lost connection receives nothing"
        return self._parser

    def _open_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "the connection was made"
        return self._transport

    def _open_plain(self) -> asyncio.Transport:
        assert self._plain is not None, "the connection was made"
        return self._plain
