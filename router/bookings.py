"""What the router has given each replica and not yet seen finished.

Each booking is waiting (prefill not known to be over) or decoding. Waiting ones are kept in the order they were
placed, which is the order an engine serves them in; the first is the one in service. The ledger keeps the fleet
view's columns in step with every change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan, nan

import numpy as np

from estimators.estimates import Estimates
from estimators.hit_probability import TIER_ROW
from estimators.output_length import Kind
from estimators.paths import Path
from estimators.request import RequestFacts
from estimators.tiers import Tier
from estimators.view import FleetView
from policies.base import Choice
from policies.watcher import Watcher


@dataclass(slots=True)  # not frozen: checked assignments cost as much as all the numbers
class Forecast:
    """What was expected of one choice, to be compared with what came; not to be changed. Seconds from the choice.

    first_token_s : if all believed blocks are there; recompute_s : if none is
    hit_probability : that all are
    raw_quantiles_s, quantiles_s : at `estimates.LEVELS`, before and after the conformal correction
    queue_s, fetch_s : Q, and F, zero where nothing is fetched
    local_tokens : reusable from the replica's HBM
    host_tokens, disk_tokens : the same with its host memory, and with its disk too; as many without such tiers
    age_s : how long ago each tier's blocks were last heard of, in the order of `hit_probability.TIERS`; NaN unknown
    """

    first_token_s: float
    recompute_s: float
    hit_probability: float
    raw_quantiles_s: list[float]
    quantiles_s: list[float]
    queue_s: float
    fetch_s: float
    local_tokens: float
    host_tokens: float
    disk_tokens: float
    age_s: list[float]

    def age_of(self, tier: Tier) -> float:
        """Age of what `tier` was to give."""
        return self.age_s[TIER_ROW[tier]]

    @classmethod
    def of(cls, estimates: Estimates, choice: Choice) -> Forecast:
        """The forecast of `choice`."""
        one = estimates.one(choice.path, choice.row)
        raw, issued = estimates.quantiles_of(one)
        return cls(
            first_token_s=one.first_token_s,
            recompute_s=one.recompute_s,
            hit_probability=one.hit_probability,
            raw_quantiles_s=raw,
            quantiles_s=issued,
            queue_s=one.queue_s,
            fetch_s=one.fetch_s,
            local_tokens=one.local_tokens,
            host_tokens=one.host_tokens,
            disk_tokens=one.disk_tokens,
            age_s=one.age_s,
        )


@dataclass(slots=True, eq=False)
class Booking:
    """One request on one replica. Times are absolute, on the dispatcher's clock, and NaN until known.

    compute_s : expected length of its service
    linear_s, attention_s : its own work at the roofline, output head included
    held_s : how long it holds the GPU beyond that work, because its fetch does
    path, forecast : as chosen, and what was expected of it
    read_tokens : what one of its decode steps reads of its context, on average over its life
    remaining_tokens : output it has yet to produce at a random moment of its decode, expected
    new_tokens, reused_tokens : prompt tokens expected to be computed, and not
    ready_at_s : earliest start its fetch allows
    starts_at_s : when its prefill should start, known once it is the first waiting
    kind : what its answer's length is learned by, once that is known
    """

    request: RequestFacts
    row: int
    placed_at_s: float
    ready_at_s: float
    compute_s: float
    linear_s: float
    attention_s: float
    held_s: float
    path: Path
    forecast: Forecast
    remaining_tokens: float
    read_tokens: float
    new_tokens: float
    reused_tokens: float
    output_tokens: float
    starts_at_s: float = nan
    first_token_at_s: float = nan
    kind: Kind | None = None
    decoding: bool = False
    released: bool = False

    @property
    def mean_context_tokens(self) -> float:
        """Context of the decode, averaged over its life: the prompt and half of the expected output."""
        return self.request.prompt_tokens + self.output_tokens / 2


class Ledger:
    """Bookings of a whole fleet. Every `place` is ended by one `release`.

    read_tokens : what a decode step reads of a context, in tokens; see `ShapeCosts`
    watcher : a rule that wants to be told of every booking, after the view has it; None: none does
    """

    def __init__(
        self, view: FleetView, read_tokens: Callable[[float], float] = float, watcher: Watcher | None = None
    ) -> None:
        self._view = view
        self._watcher = watcher
        self._read_tokens = read_tokens
        # Ordered dictionaries: the first of a plain one takes ever longer to find when firsts are deleted.
        self._waiting: list[OrderedDict[Booking, None]] = [OrderedDict() for _ in range(view.rows)]
        self._silent = 0  # of those, not streamed: only they end unseen
        self._soonest_s = inf  # no prefill in service ends before

    def place(
        self,
        request: RequestFacts,
        choice: Choice,
        estimates: Estimates,
        now_s: float,
        *,
        own_work_s: tuple[float, float],
        remaining_tokens: float,
    ) -> Booking:
        """Book `request` as `choice` says and as estimated; own_work_s : (linear, attention), output head excluded."""
        row = choice.row
        one = estimates.one(choice.path, row)
        reused, compute_s = one.reused_tokens, one.compute_s
        linear_s, attention_s = own_work_s
        booking = Booking(
            request=request,
            row=row,
            placed_at_s=now_s,
            ready_at_s=now_s + one.ready_s,
            compute_s=compute_s,
            linear_s=linear_s + self._view.head_s.item(row),
            attention_s=attention_s,
            held_s=max(0.0, compute_s - one.prefill_s),
            path=choice.path,
            forecast=Forecast.of(estimates, choice),
            remaining_tokens=remaining_tokens,
            read_tokens=float(self._read_tokens(request.prompt_tokens + estimates.output_tokens / 2)),
            new_tokens=max(1.0, request.prompt_tokens - reused),
            reused_tokens=reused,
            output_tokens=estimates.output_tokens,
        )
        self._view.booked[row] += 1
        if request.generates:
            self._view.prefill_tokens[row] += booking.new_tokens
            waiting = self._waiting[row]
            waiting[booking] = None
            self._silent += not request.streams
            if len(waiting) == 1:
                self._serve(booking, now_s)
            else:
                self._add_behind(booking, +1)
        if self._watcher is not None:
            self._view.now_s = now_s
            self._watcher.placed(booking, self._view, estimates)
        return booking

    def prefills(self, row: int) -> int:
        """Requests on `row` whose prefill is not known to be over."""
        return len(self._waiting[row])

    def first_token(self, booking: Booking, now_s: float) -> None:
        """Its first token came at `now_s`: the prefill is over and it decodes."""
        booking.first_token_at_s = now_s
        if booking.request.generates and not booking.decoding and not booking.released:
            self._end_prefill(booking, now_s)
        if self._watcher is not None and not booking.released:
            self._view.now_s = now_s
            self._watcher.first_token(booking, self._view)

    def release(self, booking: Booking, now_s: float) -> None:
        """It ended, whatever the way. Idempotent, so that no path can release twice."""
        if booking.released:
            return
        booking.released = True
        view, row = self._view, booking.row
        view.booked[row] -= 1
        if booking.decoding:
            view.decode_batch[row] -= 1
            view.decode_context_tokens[row] -= booking.mean_context_tokens
            view.decode_read_tokens[row] -= booking.read_tokens
            view.remaining_tokens[row] -= booking.remaining_tokens
        elif booking.request.generates:
            self._leave_queue(booking, now_s)
        if self._watcher is not None:
            view.now_s = now_s
            self._watcher.ended(booking, view)

    def settle(self, now_s: float) -> None:
        """Let time pass: a request that is not streamed shows no first token, so its prefill ends as expected."""
        if not self._silent or now_s < self._soonest_s:
            return
        self._soonest_s = inf
        ends_s = self._view.head_ends_s
        for row in (ends_s <= now_s).nonzero()[0].tolist():
            while (head := next(iter(self._waiting[row]), None)) is not None:
                ended_s = ends_s.item(row)
                if head.request.streams or ended_s > now_s:
                    break
                self._end_prefill(head, ended_s)
        later_s = ends_s[ends_s > now_s]
        self._soonest_s = later_s.min().item() if len(later_s) else inf

    def next_settled_s(self) -> float | None:
        """When `settle` has something to do; None while nothing but streams is in service."""
        if not self._silent:
            return None
        ends_s = [
            float(self._view.head_ends_s[row])
            for row, waiting in enumerate(self._waiting)
            if (head := next(iter(waiting), None)) is not None and not head.request.streams
        ]
        return min(ends_s, default=None)

    def _serve(self, booking: Booking, from_s: float) -> None:
        booking.starts_at_s = max(from_s, booking.ready_at_s)
        ends_s = booking.starts_at_s + booking.compute_s
        self._soonest_s = min(self._soonest_s, ends_s)
        self._view.head_ends_s[booking.row] = ends_s
        self._view.head_compute_s[booking.row] = booking.compute_s
        self._view.head_tokens[booking.row] = booking.request.prompt_tokens

    def _end_prefill(self, booking: Booking, now_s: float) -> None:
        self._leave_queue(booking, now_s)
        booking.decoding = True
        self._view.decode_batch[booking.row] += 1
        self._view.decode_context_tokens[booking.row] += booking.mean_context_tokens
        self._view.decode_read_tokens[booking.row] += booking.read_tokens
        self._view.remaining_tokens[booking.row] += booking.remaining_tokens

    def _leave_queue(self, booking: Booking, now_s: float) -> None:
        row = booking.row
        waiting = self._waiting[row]
        was_head = not isnan(booking.starts_at_s)
        del waiting[booking]
        left = self._view.prefill_tokens.item(row) - booking.new_tokens
        self._view.prefill_tokens[row] = left if waiting else 0.0  # clears what rounding left
        self._silent -= not booking.request.streams
        if not was_head:
            self._add_behind(booking, -1)
            return
        head = next(iter(waiting), None)
        if head is None:
            self._view.head_ends_s[row] = -np.inf
            self._view.head_compute_s[row] = 0.0
            self._view.head_tokens[row] = 0.0
        else:
            self._add_behind(head, -1)
            self._serve(head, now_s)

    def _add_behind(self, booking: Booking, sign: int) -> None:
        """Add or take off one booking's part of the work behind the one in service."""
        view, row = self._view, booking.row
        behind = len(self._waiting[row]) - 1
        if behind <= 0:  # nothing is left; also clears what rounding left
            view.waiting[:, row] = 0.0
            return
        view.waiting_linear_s[row] += sign * booking.linear_s
        view.waiting_attention_s[row] += sign * booking.attention_s
        view.waiting_tokens[row] += sign * booking.new_tokens
        view.waiting_held_s[row] += sign * booking.held_s
        view.waiting_context_tokens[row] += sign * booking.request.prompt_tokens
