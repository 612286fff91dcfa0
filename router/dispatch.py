"""The whole decision as plain code: events in with their time, actions out. Nothing here awaits or reads a clock.

Three shells can drive it: the gateway (wall clock), a replay (virtual clock), tests. Each `Send` is closed by exactly
one of `finished`, `failed` and `cancelled`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from estimators.arrivals import ArrivalRate
from estimators.calibration import PrefillCalibration, ScaleCalibration
from estimators.estimates import Estimates, Estimator, FleetContext, Held
from estimators.output_length import OutputLength
from estimators.paths import COLUMN, PATHS, Path
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Policy
from router.actions import Action, Cause, Ended, Outcome, Refuse, Send
from router.bookings import Booking, Ledger
from router.receipts import Candidate, Receipt

# A replica that refused a connection is left alone this long, unless its poll says it is back.
REST_AFTER_FAILURE_S = 1.0
RETRY_AFTER_S = 1
# A load report older than this says nothing about now: work of others is unknown again, not the old number.
STALE_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Replica:
    """What the dispatcher needs to address a replica. base_url : http(s)://host:port"""

    name: str
    base_url: str


class Holdings(Protocol):
    """The directory, as far as a decision reads it."""

    def held(self, chain: list[int]) -> Held: ...


@dataclass(slots=True, eq=False)
class Placement:
    """The dispatcher's record behind one `Send`."""

    booking: Booking
    receipt: Receipt
    arrived_at_s: float
    tried: set[int]


class Dispatcher:
    """Owns admission, choice and retry, the ledger and everything learned from outcomes.

    epoch_s : Unix time at now_s = 0, for receipts only
    on_receipt : called once for every request that ended, with its finished receipt
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
        on_receipt: Callable[[Receipt], None],
        max_attempts: int = 3,
        calibration_spread: float = 0.5,
        epoch_s: float = 0.0,
    ) -> None:
        self.view = view
        self.replicas = replicas
        self.up = [False] * view.rows
        self.policy_name = policy_name
        self._holdings = holdings
        self._estimator = estimator
        self._policy = policy
        self._on_receipt = on_receipt
        self._max_attempts = max_attempts
        self._epoch_s = epoch_s
        self._ledger = Ledger(view)
        self._resting_until_s = np.full(view.rows, -np.inf)
        self._prefill = [
            PrefillCalibration(view.coefficients[row], spread=calibration_spread) for row in range(view.rows)
        ]
        self._pace = [ScaleCalibration() for _ in range(view.rows)]
        self._arrivals = ArrivalRate()
        self._output = OutputLength()
        self._ended_at_s: list[deque[float]] = [deque(maxlen=256) for _ in range(view.rows)]

    # Requests

    def arrived(self, request: RequestFacts, now_s: float) -> list[Action]:
        """A whole request is here: place it or refuse it."""
        if request.generates:
            self._arrivals.arrived(now_s)
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
        serving = [row for row in range(self.view.rows) if self._serves(row, request.model)]
        if not serving and any(self.up):
            return [self._refuse(receipt, self._unknown_model(request.model), now_s, now_s)]
        return [self._place(request, receipt, now_s, set(), now_s)]

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        """The first token of `sent` was seen."""
        placement = _placement(sent)
        booking = placement.booking
        placement.receipt.first_token_s = now_s - placement.arrived_at_s
        took_s = self._ledger.first_token(booking, now_s)
        if took_s is not None and booking.request.prompt_exact:
            self._prefill[booking.row].observe(booking.features, booking.shared_s, took_s)
        return []

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Action]:
        """`sent` was answered completely, well or not."""
        placement = _placement(sent)
        if ended.stream_error or ended.status >= 500:
            outcome = Outcome.SERVER_ERROR
        elif ended.status >= 300:
            outcome = Outcome.CLIENT_ERROR
        else:
            outcome = Outcome.OK
            self._learn_decode(placement, ended, now_s)
        receipt = placement.receipt
        receipt.status = ended.status
        receipt.output_tokens = ended.output_tokens
        receipt.cached_tokens = ended.cached_tokens
        self._close(placement, outcome, now_s)
        return []

    def failed(self, sent: Send, cause: Cause, now_s: float) -> list[Action]:
        """`sent` came to nothing. Another `Send` is returned when nothing was relayed and somebody else can take it.

        An overloaded replica that nobody can stand in for keeps its own answer: an empty list, then `finished`.
        """
        placement = _placement(sent)
        receipt, row = placement.receipt, sent.row
        tried = placement.tried | {row}
        if cause in (Cause.CONNECT, Cause.NO_ANSWER):
            self._resting_until_s[row] = now_s + REST_AFTER_FAILURE_S
        may_retry = cause is not Cause.BROKEN and sent.attempt < self._max_attempts
        if may_retry and self._candidates(sent.request.model, tried, now_s):
            self._end_booking(placement, now_s)
            receipt.tried.append(sent.replica)
            return [self._place(sent.request, receipt, placement.arrived_at_s, tried, now_s)]
        if cause is Cause.OVERLOADED:
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

    # What replicas report

    def replica_up(self, row: int, models: frozenset[str]) -> None:
        """`row` answers its probes and serves `models` (empty: it did not say, so any)."""
        self.up[row] = True
        self.view.models[row] = models
        self._resting_until_s[row] = -np.inf

    def replica_down(self, row: int) -> None:
        """`row` does not answer its probes: not chosen until it does, running streams untouched."""
        self.up[row] = False
        self.load_reported(row, None, 0.0, 0.0)

    def load_reported(self, row: int, requests: float | None, sent_s: float, now_s: float) -> None:
        """`row` reported running plus waiting `requests` in answer to a poll sent at `sent_s`; None: it did not say.

        Ours are those booked now or ended since the poll went out, so nothing of ours is taken for foreign.
        """
        view = self.view
        if requests is None:
            view.reported_requests[row] = np.nan
            view.foreign_requests[row] = 0.0
            return
        ended_since = sum(1 for at_s in self._ended_at_s[row] if at_s >= sent_s)
        view.reported_requests[row] = requests
        view.foreign_requests[row] = max(0.0, requests - int(view.booked[row]) - ended_since)
        view.sampled_at_s[row] = now_s

    @property
    def models(self) -> list[str]:
        """Models served by at least one replica that is up, sorted."""
        return sorted({model for row, up in enumerate(self.up) if up for model in self.view.models[row]})

    @property
    def in_flight(self) -> int:
        """Requests placed and not yet ended."""
        return int(self.view.booked.sum())

    # Inside

    def _serves(self, row: int, model: str) -> bool:
        models = self.view.models[row]
        return self.up[row] and (not model or not models or model in models)

    def _candidates(self, model: str, tried: set[int], now_s: float) -> list[int]:
        return [
            row
            for row in range(self.view.rows)
            if row not in tried and self._serves(row, model) and self._resting_until_s[row] <= now_s
        ]

    def _place(
        self, request: RequestFacts, receipt: Receipt, arrived_at_s: float, tried: set[int], now_s: float
    ) -> Action:
        rows = self._candidates(request.model, tried, now_s)
        if not rows:
            refusal = Refuse(
                503, "ServiceUnavailable", "no replica is up; try again shortly", retry_after_s=RETRY_AFTER_S
            )
            return self._refuse(receipt, refusal, arrived_at_s, now_s)
        view = self.view
        view.ready[:] = False
        view.ready[rows] = True
        self._ledger.settle(now_s)
        view.foreign_requests[now_s - view.sampled_at_s > STALE_AFTER_S] = 0.0
        held = self._holdings.held(request.chain)
        context = FleetContext(
            arrival_rps=self._arrivals.rate_rps,
            mean_compute_s=self._arrivals.mean_work_s,
            output_tokens=max(1.0, self._output.expected(request.max_tokens)),
        )
        estimates = self._estimator.estimate(request, held, view, context, now_s)
        choice = self._policy.choose(request, view, estimates)
        self._note(receipt, choice, estimates, now_s)
        booking = self._ledger.place(request, choice.row, choice.path, estimates, now_s)
        self._promise(choice, estimates, now_s)
        if request.generates:
            self._arrivals.placed(booking.compute_s)
        receipt.attempts += 1
        replica = self.replicas[choice.row]
        return Send(
            request=request,
            row=choice.row,
            replica=replica.name,
            base_url=replica.base_url,
            attempt=receipt.attempts,
            explain=receipt.summary() if request.explain else None,
            booking=Placement(booking, receipt, arrived_at_s, tried),
        )

    def _promise(self, choice: Choice, estimates: Estimates, now_s: float) -> None:
        if choice.path is not Path.REMOTE:
            return
        row = choice.row
        fetched = estimates.reused_tokens[row, COLUMN[Path.REMOTE]] - estimates.reused_tokens[row, COLUMN[Path.LOCAL]]
        for link in self._estimator.stages[row]:
            link.promise(self._estimator.fetch_bytes(float(fetched)), now_s)

    def _note(self, receipt: Receipt, choice: Choice, estimates: Estimates, now_s: float) -> None:
        """Write every possible candidate and the choice into the receipt."""
        candidates: list[Candidate] = []
        local_column = COLUMN[Path.LOCAL]
        for row, column in np.argwhere(estimates.possible).tolist():
            path = PATHS[column]
            local = 0 if path is Path.RECOMPUTE else int(estimates.reused_tokens[row, local_column])
            age_s = now_s - float(self.view.sampled_at_s[row])
            if (row, path) == (choice.row, choice.path):
                receipt.chosen = len(candidates)
            candidates.append(
                Candidate(
                    replica=self.view.names[row],
                    path=path.value,
                    queue_s=float(estimates.queue_s[row]),
                    fetch_s=float(estimates.fetch_s[row, column]),
                    compute_s=float(estimates.compute_s[row, column]),
                    first_token_s=float(estimates.first_token_s[row, column]),
                    local_tokens=local,
                    fetched_tokens=int(estimates.reused_tokens[row, column]) - local,
                    pace_s=float(estimates.pace_s[row]),
                    price_s=float(estimates.queue_price_s[row, column] + estimates.decode_price_s[row, column]),
                    signal_age_s=None if np.isnan(age_s) else age_s,
                )
            )
        receipt.candidates = candidates
        receipt.reason = choice.reason.value
        receipt.probability = choice.probability

    def _learn_decode(self, placement: Placement, ended: Ended, now_s: float) -> None:
        booking, tokens = placement.booking, ended.output_tokens
        if tokens is None or not booking.request.generates:
            return
        self._output.observe(tokens)
        if tokens < 2 or np.isnan(booking.first_token_at_s):
            return
        row, view = booking.row, self.view
        ideal_s = view.weights_s[row] + view.decode_context_tokens[row] * view.context_s_per_token[row]
        observed_s = (now_s - booking.first_token_at_s) / (tokens - 1)
        if observed_s > 0:
            view.pace_scale[row] = self._pace[row].observe(float(observed_s / ideal_s))

    def _end_booking(self, placement: Placement, now_s: float) -> None:
        self._ledger.release(placement.booking, now_s)
        self._ended_at_s[placement.booking.row].append(now_s)

    def _close(self, placement: Placement, outcome: Outcome, now_s: float) -> None:
        self._end_booking(placement, now_s)
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

    def _unknown_model(self, model: str) -> Refuse:
        known = ", ".join(self.models) or "none yet"
        return Refuse(
            404, "NotFoundError", f"The model `{model}` does not exist here; served are: {known}.", param="model"
        )


def _placement(sent: Send) -> Placement:
    assert isinstance(sent.booking, Placement), "a Send made by this dispatcher"
    return sent.booking
