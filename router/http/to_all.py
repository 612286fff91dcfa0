"""A request that goes to several replicas at once and is answered with a report of each.

Model     all are asked together, those that are down too: one that comes back without an adapter the others have is
          what an operator has to know. 200 when all succeeded, else 502, and the report says who did not: with any
          2xx, scripts that look at the status alone would take a half-done change for done
Valid     the body is sent to each byte for byte. When the client leaves, whoever has not answered is let go; what was
          begun there may still be done
Blind to  whether the replicas agree about what was there before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from router.actions import Cause, Refuse
from router.http.contract import Endpoint
from router.http.head import RequestHead
from router.http.question import Question, Report
from router.http.replies import json_reply, refusal, request_id_of
from router.http.shared import Shared

if TYPE_CHECKING:
    from router.http.client import ClientConnection

_NO_REPLICAS = Refuse(503, "ServiceUnavailable", "The fleet has no replicas.", retry_after_s=1)


class ToAll:
    """One such request, from its last byte to its end; its client calls `start` once, `client_lost` at any time."""

    def __init__(self, client: ClientConnection, shared: Shared, head: RequestHead, body: bytes) -> None:
        self._client = client
        self._shared = shared
        self._head = head
        self._body = body
        self._request_id = request_id_of(head)
        self._open: set[Question] = set()
        self._reports: dict[int, Report] = {}  # by place in the list
        self._asked = 0
        self._over = False

    # -- called by the client's connection

    def start(self) -> None:
        refuse = hidden(self._head) if self._shared.admin is None else self._shared.admin(self._head)
        if refuse is not None:
            self._refuse(refuse)
            return
        self.ask(self._shared.endpoints())

    def client_lost(self, cause: Cause | None = None) -> None:
        self._over = True
        for question in self._open:
            question.stop()
        self._open.clear()

    def client_paused(self) -> None:
        """There is one answer, and it is small."""

    def client_resumed(self) -> None:
        """See `client_paused`."""

    # -- asking

    def ask(self, endpoints: Sequence[Endpoint]) -> None:
        """Ask all of them; at least one, or the client is refused."""
        if not endpoints:
            self._refuse(_NO_REPLICAS)
            return
        self._asked = len(endpoints)
        questions = [self._question(at, endpoint) for at, endpoint in enumerate(endpoints)]
        for question in questions:
            question.ask(self._head, self._body, request_id=self._request_id, forwarded=self._client.forwarded)

    def _question(self, at: int, endpoint: Endpoint) -> Question:
        def ended(report: Report) -> None:
            self._open.discard(question)
            self._reports[at] = report
            if len(self._reports) == self._asked and not self._over:
                self.answered([self._reports[place] for place in range(self._asked)])

        question = Question(self._shared, endpoint, ended)
        self._open.add(question)
        return question

    def answered(self, reports: list[Report]) -> None:
        """All have ended, each in its way."""
        done = sum(report.succeeded for report in reports)
        shown = [{"replica": report.replica, "status": report.status, "body": report.said} for report in reports]
        answer = {"object": "report", "succeeded": done, "failed": len(reports) - done, "replicas": shown}
        self.reply(200 if done == len(reports) else 502, msgspec.json.encode(answer))

    # -- the client

    def reply(self, status: int, body: bytes) -> None:
        """Answer with a JSON body, and end."""
        closing = self._client.closing or not self._head.keep_alive
        self._client.write(json_reply(status, body, request_id=self._request_id, closing=closing))
        self._end(closing)

    def _refuse(self, refuse: Refuse) -> None:
        self._shared.counts.turn_away(refuse.status)
        closing = self._client.closing or not self._head.keep_alive
        self._client.write(refusal(refuse, self._head, request_id=self._request_id, closing=closing))
        self._end(closing)

    def _end(self, closing: bool) -> None:
        self._over = True
        self._client.exchange_over(closing=closing)


def hidden(head: RequestHead) -> Refuse:
    """The answer to a path that this port does not show."""
    return Refuse(404, "NotFoundError", f"{head.path} is not served on the traffic port.")
