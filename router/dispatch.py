"""The whole decision as plain code: events in with their time, actions out. Nothing here awaits or reads a clock.

Three shells can drive it: the gateway (wall clock), a replay (virtual clock), tests. Each `Send` is closed by exactly
one of `finished`, `failed` and `cancelled`; only an overloaded answer that nobody can stand in for stays open after
`failed`, because it is relayed to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from estimators.estimates import Estimates, Estimator
from estimators.links import Promise
from estimators.model_prior import KNOWN_SPREAD
from estimators.paths import COLUMN, Path
from estimators.prefetch import Hold
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Policy, Refused
from router.actions import Action, Cause, Ended, Outcome, Refuse, Send
from router.beliefs import Belief, belief_of, tell
from router.bookings import Booking, Ledger
from router.holdings import Holdings
from router.learning import Learning, PrefixCounters
from router.notes import Notes
from router.prompts import CharactersPerToken
from router.receipts import Candidate, Receipt
from router.standing import Standing, rested, serving
from router.telling import telling

RETRY_AFTER_S = 1
MOST_ASKED = 64  # replicas asked for one stored response, so that a guessed id costs no more


@dataclass(frozen=True, slots=True)
class Replica:
    """What the dispatcher needs to address a replica. base_url : http(s)://host:port"""

    name: str
    base_url: str


@dataclass(slots=True, eq=False)
class Placement:
    """The dispatcher's record behind one `Send`."""

    booking: Booking
    receipt: Receipt
    notes: Notes | None  # None: nothing was estimated
    arrived_at_s: float
    tried: set[int]
    promised: list[Promise]  # what its fetch has yet to bring over which links
    room: Hold | None  # for it, where a replica has little
    belief: Belief | None  # what it counts on finding
    expected: int | None  # number under which its blocks are expected; None: it leaves none
    computed: bool = False  # its prefill is over


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
        calibration_spreads: list[float] | None = None,
        learn_disciplines: bool = False,
        epoch_s: float = 0.0,
        every_candidate: bool = True,
    ) -> None:
        self.view = view
        self.replicas = replicas
        self.policy_name = policy_name
        self._holdings = holdings
        self._estimator = estimator
        self._policy = policy
        self._by_load = by_load
        self._on_receipt = on_receipt
        self._max_attempts = max_attempts
        self._epoch_s = epoch_s
        self._every_candidate = every_candidate
        self._ledger = Ledger(view, estimator.costs.read_tokens, telling(policy))
        self.learning = Learning(
            view,
            estimator,
            characters_per_token or CharactersPerToken(),
            calibration_spreads or [KNOWN_SPREAD] * view.rows,
            learn_disciplines=learn_disciplines,
        )
        self._standing = [Standing() for _ in range(view.rows)]
        view.up[:] = False

    # Requests

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        """A whole request is here: place it or refuse it."""
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
        )
        if not any(standing.may_serve(request.model) for standing in self._standing):
            return [self._refuse(receipt, self._unknown_model(request.model), now_s, now_s)]
        self._noticed(request, now_s)
        return [self._place(request, receipt, now_s, set(), now_s)]

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        """The first token of `sent` was seen."""
        placement = _placement(sent)
        placement.receipt.first_token_s = now_s - placement.arrived_at_s
        self.learning.first_token(placement.booking, now_s)
        self._computed(placement, now_s)
        for promise in placement.promised:
            self._estimator.routes.table.arrived(promise, now_s)
        self._give_back(placement)
        self._ledger.first_token(placement.booking, now_s)
        return []

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        """`sent` was answered completely, well or not."""
        placement = _placement(sent)
        receipt = placement.receipt
        receipt.status = ended.status
        receipt.output_tokens = ended.output_tokens
        receipt.cached_tokens = ended.cached_tokens
        if ended.stream_error or ended.status >= 500:
            if ended.status not in (503, 529):  # overload is no failure
                self._standing[sent.row].failed(placement.booking.placed_at_s, now_s)
            self._close(placement, Outcome.SERVER_ERROR, now_s)
        elif ended.status >= 300:
            self._close(placement, Outcome.CLIENT_ERROR, now_s)
        else:
            self._standing[sent.row].failures = 0
            try:
                self._answered(placement, ended, now_s)
            finally:  # whatever an engine reports, the request is over
                self._close(placement, Outcome.OK, now_s)
        return []

    def failed(self, sent: Send, cause: Cause, now_s: float) -> list[Action]:
        """`sent` came to nothing. Another `Send` is returned when nothing was relayed and somebody else can take it.

        A replica that is overloaded, or does not keep the response asked for, keeps its own answer when nobody can
        stand in for it: an empty list, `sent` stays open, and `finished` follows.
        """
        placement = _placement(sent)
        receipt = placement.receipt
        tried = placement.tried | {sent.row}
        standing = self._standing[sent.row]
        if cause is Cause.OVERLOADED:  # no failure, but others first for as long as such answers ask for
            standing.overloaded(now_s, RETRY_AFTER_S)
        elif cause is not Cause.ELSEWHERE:
            standing.failed(placement.booking.placed_at_s, now_s)
        most = MOST_ASKED if cause is Cause.ELSEWHERE else self._max_attempts
        may_retry = cause is not Cause.BROKEN and sent.attempt < most
        if may_retry and rested(self._standing, self._able(sent.request), tried, now_s):
            self._end_booking(placement, now_s)
            receipt.tried.append(sent.replica)
            return [self._place(sent.request, receipt, placement.arrived_at_s, tried, now_s)]
        if cause in (Cause.OVERLOADED, Cause.ELSEWHERE):
            return []
        receipt.tried.append(sent.replica)
        receipt.cause = cause.value
        self._close(placement, Outcome.FAILED, now_s)
        if cause is Cause.BROKEN:
            return []
        return [
            Refuse(
                502,
                "BadGateway",
                f"replica {sent.replica} failed before any byte was relayed ({cause.value}),"
                " and no other replica could take the request",
                retry_after_s=RETRY_AFTER_S,
            )
        ]

    def cancelled(self, sent: Send, now_s: float) -> list[Action]:
        """The client of `sent` left."""
        self._close(_placement(sent), Outcome.CANCELLED, now_s)
        return []

    def due(self, now_s: float) -> list[Action]:
        """What time alone causes by `now_s`: prefills that nobody can see end are taken to have ended."""
        self._ledger.settle(now_s)
        return []

    @property
    def next_due_s(self) -> float | None:
        """When `due` is wanted; None while only events can change anything."""
        return self._ledger.next_settled_s()

    # What replicas report

    def replica_up(self, row: int, models: frozenset[str]) -> None:
        """`row` answers its probes and serves `models` (empty: it did not say, so any)."""
        self._standing[row].came_up(models)
        self.view.up[row] = True

    def replica_down(self, row: int) -> None:
        """`row` does not answer its probes: not chosen until it does, running streams untouched."""
        self._standing[row].up = self.view.up[row] = False
        self.load_reported(row, running=None, waiting=None, sent_s=0.0, now_s=np.nan)

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

        Ours are those booked now or ended since the poll went out, so nothing of ours is taken for foreign. A report
        that stops coming keeps its last value and shows its age in receipts.

        kv_used_share : part of its KV memory in use, 0..1; prefix : totals of its prefix cache
        """
        view, standing = self.view, self._standing[row]
        if prefix is not None:
            self.learning.counted(row, prefix, now_s)
        view.kv_used_share[row] = np.nan if kv_used_share is None else kv_used_share
        if running is None or waiting is None:
            view.foreign_waiting[row] = view.foreign_decoding[row] = view.sampled_at_s[row] = np.nan
            return
        ours = view.booked.item(row) + standing.ended_since(sent_s)  # items: sums of numpy's scalars cost ten times
        ours_waiting = ours - view.decode_batch.item(row)
        foreign = max(0.0, running + waiting - ours)
        foreign_waiting = min(foreign, max(0.0, waiting - ours_waiting))
        view.foreign_waiting[row] = foreign_waiting
        view.foreign_decoding[row] = foreign - foreign_waiting
        view.sampled_at_s[row] = now_s
        if kv_used_share is not None:
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

    def models_of(self, row: int) -> list[str]:
        """Models `row` has named, sorted."""
        return sorted(self._standing[row].models or ())

    @property
    def in_flight(self) -> int:
        """Requests placed and not yet ended."""
        return int(self.view.booked.sum())

    # Inside

    def _place(
        self, request: RequestFacts, receipt: Receipt, arrived_at_s: float, tried: set[int], now_s: float
    ) -> Action:
        able = self._able(request)
        rows = rested(self._standing, able, tried, now_s)
        if not rows:
            return self._refuse(receipt, self._nobody(request), arrived_at_s, now_s)
        try:
            return self._decide(request, receipt, rows, len(able), arrived_at_s, tried, now_s)
        except Refused as exc:
            return self._refuse(receipt, Refuse(429, "TooManyRequests", str(exc)), arrived_at_s, now_s)
        except Exception:
            receipt.cause = "internal"
            self._end_receipt(receipt, Outcome.FAILED, arrived_at_s, now_s)
            raise

    def _noticed(self, request: RequestFacts, now_s: float) -> None:
        """Traffic is learned of generations, wherever they will run."""
        if request.generates:
            self.learning.arrived(request, now_s)

    def _able(self, request: RequestFacts) -> list[int]:
        """Rows that are up and can run `request`."""
        able = serving(self._standing, request.model)
        return [row for row in able if self.replicas[row].name == request.only] if request.only else able

    def _nobody(self, request: RequestFacts) -> Refuse:
        """Why none of the replicas that serve the model is up for `request`."""
        name = request.only
        if name and all(replica.name != name for replica in self.replicas):
            return Refuse(404, "NotFoundError", f"replica {name}, which kept this response, has left the fleet")
        who = f"replica {name}, which keeps this response, is not up" if name else "no replica is up"
        return Refuse(503, "ServiceUnavailable", f"{who}; try again shortly", retry_after_s=RETRY_AFTER_S)

    def _decide(
        self,
        request: RequestFacts,
        receipt: Receipt,
        rows: list[int],
        replicas: int,
        arrived_at_s: float,
        tried: set[int],
        now_s: float,
    ) -> Send:
        """replicas : that serve the request's model, those among them that may not be chosen now included"""
        view = self.view
        view.ready[:] = False
        view.ready[rows] = True
        view.now_s = now_s
        self.due(now_s)
        around = self.learning.surroundings(request, replicas, now_s)
        held = self._holdings.held(request.chain, now_s)
        estimates = self._estimator.estimate(request, held, view, around, now_s)
        policy = self._policy if request.generates else self._by_load
        choice = policy.choose(request, view, estimates)
        booking = self._book(request, choice, estimates, now_s)
        notes = Notes(estimates, choice, held, view, now_s)
        self._note(receipt, choice, estimates)
        self._note_chosen(notes.chosen, booking, now_s)
        if request.explain:
            receipt.candidates, receipt.chosen = notes.candidates()
        receipt.placed_s = now_s - arrived_at_s
        receipt.attempts += 1
        replica = self.replicas[choice.row]
        peer = estimates.peers[choice.row] if choice.path is Path.PEER and estimates.peers is not None else None
        promised, room = self._promise(choice, estimates, now_s)
        leaves = request.generates and bool(request.chain)
        return Send(
            request=request,
            row=choice.row,
            replica=replica.name,
            base_url=replica.base_url,
            path=choice.path,
            source=None if peer is None else self.replicas[int(peer)].name,
            attempt=receipt.attempts,
            explain=receipt.summary() if request.explain else None,
            placement=Placement(
                booking=booking,
                receipt=receipt,
                notes=notes,
                arrived_at_s=arrived_at_s,
                tried=tried,
                promised=promised,
                room=room,
                belief=belief_of(request, held, estimates, choice) if leaves else None,
                expected=self._holdings.expect(choice.row, request.chain, now_s) if leaves else None,
            ),
        )

    def _book(self, request: RequestFacts, choice: Choice, estimates: Estimates, now_s: float) -> Booking:
        reused = float(estimates.reused_tokens[COLUMN[choice.path], choice.row])
        new_tokens = max(1.0, request.prompt_tokens - reused)
        booking = self._ledger.place(
            request,
            choice,
            estimates,
            now_s,
            own_work_s=self._estimator.work_s(choice.row, new_tokens, reused, self.view),
            remaining_tokens=self.learning.remaining_tokens(request),
        )
        self.learning.placed(booking, choice, estimates, now_s)
        return booking

    def _promise(self, choice: Choice, estimates: Estimates, now_s: float) -> tuple[list[Promise], Hold | None]:
        """Put the fetch of `choice` on the links it crosses, from when it will start, and hold its room."""
        moved = self._estimator.fetched_bytes(estimates, choice.path, choice.row)
        starts_s = now_s
        if self.view.disciplines[choice.row].in_turn:
            starts_s += float(estimates.queue_s[choice.row])
        table, space = self._estimator.routes.table, self._estimator.space
        promised = [table.promise(stages, size, now_s=now_s, starts_s=starts_s) for stages, size in moved]
        if space is None or not promised:
            return promised, None
        until_s = max(promise.ends_at_s for promise in promised)
        return promised, space.hold(choice.row, sum(size for _, size in moved), until_s=until_s)

    def _note(self, receipt: Receipt, choice: Choice, estimates: Estimates) -> None:
        """The choice and what it rested on; candidates are written down when the request has ended."""
        receipt.candidates, receipt.chosen = [], None
        receipt.reason = choice.reason.value
        receipt.probability = choice.probability
        around = estimates.around
        receipt.expected_output_tokens = around.output_tokens
        receipt.arrival_rps = around.arrival_rps
        receipt.mean_compute_s = around.mean_compute_s

    def _note_chosen(self, chosen: Candidate, booking: Booking, now_s: float) -> None:
        """What is worked out for the chosen candidate alone."""
        row = booking.row
        chosen.first_token_p90_s, chosen.first_token_p99_s = booking.forecast.quantiles_s
        chosen.evidence = self.learning.evidence_of(booking, now_s)
        chosen.discipline = self.view.disciplines[row].value if chosen.fetched_tokens else None

    # What caches turn out to hold

    def _computed(self, placement: Placement, now_s: float) -> None:
        """Its prefill is over, so its blocks are there; where events come they say it too."""
        if placement.expected is not None and not placement.computed:
            placement.computed = True
            self._holdings.computed(placement.booking.row, placement.booking.request.chain, now_s)

    def _answered(self, placement: Placement, ended: Ended, now_s: float) -> None:
        """It was answered well: what that teaches."""
        self.learning.answered(placement.booking, ended, now_s)
        self._shown(placement, ended, now_s)

    def _shown(self, placement: Placement, ended: Ended, now_s: float) -> None:
        """It was answered well: what that shows of the directory."""
        self._computed(placement, now_s)
        booking, belief = placement.booking, placement.belief
        if belief is not None:
            in_parts = self.view.disciplines[booking.row].takes_parts
            tell(self._holdings, belief, booking, ended.cached_tokens, now_s, in_parts=in_parts)

    # Endings

    def _end_booking(self, placement: Placement, now_s: float) -> None:
        booking = placement.booking
        if placement.expected is not None:  # confirmed by now, if it ever is
            self._holdings.cancel(placement.expected)
        for promise in placement.promised:  # what has not crossed will not come any more
            self._estimator.routes.table.take_back(promise, now_s)
        self._give_back(placement)
        self.learning.ended(booking, now_s)
        self._ledger.release(booking, now_s)
        self._standing[booking.row].ended_at_s.append(now_s)

    def _give_back(self, placement: Placement) -> None:
        if placement.room is not None and self._estimator.space is not None:
            self._estimator.space.give_back(placement.room)

    def _close(self, placement: Placement, outcome: Outcome, now_s: float) -> None:
        self._end_booking(placement, now_s)
        self._write_candidates(placement)
        self._end_receipt(placement.receipt, outcome, placement.arrived_at_s, now_s)

    def _write_candidates(self, placement: Placement) -> None:
        receipt, notes = placement.receipt, placement.notes
        if receipt.candidates or notes is None:
            return
        if self._every_candidate:
            notes.complete(receipt, best=None)
        else:
            receipt.candidates, receipt.chosen = [notes.chosen], 0

    def _end_receipt(self, receipt: Receipt, outcome: Outcome, arrived_at_s: float, now_s: float) -> None:
        assert receipt.outcome is None, f"request {receipt.request_id} ended twice"
        receipt.outcome = outcome.value
        receipt.ended_s = now_s - arrived_at_s
        self._on_receipt(receipt)

    def _refuse(self, receipt: Receipt, refusal: Refuse, arrived_at_s: float, now_s: float) -> Refuse:
        receipt.status = refusal.status
        self._end_receipt(receipt, Outcome.REFUSED, arrived_at_s, now_s)
        return refusal

    def _unknown_model(self, model: str) -> Refuse:
        known = ", ".join(self.models) or "none at the moment"
        return Refuse(
            404, "NotFoundError", f"The model `{model}` does not exist here; served are: {known}.", param="model"
        )


def _placement(sent: Send) -> Placement:
    assert isinstance(sent.placement, Placement), "a Send made by this dispatcher"
    return sent.placement
