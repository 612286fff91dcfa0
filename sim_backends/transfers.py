"""Bytes on their way over several links in series, in parts.

Model     a part passes the links of its route one after the other, stored and forwarded; when it leaves the first
          link the next part enters it. The look-up of a link (its fixed start) is paid by the first part
Valid     at least one link and one part; calls in order of time
Blind to  cut-through: a single part never uses two links at once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim_backends.links import FairLink, Transfer

Arrived = Callable[[int, float], None]


class Lane:
    """One row of parts on one route. `arrived(index, at_s)` is called when a part has passed the last link."""

    def __init__(self, route: Sequence[FairLink], parts: Sequence[float], arrived: Arrived) -> None:
        """`parts` in bytes, each > 0, in the order they are sent."""
        self._route = route
        self._parts = parts
        self._arrived = arrived
        self._open: dict[Transfer, FairLink] = {}

    def start(self, now_s: float) -> None:
        self._enter(0, 0, now_s)

    def cancel(self, now_s: float) -> None:
        """Take everything off the links; nothing arrives any more."""
        for transfer, link in self._open.items():
            link.cancel(transfer, now_s)
        self._open.clear()
        self._parts = self._parts[:0]  # no further part is sent from a callback under way

    def _enter(self, part: int, stage: int, now_s: float) -> None:
        link = self._route[stage]

        def passed(at_s: float) -> None:
            del self._open[transfer]
            if stage == 0 and part + 1 < len(self._parts):
                self._enter(part + 1, 0, at_s)
            if stage + 1 < len(self._route):
                self._enter(part, stage + 1, at_s)
            else:
                self._arrived(part, at_s)

        transfer = link.start(self._parts[part], now_s, passed, look_up=part == 0)
        self._open[transfer] = link
