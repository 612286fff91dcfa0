"""One placement: what is expected of a request everywhere, which candidate is taken, and all that is booked for it.

Model     estimates of every replica that may be chosen, one choice by the policy, then a booking, a fetch promised on
          the links it crosses, and blocks expected where it computes them. Each placement is ended once, by `end`,
          which takes back whatever did not come to pass
Valid     rows that are up and may be chosen; times of one clock, in order
Blind to  who waits, which replicas are healthy, what the client is told: the dispatcher's part
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan

from estimators import prefetch
from estimators.cost import SECONDS_PER_HOUR
from estimators.estimates import Estimates, Estimator
from estimators.links import Promise
from estimators.paths import Path
from estimators.request import RequestFacts
from estimators.routes import Held
from estimators.view import FleetView
from policies.base import Choice, Policy
from router.actions import Ended, Send
from router.beliefs import Belief, belief_of, tell
from router.bookings import Booking, Ledger
from router.busy_time import BusyTime
from router.experiments import Experiments
from router.holdings import Holdings
from router.laps import Laps, Phase
from router.learning import Learning
from router.notes import Notes, note_choice, note_chosen
from router.receipts import Receipt


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
    tried: frozenset[int]
    promised: list[Promise]  # what its fetch has yet to bring over which links
    room: prefetch.Hold | None  # for it, where a replica has little
    belief: Belief | None  # what it counts on finding
    expected: int | None  # number under which its blocks are expected; None: it leaves none
    began_s: float  # as `BusyTime` counts the replica's time
    computed: bool = False  # its prefill is over
    trial: bool = False  # it decides whether its replica works again


@dataclass(slots=True)  # not frozen: made for every decision
class Expected:
    """What one request would find now; not to be changed.

    held : of its prompt; estimates : on each replica that may be chosen
    """

    held: Held
    estimates: Estimates

    @property
    def work_s(self) -> float:
        """Its prefill where that is shortest."""
        return float(self.estimates.compute_s[self.estimates.possible].min())

    @property
    def first_token_s(self) -> float:
        """Its first token where that is soonest."""
        return float(self.estimates.expected_s[self.estimates.possible].min())


class Placer:
    """Owner of choices and of everything booked for them.

    policy : decides where a generation runs; by_load : where everything else goes
    experiments : other rules that decide instead, or beside; None: no others
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
        by_load: Policy,
        learning: Learning,
        ledger: Ledger,
        experiments: Experiments | None = None,
        laps: Laps | None = None,
    ) -> None:
        self._replicas = replicas
        self._view = view
        self._holdings = holdings
        self._estimator = estimator
        self._policy = policy
        self._by_load = by_load
        self._learning = learning
        self._ledger = ledger
        self._experiments = experiments
        self._laps = laps or Laps()
        self._busy = BusyTime(view.rows)

    def noticed(self, request: RequestFacts, now_s: float) -> None:
        """Traffic is learned of generations, wherever they will run."""
        if request.generates:
            self._learning.arrived(request, now_s)

    def expected(self, request: RequestFacts, rows: list[int], replicas: int, now_s: float) -> Expected:
        """What is expected of `request` on `rows`. replicas : that serve its model, `rows` among them"""
        view = self._view
        view.ready[:] = False
        view.ready[rows] = True
        view.now_s = now_s
        laps = self._laps
        laps.begin()
        held = self._holdings.held(request.chain, now_s)
        laps.end(Phase.MATCH)
        around = self._learning.surroundings(request, replicas, now_s)
        expected = Expected(held, self._estimator.estimate(request, held, view, around, now_s))
        laps.end(Phase.ESTIMATE)
        return expected

    def narrowed(self, expected: Expected, rows: list[int]) -> Expected:
        """The same with only `rows` to choose from."""
        ready = self._view.ready
        ready[:] = False
        ready[rows] = True
        estimates = expected.estimates
        return Expected(expected.held, estimates.narrowed(ready))

    def choose(self, request: RequestFacts, expected: Expected) -> Choice:
        """What the policy takes; `expected` was asked for, or narrowed, at this very moment."""
        policy = self._policy if request.generates else self._by_load
        if self._experiments is not None and self._experiments.active and request.generates:
            policy = self._experiments.rule(request)
        self._laps.begin()
        choice = policy.choose(request, self._view, expected.estimates)
        self._laps.end(Phase.CHOOSE)
        return choice

    def place(
        self,
        request: RequestFacts,
        expected: Expected,
        choice: Choice,
        receipt: Receipt,
        *,
        arrived_at_s: float,
        tried: frozenset[int],
        now_s: float,
    ) -> Send:
        """Book and promise what was chosen of what is `expected` at this very moment."""
        self._laps.begin()
        held, estimates = expected.held, expected.estimates
        booking = self._book(request, choice, estimates, now_s)
        notes = Notes(estimates, choice, held, self._view, now_s)
        note_choice(receipt, choice, estimates)
        note_chosen(notes.chosen, booking, self._view, self._learning, now_s)
        if self._experiments is not None and self._experiments.active and request.generates:
            self._experiments.decided(receipt, request)
            receipt.shadows = self._experiments.shadows(request, self._view, estimates)
        if request.explain:
            receipt.candidates, receipt.chosen = notes.candidates()
        receipt.placed_s = now_s - arrived_at_s
        receipt.attempts += 1
        replica = self._replicas[choice.row]
        promised, room, receipt.fetched_bytes = self._promise(choice, estimates, now_s)
        leaves = request.generates and bool(request.chain)
        send = Send(
            request=request,
            row=choice.row,
            replica=replica.name,
            base_url=replica.base_url,
            path=choice.path,
            source=self.source_of(choice, estimates),
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
                began_s=self._busy.begins(choice.row, now_s),
            ),
        )
        self._laps.end(Phase.BOOK)
        return send

    def source_of(self, choice: Choice, estimates: Estimates) -> str | None:
        """Name of the replica that `choice` reads from; None where it reads from none."""
        if choice.path is not Path.PEER or estimates.peers is None:
            return None
        return self._replicas[int(estimates.peers[choice.row])].name

    def first_token(self, placement: Placement, now_s: float) -> None:
        """Its first token was seen: its prefill and its fetch are over."""
        self._learning.first_token(placement.booking, now_s)
        self._computed(placement, now_s)
        for promise in placement.promised:
            self._estimator.routes.table.arrived(promise, now_s)
        self._give_back(placement)
        self._ledger.first_token(placement.booking, now_s)

    def answered(self, placement: Placement, ended: Ended, now_s: float) -> None:
        """It was answered well: what that teaches, and shows of the directory."""
        self._learning.answered(placement.booking, ended, now_s)
        self._computed(placement, now_s)
        booking, belief = placement.booking, placement.belief
        if belief is not None:
            in_parts = self._view.disciplines[booking.row].takes_parts
            tell(self._holdings, belief, booking, ended.cached_tokens, now_s, in_parts=in_parts)

    def end(self, placement: Placement, now_s: float) -> None:
        """It is over, whatever the way."""
        booking = placement.booking
        if placement.expected is not None:  # confirmed by now, if it ever is
            self._holdings.cancel(placement.expected)
        for promise in placement.promised:  # what has not crossed will not come any more
            self._estimator.routes.table.take_back(promise, now_s)
        self._give_back(placement)
        self._learning.ended(booking, now_s)
        self._ledger.release(booking, now_s)
        self._charge(placement, now_s)

    def _charge(self, placement: Placement, now_s: float) -> None:
        """Add what it cost to its receipt, where every replica it was at has a price."""
        row, receipt = placement.booking.row, placement.receipt
        took_s = self._busy.ends(row, placement.began_s, now_s)
        usd = took_s * self._view.usd_per_hour.item(row) / SECONDS_PER_HOUR
        if receipt.attempts > 1:
            usd += nan if receipt.usd is None else receipt.usd
        receipt.usd = None if isnan(usd) else usd

    def _computed(self, placement: Placement, now_s: float) -> None:
        """Its prefill is over, so its blocks are there; where events come they say it too."""
        if placement.expected is not None and not placement.computed:
            placement.computed = True
            request = placement.booking.request
            self._holdings.computed(placement.booking.row, request.chain, now_s, block_tokens=request.block_tokens)

    def _give_back(self, placement: Placement) -> None:
        if placement.room is not None and self._estimator.space is not None:
            self._estimator.space.give_back(placement.room)

    def _book(self, request: RequestFacts, choice: Choice, estimates: Estimates, now_s: float) -> Booking:
        reused = estimates.one(choice.path, choice.row).reused_tokens
        new_tokens = max(1.0, request.prompt_tokens - reused)
        booking = self._ledger.place(
            request,
            choice,
            estimates,
            now_s,
            own_work_s=self._estimator.work_s(choice.row, new_tokens, reused, self._view),
            remaining_tokens=self._learning.remaining_tokens(request),
        )
        self._learning.placed(booking, choice, estimates, now_s)
        return booking

    def _promise(
        self, choice: Choice, estimates: Estimates, now_s: float
    ) -> tuple[list[Promise], prefetch.Hold | None, float]:
        """Put the fetch of `choice` on the links it crosses, from when it will start, hold its room; its bytes."""
        moved = self._estimator.fetched_bytes(estimates, choice.path, choice.row)
        starts_s = now_s
        if self._view.disciplines[choice.row].in_turn:
            starts_s += estimates.one(choice.path, choice.row).queue_s
        table, space = self._estimator.routes.table, self._estimator.space
        promised = [table.promise(stages, size, now_s=now_s, starts_s=starts_s) for stages, size in moved]
        moved_bytes = sum(size for _, size in moved)
        if space is None or not promised:
            return promised, None, moved_bytes
        until_s = max(promise.ends_at_s for promise in promised)
        return promised, space.hold(choice.row, moved_bytes, until_s=until_s), moved_bytes
