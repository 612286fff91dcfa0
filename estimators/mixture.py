"""Mean and quantiles of a first token that can turn out in several ways: HBM copy, else host copy, ... else recompute.

Model     k outcomes with a probability and a time each. Point mixture: the quantile is the smallest time x with
          F(x) >= q. With spread: each time is multiplied by exp(shift + scale z), z standard logistic, the same law
          for all outcomes; then F(x) is a sum of p y / (y + a) in y = x ** (1 / scale): rational, increasing and
          concave, so two outcomes have a closed form and more are reached from below by Newton, never overshot
Valid     probabilities >= 0 that sum to 1 over the outcomes; times > 0 and finite, also of outcomes with probability
          zero; scale >= 0. An unknown time (NaN) gives an unknown mean and spread quantile
Blind to  dependence between tiers: copies are lost independently, so a restart that takes two at once is not seen
Source    AI Infra textbook, section 9.5.4 (a two-point first token);
          log-logistic: Johnson, Kotz, Balakrishnan 1995, ch. 23
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

TIE = 1e-9  # F within this below q counts as q: sums of floats such as 0.9 + 0.09 must not miss 0.99
LEAST_SCALE = 1e-9  # stands for no spread at all; a time then moves by less than 1 part in 10 million
BRACKETINGS = 60  # at most, for one candidate; three to ten are usual
REACHED = 1e-5  # of F, or of the spread's width: closer is not looked for
LARGEST_EXPONENT = 700.0  # beyond it a float overflows
NEWTON_STEPS = 24  # at most; three or four are usual, some fourteen where F is flat just below q
SETTLED = 1e-3  # of a step in units of the scale: Newton doubles its digits, so the next would change nothing visible

Grid = npt.NDArray[np.float64]


def fallbacks(survival: Grid) -> Grid:
    """Probability of each outcome when copies are tried in order; shape (k, ...) in, (k + 1, ...) out.

    survival : probability that each copy is there, 0..1; axis 0 from the copy tried first to the last

    Entry i is P(copy i there, none before it); the last is P(no copy): recompute. They sum to 1.

    >>> fallbacks(np.array([0.9, 0.5])).round(3).tolist()
    [0.9, 0.05, 0.05]
    """
    copies = len(survival)
    outcomes = np.ones((copies + 1, *survival.shape[1:]))
    left = outcomes[copies:]  # slices, not entries: they stay views when there is no other axis
    for i in range(copies):
        here = outcomes[i : i + 1]
        np.multiply(left, survival[i : i + 1], out=here)
        np.subtract(left, here, out=left)
    return outcomes


def mean_s(probability: Grid, time_s: Grid) -> Grid:
    """Expected time, seconds; arrays (k, ...) that broadcast in, (...) out. NaN where any time is unknown."""
    return np.asarray(np.multiply(probability, time_s).sum(axis=0))


def quantile_s(probability: Grid, time_s: Grid, q: float) -> Grid:
    """Smallest time with F >= q of the point mixture, seconds; arrays (k, ...) in, (...) out.

    p99 of 0.9 fast and 0.1 slow is the slow time, of 0.99 and 0.01 the fast one, also where rounding left
    F a hair below 0.99. An unknown time (NaN) counts as later than all others; inf where only such are left at q.

    Raises
    ------
    ValueError : q is not within (0, 1).

    >>> float(quantile_s(np.array([0.9, 0.1]), np.array([0.1109, 0.9672]), 0.99))
    0.9672
    """
    require(0.0 < q < 1.0, "q", q)
    probability, time_s = np.broadcast_arrays(probability, time_s)
    not_later = time_s[:, None] <= time_s[None]  # (outcome, candidate answer, ...)
    reached = np.where(not_later, probability[:, None], 0.0).sum(axis=0)
    return np.asarray(np.where(reached >= q - TIE, time_s, np.inf).min(axis=0))


def spread_quantile_s(
    probability: Grid, time_s: Grid, q: float, *, scale: npt.ArrayLike, shift: npt.ArrayLike = 0.0
) -> Grid:
    """Quantile q of the mixture whose times vary by a common residual, seconds; arrays (k, ...) in, (...) out.

    scale : logistic scale of log(observed / predicted), >= 0; broadcasts against (...). As it goes to zero this
        becomes `quantile_s`; exactly at a tie it stays between the two times.
    shift : median of log(observed / predicted), broadcasts against (...)

    One or two outcomes: exact. More: within 1e-5 of the scale, relative.

    Raises
    ------
    ValueError : q is not within (0, 1).
    """
    require(0.0 < q < 1.0, "q", q)
    probability, time_s = np.broadcast_arrays(probability, time_s)
    scale = np.maximum(scale, LEAST_SCALE)
    if len(time_s) == 1:
        centre_s = time_s[0] * np.exp(scale * np.log(q / (1.0 - q)))
    elif len(time_s) == 2:
        centre_s = _of_two(probability, time_s, q - TIE, scale)
    else:
        centre_s = _of_many(probability, time_s, q - TIE, scale)
    return np.asarray(centre_s * np.exp(shift))


def _of_two(probability: Grid, time_s: Grid, q: float, scale: Grid) -> Grid:
    """The root of p u / (u + 1) + (1 - p) u / (u + r) = q, with u = (x / fast) ** (1 / scale) and r that of slow.

    Divided by r, so that a vanishing scale (r beyond any float) leaves finite numbers.
    """
    swapped = time_s[0] > time_s[1]
    fast_s, slow_s = np.minimum(time_s[0], time_s[1]), np.maximum(time_s[0], time_s[1])
    p = np.where(swapped, probability[1], probability[0])
    small = np.exp(np.log(fast_s / slow_s) / scale)  # 1 / r, 0..1
    linear = (p - q) + (1.0 - p - q) * small
    root = np.sqrt(linear * linear + (4.0 * q * (1.0 - q)) * small)
    near_fast = linear >= 0.0  # each form where it does not cancel
    from_fast = 2.0 * q / np.maximum(linear + root, 1e-300)
    from_slow = (root - linear) / (2.0 * (1.0 - q))
    units = np.where(near_fast, from_fast, from_slow)
    return np.asarray(np.where(near_fast, fast_s, slow_s) * units**scale)


def _of_many(probability: Grid, time_s: Grid, q: float, scale: Grid) -> Grid:
    """Newton on F in y = x ** (1 / scale), kept as z = ln y, from a bound below the root.

    F is concave in y: a tangent from below crosses q before F does, so every step stays below the root.
    """
    centres = np.log(time_s) / scale
    z = _below(probability, centres, q)
    for _ in range(NEWTON_STEPS):
        reached = 1.0 / (1.0 + np.exp(np.minimum(centres - z, 700.0)))
        weighted = probability * reached
        missing = q - weighted.sum(axis=0)
        slope = (weighted * (1.0 - reached)).sum(axis=0)  # of F in ln y
        step = np.log1p(np.maximum(missing, 0.0) / np.maximum(slope, 1e-300))
        z = z + step
        if step.max(initial=0.0) < SETTLED:
            break
    return np.asarray(np.exp(z * scale))


def _below(probability: Grid, centres: Grid, q: float) -> Grid:
    """Best bound below the root: with everything before outcome i certain and all the rest moved forward to it."""
    earlier = centres[:, None] < centres[None]
    before = np.where(earlier, probability[:, None], 0.0).sum(axis=0)
    open_ = before < q
    odds = np.where(open_, q - before, 1.0) / (1.0 - q)
    return np.asarray(np.where(open_, centres + np.log(odds), -np.inf).max(axis=0))


def spread_quantiles_of_one_s(
    outcomes: Sequence[tuple[float, float]], levels: Sequence[float], *, scale: float, shift: float
) -> list[float]:
    """`spread_quantile_s` of one candidate at several levels, without arrays: for the one that was chosen.

    outcomes : (probability, time), as there; levels : each within (0, 1)
    What it reaches is within 1e-4 of the level.
    """
    width = max(scale, LEAST_SCALE)
    likely = [(probability, log(time_s)) for probability, time_s in outcomes if probability > 0.0]
    first, last = min(centre for _, centre in likely), max(centre for _, centre in likely)
    quantiles = []
    for q in levels:
        beyond = width * log(q / (1.0 - q))
        at = first + beyond if first == last else _bracketed(likely, q - TIE, first + beyond, last + beyond, width)
        quantiles.append(exp(at + shift))
    return quantiles


def _bracketed(likely: list[tuple[float, float]], q: float, low: float, high: float, width: float) -> float:
    """Where the mixture reaches `q`, between the quantiles of its first and last outcome: Newton within a bracket."""
    at = high
    for _ in range(BRACKETINGS):
        reached = density = 0.0
        for probability, centre in likely:
            z = (centre - at) / width
            below = 1.0 / (1.0 + exp(z)) if z < LARGEST_EXPONENT else 0.0
            reached += probability * below
            density += probability * below * (1.0 - below)
        low, high = (low, at) if reached >= q else (at, high)
        if abs(reached - q) < REACHED or high - low < REACHED * width:
            break
        at -= (reached - q) * width / density if density > 0.0 else 0.0
        if not low < at < high:
            at = 0.5 * (low + high)
    return high if reached < q - REACHED else at
