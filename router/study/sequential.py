"""A test that may be looked at as often as one likes: a mixture sequential probability ratio test of a difference.

Model     the observed difference of two means is normal around the true one with variance V, which shrinks as requests
          come. Against no difference stand differences drawn from a normal with standard deviation tau; the likelihood
          ratio of the two, sqrt(V / (V + tau^2)) exp(d^2 tau^2 / (2 V (V + tau^2))), exceeds 1 / alpha at any time
          with probability alpha at most when there is none. The interval holds the differences that are not rejected
Valid     independent units, enough of them for the normal law (30 in each arm at least). tau fixed beforehand, in the
          unit of the difference: it decides when the test is sharpest, never whether it is right. Who knows beforehand
          only a share of the mean (`ab.py`) tests the difference as a share of the mean seen so far: where there is no
          difference, what that mean is off changes the share in second order alone
Blind to  heavy tails: of a metric whose mean rests on a few requests, V is known late
Source    Robbins 1970; Johari, Koomen, Pekelis, Walsh, KDD 2017 (Peeking at A/B tests); asymptotic validity:
          Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, Annals of Statistics 52(6), 2024
"""

from __future__ import annotations

from math import exp, isnan, log, nan, sqrt

from estimators.ranges import require

LEAST_UNITS = 30  # in each arm; before, nothing is said
LARGEST_EXPONENT = 700.0


def half_width(*, variance: float, tau: float, alpha: float) -> float:
    """Half of the interval around the observed difference that holds the true one at all times, 1 - alpha.

    variance : of the difference, > 0; NaN (unknown) comes back
    tau : size of difference the test is sharpest for, > 0, in the unit of the difference
    """
    require(0.0 < alpha < 1.0, "alpha", alpha)
    require(tau > 0.0, "tau", tau)
    if isnan(variance):
        return nan
    if variance <= 0.0:
        return 0.0
    both = variance + tau * tau
    return sqrt(variance * both / (tau * tau) * (2.0 * log(1.0 / alpha) + log(both / variance)))


def p_value(difference: float, *, variance: float, tau: float) -> float:
    """1 over the likelihood ratio, at most 1: the smallest alpha at which no difference is rejected now.

    The smallest over all looks so far is a p-value at any time of stopping. NaN where the variance is unknown.
    """
    require(tau > 0.0, "tau", tau)
    if isnan(variance) or isnan(difference):
        return nan
    if variance <= 0.0:
        return 1.0 if difference == 0.0 else 0.0
    both = variance + tau * tau
    exponent = difference * difference * tau * tau / (2.0 * variance * both)
    return min(1.0, sqrt(both / variance) * exp(-min(exponent, LARGEST_EXPONENT)))
