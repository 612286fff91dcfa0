"""Corrects a replica's prefill time from the first tokens it was seen to deliver.

Model     C = theta . x with the physical features x of `prefill_features.py`. Least squares on relative errors; what
          is old fades, and a prior does not: the start values times one common factor, which is the median of the
          first samples. So a card that is three times faster than believed is known after a handful of samples, and
          no direction without news drifts away
            outlier  a residual beyond 3 usual ones counts as one at 3, beyond 8 it counts nothing
            change   when clipped residuals pile up on one side (CUSUM), all coefficients are multiplied by the median
                     factor of the samples in that pile, and learning starts anew from there
          An answer that is not streamed has one number for queue, prefill and decode together: it moves both
          corrections a little, and the less the more direct samples there were
Valid     samples of the time from one known moment of a replica's GPU to another; coefficients are never negative
Blind to  what no feature carries
Source    Ljung 1999, ch. 11 (recursive least squares); Kulhavy and Zarrop 1993 (forgetting towards a prior);
          Huber 1964 (clipped residuals); Page 1954 (CUSUM)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import exp, inf, log, sqrt
from typing import Any

import numpy as np

from estimators.fading_fit import Drift, Fit, Vector, is_positive_definite
from estimators.ranges import require
from estimators.stored import number, numbers

LEAST_ERROR, FIRST_ERROR, LARGEST_ERROR = 0.03, 0.15, 1.0  # usual relative residual: bounds, and before any was seen
ERROR_GAIN = 0.05  # of one residual, on the usual one
FAR, ABSURD = 3.0, 8.0  # residuals in usual ones
FIRST_SAMPLES = 8  # set the common factor
KEPT_SAMPLES = 32  # for a start from a change
OWN_SPREAD = (0.3, 0.4, 1.0, 1.0, 0.5)  # of each coefficient (see FEATURES) around the prior, in common factors
NUDGE_GAIN, LARGEST_NUDGE = 0.1, log(2.0)  # of one whole answer, and its largest error, on the logarithm
DAY_S = 86_400.0  # a state older than this is believed less


class Trust:
    """How much whole answers may still teach beside samples that show the same thing directly."""

    _MOST = 100.0  # samples that count; each whole answer takes a hundredth of them away

    def __init__(self, samples: float = 0.0) -> None:
        self._direct = min(self._MOST, samples)

    def saw(self) -> None:
        """There was a direct sample."""
        self._direct = min(self._MOST, self._direct + 1.0)

    def factor(self, ratio: float, weight: float) -> float:
        """What to multiply by when a whole answer took `ratio` (> 0) of what was expected, `weight` of it ours."""
        require(0 < ratio < inf, "ratio", ratio)
        require(0 <= weight <= 1, "weight", weight)
        gain = NUDGE_GAIN * weight / (1.0 + self._direct / FIRST_SAMPLES)
        self._direct *= 1.0 - 1.0 / self._MOST
        return exp(gain * max(-LARGEST_NUDGE, min(LARGEST_NUDGE, log(ratio))))


class PrefillCalibration:
    """One replica's correction. `coefficients` is the row of the fleet view it keeps up to date.

    samples : observations taken in; changes : of the replica, noticed
    usual_error : typical relative residual of one sample
    forgetting : weight of the past per sample, (0, 1]; 0.99 follows a slow change within about 100 samples
    spread : standard deviation believed of the start values' common factor, > 0; wide where the card is unknown
    """

    def __init__(self, coefficients: Vector, *, forgetting: float = 0.99, spread: float = 0.5) -> None:
        require(0 < forgetting <= 1, "forgetting", forgetting)
        require(0 < spread < inf, "spread", spread)
        self._theta = coefficients
        self._start = coefficients.copy()
        self._forgetting = forgetting
        self._spread = spread
        self._recent: deque[tuple[Vector, float, float]] = deque(maxlen=KEPT_SAMPLES)
        self._centre: Vector
        self._fit: Fit
        self._drift: Drift
        self._begin(self._start)
        self._trust = Trust()
        self.samples = 0
        self.changes = 0
        self.usual_error = FIRST_ERROR

    def observe(self, features: Vector, *, observed_s: float, extra_s: float = 0.0, blur_s: float = 0.0) -> None:
        """Learn that work with `features` (seconds, all >= 0) took `observed_s` (> 0).

        extra_s : part of the observed time that other models explain, >= 0
        blur_s : standard deviation of what is not known of the observed time, >= 0
        """
        require(0 < observed_s < inf, "observed_s", observed_s)
        require(0 <= extra_s < inf, "extra_s", extra_s)
        require(0 <= blur_s < inf, "blur_s", blur_s)
        own_s = observed_s - extra_s
        if own_s <= 0 or float(features @ self._theta) <= 0:
            return
        self.samples += 1
        self._trust.saw()
        self._recent.append((features.copy(), own_s, blur_s))
        if self.samples <= FIRST_SAMPLES:
            self._start_from(self._start, self.samples)
            return
        residual = self._learn(features, own_s, blur_s)
        self._theta[:] = self._fit.solution()
        if self._drift.saw(residual):
            self.changes += 1
            self._start_from(self._theta.copy(), self._drift.pile)

    def nudge(self, ratio: float, *, weight: float) -> None:
        """Move all coefficients a little towards `ratio` (> 0): observed over expected time of a whole answer.

        weight : the prefill's part in the expected time, 0..1. One answer moves them by at most 7 %, and by less the
        more samples of first tokens there are.
        """
        factor = self._trust.factor(ratio, weight)
        self._theta *= factor
        self._centre = self._centre * factor
        self._fit.scale(factor)

    def state(self) -> dict[str, Any]:
        """What was learned, as plain numbers and lists: for `restore`, in this process or the next."""
        return {
            "coefficients": self._theta.tolist(),
            "centre": self._centre.tolist(),
            "information": self._fit.information.tolist(),
            "vector": self._fit.vector.tolist(),
            "usual_error": self.usual_error,
            "samples": self.samples,
        }

    def restore(self, state: Mapping[str, Any], *, age_s: float) -> None:
        """Take over what `state` says; it was made `age_s` (>= 0) ago, and is believed less after a day.

        A state of fewer than `FIRST_SAMPLES` samples teaches nothing.

        Raises
        ------
        ValueError : it is not a state of this kind; nothing has changed then.
        """
        require(0 <= age_s < inf, "age_s", age_s)
        size = len(self._theta)
        theta, centre = (
            numbers(state.get("coefficients"), "coefficients", (size,)),
            numbers(state.get("centre"), "centre", (size,)),
        )
        information, vector = (
            numbers(state.get("information"), "information", (size, size)),
            numbers(state.get("vector"), "vector", (size,)),
        )
        usual_error, samples = number(state.get("usual_error"), "usual_error"), number(state.get("samples"), "samples")
        require(bool((theta >= 0).all() and theta.max() > 0), "coefficients", theta.tolist())
        require(bool((centre >= 0).all() and centre.max() > 0), "centre", centre.tolist())
        require(is_positive_definite(information), "information", "a matrix", "not positive definite")
        require(LEAST_ERROR <= usual_error <= LARGEST_ERROR, "usual_error", usual_error)
        require(samples >= 0 and samples == int(samples), "samples", samples, "no count")
        if samples < FIRST_SAMPLES:
            return
        kept = min(1.0, DAY_S / max(age_s, 1.0))
        self._begin(centre)
        self._fit.hold(information, vector)
        self._fit.widen(kept)
        self._theta[:] = theta if kept == 1.0 else self._fit.solution()
        self._recent.clear()
        self.usual_error = usual_error
        self.samples = int(samples)
        self._trust = Trust(samples * kept)

    def _begin(self, centre: Vector) -> None:
        """Know nothing but `centre`."""
        self._centre = centre
        self._fit = Fit(centre, own_spread=OWN_SPREAD, spread=self._spread, forgetting=self._forgetting)
        self._drift = Drift()

    def _start_from(self, coefficients: Vector, count: int) -> None:
        """Begin with `coefficients` times the median factor of the last `count` samples, and learn those."""
        last = list(self._recent)[-count:]
        factor = float(np.median([own_s / float(features @ coefficients) for features, own_s, _ in last]))
        self._begin(coefficients * factor)
        self._theta[:] = self._centre
        self.usual_error = max(self.usual_error, FIRST_ERROR)
        for features, own_s, blur_s in last:
            self._learn(features, own_s, blur_s)
        self._theta[:] = self._fit.solution()

    def _learn(self, features: Vector, own_s: float, blur_s: float) -> float:
        """Take one sample in. Its residual in usual ones, at most `FAR` from zero."""
        expected_s = float(features @ self._theta)
        error = own_s / expected_s - 1.0
        deviation = sqrt(self.usual_error**2 + (blur_s / expected_s) ** 2)
        distance = abs(error) / deviation
        trust = 0.0 if distance > ABSURD else min(1.0, FAR / max(distance, FAR))
        self._fit.add(features / expected_s, own_s / expected_s, trust / deviation**2)
        clipped = max(-FAR, min(FAR, error / deviation))
        # The mean of a normal residual's size is 0.8 of its deviation.
        seen = 1.25 * abs(clipped) * self.usual_error
        usual = self.usual_error + ERROR_GAIN * (seen - self.usual_error)
        self.usual_error = max(LEAST_ERROR, min(LARGEST_ERROR, usual))
        return clipped


class ScaleCalibration:
    """Ratio of observed to ideal, tracked on a logarithmic scale with bounded steps. Starts at 1."""

    def __init__(self, *, gain: float = 0.1, largest_step: float = 0.7) -> None:
        require(0 < gain <= 1, "gain", gain)
        self._gain = gain
        self._largest_step = largest_step
        self._log = 0.0
        self._trust = Trust()
        self.samples = 0

    @property
    def scale(self) -> float:
        """The ratio as learned so far, > 0."""
        return exp(self._log)

    def observe(self, ratio: float) -> float:
        """Learn one ratio (> 0); returns the new scale."""
        require(0 < ratio < inf, "ratio", ratio)
        step = log(ratio) - self._log
        step = max(-self._largest_step, min(self._largest_step, step))
        self.samples += 1
        self._trust.saw()
        self._log += max(self._gain, 1.0 / self.samples) * step
        return self.scale

    def nudge(self, ratio: float, *, weight: float) -> float:
        """Move a little towards observed over expected time of a whole answer, as `PrefillCalibration.nudge` does.

        weight : the decode's part in the expected time, 0..1. Returns the new scale.
        """
        self._log += log(self._trust.factor(ratio, weight))
        return self.scale

    def state(self) -> dict[str, Any]:
        """What was learned, as plain numbers."""
        return {"scale": self.scale, "samples": self.samples}

    def restore(self, state: Mapping[str, Any], *, age_s: float) -> None:
        """Take over what `state` says, made `age_s` (>= 0) ago; after a day it counts as fewer samples.

        Raises
        ------
        ValueError : it is not a state of this kind; nothing has changed then.
        """
        require(0 <= age_s < inf, "age_s", age_s)
        scale, samples = number(state.get("scale"), "scale"), number(state.get("samples"), "samples")
        require(0 < scale < inf, "scale", scale)
        require(samples >= 0 and samples == int(samples), "samples", samples, "no count")
        self._log = log(scale)
        self.samples = int(samples * min(1.0, DAY_S / max(age_s, 1.0)))
        self._trust = Trust(self.samples)
