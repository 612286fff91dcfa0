"""Least squares that follow a change: data that fade, a prior that does not, and an alarm for a shift.

Model     regularised recursive least squares: old samples fade exponentially and what they leave is the prior, so a
          direction that no new sample excites returns to it instead of drifting away
Valid     a handful of coefficients, none negative; samples with known relative weights
Blind to  outliers: whoever adds a sample gives it its weight
Source    Ljung 1999, ch. 11 (recursive least squares); Kulhavy and Zarrop, Int. J. Control 58(4), 1993 (forgetting
          towards a prior); Page, Biometrika 41, 1954 (CUSUM); Lawson and
          Hanson 1974, ch. 23 (least squares with bounds)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SLACK, ALARM = 0.75, 8.0  # CUSUM, in usual residuals: what each one loses, and where it is a change
LEAST_PILE = 4  # samples on one side that may be a change

Vector = npt.NDArray[np.float64]


class Fit:
    """Weighted least squares whose data fade and whose prior does not. No coefficient is negative.

    theta minimises (theta - centre)' P (theta - centre) + sum of weight (y - x . theta)^2, newer samples counting more
    by 1 / forgetting each. P is loose along the centre (`spread`) and firm across it (`own_spread`).

    centre : prior mean, >= 0, not all zero
    own_spread : standard deviation of each coefficient around a multiple of the centre, > 0, in units of the centre's
        first two coefficients (their mean)
    spread : standard deviation of that multiple, > 0
    forgetting : (0, 1]; 1 forgets nothing
    """

    def __init__(self, centre: Vector, *, own_spread: Sequence[float], spread: float, forgetting: float) -> None:
        scale = max(float(centre[:2].mean()), 0.1 * float(centre.max()))
        own = scale * np.asarray(own_spread)
        self._forgetting = forgetting
        self._prior = np.linalg.inv(np.diag(own**2) + spread**2 * np.outer(centre, centre))
        self._prior_vector = self._prior @ centre
        self.information = self._prior.copy()
        self.vector = self._prior_vector.copy()

    def add(self, x: Vector, y: float, weight: float) -> None:
        """One sample y = x . theta, weight >= 0 being one over its variance; all before it fade."""
        keep = self._forgetting
        self.information += (1.0 - keep) * (self._prior - self.information)
        self.vector += (1.0 - keep) * (self._prior_vector - self.vector)
        self.information += np.outer(weight * x, x)
        self.vector += (weight * y) * x

    def solution(self) -> Vector:
        """The best coefficients of which none is negative (least squares with bounds)."""
        theta = np.linalg.solve(self.information, self.vector)
        free = theta > 0
        if free.all():
            return theta
        theta = np.zeros(len(theta))
        if free.any():  # mostly the right ones, which saves finding them one by one
            best = self._best(free)
            if (best >= 0).all():
                theta = best
            else:
                free[:] = False
        for _ in range(4 * len(theta)):  # it takes a few; the bound is against rounding that goes in circles
            gain = np.where(free, 0.0, self.vector - self.information @ theta)
            if gain.max() <= self._nothing:
                break
            free[int(gain.argmax())] = True
            theta = self._feasible(theta, free)
            free = theta > 0
        return theta

    def _feasible(self, theta: Vector, free: npt.NDArray[np.bool_]) -> Vector:
        """The best with `free` coefficients or, where it is negative, with fewer; `theta` is where to come from."""
        best = self._best(free)
        while (best[free] <= 0).any():
            down = np.flatnonzero(free & (best <= 0))
            shares = theta[down] / np.maximum(theta[down] - best[down], np.finfo(np.float64).tiny)
            theta = theta + float(shares.min()) * (best - theta)
            free = free & (theta > 0)
            free[down[int(shares.argmin())]] = False
            theta = np.where(free, theta, 0.0)
            best = self._best(free)
        return best

    @property
    def _nothing(self) -> float:
        """A gradient that is rounding."""
        return 1e-9 * float(np.abs(self.vector).max())

    def _best(self, free: npt.NDArray[np.bool_]) -> Vector:
        """The best coefficients when only `free` ones may differ from zero, and may be negative."""
        best = np.zeros(len(free))
        best[free] = np.linalg.solve(self.information[np.ix_(free, free)], self.vector[free])
        return best

    def scale(self, factor: float) -> None:
        """Multiply what was learned and what was believed before by `factor` (> 0)."""
        for matrix in (self._prior, self.information):
            matrix /= factor**2
        for vector in (self._prior_vector, self.vector):
            vector /= factor

    def widen(self, kept: float) -> None:
        """Keep `kept` (0..1) of what the data say beyond the prior."""
        self.information = self._prior + kept * (self.information - self._prior)
        self.vector = self._prior_vector + kept * (self.vector - self._prior_vector)

    def hold(self, information: Vector, vector: Vector) -> None:
        """Take over what another fit with the same centre learned."""
        self.information, self.vector = information, vector


class Drift:
    """Two-sided CUSUM of residuals. `pile` : samples since the larger side was last at zero."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0]
        self._piles = [0, 0]

    @property
    def pile(self) -> int:
        return self._piles[self._sums[1] > self._sums[0]]

    def saw(self, residual: float) -> bool:
        """Whether, with this residual (in usual ones), those on one side are too many to be chance."""
        for side, signed in enumerate((residual, -residual)):
            self._sums[side] = max(0.0, self._sums[side] + signed - SLACK)
            self._piles[side] = self._piles[side] + 1 if self._sums[side] > 0.0 else 0
        return max(self._sums) > ALARM and self.pile >= LEAST_PILE


def is_positive_definite(matrix: Vector) -> bool:
    """Whether a square matrix is one that a least squares fit can have."""
    if not np.allclose(matrix, matrix.T, rtol=1e-6, atol=1e-9 * float(np.abs(matrix).max())):
        return False
    try:
        np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return False
    return True
