"""One request to one replica, whose answer is read by the router and not relayed: what a report is made of.

Model     a connection of its own, because a request that changes a replica must not go out twice; the beginning of the
          answer is kept, the rest is read and dropped. `ended` is called once, unless it was stopped before
Valid     answers of any length; limits on time are those of relayed requests
Blind to  what the answer means
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.actions import Cause
from router.errors import ReplicaUnreachable
from router.gate import CREDENTIALS
from router.http.contract import Endpoint
from router.http.head import Forwarded, RequestHead, ResponseHead, upstream_head
from router.http.pool import origin_of
from router.http.shared import Shared
from router.http.upstream import UpstreamConnection

_log = logging.getLogger(__name__)
_EXCERPT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one question. status : None when there was no whole answer; said : its beginning, or why not."""

    replica: str
    status: int | None
    said: str

    @property
    def succeeded(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class Question:
    """Asks `endpoint` what `head` and `body` ask, without the client's credentials: they may be the admin's."""

    def __init__(self, shared: Shared, endpoint: Endpoint, ended: Callable[[Report], None]) -> None:
        self._shared = shared
        self._endpoint = endpoint
        self._ended = ended
        self._request = (b"", b"")
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: UpstreamConnection | None = None
        self._status = 0
        self._excerpt = b""

    def ask(self, head: RequestHead, body: bytes, *, request_id: bytes, forwarded: Forwarded) -> None:
        """Send it; called once."""
        origin = origin_of(self._endpoint.base_url)
        shared = self._shared
        fields = upstream_head(
            head,
            host=origin.host_field,
            prefix=origin.prefix,
            body_bytes=len(body),
            request_id=request_id,
            forwarded=forwarded,
            extra=self._endpoint.fields,
            drops=shared.drops | CREDENTIALS,
            via=shared.via,
        )
        self._request = (fields, body)
        self._connecting = shared.pool.connect(self._endpoint.base_url, self._connected, self._connect_failed)

    def stop(self) -> None:
        """Give it up; `ended` is not called any more."""
        self._ended = _nobody
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()

    def _connected(self, connection: UpstreamConnection) -> None:
        self._connecting = None
        if self._ended is _nobody or not connection.usable:
            connection.close()
            self._end(None, "the connection was lost before the request was sent")
            return
        self._upstream = connection
        connection.request(*self._request, self, bodiless=False)

    def _connect_failed(self, error: ReplicaUnreachable) -> None:
        self._connecting = None
        _log.info("%s", error)
        self._end(None, "no connection")

    def _end(self, status: int | None, said: str) -> None:
        self._upstream = None
        self._ended(Report(self._endpoint.name, status, said))

    # -- called by the connection

    def response_started(self, response: ResponseHead) -> None:
        self._status = response.status

    def body(self, piece: bytes) -> None:
        if len(self._excerpt) < _EXCERPT_BYTES:
            self._excerpt = (self._excerpt + piece)[:_EXCERPT_BYTES]

    def relay(self, data: bytes) -> None:
        """Nobody is waiting for the bytes themselves."""

    def response_ended(self) -> None:
        self._end(self._status, self._excerpt.decode("utf-8", "replace"))

    def response_switched(self, response: ResponseHead, rest: bytes) -> None:
        raise AssertionError("no switch of protocols was asked for")

    def response_lost(self, cause: Cause, *, silent: bool) -> None:
        self._end(None, "no whole answer in time" if silent else f"no whole answer ({cause.value})")


def _nobody(report: Report) -> None:
    """The client has left."""
