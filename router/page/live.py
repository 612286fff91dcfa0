"""What the page remembers of requests that ended: some decisions whole, thousands as lines of numbers, all as counts.

Model     of each second the first few decisions are kept with what they noted, and as many of those that are worth a
          look: failed, late, overridden or asked about. A line of numbers is kept of every request that was placed by
          estimates, and counts by path in steps of time. Everything is bounded, so it is kept whether or not somebody
          watches: who opens the page because something went wrong wants to see what went before
Valid     one thread, the loop's. What a decision noted does not change, so any thread may work it out
Blind to  requests under way: they are in the fleet's bookings
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec

from router.receipts import Candidate, Receipt
from router.receipts.writer import Detail, is_notable, was_late

PER_SECOND = 4  # kept whole of each second, and as many again that are worth a look
KEPT = 160  # whole decisions: some 3 MB with 64 replicas
LINES = 4000
STEP_S = 10
STEPS = 90  # a quarter of an hour


@dataclass(frozen=True, slots=True)
class Decision:
    """One that ended. number : in order of ending, from 1; choice : as it was when the request ended"""

    number: int
    receipt: Receipt
    choice: Candidate | None
    detail: Detail | None
    late: bool | None
    notable: bool

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

    number: int
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
    """Takes every request that ended. Reading it changes nothing."""

    def __init__(self) -> None:
        self.ended_total = 0
        self.lines: deque[Line] = deque(maxlen=LINES)
        self.steps: deque[Step] = deque(maxlen=STEPS)
        self._usual: deque[Decision] = deque(maxlen=KEPT)
        self._notable: deque[Decision] = deque(maxlen=KEPT)
        self._second = 0
        self._taken = [0, 0]  # in this second: usual ones, notable ones

    def ended(self, receipt: Receipt, detail: Detail | None) -> None:
        """A request ended; detail : what its last decision noted, if it made one by estimates."""
        self.ended_total += 1
        if receipt.reason is None and receipt.outcome == "client_error":
            return  # nothing was decided
        at = receipt.arrived_at + (receipt.ended_s or 0.0)
        choice, late = receipt.choice, was_late(receipt)
        self._count(at, "refused" if receipt.reason is None else "unknown" if choice is None else choice.path)
        if receipt.reason is not None and not receipt.override:
            self.lines.append(_line(self.ended_total, receipt, choice, late))
        notable = late is True or is_notable(receipt)
        if self._has_room(int(at), notable):
            kept = self._notable if notable else self._usual
            kept.append(Decision(self.ended_total, receipt, choice, detail, late, notable))

    def decisions(self, *, after: int = 0, most: int = KEPT) -> list[Decision]:
        """Those kept whole that ended after the one of that number, in order; the last `most` of either kind."""
        found = [one for kept in (self._usual, self._notable) for one in list(kept)[-most:] if one.number > after]
        return sorted(found, key=lambda one: one.number)

    def find(self, number: int) -> Decision | None:
        """One by its number; None when it is not kept."""
        return next((one for one in chain(self._usual, self._notable) if one.number == number), None)

    def lines_after(self, number: int) -> list[Line]:
        """Lines of requests that ended after the one of that number, in order."""
        found: list[Line] = []
        for line in reversed(self.lines):
            if line.number <= number:
                break
            found.append(line)
        return found[::-1]

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


def _line(number: int, receipt: Receipt, choice: Candidate | None, late: bool | None) -> Line:
    return Line(
        number,
        receipt.arm or "",
        receipt.policy,
        "unknown" if choice is None else choice.path,
        receipt.outcome or "",
        None if choice is None else choice.expected_s,
        None if choice is None else choice.first_token_p90_s,
        None if choice is None else choice.first_token_p99_s,
        receipt.waited_s,
        receipt.first_token_s,
        receipt.ended_s,
        late,
    )
