"""Ends a request that is open elsewhere in the router, by the id its client or its engine gave it.

Model     the ids of a request are the body's own (SGLang's `rid`, vLLM's `request_id`), that of its answer, and its
          x-request-id. Where the engine knows the id, it is asked to abort, and ends the answer in its own way. Where
          it does not, or has no such route, the request's connection is closed, which every engine takes for an abort
Valid     requests of the same client key. Everything at once (`abort_all`, or no id) takes the admin key
Blind to  requests of other routers
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.actions import Refuse
from router.http.exchange import Exchange
from router.http.question import Report
from router.http.to_all import ToAll


class _Wish(msgspec.Struct):
    rid: Any = None
    request_id: Any = None
    abort_all: Any = False


_decode = msgspec.json.Decoder(_Wish).decode
_NOT_JSON = Refuse(400, "BadRequestError", "The body must be a JSON object with `rid`, a string.")


class Abort(ToAll):
    """One POST to /abort_request."""

    _asked_about: tuple[Exchange, ...] = ()  # exchanges whose engine is asked, one for each report
    _dropped = 0

    def start(self) -> None:
        try:
            wish = _decode(self._body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._refuse(_NOT_JSON)
            return
        if wish.abort_all or not wish.rid:
            super().start()
        elif isinstance(wish.rid, str):
            self._abort(wish.rid)
        else:
            self._refuse(_NOT_JSON)

    def _abort(self, wanted: str) -> None:
        found = [exchange for exchange in self._open_exchanges() if _is_meant(exchange, wanted)]
        if not found:
            self._refuse(Refuse(404, "NotFoundError", "No open request has this id.", param="rid"))
            return
        asked = []
        for exchange in found:
            endpoint = exchange.runs_as(wanted)
            if endpoint is not None:
                asked.append((exchange, endpoint))
            else:
                self._drop(exchange)
        if asked:
            self._asked_about = tuple(exchange for exchange, _ in asked)
            self.ask([endpoint for _, endpoint in asked])
        else:
            self._tell([])

    def _open_exchanges(self) -> list[Exchange]:
        """Those this client may end."""
        own = self._head.client
        exchanges = [client.exchange for client in self._shared.clients]
        return [one for one in exchanges if isinstance(one, Exchange) and (not own or one.client_name == own)]

    def _drop(self, exchange: Exchange) -> None:
        self._dropped += exchange.drop()

    def answered(self, reports: list[Report]) -> None:
        if not self._asked_about:
            super().answered(reports)
            return
        for exchange, report in zip(self._asked_about, reports, strict=True):
            if not report.succeeded:
                self._drop(exchange)
        self._tell(reports)

    def _tell(self, reports: list[Report]) -> None:
        told = [report.replica for report in reports if report.succeeded]
        answer = {"object": "abort", "told": told, "cut": self._dropped}
        self.reply(200, msgspec.json.encode(answer))


def _is_meant(exchange: Exchange, wanted: str) -> bool:
    if exchange.has_id(wanted):
        return True
    body = exchange.unread_body
    if wanted.encode("utf-8", "replace") not in body:  # nearly always; reading a body takes longer
        return False
    try:
        named = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return wanted in (named.rid, named.request_id)
