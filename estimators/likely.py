"""How likely each candidate is in time, and any quantile of its first token: what rules with a deadline or a tail read.

Model     the mixture of `mixture.py` with the replica's residuals, log-logistic; issued like the quantiles in receipts,
          that is multiplied by the conformal factor of the level: the learned ones at LEVELS, between them on the
          logistic scale, beyond the last as there, and none at the median and below. A pace is log-logistic around its
          estimate, with a stated width. Pace and first token are taken to be independent
Valid     candidates that are possible; others are given as never in time, and as inf
Blind to  how far one replica's paces spread; that a full replica is late with both; corrections that make quantiles
          cross, where receipts lift the higher one to the lower
"""

from __future__ import annotations

from math import exp, log

import numpy as np
import numpy.typing as npt

from estimators.candidates import LEVELS, Estimates, Grid
from estimators.mixture import quantile_s as point_quantile_s
from estimators.mixture import spread_quantile_s
from estimators.paths import COLUMN, Path
from estimators.ranges import require

PACE_SCALE = 0.1  # of the log of a pace over its estimate: nine of ten within a quarter, as on the simulated engines
FURTHEST = 500.0  # scales from a time at which its share is 0 or 1 to the last digit

_RECOMPUTE = COLUMN[Path.RECOMPUTE]
_LOGITS = (0.0, *(log(level / (1.0 - level)) for level in LEVELS))


def quantile_s(estimates: Estimates, q: float) -> Grid:
    """Quantile q of every candidate's first token, as issued, seconds, (paths, rows).

    Raises
    ------
    ValueError : q is not within (0, 1).
    """
    require(0.0 < q < 1.0, "q", q)
    probability, time_s, scale, shift = _outcomes(estimates)
    exact = scale == 0.0
    if exact.all():
        raw = point_quantile_s(probability, time_s, q)
    else:
        raw = spread_quantile_s(probability, time_s, q, scale=scale, shift=shift)
    grid = np.full(estimates.possible.shape, np.inf)
    grid[estimates.possible] = raw * factor(estimates, q)
    return grid


def in_time(estimates: Estimates, deadline_s: float, *, level: float) -> Grid:
    """Probability of a first token within `deadline_s` (> 0), (paths, rows); as issued at `level` (0..1).

    It is at least `level` exactly where that quantile, as issued, is within the deadline.
    """
    require(deadline_s > 0.0, "deadline_s", deadline_s)
    probability, time_s, scale, shift = _outcomes(estimates)
    left = log(deadline_s / factor(estimates, level)) - shift - np.log(time_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        reached = _logistic(left / scale)
    reached = np.where(scale > 0.0, reached, left >= 0.0)
    grid = np.zeros(estimates.possible.shape)
    grid[estimates.possible] = (probability * reached).sum(axis=0)
    return grid


def on_pace(estimates: Estimates, deadline_s: float) -> npt.NDArray[np.float64]:
    """Probability that further tokens take at most `deadline_s` (> 0) each, on average, (rows,)."""
    require(deadline_s > 0.0, "deadline_s", deadline_s)
    return _logistic(np.log(deadline_s / estimates.pace_s) / PACE_SCALE)


def factor(estimates: Estimates, q: float) -> float:
    """What quantile q is multiplied with before it is issued, > 0; 1 where nothing is learned."""
    if estimates.doubt is None:
        return 1.0
    learned = np.log(estimates.doubt.conformal.factors(estimates.prompt_tokens)).tolist()
    return exp(float(np.interp(log(q / (1.0 - q)), _LOGITS, (0.0, *learned))))


def _logistic(scales: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(scales, -FURTHEST, FURTHEST))))


def _outcomes(estimates: Estimates) -> tuple[Grid, Grid, Grid, Grid]:
    """Of the possible candidates, in the order of the grid: chance and time of each outcome, (3, n); scale, shift."""
    possible = estimates.possible

    def chosen(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), possible.shape)[possible]

    hit, stored = chosen(estimates.hit_probability), chosen(estimates.stored_probability)
    probability = np.stack((hit, stored, np.maximum(1.0 - hit - stored, 0.0)))
    times = (estimates.first_token_s, estimates.stored_s, estimates.first_token_s[_RECOMPUTE])
    return probability, np.stack([chosen(time_s) for time_s in times]), chosen(estimates.scale), chosen(estimates.shift)
