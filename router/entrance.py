"""Who is placed at once, who waits, and who goes when there is room: the way from a request to a placement.

Model     a request is placed where the policy wants it among all replicas fit to take it, if that one has room. If
          that one is full and another is not, it may wait for the first although it could go: its prompt is cached
          there, or the card is faster. It does while what those before it claim of that replica takes less time than
          its first token would come later elsewhere. So a hot prefix overflows its holder as soon as the queue for it
          costs more than computing it again
Valid     whoever tells of an event that makes room asks `let_go` afterwards; `next_due_s` says what time does
Blind to  changes of what waiting saves, until the claims before it exceed it or its replica has room
Source    delay scheduling: Zaharia et al., EuroSys 2010
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from estimators.paths import Path
from estimators.request import RequestFacts
from policies.base import Choice, Refused, Wait
from router import refusals
from router.actions import Action, Cause, Hold, Outcome, Refuse, Send, Why
from router.admission import Admission, whole_seconds
from router.backlog import Ticket
from router.endings import Endings
from router.placing import Expected, Placement, Placer
from router.receipts import Receipt
from router.standing import Standing, fit, in_turn, next_change_s, on_trial, serving

ASKED = 8  # requests asked where they want to go, each for the price of a decision, whenever something made room
PASSED = 256  # requests passed over because they are known to want another replica

_NONE: frozenset[int] = frozenset()

log = logging.getLogger(__name__)


class Where(NamedTuple):
    """What decides who can take a request.

    only : name of the one replica that can; "" for any. tried : rows that failed it
    """

    model: str
    only: str
    tried: frozenset[int]


def where_of(request: RequestFacts, tried: frozenset[int]) -> Where:
    """Who can take `request` after those `tried`."""
    return Where(request.model, request.only, tried)


@dataclass(slots=True, eq=False)
class Candidacy:
    """One request on its way to a placement.

    tried : replicas that failed it
    claim_row, claim_s : the full replica it waits for although it could go, and its work there; -1: none
    saved_s : what waiting for it was found to save
    path, source : how its prompt's state would get there, and from which peer
    """

    request: RequestFacts
    receipt: Receipt
    tried: frozenset[int]
    arrived_at_s: float
    claim_row: int = -1
    claim_s: float = 0.0
    saved_s: float = 0.0
    path: Path = Path.RECOMPUTE
    source: str | None = None
    hold: Hold | None = None  # once it waits

    @property
    def where(self) -> Where:
        """Who can take it."""
        return where_of(self.request, self.tried)


class Entrance:
    """Owner of the queue. standings : of all replicas, kept up to date by the dispatcher; names : of the same"""

    def __init__(
        self,
        *,
        admission: Admission,
        standings: Sequence[Standing],
        names: Sequence[str],
        placer: Placer,
        endings: Endings,
    ) -> None:
        self._admission = admission
        self._backlog = admission.backlog
        self._standings = standings
        self._names = names
        self._placer = placer
        self._endings = endings
        self._looked_at_s = -inf  # when it was last seen who can go
        self._claims_s: dict[int, float] = {}  # work of those that wait for a replica although they could go

    def enter(
        self, request: RequestFacts, receipt: Receipt, tried: frozenset[int], *, arrived_at_s: float, now_s: float
    ) -> list[Action]:
        """Place a request, let it wait, or refuse it; and who loses a place in the queue to it."""
        able = self._able(request.model, request.only)
        rows = whose = fit(self._standings, able, tried, now_s)
        if rows is able and not self._admission.compares:  # all may be given anything, and nobody ever waits
            return self._place_at_once(request, able, receipt, arrived_at_s, now_s)
        one = Candidacy(request, receipt, tried, arrived_at_s)
        if not rows:
            return [self._refuse(one, self._nobody(request.only, self.retry_after_s(now_s)), now_s)]
        if rows is not able:  # else all may be given anything
            rows = self._trial(one, rows, now_s) or rows
        free = self._admission.with_room(rows) if request.generates else rows
        if rows is not able:
            whose = self._in_turn(rows, free, now_s)
        try:
            expected = self._placer.expected(request, whose, len(able), now_s)
            action = self._offer(one, expected, free, self._claims_s, now_s) if free else None
            return [action] if action is not None else self._let_wait(one, expected, now_s)
        except Exception:
            self._break(receipt, arrived_at_s, now_s)
            raise

    def left(self, hold: Hold, now_s: float, *, cause: Cause | None) -> None:
        """A request that waits is forgotten. cause : why it is not to be answered any more; None: its client left"""
        ticket = hold.ticket
        assert isinstance(ticket, Ticket), "a Hold made here"
        assert self._backlog.remove(ticket), f"request {hold.request.request_id} does not wait any more"
        one = _candidacy(ticket)
        self._give_up_claim(one)
        if cause is not None:
            one.receipt.cause = cause.value
        outcome = Outcome.CANCELLED if cause is None else Outcome.FAILED
        self._endings.close(one.receipt, outcome, arrived_at_s=one.arrived_at_s, now_s=now_s)

    def let_go(self, now_s: float) -> list[Action]:
        """Everybody who waits, for whom there is room now and who wants it, in order."""
        self._looked_at_s = now_s
        actions: list[Action] = []
        if not len(self._backlog):
            return actions
        asked: list[Candidacy] = []
        while (action := self._next(asked, now_s)) is not None:
            actions.append(action)
        return actions

    def time_out(self, now_s: float) -> list[Action]:
        """Refuse those that waited as long as they may, and those whom nobody that is up could ever take."""
        if not len(self._backlog):
            return []
        retry_after_s = self.retry_after_s(now_s)
        actions: list[Action] = []
        for one in map(_candidacy, self._backlog.expired(now_s)):
            refusal = refusals.queue_timeout(now_s - one.arrived_at_s, retry_after_s)
            actions.append(self._refuse_held(one, refusal, now_s))
        for kind in self._backlog.kinds():
            where = _where(kind)
            if not set(self._able(where.model, where.only)) - where.tried:
                nobody = self._nobody(where.only, retry_after_s)
                gone = map(_candidacy, self._backlog.flush(where))
                actions += [self._refuse_held(one, nobody, now_s) for one in gone]
        return actions

    def next_due_s(self) -> float | None:
        """When time changes anything for those that wait, -inf for now; None when it does not, or nobody waits."""
        if not len(self._backlog):
            return None
        if self._looked_at_s == -inf:
            return -inf
        expiry_s, change_s = self._backlog.next_expiry_s, next_change_s(self._standings, self._looked_at_s)
        return min((time_s for time_s in (expiry_s, change_s) if time_s is not None), default=None)

    def look_again(self) -> None:
        """A replica came or went, or a request ended: who can go is to be looked at as soon as possible."""
        self._looked_at_s = -inf

    def fit(self, where: Where, now_s: float) -> list[int]:
        """Rows to choose from for a request, full ones included."""
        return fit(self._standings, self._able(where.model, where.only), where.tried, now_s)

    def retry_after_s(self, now_s: float) -> int:
        """What a client is told that is to come back later, whole seconds."""
        working = sum(standing.up and not standing.drained for standing in self._standings)
        return self._admission.retry_after_s(working, now_s)

    # One request

    def _place_at_once(
        self, request: RequestFacts, rows: list[int], receipt: Receipt, arrived_at_s: float, now_s: float
    ) -> list[Action]:
        """Place a request that failed nowhere on one of `rows`, which are all that can run it, unless its rule has a
        limit of its own.
        """
        placer = self._placer
        try:
            expected = placer.expected(request, rows, len(rows), now_s)
            try:
                choice = placer.choose(request, expected)
            except Refused as exc:
                return self._by_rule(Candidacy(request, receipt, _NONE, arrived_at_s), expected, exc, now_s)
            return [
                placer.place(request, expected, choice, receipt, arrived_at_s=arrived_at_s, tried=_NONE, now_s=now_s)
            ]
        except Exception:
            self._break(receipt, arrived_at_s, now_s)
            raise

    def _by_rule(self, one: Candidacy, expected: Expected, refused: Refused, now_s: float) -> list[Action]:
        """Its rule finds no replica good enough, for ever or for now."""
        if isinstance(refused, Wait):
            return self._let_wait(one, expected, now_s)
        return [self._refuse(one, refusals.by_rule(str(refused), self.retry_after_s(now_s)), now_s)]

    def _break(self, receipt: Receipt, arrived_at_s: float, now_s: float) -> None:
        """The router failed by itself."""
        receipt.cause = Why.INTERNAL.value
        self._endings.close(receipt, Outcome.FAILED, arrived_at_s=arrived_at_s, now_s=now_s)

    def _able(self, model: str, only: str) -> list[int]:
        """Rows that are up and can run a request, those that failed it included. only : "" for any"""
        rows = serving(self._standings, model)
        return [row for row in rows if self._names[row] == only] if only else rows

    def _nobody(self, only: str, retry_after_s: int) -> Refuse:
        """Why no replica that is up can take a request. only : the one that could; "" for any"""
        if only and only not in self._names:
            return refusals.keeper_left(only)
        return refusals.nobody_up(only, retry_after_s)

    def _trial(self, one: Candidacy, rows: list[int], now_s: float) -> list[int]:
        """The replica that it is to try, if one is due and has room; empty otherwise. A retry tries nothing."""
        if one.tried or not one.request.generates:
            return []
        return self._admission.with_room(on_trial(self._standings, rows, now_s))

    def _in_turn(self, rows: list[int], free: list[int], now_s: float) -> list[int]:
        """All of `rows` whose turn it is, and `free` if none of them is, so that one of these is there at least."""
        whose = in_turn(self._standings, rows, now_s)
        return whose if not free or any(row in whose for row in free) else whose + free

    def _offer(
        self, one: Candidacy, expected: Expected, free: list[int], claims_s: dict[int, float], now_s: float
    ) -> Send | Refuse | None:
        """Place it on one of `free`, refuse it as too late or by the rule's own limit, or None: it would rather wait.

        claims_s : work that those before it claim of each replica
        """
        if one.claim_row >= 0:
            self._give_up_claim(one)
        if self._admission.refuses_late:
            refusal = self._too_late(one, expected, now_s)
            if refusal is not None:
                return self._refuse(one, refusal, now_s)
        try:
            chosen = self._choose(one, expected, free, claims_s)
        except Wait:
            return None
        except Refused as exc:
            return self._refuse(one, refusals.by_rule(str(exc), self.retry_after_s(now_s)), now_s)
        return None if chosen is None else self._place(one, *chosen, now_s)

    def _choose(
        self, one: Candidacy, expected: Expected, free: list[int], claims_s: dict[int, float]
    ) -> tuple[Expected, Choice] | None:
        """What it takes of `free`, and what was expected of those; None: it waits for a full one.

        Raises policies.base.Refused when the rule finds nobody good enough, full ones included.
        """
        choice = self._placer.choose(one.request, expected)
        if choice.row in free:
            return expected, choice
        there = self._placer.narrowed(expected, free)
        saved_s = there.first_token_s - expected.first_token_s
        if claims_s.get(choice.row, 0.0) < saved_s:
            self._claim(one, choice.row, expected.work_s, saved_s)
            one.path, one.source = choice.path, self._placer.source_of(choice, expected.estimates)
            return None
        try:
            return there, self._placer.choose(one.request, there)
        except Refused:  # a full one would do, so it has a chance yet
            return None

    def _place(self, one: Candidacy, expected: Expected, choice: Choice, now_s: float) -> Send:
        """Send it, and say so where that is a trial."""
        sent = self._placer.place(
            one.request,
            expected,
            choice,
            one.receipt,
            arrived_at_s=one.arrived_at_s,
            tried=one.tried,
            now_s=now_s,
        )
        if self._standings[sent.row].health.chosen(now_s):
            assert isinstance(sent.placement, Placement), "the placer's own"
            sent.placement.trial = True
        return sent

    def _let_wait(self, one: Candidacy, expected: Expected, now_s: float) -> list[Action]:
        """A place in the queue, unless it has none, or the deadline would pass in it."""
        admission, work_s = self._admission, expected.work_s
        ticket = admission.ticket(
            one.request, one.where, one, work_s=work_s, arrived_at_s=one.arrived_at_s, now_s=now_s
        )
        deadline_s = admission.deadline_s(one.request)
        if deadline_s is not None:
            wait_s = admission.wait_s(ticket, max(1, len(self._able(one.request.model, one.request.only))), now_s)
            first_token_s = now_s - one.arrived_at_s + wait_s + work_s
            if first_token_s > deadline_s:
                return [self._refuse(one, refusals.too_late(first_token_s, deadline_s, whole_seconds(wait_s)), now_s)]
        one.hold = Hold(one.request, ticket=ticket, row=one.claim_row, path=one.path, source=one.source)
        pushed_out = self._backlog.put(ticket)
        if pushed_out is None:
            return [one.hold]
        full = refusals.queue_full(self.retry_after_s(now_s))
        if pushed_out is ticket:
            return [self._refuse(one, full, now_s)]
        return [one.hold, self._refuse_held(_candidacy(pushed_out), full, now_s)]

    def _too_late(self, one: Candidacy, expected: Expected, now_s: float) -> Refuse | None:
        """The refusal of a request whose deadline no replica is expected to meet, where that is wanted."""
        deadline_s = self._admission.deadline_s(one.request)
        if deadline_s is None or not one.request.generates:
            return None
        first_token_s = now_s - one.arrived_at_s + expected.first_token_s
        late_s = first_token_s - deadline_s
        return refusals.too_late(first_token_s, deadline_s, whole_seconds(late_s)) if late_s > 0 else None

    # Those that wait

    def _next(self, asked: list[Candidacy], now_s: float) -> Send | Refuse | None:
        """The next one that goes; None when nobody can or wants to. asked : those that were, at this moment"""
        rows_of: dict[Hashable, tuple[list[int], list[int]]] = {}  # fit, and of those with room
        claims_s: dict[int, float] = {}  # of those before the one that is looked at
        taken: Send | Refuse | None = None

        def rows(where: Hashable) -> tuple[list[int], list[int]]:
            if where not in rows_of:
                able = self.fit(_where(where), now_s)
                rows_of[where] = able, self._admission.with_room(able)
            return rows_of[where]

        def wants(ticket: Ticket) -> bool:
            nonlocal taken
            one = _candidacy(ticket)
            able, free = rows(ticket.where)
            waits = one.claim_row in able and one.claim_row not in free
            if not waits or claims_s.get(one.claim_row, 0.0) >= one.saved_s:
                if len(asked) >= ASKED:
                    return False
                asked.append(one)
                taken = self._offer_held(one, able, free, claims_s, now_s)
            if taken is None:
                claims_s[one.claim_row] = claims_s.get(one.claim_row, 0.0) + one.claim_s
            return taken is not None

        self._admission.take(lambda where: bool(rows(where)[1]), wants, now_s, looks=PASSED)
        return taken

    def _offer_held(
        self, one: Candidacy, rows: list[int], free: list[int], claims_s: dict[int, float], now_s: float
    ) -> Send | Refuse | None:
        """`_offer` for one that waits. What goes wrong is its own matter, not that of the request that made room."""
        try:
            trial = self._trial(one, rows, now_s)
            rows, free = (trial, trial) if trial else (rows, free)
            whose, replicas = self._in_turn(rows, free, now_s), len(self._able(one.request.model, one.request.only))
            expected = self._placer.expected(one.request, whose, replicas, now_s)
            action = self._offer(one, expected, free, claims_s, now_s)
        except Exception:
            log.exception("a request that waited could not be placed")
            action = self._refuse(one, refusals.internal(), now_s)
        if action is not None:
            action.held = one.hold
        return action

    def _claim(self, one: Candidacy, row: int, work_s: float, saved_s: float) -> None:
        one.claim_row, one.claim_s, one.saved_s = row, work_s, saved_s
        self._claims_s[row] = self._claims_s.get(row, 0.0) + work_s

    def _give_up_claim(self, one: Candidacy) -> None:
        if one.claim_row >= 0:
            left_s = self._claims_s.pop(one.claim_row) - one.claim_s
            if left_s > 1e-9:  # else it is what rounding left
                self._claims_s[one.claim_row] = left_s
            one.claim_row = -1

    def _refuse(self, one: Candidacy, refusal: Refuse, now_s: float) -> Refuse:
        self._give_up_claim(one)
        return self._endings.refuse(one.receipt, refusal, arrived_at_s=one.arrived_at_s, now_s=now_s)

    def _refuse_held(self, one: Candidacy, refusal: Refuse, now_s: float) -> Refuse:
        return self._refuse(one, replace(refusal, held=one.hold), now_s)


def _candidacy(ticket: Ticket) -> Candidacy:
    assert isinstance(ticket.what, Candidacy), "a ticket made here"
    return ticket.what


def _where(where: Hashable) -> Where:
    assert isinstance(where, Where), "a ticket made here"
    return where
