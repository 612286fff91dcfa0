"""The whole decision as plain code: events in with their time, actions out. Nothing here awaits or reads a clock.

Three shells can drive it: the gateway (wall clock), a replay (virtual clock), tests. Each `Send` is closed by exactly
one of `finished`, `failed` and `cancelled`; only an overloaded answer that nobody can stand in for stays open after
`failed`, because it is relayed to its end. Each `Hold` is followed by one `Send` or `Refuse`, or given up by `left`.

Whatever is told can make room for a request that waits, so the actions of any call can be those of others: they name
their `Hold`, and come after the actions for the request the call is about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from estimators.estimates import Estimator
from estimators.model_prior import KNOWN_SPREAD
from estimators.request import RequestFacts
from estimators.view import FleetView, is_nobody
from policies.base import Policy
from router import load_reports, refusals
from router.actions import Action, Cause, Ended, Hold, Outcome, Send
from router.admission import Admission, AdmissionConfig
from router.bookings import Ledger
from router.endings import Endings, Keep
from router.entrance import Entrance, where_of
from router.experiments import Experiments, OverrideRefused
from router.health import Health, HealthConfig, Trouble
from router.holdings import Holdings
from router.laps import Laps
from router.learning import Learning, PrefixCounters
from router.notes import write_candidates
from router.placing import Placement, Placer, Replica
from router.prompts import CharactersPerToken
from router.receipts import Receipt, Resume
from router.resume.reasons import WhyNot
from router.retries import RetryBudget, RetryConfig
from router.standing import Standing, may_serve
from router.telling import telling

MOST_ASKED = 64  # replicas asked for one stored response, so that a guessed id costs no more
OVERLOADED_S = 1.0  # how long an overloaded replica is left alone that does not say
_NEUTRAL = (Cause.ELSEWHERE, Cause.TOO_LONG, Cause.STOPPING, Cause.REST_REFUSED)  # for health
_LAST = (Cause.BROKEN, Cause.TOO_LONG, Cause.STOPPING, Cause.REST_REFUSED)  # no other attempt, nor our own answer
_NONE: frozenset[int] = frozenset()
_TROUBLES = {Cause.CONNECT: Trouble.UNREACHABLE}  # all other causes are a kind of silence

log = logging.getLogger(__name__)


class Dispatcher:
    """Owns admission, choice and retry, the ledger and everything learned from outcomes.

    policy : decides where a generation runs; by_load : where everything else goes
    epoch_s : Unix time at now_s = 0, for receipts only
    on_receipt : called once for every request that ended, with its finished receipt
    keep : called after that with what more there is to keep of it; see `Endings`
    experiments : rules that decide instead of `policy`, or beside it; None: no others
    retries : the budget of second attempts, to be looked at
    every_candidate : receipts name all that was possible, else only what was chosen
    placing : how placements are made
    laps : told of the phases of each decision
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
        keep: Keep | None = None,
        experiments: Experiments | None = None,
        characters_per_token: CharactersPerToken | None = None,
        max_attempts: int = 3,
        admission: AdmissionConfig | None = None,
        health: HealthConfig | None = None,
        retries: RetryConfig | None = None,
        calibration_spreads: list[float] | None = None,
        learn_disciplines: bool = False,
        epoch_s: float = 0.0,
        every_candidate: bool = True,
        placing: type[Placer] = Placer,
        laps: Laps | None = None,
    ) -> None:
        self.view = view
        self.replicas = replicas
        self.policy_name = policy_name
        self._max_attempts = max_attempts
        self._epoch_s = epoch_s
        self._every_candidate = every_candidate
        watcher = telling(policy) if experiments is None else experiments.watcher
        self._ledger = Ledger(view, estimator.costs.read_tokens, watcher)
        self.learning = Learning(
            view,
            estimator,
            characters_per_token or CharactersPerToken(),
            calibration_spreads or [KNOWN_SPREAD] * view.rows,
            learn_disciplines=learn_disciplines,
        )
        self._placer = placing(
            replicas=replicas,
            view=view,
            holdings=holdings,
            estimator=estimator,
            policy=policy,
            by_load=by_load,
            learning=self.learning,
            ledger=self._ledger,
            experiments=experiments,
            laps=laps,
        )
        self._experiments = experiments
        self._health = health or HealthConfig()
        self._standing = [Standing(Health(self._health), present=not is_nobody(name)) for name in view.names]
        self._names = [replica.name for replica in replicas]
        self.retries = RetryBudget(retries or RetryConfig())
        self._admission = Admission(
            admission or AdmissionConfig(), view.rows, in_flight=view.booked.item, prefills=self._ledger.prefills
        )
        self._endings = Endings(on_receipt, keep)
        self._entrance = Entrance(
            admission=self._admission,
            standings=self._standing,
            names=self._names,
            placer=self._placer,
            endings=self._endings,
        )
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
            client=request.client or None,
            edited=request.edited,
            explained=request.explain,
            deadline_s=request.deadline_s,
            pace_deadline_s=request.pace_deadline_s,
        )
        if self._experiments is not None and (self._experiments.active or request.policy):
            try:
                self._experiments.note(receipt, request)
            except OverrideRefused as exc:
                refusal = refusals.override(exc.status, str(exc))
                return [self._endings.refuse(receipt, refusal, arrived_at_s=now_s, now_s=now_s)]
        if self._has_replicas and not may_serve(self._standing, request.model):
            refusal = refusals.unknown_model(request.model, self.models)
            return [self._endings.refuse(receipt, refusal, arrived_at_s=now_s, now_s=now_s)]
        others = self.due(now_s)
        self.retries.request(now_s)
        self._placer.noticed(request, now_s)
        try:
            actions = self._entrance.enter(request, receipt, _NONE, arrived_at_s=now_s, now_s=now_s)
        except Exception:
            if not others:
                raise
            log.exception("a request could not be placed")  # it must not take with it what was decided for others
            actions = [refusals.internal()]
        return [*actions, *others] if others else actions

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        """The first token of `sent` was seen."""
        placement = _placement(sent)
        _note_first_token(placement.receipt, sent.request, now_s - placement.arrived_at_s)
        self._standing[sent.row].health.answered(placement.booking.placed_at_s, now_s)
        self._placer.first_token(placement, now_s)
        return self._entrance.let_go(now_s)

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        """`sent` was answered completely, well or not."""
        placement = _placement(sent)
        receipt, health = placement.receipt, self._standing[sent.row].health
        receipt.status = ended.status
        receipt.output_tokens = _with_sent(sent.request, ended.output_tokens)
        receipt.events = _with_sent(sent.request, ended.events or None)
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
        return self._entrance.let_go(now_s)

    def failed(self, sent: Send, cause: Cause, now_s: float, retry_after_s: float | None = None) -> list[Action]:
        """`sent` came to nothing. When nothing was relayed and somebody else can take it, it is placed anew.

        A replica that is overloaded, or does not keep the response asked for, keeps its own answer when nobody can
        stand in for it: no action for this request, `sent` stays open, and `finished` follows.

        retry_after_s : what an overloaded replica asked for; None: it did not say
        """
        placement = _placement(sent)
        receipt, health = placement.receipt, self._standing[sent.row].health
        if cause is Cause.OVERLOADED:  # no failure, but others first for as long as such answers ask for
            health.overloaded(now_s, OVERLOADED_S if retry_after_s is None else retry_after_s)
        elif cause not in _NEUTRAL:
            health.failed(_TROUBLES.get(cause, Trouble.SILENT), now_s)
        tried = placement.tried | {sent.row}
        no_more = None if cause in _LAST else self._why_no_more(sent, cause, tried, now_s)
        if cause not in _LAST and no_more is None:
            return self._place_again(sent, sent.request, now_s)
        is_rest = sent.request.sent_tokens is not None
        if cause in (Cause.OVERLOADED, Cause.ELSEWHERE) and not is_rest:
            return []
        receipt.tried.append(sent.replica)
        receipt.cause = cause.value
        if is_rest and no_more is not None:
            receipt.not_resumed = no_more.value
        self._close(placement, Outcome.FAILED, now_s)
        if no_more is None:  # the shell knows what its client has seen
            return self._entrance.let_go(now_s)
        retry_after = self._entrance.retry_after_s(now_s)
        refusal = refusals.attempts_failed(sent.replica, cause, no_more, retry_after)
        return [refusal, *self._entrance.let_go(now_s)]

    def broke(self, sent: Send, rest: RequestFacts | WhyNot, now_s: float) -> list[Action]:
        """The stream of `sent` broke, and its client has some of it. The rest is placed as a request of its own, on
        none of the replicas that failed this one; no action for this request: it is over.

        rest : what another replica is to be asked; or why there is nothing to ask, of which REFUSED says that `sent`
            itself was the rest of a stream, and its replica would not have it
        """
        placement = _placement(sent)
        receipt = placement.receipt
        if isinstance(rest, RequestFacts):
            why_not = self._why_not_elsewhere(rest, placement.tried | {sent.row}, now_s, is_retry=True)
            if why_not is None:
                self._standing[sent.row].health.failed(Trouble.SILENT, now_s)
                broke_s = now_s - placement.arrived_at_s
                receipt.resumes.append(Resume(sent.replica, broke_s, rest.sent_tokens or 0))
                return self._place_again(sent, rest, now_s)
            rest = why_not
        receipt.not_resumed = rest.value
        return self.failed(sent, Cause.REST_REFUSED if rest is WhyNot.REFUSED else Cause.BROKEN, now_s)

    def cancelled(self, sent: Send, now_s: float) -> list[Action]:
        """The client of `sent` left."""
        self._close(_placement(sent), Outcome.CANCELLED, now_s)
        return self._entrance.let_go(now_s)

    def left(self, hold: Hold, now_s: float, *, cause: Cause | None = None) -> list[Action]:
        """A request that waits is forgotten. cause : why it is not to be answered any more; None: its client left"""
        self._entrance.left(hold, now_s, cause=cause)
        return []

    def due(self, now_s: float) -> list[Action]:
        """What time alone causes by `now_s`: unseen prefills end, waits time out, replicas may be tried again."""
        self._ledger.settle(now_s)
        return [*self._entrance.time_out(now_s), *self._entrance.let_go(now_s)]

    def settle(self, now_s: float) -> None:
        """Let unseen prefills end by `now_s`, for who looks at the fleet; nobody is sent on."""
        self._ledger.settle(now_s)

    @property
    def next_due_s(self) -> float | None:
        """When `due` is wanted; None while only events can change anything. Changes with every call."""
        settled_s, waited_s = self._ledger.next_settled_s(), self._entrance.next_due_s()
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

    def identified(self, row: int, facts: Mapping[str, Hashable], now_s: float) -> bool:
        """Whether another backend than before answers as `row`; what was learned of the old one is forgotten then.

        facts : whatever tells backends apart and is known now, for example models or the start of the process
        """
        changed = self._standing[row].health.identified(facts, now_s)
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

    def most_running_reported(self, row: int, requests: int) -> None:
        """`row` said that it runs at most so many `requests` (>= 1) at once: more would only queue there."""
        self._admission.learned(row, requests)

    def capacity_reported(self, row: int, tokens: float) -> None:
        """`row` said that its KV memory holds `tokens` (> 0) of context."""
        self.view.has_capacity(row, tokens)

    # Replicas that come and go; `Rows` calls these

    def joins(self, row: int, replica: Replica) -> None:
        """`row` is that of `replica` from now on, of which nothing is known: not up yet. Nothing is booked there."""
        assert not self.view.booked[row], "the requests of another replica are still running"
        self._standing[row] = Standing(Health(self._health))
        self._admission.forget(row)
        self._addressed(row, replica)

    def leaves(self, row: int, replica: Replica) -> None:
        """The replica of `row` is gone, or nobody wants it any more: nothing new for it, and no probe counts.

        replica : what the row is called from now on; its running requests end as they would
        """
        standing = self._standing[row]
        standing.present = standing.drained = False
        standing.health.went_down()
        self._up_or_down(row)
        self._addressed(row, replica)

    def returns(self, row: int, replica: Replica) -> None:
        """The replica that left `row` is wanted again, before its last request ended: up with its next probe."""
        self._standing[row].present = True
        self._addressed(row, replica)

    def drain(self, row: int, *, drained: bool) -> None:
        """Give the replica of `row` nothing new, or traffic again."""
        if self._standing[row].drained is not drained:
            self._standing[row].drained = drained
            self._entrance.look_again()

    # What is known

    def is_drained(self, row: int) -> bool:
        """Whether `row` is given nothing new, by an operator's wish."""
        return self._standing[row].drained

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

    # Inside

    @property
    def _has_replicas(self) -> bool:
        return any(standing.present for standing in self._standing)

    def _addressed(self, row: int, replica: Replica) -> None:
        self.replicas[row] = replica
        self._names[row] = replica.name

    def _why_no_more(self, sent: Send, cause: Cause, tried: frozenset[int], now_s: float) -> WhyNot | None:
        """Why a request that failed gets no other attempt; None when it does, which is then paid for."""
        most = MOST_ASKED if cause is Cause.ELSEWHERE else self._max_attempts
        if sent.attempt >= most:
            return WhyNot.TOO_OFTEN
        return self._why_not_elsewhere(sent.request, tried, now_s, is_retry=cause is not Cause.ELSEWHERE)

    def _why_not_elsewhere(
        self, request: RequestFacts, tried: frozenset[int], now_s: float, *, is_retry: bool
    ) -> WhyNot | None:
        """The same where any number of attempts may be made. is_retry : asking around is none, and costs nothing"""
        if not self._entrance.fit(where_of(request, tried), now_s):
            return WhyNot.NO_REPLICA
        return WhyNot.NO_BUDGET if is_retry and not self.retries.take(now_s) else None

    def _place_again(self, sent: Send, request: RequestFacts, now_s: float) -> list[Action]:
        """End the placement of `sent` and place `request`, which it was or what is left of it, somewhere else."""
        placement = _placement(sent)
        self._end_placement(placement, now_s)
        placement.receipt.tried.append(sent.replica)
        tried, arrived_at_s = placement.tried | {sent.row}, placement.arrived_at_s
        again = self._entrance.enter(request, placement.receipt, tried, arrived_at_s=arrived_at_s, now_s=now_s)
        return [*again, *self._entrance.let_go(now_s)]

    def _up_or_down(self, row: int) -> None:
        self.view.up[row] = self._standing[row].up
        self._entrance.look_again()

    def _end_placement(self, placement: Placement, now_s: float) -> None:
        self._entrance.look_again()  # there is room, even if whoever let it go comes to grief before `let_go`
        self._placer.end(placement, now_s)
        standing = self._standing[placement.booking.row]
        standing.ended_at_s.append(now_s)
        if placement.trial:
            standing.health.trial_over(now_s)

    def _close(self, placement: Placement, outcome: Outcome, now_s: float) -> None:
        self._end_placement(placement, now_s)
        write_candidates(placement.receipt, placement.notes, every=self._every_candidate)
        self._endings.close(
            placement.receipt,
            outcome,
            arrived_at_s=placement.arrived_at_s,
            now_s=now_s,
            request=placement.booking.request,
            detail=placement.notes,
        )


def _note_first_token(receipt: Receipt, request: RequestFacts, at_s: float) -> None:
    """A first token came at `at_s` from arrival: that of the answer, or that of its rest."""
    if request.sent_tokens is None:
        receipt.first_token_s = at_s
        return
    receipt.resumes[-1].went_on_s = at_s
    if receipt.first_token_s is None:  # the client had none of the replica that failed
        receipt.first_token_s = at_s


def _with_sent(request: RequestFacts, output_tokens: int | None) -> int | None:
    """Tokens of a whole answer, of which one replica made the last `output_tokens`."""
    return None if output_tokens is None else output_tokens + (request.sent_tokens or 0)


def _placement(sent: Send) -> Placement:
    assert isinstance(sent.placement, Placement), "a Send made by this dispatcher"
    return sent.placement
