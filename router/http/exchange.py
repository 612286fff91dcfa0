"""One request and its relays, driven by two protocols; no clock and no rule of its own.

Model     read the prompt, which may take a while, ask the decider, wait if it says so, send, relay, report. A `Send`
          is closed once: it is put away before the decider hears of its end. A `Hold` ends with what is granted for
          it, or with a client that leaves. The head of a generation waits for the first byte of its body,
          so that a replica that says 200 and then nothing can still be replaced
Valid     until the first byte has gone to the client the decider may name another replica; after it a failure is
          shown to the client as a cut connection, never as an end. `resumed.py` has streams that go on elsewhere
Blind to  what is in the bytes: a side reader looks at a copy, and may fail
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from estimators.request import RequestFacts
from router.actions import Action, Cause, Ended, Hold, Outcome, Refuse, Send
from router.errors import ReplicaUnreachable
from router.http.along import Along, along, cause_for_another, ended_as, show_head
from router.http.contract import Endpoint, Read, Rewritten
from router.http.head import RequestHead, ResponseHead, client_head, field_value, upstream_head
from router.http.outlet import Outlet
from router.http.pool import origin_of
from router.http.reframing import Filter, Reframer
from router.http.replies import refusal, request_id_of
from router.http.retry_after import retry_after_s
from router.http.shared import Shared
from router.http.splice import UsageSwallower, with_members
from router.http.upstream import UpstreamConnection
from router.request_ids import clients_own
from router.routes import Route, stored_id
from router.telemetry.logs import about

if TYPE_CHECKING:
    from router.http.client import ClientConnection

_log = logging.getLogger(__name__)
_RESPONSES = "/v1/responses"


class Exchange:
    """A request from its last byte to its end. Its client calls `start` once, and `client_lost` at any time."""

    __slots__ = (
        "_along",
        "_answer_id",
        "_attempt",
        "_body",
        "_client",
        "_closing",
        "_connecting",
        "_granted",
        "_head",
        "_hold",
        "_limit",
        "_outlet",
        "_over",
        "_own_id",
        "_reading",
        "_request_id",
        "_reused",
        "_row",
        "_sent",
        "_shared",
        "_status",
        "_swallows_usage",
        "_unframed",
        "_upstream",
    )

    def __init__(self, client: ClientConnection, shared: Shared, head: RequestHead, body: bytes) -> None:
        self._client = client
        self._shared = shared
        self._head = head
        self._body = body
        self._request_id = b""
        self._reading: asyncio.Future[Read] | None = None  # its prompt, when that takes a while
        self._own_id = ""  # the id its body gives it
        self._answer_id = b""  # the id its answer gives itself
        self._swallows_usage = False  # the router asked for usage, the client did not
        self._sent: Send | None = None  # open towards the decider
        self._attempt: Send | None = None  # the same, kept while its answer is relayed
        self._row = -1  # of its replica
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: UpstreamConnection | None = None
        self._hold: Hold | None = None  # it waits until somebody has room
        self._granted: Refuse | Send | None = None  # it waited, and this is what it waited for
        self._limit: asyncio.TimerHandle | None = None  # of the whole, if there is one
        self._reused = False  # that connection had carried another request before
        self._along: Along | None = None
        self._outlet = Outlet(client.write)
        self._status = 0
        self._closing = False  # the client's connection ends with this answer
        self._unframed = False  # the answer ends with the connection
        self._over = False

    # -- called by the client's connection

    def start(self) -> None:
        self._shared.counts.received += 1
        if self._shared.times.total_s is not None:
            loop = self._shared.loop
            self._limit = loop.call_at(loop.time() + self._shared.times.total_s, self._too_long)
        self._read(self._body)

    def _read(self, body: bytes) -> None:
        """Have a body read: the client's, or one that asks for the rest of its answer."""
        try:
            read = self._shared.read_prompt(self._head, body)
        except Exception:
            self._reader_broke()
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
                self._not_placed(_STOPPING)
                self._refuse(_STOPPING)
        except Exception:
            if not self._over:
                self._reader_broke()
        else:
            if not self._over:
                self._place(read)

    def _place(self, read: Read) -> None:
        if isinstance(read, Refuse):
            self._shared.counts.reject(read.status)
            self._refuse(read)
            return
        facts = read.facts if isinstance(read, Rewritten) else read
        if isinstance(read, Rewritten):
            self._body = read.body
            self._swallows_usage = read.swallows_usage
        if facts.continues or self._head.route is Route.STORED:
            facts = self._where_stored(facts)
        self._request_id = field_value(facts.request_id)
        self._own_id = facts.own_id
        self._obey(self._ask(self._shared.decider.arrived, facts))

    def _where_stored(self, facts: RequestFacts) -> RequestFacts:
        """The same, bound to the replica that keeps the response it is about, if that is known."""
        wanted = stored_id(self._head.path) if self._head.route is Route.STORED else facts.continues
        return replace(facts, only=self._shared.stored.holder(wanted))

    def client_lost(self, cause: Cause | None = None) -> None:
        """In any phase: the replica is told by closing its connection, the decider once. cause : as in `_give_up`"""
        if self._over:
            return
        self._over = True
        self._give_up(cause)

    # -- called by the messenger

    def held(self, hold: Hold) -> None:
        self._hold = hold

    def granted(self, action: Send | Refuse) -> None:
        self._hold, self._granted = None, action
        if isinstance(action, Send):
            self._sent = action  # open from now on, whether or not it comes to be sent

    def proceed(self) -> None:
        action, self._granted = self._granted, None
        if self._over or action is None:
            return
        self._sent = None
        self._obey([action])

    # -- called when somebody asks to abort it

    @property
    def client_name(self) -> str:
        """Name of the key that let its client in; "" when none was needed."""
        return self._head.client

    @property
    def unread_body(self) -> bytes:
        """Its body while its prompt is being read, so that the id in there is not known yet; else b""."""
        return b"" if self._reading is None or self._outlet.relayed else self._body

    def has_id(self, wanted: str) -> bool:
        """Whether its client or its engine knows it by this id."""
        request_id = self._request_id.decode("latin-1") or clients_own(self._head.get(b"x-request-id"))
        return wanted in (self._own_id, self._answer_id.decode("latin-1"), request_id)

    def runs_as(self, wanted: str) -> Endpoint | None:
        """Where an engine runs it under this id; None while none does, or under another."""
        attempt = self._attempt
        known = wanted in (self._own_id, self._answer_id.decode("latin-1"))
        if attempt is None or self._upstream is None or not known:
            return None
        return Endpoint(attempt.replica, attempt.base_url, tuple(attempt.extra_headers))

    def drop(self) -> bool:
        """End it, and show its client that it did not end by itself. False when it was over already."""
        if self._over:
            return False
        if self._outlet.relayed:
            self.client_lost()
            self._client.cut(reset=self._unframed)
        else:
            self.client_lost()
            self._refuse(_ABORTED)
        return True

    # -- called by the client's connection, of itself

    def client_paused(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def client_resumed(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # -- called by the connection to the replica

    def response_started(self, response: ResponseHead) -> None:
        attempt = self._attempt
        assert attempt is not None, "an answer follows an attempt"
        if self._shared.heard is not None:
            show_head(self._shared.heard, attempt, response, self._shared.counts)
        cause = cause_for_another(self._head, attempt, response)
        if cause is not None and (sent := self._put_away()) is not None:
            rule = partial(self._shared.decider.failed, retry_after_s=retry_after_s(response))
            actions = self._ask(rule, sent, cause)
            if actions != [] or self._waits_for_room:
                self._drop_upstream()
                self._obey(actions)
                return
            self._sent = sent  # still open: its own answer is relayed, and `finished` will close it
        self._status = response.status
        self._unframed = response.until_close or self._head.http10
        self._closing = self._unframed or self._client.closing or not self._head.keep_alive
        notes_json = self._note_id if self._head.path == _RESPONSES else None
        self._along = along(response, attempt, self._shared.counts, stream_id=self._note_id, json_id=notes_json)
        reframer = self._reframing(response)
        self._outlet.open(self._client_head(response), waits=self._head.route is Route.GENERATE, reframer=reframer)

    def body(self, piece: bytes) -> None:
        if self._along is not None and self._along.feed(piece) and self._sent is not None:
            self._ask(self._shared.decider.first_token, self._sent)
        self._outlet.body(piece)

    def relay(self, data: bytes) -> None:
        self._shared.spoke.add(self._row)
        self._outlet.relay(data)
        if self._body and self._outlet.relayed:
            self._body = b""  # it cannot be needed again

    def response_ended(self) -> None:
        self._upstream = None
        self._outlet.end()
        sent = self._put_away()
        if sent is not None:
            self._ask(self._shared.decider.finished, sent, self._ended())
        self._end(closing=self._closing)

    def _ended(self) -> Ended:
        """What the decider is told of the complete answer."""
        return ended_as(self._status, self._along)

    def response_switched(self, response: ResponseHead, rest: bytes) -> None:
        """Both connections are joined; to the decider the request stays open until one of them ends."""
        upstream = self._upstream
        assert upstream is not None, "an answer comes on a connection"
        self._status, self._outlet.relayed, self._closing = response.status, True, True
        self._stop_clock()
        head = self._client_head(response, upgrade=self._head.upgrade)
        self._client.switch(head, upstream, rest, ended=self._tunnel_ended)

    def _tunnel_ended(self) -> None:
        if self._upstream is not None:
            self._upstream.let_go()
        if not self._over:
            self.response_ended()

    def response_lost(self, cause: Cause, *, silent: bool) -> None:
        self._upstream = None
        if silent and self._client.paused:  # the replica was not read because the client does not read
            self.client_lost()
            self._client.abort()
        elif self._is_seen:
            self._broke()
        elif cause is Cause.NO_ANSWER and self._reused and not silent:
            self._shared.counts.repeats += 1
            self._connect()
        else:
            self._fail(Cause.NO_ANSWER if silent else Cause.BAD_ANSWER if cause is Cause.BROKEN else cause)

    # -- one attempt

    def _send(self, send: Send) -> None:
        assert self._sent is None, "one attempt at a time"
        self._sent = self._attempt = send
        self._row = send.row
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
        _log.info("%s", error, extra=self._about)
        self._fail(Cause.CONNECT)

    def _transmit(self, connection: UpstreamConnection) -> None:
        assert self._attempt is not None, "a replica was chosen"
        self._upstream = connection
        origin = origin_of(self._attempt.base_url)
        members = self._attempt.members
        body = with_members(self._body, members) if members else self._body
        head = upstream_head(
            self._head,
            host=origin.host_field,
            prefix=origin.prefix,
            body_bytes=len(body),
            request_id=self._request_id,
            forwarded=self._client.forwarded,
            extra=self._attempt.extra_headers,
            drops=self._shared.drops,
            via=self._shared.via,
        )
        bodiless = self._head.method == b"HEAD"
        connection.request(head, body, self, bodiless=bodiless, upgrade=self._head.upgrade)
        if self._client.paused:  # still full of the answer before
            connection.pause()

    def _fail(self, cause: Cause, *, retry_after_s: float | None = None) -> None:
        """This attempt failed before the client saw anything of it. retry_after_s : what it asked for, if it did"""
        if self._over:
            return
        sent = self._put_away()
        rule = partial(self._shared.decider.failed, retry_after_s=retry_after_s)
        actions = [] if sent is None else self._ask(rule, sent, cause)
        if actions == [] and not self._waits_for_room:
            name = self._attempt.replica if self._attempt is not None else "?"
            message = f"Replica {name} gave no usable answer ({cause.value})."
            self._refuse(Refuse(502, "BadGatewayError", message))
        else:
            self._obey(actions)

    @property
    def _is_seen(self) -> bool:
        """Whether the client may have seen something of this attempt's answer."""
        return self._outlet.relayed

    def _broke(self) -> None:
        """The answer broke under way."""
        self._break_off()

    def _break_off(self, *, too_long: bool = False) -> None:
        """The client gets all that came, and then a visible cut."""
        self._over = True
        self._outlet.rest()
        self._give_up(Cause.TOO_LONG if too_long else Cause.BROKEN)
        self._client.cut(reset=self._unframed)

    def _too_long(self) -> None:
        """The limit of the whole has passed, however well it progresses."""
        self._limit = None
        if self._over:
            return
        if self._outlet.relayed:
            self._break_off(too_long=True)
        else:
            self._give_up(Cause.TOO_LONG)
            self._refuse(_TOO_LONG)

    def _give_up(self, cause: Cause | None = None) -> None:
        """Let go of whatever is under way, in any phase. cause : None: the client left"""
        self._stop_clock()
        if self._reading is not None:
            refuse = None if cause is None else _STOPPING if cause is Cause.STOPPING else _TOO_LONG
            self._head.given_up = Outcome.CANCELLED if refuse is None else Outcome.of_own_answer(refuse.status)
            self._reading.cancel()
            self._not_placed(refuse)
        if self._connecting is not None:
            self._connecting.cancel()
        self._drop_upstream()
        decider, hold, sent = self._shared.decider, self._hold, self._put_away()
        if hold is not None:
            self._hold = None
            self._shared.messenger.leave(self, partial(decider.left, cause=cause), hold)
        if sent is not None:
            self._granted = None
            self._ask(decider.cancelled, sent) if cause is None else self._ask(decider.failed, sent, cause)

    def _stop_clock(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    # -- the decider

    def _ask(self, rule: Callable[..., list[Action]], *facts: object) -> list[Action] | None:
        """What the decider says to do with this request; None when it raised."""
        return self._shared.messenger.ask(self, rule, *facts)

    @property
    def _waits_for_room(self) -> bool:
        return self._hold is not None or self._granted is not None

    def _obey(self, actions: list[Action] | None) -> None:
        """Do what was decided for a request that waits for a decision."""
        if not actions:
            if actions is None or not self._waits_for_room:
                self._refuse(_INTERNAL)
            return
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            else:
                assert isinstance(action, Refuse), "a Hold is no action of its own"
                self._refuse(action)

    def _put_away(self) -> Send | None:
        """Take the open `Send`, so that nothing can close it twice."""
        sent, self._sent = self._sent, None
        return sent

    @property
    def _about(self) -> dict[str, dict[str, str]]:
        """What a log line about it says of it."""
        return about(request_id=(self._request_id or request_id_of(self._head)).decode("latin-1"))

    def _not_placed(self, refuse: Refuse | None) -> None:
        """Its reading ends without a decision, unless it is the rest of a stream. refuse : None: the client left"""
        if self._attempt is not None:
            return
        if refuse is None:
            self._shared.counts.left_early += 1
        else:
            self._shared.counts.reject(refuse.status)

    def _reader_broke(self) -> None:
        self._shared.counts.internal_errors += 1
        self._shared.counts.broken += self._attempt is None
        _log.exception("the prompt reader raised", extra=self._about)
        self._refuse(_INTERNAL)

    # -- the client

    def _refuse(self, refuse: Refuse) -> None:
        assert not self._outlet.relayed, "a refusal is a whole answer"
        closing = self._client.closing or not self._head.keep_alive
        request_id = self._request_id or request_id_of(self._head)
        self._outlet.write(refusal(refuse, self._head, request_id=request_id, closing=closing))
        self._end(closing=closing)

    def _end(self, *, closing: bool) -> None:
        self._over = True
        self._stop_clock()
        self._along = None
        self._client.exchange_over(closing=closing)

    def _client_head(self, response: ResponseHead, *, upgrade: bytes = b"") -> bytes:
        attempt = self._attempt
        assert attempt is not None, "an answer follows an attempt"
        return client_head(
            response,
            request_id=self._request_id,
            replica=field_value(attempt.replica),
            explain=None if attempt.explain is None else field_value(attempt.explain),
            closing=self._closing,
            unchunked=response.chunked and self._head.http10,
            upgrade=upgrade,
        )

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    # -- what an answer is

    def _reframing(self, response: ResponseHead) -> Reframer | None:
        """What the body passes, where it cannot pass as it came."""
        if self._along is not None and self._along.is_stream and (response.chunked or self._unframed):
            filter_ = self._filter()
            if filter_ is not None:
                return Reframer(chunked=not self._unframed, filter_=filter_)
        return Reframer(chunked=False) if response.chunked and self._head.http10 else None

    def _filter(self) -> Filter | None:
        """What the content of a stream passes, where not all of it passes as it came."""
        return UsageSwallower() if self._swallows_usage else None

    def _note_id(self, answer_id: bytes) -> None:
        self._answer_id = answer_id
        if self._head.path == _RESPONSES and self._attempt is not None:
            self._shared.stored.note(answer_id.decode("latin-1"), self._attempt.replica)


_STOPPING = Refuse(503, "ServiceUnavailable", "The router is stopping.", retry_after_s=1)
_TOO_LONG = Refuse(504, "GatewayTimeout", "The request took longer than this router allows in all.")
_ABORTED = Refuse(400, "BadRequestError", "The request was aborted.")
_INTERNAL = Refuse(500, "InternalServerError", "The router failed to place this request.")
