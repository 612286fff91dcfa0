"""One connection of a client: takes requests in, serves them one after the other, writes what it is given.

Model     a whole request waits until the one before it is answered, so that pipelined requests are answered in
          order. Reading goes on meanwhile, because that is how a client's leaving is noticed
Valid     a client that shuts its sending side while it waits for an answer has left
Blind to  the leaving of a client whose pipelined requests, or what it says too early in another protocol, fill
          their limit: then its connection is not read
Source    RFC 9112 section 9
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import cast

from router.actions import Cause, Refuse
from router.errors import RequestUnacceptable
from router.http.aborts import Abort
from router.http.assembler import RequestAssembler
from router.http.deadline import Deadline
from router.http.exchange import Exchange
from router.http.head import Forwarded, RequestHead
from router.http.replies import json_reply, refusal, request_id_of
from router.http.resumed import ResumedExchange
from router.http.shared import Shared
from router.http.to_all import ToAll, hidden
from router.http.tunnel import Tunnel
from router.http.upstream import UpstreamConnection
from router.routes import Route

_log = logging.getLogger(__name__)
_TOO_MANY = RequestUnacceptable(429, "RateLimitError", "Too many connections are open from this address.")
_EXCHANGES: dict[Route, type[Exchange | ToAll]] = {Route.TO_ALL: ToAll, Route.ABORT: Abort}
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ClientConnection(asyncio.Protocol):
    """Protocol of one client connection.

    closing : the connection ends with the answer in progress
    paused : the client does not read, and what is buffered for it has reached the limit
    forwarded : who the client is, for the replica
    """

    def __init__(self, shared: Shared) -> None:
        self.closing = False
        self.paused = False
        self.forwarded = Forwarded(b"unknown", b"http")
        self._shared = shared
        self._times = shared.times
        self._now = shared.loop.time
        self._deadline = Deadline(shared.loop, self._expired)
        self._assembler = RequestAssembler(shared.limits)
        self._waiting = self._assembler.complete
        self._stage = (0, False)  # request and part of it that the deadline was set for
        self._began_s: float | None = None  # when the first part came of the request that is unfinished
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | ToAll | None = None
        self._serving = False
        self._reading_stopped = False
        self._rejection: RequestUnacceptable | None = None  # answered after the requests before it
        self._input_over = False  # whatever still arrives is dropped
        self._lingering = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        proto = b"https" if transport.get_extra_info("sslcontext") else b"http"
        if isinstance(peer, tuple):
            self.forwarded = Forwarded(str(peer[0]).encode("ascii", "replace"), proto)
        self._deadline.set(self._now() + self._times.request_head_s)
        if not self._shared.join(self):
            self._reject(_TOO_MANY)
            self._serve()

    def data_received(self, data: bytes) -> None:
        if self._input_over:
            return
        assembler, before = self._assembler, len(self._waiting)
        try:
            assembler.feed(data)
        except RequestUnacceptable as exc:
            self._reject(exc)
        if self._began_s is not None and len(self._waiting) > before:
            self._waiting[before][0].began_s, self._began_s = self._began_s, None
        if assembler.unfinished:
            self._limit_assembly()
        if self._exchange is None and (self._waiting or self._rejection is not None):
            self._serve()
        if self._exchange is not None and (self._waiting or assembler.unfinished or assembler.held):
            self._stop_reading_when_full()

    def eof_received(self) -> bool:
        if self._exchange is not None:
            self._leave()
            self.abort()
        return False  # the transport closes once its buffer is written

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._input_over = True
        self._deadline.close()
        self._shared.leave(self)

    def pause_writing(self) -> None:
        self.paused = True
        if self._exchange is not None:
            self._exchange.client_paused()

    def resume_writing(self) -> None:
        self.paused = False
        if self._exchange is not None:
            self._exchange.client_resumed()

    # -- used by the exchange and by the server

    @property
    def busy(self) -> bool:
        return self._exchange is not None

    @property
    def exchange(self) -> Exchange | ToAll | None:
        """The request in progress."""
        return self._exchange

    @property
    def write(self) -> Callable[[bytes], None]:
        """The transport's own method: a relay holds it, and calls it for every piece."""
        return self._open_transport().write

    def switch(self, head: bytes, upstream: UpstreamConnection, rest: bytes, ended: Callable[[], None]) -> None:
        """Answer with that head and join the two connections, raw, until `ended`.

        rest : what the replica has said behind its own head
        """
        transport, other = self._open_transport(), upstream.hand_over()
        held = self._assembler.held or b""
        self._assembler.close()
        Tunnel(self._shared.loop, transport, other, idle_s=self._times.stall_s, ended=ended)
        transport.write(head + rest)
        other.write(held)
        self._read_again()

    def exchange_over(self, *, closing: bool) -> None:
        """The exchange has written its whole answer."""
        self._exchange = None
        self._after_answer(closing)
        if self._waiting or self._rejection is not None or self._assembler.unfinished:
            self._serve()

    def cut(self, *, reset: bool) -> None:
        """End the connection in the middle of an answer, after all that was written.

        reset : the client would take an ordinary end for the end of the answer. Over TLS it then gets what its socket
            takes at once
        """
        self._exchange = None
        if reset:
            self._reset_on_close()
        if reset and self._open_transport().get_extra_info("sslcontext") is not None:
            self._input_over = True
            self._assembler.close()
            # `close` would say in TLS that this was all; and what was written leaves before the loop's next turn
            self._shared.loop.call_soon(self._open_transport().abort)
        else:
            self._close()

    def abort(self) -> None:
        """End the connection at once."""
        self._input_over = True
        self._open_transport().abort()

    def stop(self) -> None:
        """Close when the request in progress is answered, also one that is still arriving."""
        self.closing = True
        if self._exchange is None and not self._assembler.unfinished:
            self._close()

    def stop_now(self) -> None:
        """Cut what is in progress, visibly."""
        self._leave(Cause.STOPPING)
        self._reset_on_close()
        self.abort()

    # -- taking requests in

    def _limit_assembly(self) -> None:
        """A limit for the head, and another for the body, of a request that comes in parts."""
        assembler = self._assembler
        stage = (assembler.begun, assembler.head_done)
        if stage != self._stage:
            if self._began_s is None and stage[0] != self._stage[0]:
                self._began_s = self._shared.clock()
            self._stage = stage
            times = self._times
            self._deadline.set(self._now() + (times.request_body_s if assembler.head_done else times.request_head_s))
            if assembler.head_done and not self._admitted():
                return
            self._ask_to_continue()

    def _admitted(self) -> bool:
        """Whether the request whose body is still to come may come; if not, nothing of it is held."""
        refuse = self._shared.admit and self._shared.admit(self._assembler.seen_of_last())
        if refuse:
            self._reject(RequestUnacceptable(refuse.status, refuse.kind, refuse.message))
        return not refuse

    def _ask_to_continue(self) -> None:
        """Ask for the body of a request that waits to be asked, in its turn."""
        if self._assembler.asks_to_continue and self._exchange is None and not self._waiting:
            self._assembler.asks_to_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _reject(self, problem: RequestUnacceptable) -> None:
        """Read no more; the answer comes after those of the requests before."""
        self._input_over = True
        self._assembler.unfinished = False
        self._rejection = problem
        self._shared.counts.turn_away(problem.status)

    def _stop_reading_when_full(self) -> None:
        limits, assembler = self._shared.limits, self._assembler
        if self._reading_stopped or not self._open():
            return
        held_bytes = assembler.pending_bytes + len(assembler.held or b"")
        held_bytes += sum(len(body) for _, body in self._waiting)
        if len(self._waiting) >= limits.max_waiting_requests or held_bytes >= limits.max_waiting_bytes:
            self._reading_stopped = True
            self._deadline.clear()  # what does not arrive now is not the client's doing
            self._open_transport().pause_reading()

    def _read_again(self) -> None:
        if self._reading_stopped and not self._waiting and self._open():
            self._reading_stopped = False
            if self._assembler.unfinished:
                self._stage = (0, False)
                self._limit_assembly()
            self._open_transport().resume_reading()

    # -- serving

    def _serve(self) -> None:
        """Answer the requests that wait, up to the first one whose answer takes time."""
        if self._serving:
            return  # an answer made at once has come back here: the loop below goes on
        self._serving = True
        while self._exchange is None and self._waiting and self._open():
            head, body = self._waiting.popleft()
            self._answer(head, body)
        self._serving = False
        self._read_again()
        if self._exchange is None and self._open():
            if self._rejection is not None:
                self._answer_rejection(self._rejection)
            else:
                self._ask_to_continue()

    def _answer(self, head: RequestHead, body: bytes) -> None:
        refuse = self._shared.admit and self._shared.admit(head)
        if refuse:
            self._turn_away(head, refuse)
        elif head.route is Route.ANSWERED:
            self._answer_here(head)
        elif head.route is Route.ADMIN_ONLY:
            self._turn_away(head, hidden(head))
        elif head.route is Route.UNKNOWN and not self._shared.relay_unknown:
            self._turn_away(head, Refuse(404, "NotFoundError", f"There is no route {head.path}."))
        else:
            self._exchange = exchange = self._kind(head.route)(self, self._shared, head, body)
            exchange.start()

    def _kind(self, route: Route) -> type[Exchange | ToAll]:
        if route is Route.GENERATE and self._shared.resumable is not None:
            return ResumedExchange
        return _EXCHANGES.get(route, Exchange)

    def _answer_here(self, head: RequestHead) -> None:
        try:
            status, body = self._shared.answer(head)
        except Exception:
            self._shared.counts.internal_errors += 1
            _log.exception("no answer to %s", head.path)
            self._refuse(head, Refuse(500, "InternalServerError", "The router failed to answer."))
            return
        closing = self.closing or not head.keep_alive
        bodiless = head.method == b"HEAD"
        request_id = request_id_of(head)
        self.write(json_reply(status, body, request_id=request_id, closing=closing, bodiless=bodiless))
        self._after_answer(closing)

    def _turn_away(self, head: RequestHead, refuse: Refuse) -> None:
        self._shared.counts.turn_away(refuse.status)
        self._refuse(head, refuse)

    def _refuse(self, head: RequestHead, refuse: Refuse) -> None:
        closing = self.closing or not head.keep_alive
        self.write(refusal(refuse, head, request_id=request_id_of(head), closing=closing))
        self._after_answer(closing)

    def _answer_rejection(self, problem: RequestUnacceptable) -> None:
        """Answer, then read on and drop it for a while: a closed socket would wipe the answer out."""
        self._rejection = None
        head = self._assembler.seen_of_last()
        refuse = Refuse(problem.status, problem.kind, problem.message)
        self.write(refusal(refuse, head, request_id=request_id_of(head), closing=True))
        self._lingering = True
        self._deadline.set(self._now() + self._times.linger_s)
        transport = self._open_transport()
        if transport.can_write_eof():
            transport.write_eof()

    def _after_answer(self, closing: bool) -> None:
        if closing or self.closing:
            self._close()
            return
        if self._assembler.held is not None and not self._waiting:  # this was the answer to a wish to switch
            self._decline_switch()
        if not self._assembler.unfinished:
            self._deadline.set(self._now() + self._times.keep_alive_s)

    def _decline_switch(self) -> None:
        try:
            self._assembler.decline()
        except RequestUnacceptable as exc:
            self._reject(exc)
        if self._assembler.unfinished:
            self._limit_assembly()

    # -- the connection

    def _leave(self, cause: Cause | None = None) -> None:
        """The client is gone, or treated so for this cause."""
        self._assembler.close()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_lost(cause)

    def _expired(self) -> None:
        if self._lingering or not self._open():
            self._open_transport().abort()
        elif self._assembler.unfinished:
            self._reject(RequestUnacceptable(408, "RequestTimeoutError", "The request did not arrive in time."))
            self._serve()
        elif self._exchange is None:
            self._close()

    def _close(self) -> None:
        """Close after what was written; a client that does not take it has `stall_s`."""
        self._input_over = True
        self._assembler.close()
        self._deadline.set(self._now() + self._times.stall_s)
        self._open_transport().close()

    def _reset_on_close(self) -> None:
        sock: socket.socket | None = self._open_transport().get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _open_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "the connection was made"
        return self._transport
