"""Turns first tokens into samples of how long a replica takes for prefill work.

Model     a first-come engine has the GPU free for a request from the moment the one before it got its first token;
          an engine packs several prefills into one step, so first tokens within one step of each other are one
          sample: their work together, over the time the replica took for all of it
Valid     requests that were streamed and answered, whose computed tokens are known: counted from a token prompt and
          expected reuse, or reported by the engine, whose word counts
Blind to  prefills whose start a fetch decided, or a request that left, or that were overtaken: no sample rather
          than a wrong one
Source    service times of a work-conserving queue are the gaps between its departures
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, isnan

import numpy as np

from estimators.estimates import Estimator
from estimators.view import FleetView
from router.bookings import Booking


@dataclass(frozen=True, slots=True)
class Computed:
    """What an engine really did for one prompt, tokens."""

    new_tokens: float
    reused_tokens: float


@dataclass(slots=True, eq=False)
class Group:
    """First tokens that came out of one step. `computed` has an entry for each that ended; None makes it void."""

    starts_at_s: float
    ends_at_s: float
    members: list[Booking]
    computed: dict[Booking, Computed | None] = field(default_factory=dict)


# row, features (seconds at the roofline), seconds explained by running decodes, seconds taken
OnSample = Callable[[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]], float, float], None]


class PrefillSamples:
    """Samples of a whole fleet. `first_token` before the ledger hears of it, `ended` once for each booking."""

    def __init__(self, view: FleetView, estimator: Estimator, on_sample: OnSample) -> None:
        self._view = view
        self._estimator = estimator
        self._on_sample = on_sample
        self._open: list[Group | None] = [None] * view.rows
        self._overtaken = [False] * view.rows
        self._group_of: dict[Booking, Group] = {}

    def first_token(self, booking: Booking, now_s: float) -> None:
        """The first token of `booking` came at `now_s`."""
        row = booking.row
        group = self._open[row]
        if group is not None and now_s - group.ends_at_s <= self._view.weights_s[row]:
            group.members.append(booking)
            self._group_of[booking] = group
            return
        self._open[row] = None
        if isnan(booking.starts_at_s):
            self._overtaken[row] = True
            return
        usable = booking.start_seen and not self._overtaken[row] and now_s > booking.starts_at_s
        self._overtaken[row] = False
        if usable:
            group = Group(booking.starts_at_s, now_s, [booking])
            self._open[row] = self._group_of[booking] = group

    def ended(self, booking: Booking, computed: Computed | None, now_s: float) -> None:
        """`booking` ended; None when what was computed for it is not known."""
        group = self._group_of.pop(booking, None)
        if group is None:
            return
        group.computed[booking] = computed
        step_s = float(self._view.weights_s[booking.row])
        if len(group.computed) == len(group.members) and now_s - group.ends_at_s > step_s:
            self._observe(booking.row, group)

    def _observe(self, row: int, group: Group) -> None:
        computed = [work for work in group.computed.values() if work is not None]
        if len(computed) < len(group.members):
            return
        features = sum(
            self._estimator.features_at(
                row, new_tokens=work.new_tokens, cached_tokens=work.reused_tokens, view=self._view
            )
            for work in computed
        )
        assert isinstance(features, np.ndarray), "a group has members"
        weights_s = float(self._view.weights_s[row])
        steps = ceil(sum(work.new_tokens for work in computed) / self._estimator.step_tokens)
        features[2], features[3] = steps * weights_s, weights_s
        shared_s = steps * group.members[0].step_share_s
        self._on_sample(row, features, shared_s, group.ends_at_s - group.starts_at_s)
