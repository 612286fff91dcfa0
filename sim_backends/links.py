"""One link in virtual time, shared fairly by the transfers on it.

Model     a transfer waits `start_s`, then all that have started share the rate equally (processor sharing).
          Kept exactly: the service each active transfer has had in bytes grows as rate / active, one number for
          all; a transfer ends when that number reaches what it was at its start plus its own bytes
Valid     any number of transfers; calls in order of time
Blind to  congestion control, packet loss, one flow's own limit below the link's rate
Source    egalitarian processor sharing; Harchol-Balter 2013, ch. 30
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import inf

Done = Callable[[float], None]


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer; `done(at_s)` is called once when its last byte has come, never after `cancel`."""

    size_bytes: float
    done: Done
    active: bool = False
    over: bool = False


class FairLink:
    """A link of `rate_bytes_per_s` > 0 and `start_s` >= 0 before the first byte of a transfer."""

    def __init__(self, *, rate_bytes_per_s: float, start_s: float = 0.0) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.start_s = start_s
        self.due_s = inf  # when `run_due` is wanted
        self._now_s = 0.0
        self._served_bytes = 0.0  # had by each transfer that was active all the time
        self._active = 0
        self._order = count()
        self._starting: list[tuple[float, int, Transfer]] = []  # by start time
        self._ending: list[tuple[float, int, Transfer]] = []  # by the value of _served_bytes at the end

    @property
    def active_transfers(self) -> int:
        """Transfers that share the rate now."""
        return self._active

    def start(self, size_bytes: float, now_s: float, done: Done, *, look_up: bool = True) -> Transfer:
        """Begin a transfer of `size_bytes` > 0 at `now_s`; `look_up` False skips `start_s`."""
        transfer = Transfer(size_bytes, done)
        delay_s = self.start_s if look_up else 0.0
        if delay_s > 0.0:
            heapq.heappush(self._starting, (now_s + delay_s, next(self._order), transfer))
        else:
            self._serve_until(now_s)
            self._activate(transfer)
        self._plan()
        return transfer

    def cancel(self, transfer: Transfer, now_s: float) -> None:
        """Take a transfer off the link; what it had is lost. Without effect when it is over."""
        if transfer.over:
            return
        transfer.over = True
        if transfer.active:
            self._serve_until(now_s)
            self._active -= 1
        self._plan()

    def run_due(self) -> None:
        """Handle the one thing due at `due_s`: an end before a start at the same time."""
        now_s = self.due_s
        if self._starting and self._starting[0][0] <= now_s and self._end_s() > now_s:
            self._serve_until(now_s)
            self._activate(heapq.heappop(self._starting)[2])
            self._plan()
            return
        served, _order, transfer = heapq.heappop(self._ending)
        self._now_s = now_s
        self._served_bytes = served  # not recomputed, so that rounding cannot leave a byte behind
        self._active -= 1
        transfer.over = True
        if self._active == 0:
            self._served_bytes = 0.0  # small numbers keep their last digits
        self._plan()
        transfer.done(now_s)

    def _activate(self, transfer: Transfer) -> None:
        transfer.active = True
        self._active += 1
        heapq.heappush(self._ending, (self._served_bytes + transfer.size_bytes, next(self._order), transfer))

    def _serve_until(self, now_s: float) -> None:
        if self._active and now_s > self._now_s:
            self._served_bytes += (now_s - self._now_s) * self.rate_bytes_per_s / self._active
        self._now_s = max(self._now_s, now_s)

    def _end_s(self) -> float:
        if not self._ending:
            return inf
        left_bytes = max(0.0, self._ending[0][0] - self._served_bytes)
        return self._now_s + left_bytes * self._active / self.rate_bytes_per_s

    def _plan(self) -> None:
        while self._starting and self._starting[0][2].over:
            heapq.heappop(self._starting)
        while self._ending and self._ending[0][2].over:
            heapq.heappop(self._ending)
        first_start_s = self._starting[0][0] if self._starting else inf
        self.due_s = min(first_start_s, self._end_s())
