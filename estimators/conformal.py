"""Corrects predicted quantiles until they cover what they claim, for each level and prompt length.

Model     a factor exp(theta) on each predicted quantile. After each outcome, with r = ln(observed / predicted):
            theta += gain x scale x (1 if r > theta else 0, less the miss rate aimed at)
          the gradient of the quantile loss, judged by the theta of now, so that outcomes that arrive late do not push
          it further once it covers them. The rate aimed at is 1 - level, less what is owed: misses of the quantiles
          that were issued, beyond those allowed, are paid back slowly by aiming lower, and the reverse
          scale is the usual distance of r from its centre. A length never seen reads the correction of all together
Valid     any sequence, no distribution is assumed: misses - (1 - level) x n = change of theta / (gain x scale) while
          outcomes are prompt. A burst of misses within the delay of the outcomes cannot be prevented, only paid back
Blind to  what distinguishes requests of one length. Only chosen candidates are judged, so the optimism of choosing the
          smallest is corrected with the rest
Source    Gibbs and Candes 2021 (adaptive conformal inference); Angelopoulos, Candes, Tibshirani 2023 (conformal PID:
          quantile tracking, error integration)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from math import exp, inf, log, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.ranges import require
from estimators.stored import items, mapping, number

Grid = npt.NDArray[np.float64]

BUCKET_EDGES_TOKENS = (1024, 4096, 16384, 65536)  # a prompt of just this length is in the longer bucket
BUCKETS = len(BUCKET_EDGES_TOKENS) + 1

GAIN = 1.5  # steps in units of the scale: a miss at p99 raises the quantile by one and a half usual distances
PAYBACK = 0.03  # how strongly what is owed changes the rate aimed at, over the square root of the allowed rate
AIM_LOWER, AIM_HIGHER = 0.1, 2.7  # of the allowed miss rate: bounds of what is aimed at
OWED_AT_MOST = 1600.0  # requests' worth of allowed misses; an outage is not paid back for ever
FURTHEST = 4.0  # usual distances at which a residual stops widening the scale
LEAST_SCALE, START_SCALE = 0.01, 0.1
START_SAMPLES, MEMORY = 5.0, 50.0  # of centre and scale
LARGEST_CORRECTION = log(100.0)


def bucket_of(prompt_tokens: int) -> int:
    """Length bucket of a prompt, 0 (shortest) to BUCKETS - 1."""
    return bisect_right(BUCKET_EDGES_TOKENS, prompt_tokens)


class _Tracker:
    """One level in one bucket."""

    __slots__ = ("centre", "owed", "samples", "scale", "theta")

    FIELDS = ("theta", "centre", "scale", "owed", "samples")

    def __init__(self, theta: float = 0.0) -> None:
        self.theta = theta
        self.centre = 0.0
        self.scale = START_SCALE
        self.owed = 0.0  # misses beyond those allowed
        self.samples = 0.0

    def observe(self, residual: float, *, missed: bool, allowed: float) -> None:
        self.see(residual)
        self.count(missed=missed, above=residual > self.theta, allowed=allowed)

    def count(self, *, missed: bool, above: bool, allowed: float) -> None:
        """One quantile was `missed` or not; above : the first token came after what would be issued now."""
        bound = OWED_AT_MOST * allowed
        self.owed = max(-bound, min(bound, self.owed + missed - allowed))
        aimed = allowed * max(AIM_LOWER, min(AIM_HIGHER, exp(-PAYBACK / sqrt(allowed) * self.owed)))
        theta = self.theta + GAIN * self.scale * (above - aimed)
        self.theta = max(-LARGEST_CORRECTION, min(LARGEST_CORRECTION, theta))

    def see(self, residual: float) -> None:
        """How far and how widely first tokens are from the prediction."""
        self.samples = min(self.samples + 1.0, MEMORY)
        gain = 1.0 / min(self.samples + START_SAMPLES, MEMORY)
        distance = residual - self.centre
        self.centre += gain * max(-2.0 * self.scale, min(2.0 * self.scale, distance))
        self.scale += gain * (min(abs(distance), FURTHEST * self.scale) - self.scale)
        self.scale = max(self.scale, LEAST_SCALE)

    def state(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.FIELDS}

    def restore(self, state: object) -> None:
        values = mapping(state, "tracker")
        bound = LARGEST_CORRECTION
        self.theta = number(values.get("theta"), "theta", least=-bound, most=bound)
        self.centre = number(values.get("centre"), "centre")
        self.scale = number(values.get("scale"), "scale", least=LEAST_SCALE)
        self.owed = number(values.get("owed"), "owed")
        self.samples = number(values.get("samples"), "samples", least=0.0, most=MEMORY)


class Conformal:
    """Corrections of a whole fleet; which replica ran a request makes no difference here.

    levels : quantiles predicted, rising, each within (0, 1)
    """

    def __init__(self, levels: Sequence[float] = (0.9, 0.99)) -> None:
        require(len(levels) > 0 and all(0.0 < level < 1.0 for level in levels), "levels", levels)
        require(list(levels) == sorted(set(levels)), "levels", levels, "not rising")
        self.levels = tuple(levels)
        self._all = [_Tracker() for _ in levels]
        self._buckets: list[list[_Tracker] | None] = [None] * BUCKETS

    def factors(self, prompt_tokens: int) -> Grid:
        """What each level's predicted quantile is multiplied with, > 0, shape (levels,)."""
        trackers = self._buckets[bucket_of(prompt_tokens)] or self._all
        return np.array([exp(tracker.theta) for tracker in trackers])

    def corrected(self, prompt_tokens: int, predicted_s: Grid) -> Grid:
        """Quantiles to issue, seconds; (levels, ...) in and out. A higher level never comes out below a lower one."""
        require(len(predicted_s) == len(self.levels), "predicted_s", np.shape(predicted_s), "not one for each level")
        factors = self.factors(prompt_tokens).reshape(-1, *[1] * (np.ndim(predicted_s) - 1))
        return np.asarray(np.maximum.accumulate(predicted_s * factors, axis=0))

    def corrected_one(self, prompt_tokens: int, predicted_s: Sequence[float]) -> list[float]:
        """`corrected` of one candidate, without arrays."""
        require(len(predicted_s) == len(self.levels), "predicted_s", len(predicted_s), "not one for each level")
        trackers = self._buckets[bucket_of(prompt_tokens)] or self._all
        issued_s: list[float] = []
        least_s = -inf
        for predicted, tracker in zip(predicted_s, trackers, strict=True):
            least_s = max(least_s, predicted * exp(tracker.theta))
            issued_s.append(least_s)
        return issued_s

    def overdue(self, prompt_tokens: int, level: int) -> None:
        """The quantile issued at `levels[level]` has passed without a first token, which may still be long in coming.

        Counted now rather than when it comes: under growing delays the next thousand requests cannot wait for it.
        """
        for trackers in (self._of(prompt_tokens), self._all):
            trackers[level].count(missed=True, above=True, allowed=1.0 - self.levels[level])

    def observe(
        self,
        prompt_tokens: int,
        *,
        observed_s: float,
        predicted_s: Sequence[float],
        issued_s: Sequence[float],
        counted: Collection[int] = (),
    ) -> None:
        """A first token came after `observed_s` (> 0). Outcomes may come late and out of order.

        predicted_s, issued_s : its quantiles before and after `corrected`, > 0, one for each level
        counted : levels of which `overdue` has been told already
        """
        require(0.0 < observed_s < inf, "observed_s", observed_s)
        for name, quantiles_s in (("predicted_s", predicted_s), ("issued_s", issued_s)):
            require(len(quantiles_s) == len(self.levels), name, quantiles_s, "not one for each level")
            require(all(0.0 < quantile_s < inf for quantile_s in quantiles_s), name, quantiles_s)
        for trackers in (self._of(prompt_tokens), self._all):
            for index, tracker in enumerate(trackers):
                residual = log(observed_s / predicted_s[index])
                if index in counted:
                    tracker.see(residual)
                else:
                    missed = bool(observed_s > issued_s[index])
                    tracker.observe(residual, missed=missed, allowed=1.0 - self.levels[index])

    def _of(self, prompt_tokens: int) -> list[_Tracker]:
        """The trackers of prompts of this length; new ones start where all lengths together stand."""
        bucket = bucket_of(prompt_tokens)
        own = self._buckets[bucket]
        if own is None:
            own = self._buckets[bucket] = [_Tracker(tracker.theta) for tracker in self._all]
        return own

    def state(self) -> dict[str, Any]:
        """What was learned, as plain values."""
        return {
            "levels": list(self.levels),
            "all": [tracker.state() for tracker in self._all],
            "buckets": [own and [tracker.state() for tracker in own] for own in self._buckets],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned.

        Raises
        ------
        ValueError : it is nothing that `state` returned, or of other levels; then nothing has changed.
        """
        require(state.get("levels") == list(self.levels), "levels", state.get("levels"), "of other quantiles")
        buckets = items(state.get("buckets"), "buckets", BUCKETS)
        everything = self._restored(state.get("all"))
        own = [None if stored is None else self._restored(stored) for stored in buckets]
        self._all, self._buckets = everything, own

    def _restored(self, stored: object) -> list[_Tracker]:
        stored = items(stored, "trackers", len(self.levels))
        trackers = [_Tracker() for _ in stored]
        for tracker, state in zip(trackers, stored, strict=True):
            tracker.restore(state)
        return trackers
