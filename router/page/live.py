"""What the page remembers of requests: some decisions whole, thousands as lines of numbers, all as counts.

Model     of each second the first few decisions are kept with what they noted, from the moment of the choice, and as
          many of those that ended and are worth a look: failed, late, overridden or asked about. A line of numbers is
          kept of every request that was placed and ended, and counts by path in steps of time. All of it is bounded,
          and kept whether or not somebody watches: who opens the page because something went wrong wants to see what
          went before. `changes` counts what happened, so that each watcher is told what it has not seen
Valid     one thread, the loop's. What a decision noted does not change, so any thread may work it out
Blind to  requests that wait in the router, until they are placed
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

import msgspec

from router.actions import Send
from router.placing import Placement
from router.receipts import Candidate, Receipt
from router.receipts.writer import Detail, is_notable, was_late

PER_SECOND = 4  # kept whole of each second, and as many again that are worth a look
KEPT = 160  # whole decisions of either kind: some MB with 64 replicas
OPEN = 80  # of those under way
LINES = 4000
STEP_S = 10
STEPS = 90  # a quarter of an hour


@dataclass(slots=True, eq=False)
class Decision:
    """One request that was placed, or refused.

    number : in order of being kept, from 1; stays the same
    changed : `Live.changes` at its last change
    choice : as it is now, or was when the request ended; None: placed without estimates, or not at all
    """

    number: int
    changed: int
    receipt: Receipt
    choice: Candidate | None
    detail: Detail | None
    answers: bool = False  # its first token came
    late: bool | None = None
    notable: bool = False

    def whole(self) -> Receipt:
        """Its receipt with every candidate; a copy, since another thread may be at the receipt itself."""
        receipt = msgspec.structs.replace(self.receipt, late=self.late)
        receipt.candidates, receipt.chosen = ([], None) if self.choice is None else ([self.choice], 0)
        if self.detail is not None:
            self.detail.complete(receipt, best=None)
        return receipt


class Line(NamedTuple):
    """One request that was placed, as numbers. Seconds; what nobody saw is None.

    expected_s to waited_s count from the choice, first_token_s and ended_s from the request's arrival
    """

    change: int  # `Live.changes` when it ended
    arm: str  # "" outside an experiment
    policy: str
    path: str
    outcome: str
    expected_s: float | None
    p90_s: float | None
    p99_s: float | None
    waited_s: float | None
    first_token_s: float | None
    ended_s: float | None
    late: bool | None


@dataclass(slots=True)
class Step:
    """Requests that ended in one step of time, by path. start : Unix time, a multiple of `STEP_S`"""

    start: int
    paths: dict[str, int] = field(default_factory=dict)


class Live:
    """Takes every placement and every end of a request."""

    def __init__(self) -> None:
        self.changes = 0
        self.lines: deque[Line] = deque(maxlen=LINES)
        self.steps: deque[Step] = deque(maxlen=STEPS)
        self._open: dict[int, Decision] = {}  # under way, by the identity of their receipts
        self._usual: deque[Decision] = deque(maxlen=KEPT)
        self._notable: deque[Decision] = deque(maxlen=KEPT)
        self._numbers = count(1)
        self._second = 0
        self._taken = [0, 0]  # in this second: usual ones, notable ones

    def placed(self, sent: Send) -> None:
        """A request was sent to a replica, for the first time or once more."""
        placement = sent.placement
        if not isinstance(placement, Placement):
            return
        receipt, notes = placement.receipt, placement.notes
        one = self._open.get(id(receipt))
        if one is None:
            at = receipt.arrived_at + (receipt.placed_s or 0.0)
            if len(self._open) >= OPEN or not self._has_room(int(at), notable=False):
                return
            one = self._open[id(receipt)] = Decision(next(self._numbers), 0, receipt, None, None)
        one.choice, one.detail = (None, None) if notes is None else (notes.chosen, notes)
        one.changed = self._changed()

    def ended(self, receipt: Receipt, detail: Detail | None) -> None:
        """A request ended; detail : what its last decision noted, if it made one by estimates."""
        change = self._changed()
        one = self._open.pop(id(receipt), None)
        if receipt.reason is None and receipt.outcome == "client_error":
            return  # nothing was decided
        at = receipt.arrived_at + (receipt.ended_s or 0.0)
        choice, late = receipt.choice, was_late(receipt)
        self._count(at, "refused" if receipt.reason is None else receipt.path or "unknown")
        if receipt.reason is not None and not receipt.override:
            self.lines.append(_line(change, receipt, choice, late))
        notable = late is True or is_notable(receipt)
        if one is None:
            if not self._has_room(int(at), notable):
                return
            one = Decision(next(self._numbers), change, receipt, choice, detail)
        one.changed, one.choice, one.detail, one.late, one.notable = change, choice, detail, late, notable
        (self._notable if notable else self._usual).append(one)

    def look(self) -> None:
        """Notice which of those under way have got their first token, before somebody is told."""
        for one in self._open.values():
            if not one.answers and one.receipt.first_token_s is not None:
                one.answers, one.changed = True, self._changed()

    def decisions(self, *, after: int = 0, most: int = KEPT) -> list[Decision]:
        """Those kept whole that changed after that change, in order; of those that ended, the last `most` of a kind."""
        kept = chain(self._open.values(), list(self._usual)[-most:], list(self._notable)[-most:])
        return sorted((one for one in kept if one.changed > after), key=lambda one: one.number)

    def find(self, number: int) -> Decision | None:
        """One by its number; None when it is not kept."""
        kept = chain(self._open.values(), self._usual, self._notable)
        return next((one for one in kept if one.number == number), None)

    def lines_after(self, change: int) -> list[Line]:
        """Lines of requests that ended after that change, in order."""
        found: list[Line] = []
        for line in reversed(self.lines):
            if line.change <= change:
                break
            found.append(line)
        return found[::-1]

    def _changed(self) -> int:
        self.changes += 1
        return self.changes

    def _count(self, at: float, path: str) -> None:
        start = int(at) // STEP_S * STEP_S
        if not self.steps or self.steps[-1].start < start:
            self.steps.append(Step(start))
        paths = self.steps[-1].paths
        paths[path] = paths.get(path, 0) + 1

    def _has_room(self, second: int, notable: bool) -> bool:
        """Whether one more of this second is kept: else a busy second would push out all before it."""
        if second != self._second:
            self._second, self._taken = second, [0, 0]
        self._taken[notable] += 1
        return self._taken[notable] <= PER_SECOND


def _line(change: int, receipt: Receipt, choice: Candidate | None, late: bool | None) -> Line:
    return Line(
        change,
        receipt.arm or "",
        receipt.policy,
        receipt.path or "unknown",
        receipt.outcome or "",
        None if choice is None else choice.expected_s,
        None if choice is None else choice.first_token_p90_s,
        None if choice is None else choice.first_token_p99_s,
        receipt.waited_s,
        receipt.first_token_s,
        receipt.ended_s,
        late,
    )
