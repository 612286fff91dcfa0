"""Whether arms may be compared at all: as many units as intended, and the same mix of prompts.

Model     units of each arm against the share it was meant to get: normal approximation of the binomial. Prompt
          lengths in groups: the largest difference two arms would show by chance is found by dealing the units to the
          arms anew (permutation test of the total variation)
Valid     a handful of arms, hundreds of units
Source    sample ratio: Fabijan et al., KDD 2019
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import erfc, nan, sqrt

import numpy as np

from router.study.groups import Floats
from router.study.samples import Ints

SUSPICIOUS_RATIO = 0.001  # p-value; that far off by chance once in a thousand experiments
SUSPICIOUS_MIX = 0.01
PERMUTATIONS = 999


def ratio_p_value(units: Mapping[str, int], shares: Mapping[str, float]) -> float:
    """Probability of counts as far off as the farthest arm's, were units assigned by `shares`; all arms considered.

    shares : intended, > 0, of any scale. NaN with fewer than two arms.
    """
    total, intended = sum(units.values()), sum(shares.values())
    if len(units) < 2 or not total:
        return nan
    smallest = 1.0
    for arm, count in units.items():
        share = shares[arm] / intended
        off = abs(count - total * share) / sqrt(total * share * (1.0 - share))
        smallest = min(smallest, erfc(off / sqrt(2.0)))
    tests = len(units) if len(units) > 2 else 1  # of two arms the second says the same as the first
    return min(1.0, smallest * tests)


def mix_p_value(groups: Sequence[int], units: Ints, arms: Ints, rng: np.random.Generator) -> float:
    """Probability that two arms' requests fall into `groups` as differently as these do, were units dealt anew.

    groups : of each request, from 0; units : whose each request is, from 0; arms : of each unit, 0 or 1
    NaN when an arm has no unit.
    """
    if not len(arms) or not 0 < int(arms.sum()) < len(arms):
        return nan
    table = np.zeros((len(arms), int(np.max(groups)) + 1))
    np.add.at(table, (units, np.asarray(groups)), 1.0)
    observed = _variation(table, arms)
    extreme = sum(_variation(table, rng.permutation(arms)) >= observed - 1e-12 for _ in range(PERMUTATIONS))
    return (1 + extreme) / (1 + PERMUTATIONS)


def _variation(table: Floats, arms: Ints) -> float:
    """Half of the summed differences of the two arms' shares of requests in each group."""
    ones = arms @ table
    others = table.sum(axis=0) - ones
    if not ones.sum() or not others.sum():
        return 0.0
    return float(np.abs(ones / ones.sum() - others / others.sum()).sum()) / 2.0
