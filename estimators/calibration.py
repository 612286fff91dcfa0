"""Corrects a replica's prefill time from the first tokens it was seen to deliver.

Model     C = theta . x with physical features x (seconds at the roofline), theta = (1, 1, 0, 0) at the start:
            linear     matrix work of the new tokens
            attention  attention of the new tokens with all before them
            steps      engine steps the prefill takes, in passes over the weights
            constant   one pass over the weights
          recursive least squares on relative errors with exponential forgetting; a residual beyond three
          times the usual one is pulled in to that distance, so one absurd sample moves little; several of
          them in a row on the same side are a change of the replica, and the start covariance is restored
Valid     observations of single prefills: from the moment a replica was free for it to its first token
Blind to  what no feature carries; neighbours sharing the first and last step come out as noise
Source    Ljung 1999, ch. 11 (recursive least squares); Huber 1964 (clipped residuals)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

LEAST_ERROR = 0.03  # relative; no engine repeats itself better than this
CHANGE_AFTER = 5  # pulled-in residuals in a row, on one side, that are taken for a change of the replica

FEATURES = ("linear", "attention", "steps", "constant")

Vector = npt.NDArray[np.float64]


def prior_coefficients() -> Vector:
    """The roofline itself: work as computed, no fixed cost."""
    return np.array([1.0, 1.0, 0.0, 0.0])


class PrefillCalibration:
    """One replica's correction. `coefficients` is the row of the fleet view it keeps up to date.

    forgetting : weight of the past per sample, (0, 1]; 0.99 follows a change within about 100 samples
    spread : standard deviation believed of each start value, > 0; wide where the card is unknown
    """

    def __init__(self, coefficients: Vector, *, forgetting: float = 0.99, spread: float = 0.5) -> None:
        require(0 < forgetting <= 1, "forgetting", forgetting)
        require(0 < spread < float("inf"), "spread", spread)
        self._theta = coefficients
        self._forgetting = forgetting
        self._start = np.diag(np.full(len(FEATURES), spread**2))
        self._covariance = self._start
        self._one_sided = 0  # signed count of pulled-in residuals in a row
        self._ceiling = float(4 * len(FEATURES) * spread**2)
        self._usual_error = 0.25
        self.samples = 0

    def observe(self, features: Vector, *, extra_s: float, observed_s: float) -> None:
        """Learn that work with `features` (seconds, all >= 0) took `observed_s` (> 0).

        extra_s : part of the observed time explained by other models (decodes in the same steps), >= 0.
        """
        require(0 < observed_s < float("inf"), "observed_s", observed_s)
        expected_s = float(features @ self._theta) + extra_s
        if expected_s <= 0:
            return
        x = features / expected_s
        error = observed_s / expected_s - 1.0
        error = self._pull_in(error)
        spread_x = self._covariance @ x
        # Noise of one sample is the usual error squared: a noisy replica is learned more slowly.
        gain = spread_x / (self._forgetting * self._usual_error**2 + x @ spread_x)
        np.add(self._theta, gain * error, out=self._theta)
        np.maximum(self._theta, 0.0, out=self._theta)
        self._covariance = (self._covariance - np.outer(gain, spread_x)) / self._forgetting
        trace = float(np.trace(self._covariance))
        if trace > self._ceiling:  # forgetting without news in some direction must not blow it up
            self._covariance *= self._ceiling / trace
        self.samples += 1

    def _pull_in(self, error: float) -> float:
        """`error` within three usual ones, and what it says about the usual one and about a change."""
        limit = 3.0 * self._usual_error
        pulled = max(-limit, min(limit, error))
        self._usual_error = max(LEAST_ERROR, self._usual_error + 0.05 * (abs(pulled) - self._usual_error))
        side = 0 if pulled == error else (1 if error > 0 else -1)
        self._one_sided = self._one_sided + side if side * self._one_sided >= 0 and side else side
        if abs(self._one_sided) >= CHANGE_AFTER:
            self._one_sided = 0
            self._covariance = self._start
            self._usual_error = max(self._usual_error, min(abs(error), 1.0))
        return pulled


class ScaleCalibration:
    """Ratio of observed to ideal, tracked on a logarithmic scale with bounded steps. Starts at 1."""

    def __init__(self, *, gain: float = 0.1, largest_step: float = 0.7) -> None:
        require(0 < gain <= 1, "gain", gain)
        self._gain = gain
        self._largest_step = largest_step
        self._log = 0.0
        self.samples = 0

    def observe(self, ratio: float) -> float:
        """Learn one ratio (> 0); returns the new scale."""
        require(0 < ratio < float("inf"), "ratio", ratio)
        step = float(np.log(ratio)) - self._log
        step = max(-self._largest_step, min(self._largest_step, step))
        self.samples += 1
        self._log += max(self._gain, 1.0 / self.samples) * step
        return float(np.exp(self._log))
