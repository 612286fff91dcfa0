"""The whole decision as plain code: events in with their time, actions out. Nothing here awaits or reads a clock.

Three shells can drive it: the gateway (wall clock), a replay (virtual clock), tests. Each `Send` is closed by exactly
one of `finished`, `failed` and `cancelled`; only an overloaded answer that nobody can stand in for stays open after
`failed`, because it is relayed to its end. Each `Hold` is followed by one `Send` or `Refuse`, or given up by `left`.

Whatever is told can make room for a request that waits, so the actions of any call can be those of others: they name
their `Hold`, and come after the actions for the request the call is about.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np

from estimators.estimates import Estimator
from estimators.model_prior import KNOWN_SPREAD
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Policy
from router import load_reports, refusals
from router.actions import Action, Cause, Ended, Hold, Outcome, Refuse, Send
from router.admission import Admission, AdmissionConfig, whole_seconds
from router.backlog import Ticket
from router.bookings import Ledger
from router.health import Health, HealthConfig, Trouble
from router.holdings import Holdings
from router.learning import Learning, PrefixCounters
from router.notes import write_candidates
from router.placing import Expected, Placement, Placer, Replica
from router.prompts import CharactersPerToken
from router.receipts import Receipt
from router.retries import RetryBudget, RetryConfig
from router.standing import Standing, fit, in_turn, next_change_s, serving

OVERLOADED_S = 1.0  # how long an overloaded replica is left alone that does not say
_TROUBLES = {Cause.CONNECT: Trouble.UNREACHABLE}  # all other causes are a kind of silence

Where = tuple[str, frozenset[int]]  # model, and replicas that failed the request: who can take it


@dataclass(frozen=True, slots=True)
class Waiting:
    """The dispatcher's record behind one `Hold`."""

    hold: Hold
    receipt: Receipt
    where: Where
    arrived_at_s: float


class Dispatcher:
    """Owns admission, choice and retry, the ledger and everything learned from outcomes.

    policy : decides where a generation runs; by_load : where everything else goes
    epoch_s : Unix time at now_s = 0, for receipts only
    on_receipt : called once for every request that ended, with its finished receipt
    every_candidate : receipts name all that was possible, else only what was chosen
    """

    def __init__(
        self,
        *,
        replicas: list[Replica],
        view: FleetView,
        holdings: Holdings,
        estimator: Estimator,
        policy: Policy,
        policy_name: str,
        by_load: Policy,
        on_receipt: Callable[[Receipt], None],
        characters_per_token: CharactersPerToken | None = None,
        max_attempts: int = 3,
        admission: AdmissionConfig | None = None,
        health: HealthConfig | None = None,
        retries: RetryConfig | None = None,
        calibration_spreads: list[float] | None = None,
        learn_disciplines: bool = False,
        epoch_s: float = 0.0,
        every_candidate: bool = True,
    ) -> None:
        self.view = view
        self.replicas = replicas
        self.policy_name = policy_name
        self._on_receipt = on_receipt
        self._max_attempts = max_attempts
        self._epoch_s = epoch_s
        self._every_candidate = every_candidate
        self._ledger = Ledger(view, estimator.costs.read_tokens)
        self.learning = Learning(
            view,
            estimator,
            characters_per_token or CharactersPerToken(),
            calibration_spreads or [KNOWN_SPREAD] * view.rows,
            learn_disciplines=learn_disciplines,
        )
        self._placer = Placer(
            replicas=replicas,
            view=view,
            holdings=holdings,
            estimator=estimator,
            policy=policy,
            by_load=by_load,
            learning=self.learning,
            ledger=self._ledger,
        )
        health = health or HealthConfig()
        self._standing = [Standing(Health(health)) for _ in range(view.rows)]
        self._retries = RetryBudget(retries or RetryConfig())
        self._admission = Admission(
            admission or AdmissionConfig(), view.rows, in_flight=view.booked.item, prefills=self._ledger.prefills
        )
        self._looked_at_s = -np.inf  # when it was last seen who of those that wait can go
        view.up[:] = False

    # Requests

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        """A whole request is here: place it, let it wait, or refuse it."""
        receipt = Receipt(
            request_id=request.request_id,
            arrived_at=self._epoch_s + now_s,
            endpoint=request.path,
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            prompt_exact=request.prompt_exact,
            streamed=request.streams,
            policy=self.policy_name,
        )
        if not any(standing.may_serve(request.model) for standing in self._standing):
            return [self._refuse(receipt, refusals.unknown_model(request.model, self.models), now_s, now_s)]
        others = self.due(now_s)
        self._retries.request(now_s)
        if request.generates:
            self.learning.arrived(request, now_s)
        return [*self._enter(request, receipt, frozenset(), now_s, now_s), *others]

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        """The first token of `sent` was seen."""
        placement = _placement(sent)
        placement.receipt.first_token_s = now_s - placement.arrived_at_s
        self._standing[sent.row].health.answered(placement.booking.placed_at_s, now_s)
        self._placer.first_token(placement, now_s)
        return self._let_go(now_s)

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        """`sent` was answered completely, well or not."""
        placement = _placement(sent)
        receipt, health = placement.receipt, self._standing[sent.row].health
        receipt.status = ended.status
        receipt.output_tokens = ended.output_tokens
        receipt.cached_tokens = ended.cached_tokens
        if ended.stream_error or ended.status >= 500:
            if ended.status not in (503, 529):  # overload is no failure
                health.failed(Trouble.ERRORS, now_s)
            self._close(placement, Outcome.SERVER_ERROR, now_s)
        elif ended.status >= 300:
            self._close(placement, Outcome.CLIENT_ERROR, now_s)
        else:
            health.answered(placement.booking.placed_at_s, now_s)
            try:
                self._placer.answered(placement, ended, now_s)
            finally:  # whatever an engine reports, the request is over
                self._close(placement, Outcome.OK, now_s)
        return self._let_go(now_s)

    def failed(self, sent: Send, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]:
        """`sent` came to nothing. When nothing was relayed and somebody else can take it, it is placed anew.

        An overloaded replica that nobody can stand in for keeps its own answer: no action for this request, `sent`
        stays open, and `finished` follows.

        retry_after_s : what an overloaded replica asked for; None: it did not say
        """
        placement = _placement(sent)
        receipt, health = placement.receipt, self._standing[sent.row].health
        if cause is Cause.OVERLOADED:  # no failure, but others first for as long as such answers ask for
            health.overloaded(now_s, OVERLOADED_S if retry_after_s is None else retry_after_s)
        else:
            health.failed(_TROUBLES.get(cause, Trouble.SILENT), now_s)
        tried = placement.tried | {sent.row}
        why_no_more = "" if cause is Cause.BROKEN else self._why_no_more(sent, tried, now_s)
        if cause is not Cause.BROKEN and not why_no_more:
            self._end_placement(placement, now_s)
            receipt.tried.append(sent.replica)
            again = self._enter(sent.request, receipt, tried, placement.arrived_at_s, now_s)
            return [*again, *self._let_go(now_s)]
        if cause is Cause.OVERLOADED:
            return []
        receipt.tried.append(sent.replica)
        receipt.cause = cause.value
        self._close(placement, Outcome.FAILED, now_s)
        if cause is Cause.BROKEN:
            return self._let_go(now_s)
        retry_after = self._retry_after_s(now_s)
        refusal = refusals.attempts_failed(sent.replica, cause, why_no_more, retry_after)
        return [refusal, *self._let_go(now_s)]

    def cancelled(self, sent: Send, now_s: float) -> list[Action]:
        """The client of `sent` left."""
        self._close(_placement(sent), Outcome.CANCELLED, now_s)
        return self._let_go(now_s)

    def left(self, hold: Hold, now_s: float) -> list[Action]:
        """The client of a request that waits left: it is forgotten."""
        ticket = hold.ticket
        assert isinstance(ticket, Ticket), "a Hold made by this dispatcher"
        waiting = _waiting(ticket)
        assert self._admission.backlog.remove(ticket), f"request {hold.request.request_id} does not wait any more"
        self._end_receipt(waiting.receipt, Outcome.CANCELLED, waiting.arrived_at_s, now_s)
        return []

    def due(self, now_s: float) -> list[Action]:
        """What time alone causes by `now_s`: unseen prefills end, waits time out, replicas may be tried again."""
        self._ledger.settle(now_s)
        return [*self._time_out(now_s), *self._let_go(now_s)]

    @property
    def next_due_s(self) -> float | None:
        """When `due` is wanted; None while only events can change anything. Changes with every call."""
        settled_s, waited_s = self._ledger.next_settled_s(), self._next_wait_s()
        if settled_s is None or waited_s is None:
            return waited_s if settled_s is None else settled_s
        return min(settled_s, waited_s)

    # What replicas report

    def replica_up(self, row: int, models: frozenset[str], now_s: float) -> None:
        """`row` answers its probes and serves `models` (empty: it did not say, so any)."""
        standing = self._standing[row]
        standing.models = models
        standing.health.came_up(now_s)
        self._up_or_down(row)

    def replica_down(self, row: int) -> None:
        """`row` does not answer its probes: not chosen until it does, running streams untouched."""
        self._standing[row].health.went_down()
        self._up_or_down(row)
        self.load_reported(row, running=None, waiting=None, sent_s=0.0, now_s=np.nan)

    def probed(
        self, row: int, now_s: float, *, alive: bool, progress: bool | None = None, running: float | None = None
    ) -> None:
        """Take in one probe of `row`; see `Health.probed`. Its models are those it named last."""
        self._standing[row].health.probed(now_s, alive=alive, progress=progress, running=running)
        self._up_or_down(row)

    def heard(self, row: int, now_s: float) -> None:
        """Bytes of an answer came from `row`: a probe that is late means nothing then."""
        self._standing[row].health.heard(now_s)

    def identified(self, row: int, identity: Hashable) -> bool:
        """Whether another backend than before answers as `row`; what was learned of the old one is forgotten then.

        identity : whatever tells backends apart, for example models, version and start of the process
        """
        changed = self._standing[row].health.identified(identity)
        if changed:
            self.learning.restarted(row)
        return changed

    def load_reported(
        self,
        row: int,
        *,
        running: float | None,
        waiting: float | None,
        sent_s: float,
        now_s: float,
        kv_used_share: float | None = None,
        prefix: PrefixCounters | None = None,
    ) -> None:
        """`row` reported requests `running` and `waiting` in answer to a poll sent at `sent_s`; None: it did not say.

        A report that stops coming keeps its last value and shows its age in receipts.

        kv_used_share : part of its KV memory in use, 0..1; prefix : totals of its prefix cache
        """
        if prefix is not None:
            self.learning.counted(row, prefix, now_s)
        load_reports.take_in(
            self.view,
            row,
            running=running,
            waiting=waiting,
            ended_since=self._standing[row].ended_since(sent_s),
            kv_used_share=kv_used_share,
            now_s=now_s,
        )
        if kv_used_share is not None and running is not None and waiting is not None:
            self.learning.kv_used(row, kv_used_share)

    def capacity_reported(self, row: int, tokens: float) -> None:
        """`row` said that its KV memory holds `tokens` (> 0) of context."""
        self.view.has_capacity(row, tokens)

    # What is known

    @property
    def models(self) -> list[str]:
        """Models served by at least one replica that is up, sorted."""
        return sorted({model for standing in self._standing if standing.up for model in standing.models or ()})

    def is_up(self, row: int) -> bool:
        """Whether `row` answers its probes."""
        return self._standing[row].up

    def health(self, row: int) -> Health:
        """How `row` is doing, to be looked at."""
        return self._standing[row].health

    def models_of(self, row: int) -> list[str]:
        """Models `row` has named, sorted."""
        return sorted(self._standing[row].models or ())

    @property
    def in_flight(self) -> int:
        """Requests placed and not yet ended."""
        return int(self.view.booked.sum())

    @property
    def queued(self) -> dict[str, int]:
        """Requests that wait for a replica with room, by who shares."""
        return self._admission.backlog.counts()

    # Who waits, and who is placed

    def _enter(
        self, request: RequestFacts, receipt: Receipt, tried: frozenset[int], arrived_at_s: float, now_s: float
    ) -> list[Action]:
        """Place a request, let it wait, or refuse it; and who loses a place in the queue to it."""
        rows = fit(self._standing, serving(self._standing, request.model), tried, now_s)
        if not rows:
            refusal = refusals.nobody_up(self._retry_after_s(now_s))
            return [self._refuse(receipt, refusal, arrived_at_s, now_s)]
        free = self._admission.with_room(rows) if request.generates else rows
        where = (request.model, tried)
        try:
            if not free:
                return self._hold(request, receipt, where, rows, arrived_at_s, now_s)
            return [self._place(request, receipt, where, free, arrived_at_s, now_s)]
        except Exception:
            receipt.cause = "internal"
            self._end_receipt(receipt, Outcome.FAILED, arrived_at_s, now_s)
            raise

    def _hold(
        self, request: RequestFacts, receipt: Receipt, where: Where, rows: list[int], arrived_at_s: float, now_s: float
    ) -> list[Action]:
        """All `rows` are full: a place in the queue, unless it has none, or the deadline would pass in it."""
        admission = self._admission
        work_s = self._expected(request, rows, now_s).work_s
        waiting = Waiting(Hold(request), receipt, where, arrived_at_s)
        ticket = admission.ticket(request, where, waiting, work_s=work_s, arrived_at_s=arrived_at_s)
        waiting.hold.ticket = ticket
        deadline_s = admission.deadline_s(request)
        if deadline_s is not None:
            wait_s = admission.wait_s(ticket, len(rows), now_s)
            expected_s = now_s - arrived_at_s + wait_s + work_s
            if expected_s > deadline_s:
                refusal = refusals.too_late(expected_s, deadline_s, whole_seconds(wait_s))
                return [self._refuse(receipt, refusal, arrived_at_s, now_s)]
        pushed_out = admission.backlog.put(ticket)
        if pushed_out is None:
            return [waiting.hold]
        full = refusals.queue_full(self._retry_after_s(now_s))
        if pushed_out is ticket:
            return [self._refuse(receipt, full, arrived_at_s, now_s)]
        return [waiting.hold, self._refuse_waiting(pushed_out, full, now_s)]

    def _let_go(self, now_s: float) -> list[Action]:
        """Everybody who waits and for whom there is room now, in order."""
        self._looked_at_s = now_s
        actions: list[Action] = []
        while len(self._admission.backlog):
            ticket = self._admission.take(lambda where: bool(self._rows_with_room(where, now_s)), now_s)
            if ticket is None:
                break
            waiting = _waiting(ticket)
            rows = self._rows_with_room(waiting.where, now_s)
            request, receipt, arrived_at_s = waiting.hold.request, waiting.receipt, waiting.arrived_at_s
            action = self._place(request, receipt, waiting.where, rows, arrived_at_s, now_s)
            action.held = waiting.hold
            actions.append(action)
        return actions

    def _rows_with_room(self, where: Hashable, now_s: float) -> list[int]:
        model, tried = _where(where)
        return self._admission.with_room(fit(self._standing, serving(self._standing, model), tried, now_s))

    def _time_out(self, now_s: float) -> list[Action]:
        """Refuse those that waited as long as they may, and those whom nobody that is up could ever take."""
        backlog = self._admission.backlog
        if not len(backlog):
            return []
        retry_after_s = self._retry_after_s(now_s)
        actions: list[Action] = []
        for ticket in backlog.expired(now_s):
            refusal = refusals.queue_timeout(now_s - _waiting(ticket).arrived_at_s, retry_after_s)
            actions.append(self._refuse_waiting(ticket, refusal, now_s))
        for where in backlog.kinds():
            model, tried = _where(where)
            if not set(serving(self._standing, model)) - tried:
                gone = backlog.flush(where)
                actions += [self._refuse_waiting(ticket, refusals.nobody_up(retry_after_s), now_s) for ticket in gone]
        return actions

    def _next_wait_s(self) -> float | None:
        """When time changes anything for those that wait; None when it does not, or nobody waits."""
        backlog = self._admission.backlog
        if not len(backlog):
            return None
        times_s = (backlog.next_expiry_s, next_change_s(self._standing, self._looked_at_s))
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _refuse_waiting(self, ticket: Ticket, refusal: Refuse, now_s: float) -> Refuse:
        waiting = _waiting(ticket)
        refusal = replace(refusal, held=waiting.hold)
        return self._refuse(waiting.receipt, refusal, waiting.arrived_at_s, now_s)

    def _retry_after_s(self, now_s: float) -> int:
        return self._admission.retry_after_s(sum(standing.up for standing in self._standing), now_s)

    def _why_no_more(self, sent: Send, tried: frozenset[int], now_s: float) -> str:
        """Why a request that failed gets no other attempt; "" when it does, which is then paid for."""
        if sent.attempt >= self._max_attempts:
            return f"no more than {self._max_attempts} attempts are made"
        if not fit(self._standing, serving(self._standing, sent.request.model), tried, now_s):
            return "no other replica could take the request"
        return "" if self._retries.take(now_s) else "the budget for second attempts is spent"

    def _up_or_down(self, row: int) -> None:
        self.view.up[row] = self._standing[row].up
        self._looked_at_s = -np.inf

    # Placing

    def _place(
        self, request: RequestFacts, receipt: Receipt, where: Where, rows: list[int], arrived_at_s: float, now_s: float
    ) -> Send | Refuse:
        """On one of `rows`, unless its deadline is not expected to be met on any."""
        _, tried = where
        rows = in_turn(self._standing, rows, now_s)
        expected = self._expected(request, rows, now_s)
        refusal = self._too_late(request, expected, now_s - arrived_at_s)
        if refusal is not None:
            return self._refuse(receipt, refusal, arrived_at_s, now_s)
        sent = self._placer.place(request, expected, receipt, arrived_at_s=arrived_at_s, tried=tried, now_s=now_s)
        _placement(sent).trial = self._standing[sent.row].health.chosen(now_s)
        return sent

    def _expected(self, request: RequestFacts, rows: list[int], now_s: float) -> Expected:
        return self._placer.expected(request, rows, len(serving(self._standing, request.model)), now_s)

    def _too_late(self, request: RequestFacts, expected: Expected, waited_s: float) -> Refuse | None:
        """The refusal of a request whose deadline no candidate is expected to meet, where that is wanted."""
        deadline_s = self._admission.deadline_s(request)
        if deadline_s is None or not request.generates:
            return None
        first_token_s = waited_s + expected.first_token_s
        late_s = first_token_s - deadline_s
        return refusals.too_late(first_token_s, deadline_s, whole_seconds(late_s)) if late_s > 0 else None

    # Endings

    def _end_placement(self, placement: Placement, now_s: float) -> None:
        self._placer.end(placement, now_s)
        standing = self._standing[placement.booking.row]
        standing.ended_at_s.append(now_s)
        if placement.trial:
            standing.health.trial_over(now_s)

    def _close(self, placement: Placement, outcome: Outcome, now_s: float) -> None:
        self._end_placement(placement, now_s)
        write_candidates(placement.receipt, placement.notes, every=self._every_candidate)
        self._end_receipt(placement.receipt, outcome, placement.arrived_at_s, now_s)

    def _end_receipt(self, receipt: Receipt, outcome: Outcome, arrived_at_s: float, now_s: float) -> None:
        assert receipt.outcome is None, f"request {receipt.request_id} ended twice"
        receipt.outcome = outcome.value
        receipt.ended_s = now_s - arrived_at_s
        self._on_receipt(receipt)

    def _refuse(self, receipt: Receipt, refusal: Refuse, arrived_at_s: float, now_s: float) -> Refuse:
        receipt.status = refusal.status
        self._end_receipt(receipt, Outcome.REFUSED, arrived_at_s, now_s)
        return refusal


def _placement(sent: Send) -> Placement:
    assert isinstance(sent.placement, Placement), "a Send made by this dispatcher"
    return sent.placement


def _waiting(ticket: Ticket) -> Waiting:
    assert isinstance(ticket.what, Waiting), "a ticket made by this dispatcher"
    return ticket.what


def _where(where: Hashable) -> Where:
    assert isinstance(where, tuple), "a ticket made by this dispatcher"
    model, tried = where
    return model, tried
