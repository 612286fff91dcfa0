"""The dispatcher as the traffic port drives it, with what only the shell adds: how long it took, fields of the request.

Nothing here decides. Replicas that share a URL are its data-parallel ranks, and only a header field makes the server
run a request on the rank that was chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

from estimators.request import RequestFacts
from router.actions import Action, Aside, Cause, Ended, Hold, Send
from router.directing.directions import Directions
from router.dispatch import Dispatcher
from router.placing import Placement
from router.resume.reasons import WhyNot
from router.signals.orca import REQUEST_HEADER
from router.signals.ranks import rows_by_url

RANK_HEADER = b"X-data-parallel-rank"  # vLLM from 0.11.2, SGLang from 0.5.12

log = logging.getLogger(__name__)

Answered = Callable[[RequestFacts, Ended, float], object]  # request, how it ended, tokens it was promised to reuse


class TimedDecider:
    """Owner of every rule, as the traffic port wants it (`router.http.contract.Decider`).

    took : told how long each decision took, seconds
    answered : told of each answer to a prompt that the router tokenised
    ranks : the rank of each row behind its URL; None where it is alone there
    asks_load : have engines tell their load in the heads of whole answers
    placed : told of every request that is sent
    fields : added to every request of each row, such as the key it wants
    directions : what engines are told of a prompt's state; None: they decide by themselves
    aside : obeys what is to be told aside; never waits
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        took: Callable[[float], object],
        answered: Answered,
        ranks: Sequence[int | None],
        asks_load: bool = False,
        placed: Callable[[Send], object] = lambda sent: None,
        fields: Callable[[int], Iterable[tuple[bytes, bytes]]] = lambda row: (),
        directions: Directions | None = None,
        aside: Callable[[Aside], object] = lambda aside: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._took = took
        self._answered = answered
        self._placed = placed
        self._fields_of = fields
        self._fields: list[list[tuple[bytes, bytes]]]
        self._asks_load = asks_load
        self._directions = directions
        self._tell_aside = aside
        self._adds_fields: bool
        self.members_changed(ranks)

    def members_changed(self, ranks: Sequence[int | None]) -> None:
        """Replicas came or went. ranks : as at the start"""
        self._fields = [
            [*self._fields_of(row), *([] if rank is None else [(RANK_HEADER, b"%d" % rank)])]
            for row, rank in enumerate(ranks)
        ]
        self._adds_fields = self._asks_load or any(self._fields)

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        began_s = perf_counter()
        if self._directions is not None:
            self._directions.look(now_s)
        actions = self._dispatcher.arrived(request, now_s)
        self._took(perf_counter() - began_s)
        return self._complete(actions, now_s)

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        if self._directions is not None:
            self._directions.first_token(sent)
        return self._complete(self._dispatcher.first_token(sent, now_s), now_s)

    def failed(self, sent: Send, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]:
        self._over(sent)
        return self._complete(self._dispatcher.failed(sent, cause, now_s, retry_after_s), now_s)

    def broke(self, sent: Send, rest: RequestFacts | WhyNot, now_s: float) -> list[Action]:
        self._over(sent)
        return self._complete(self._dispatcher.broke(sent, rest, now_s), now_s)

    def cancelled(self, sent: Send, now_s: float) -> list[Action]:
        self._over(sent)
        return self._complete(self._dispatcher.cancelled(sent, now_s), now_s)

    def left(self, hold: Hold, now_s: float, *, cause: Cause | None = None) -> list[Action]:
        self._over(hold)
        return self._complete(self._dispatcher.left(hold, now_s, cause=cause), now_s)

    def due(self, now_s: float) -> list[Action]:
        return self._complete(self._dispatcher.due(now_s), now_s)

    @property
    def next_due_s(self) -> float | None:
        return self._dispatcher.next_due_s

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        placement = sent.placement
        try:
            if sent.request.tokenised and isinstance(placement, Placement):
                self._answered(sent.request, ended, placement.booking.reused_tokens)
            if self._directions is not None:
                self._obey(self._directions.finished(sent, ended, now_s))
        except Exception:
            _failed_beside()
        return self._complete(self._dispatcher.finished(sent, ended, now_s), now_s)

    def _over(self, gone: Send | Hold) -> None:
        if self._directions is not None:
            try:
                self._obey(self._directions.over(gone))
            except Exception:
                _failed_beside()

    def _obey(self, asides: list[Aside]) -> None:
        for aside in asides:
            self._tell_aside(aside)

    def _complete(self, actions: list[Action], now_s: float) -> list[Action]:
        """What the dispatcher said, with what is told beside it."""
        try:
            if self._directions is not None and actions:
                self._obey(self._directions.directed(actions, now_s))
            for action in actions:
                if isinstance(action, Send):
                    self._placed(action)
        except Exception:
            _failed_beside()
        for action in actions:
            if isinstance(action, Send) and self._adds_fields:
                action.extra_headers += self._fields[action.row]
                if self._asks_load and action.request.generates and not action.request.streams:
                    action.extra_headers.append(REQUEST_HEADER)
        return actions


def _failed_beside() -> None:
    """What is told beside a decision went wrong. The decision stands: requests are booked, and others wait for it."""
    log.exception("what is told beside a decision failed")


def ranks_of(urls: Sequence[str | None]) -> list[int | None]:
    """The rank of each row among those that share its URL, in listed order; None where it is alone.

    >>> ranks_of(["http://a", "http://b", "http://a/"])
    [0, None, 1]
    """
    ranks: list[int | None] = [None] * len(urls)
    for rows in rows_by_url(urls).values():
        if len(rows) > 1:
            for rank, row in enumerate(rows):
                ranks[row] = rank
    return ranks
