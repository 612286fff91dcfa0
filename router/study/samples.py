"""Values of one arm, in the units that were assigned to it.

Model     an experiment assigns units (sessions, users), not requests, and requests of one unit are alike; so a unit is
          what is drawn again, and what a variance is made of
Valid     units of one arm; values in any order, NaN left out
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan, nan

import numpy as np
import numpy.typing as npt

from router.study.groups import Floats

Ints = npt.NDArray[np.int64]

REPLICATES_AT_ONCE = 64  # drawn together: enough for arrays to pay, few enough for memory


@dataclass(frozen=True, slots=True)
class Sample:
    """values : without NaN; unit : whose each one is, 0..units-1; both shape (values,)"""

    values: Floats
    unit: Ints
    units: int

    @property
    def mean(self) -> float:
        return float(self.values.mean()) if len(self.values) else nan

    def quantile(self, q: float) -> float:
        return float(np.quantile(self.values, q)) if len(self.values) else nan

    @property
    def mean_variance(self) -> float:
        """Of the mean, units being independent and of random size; NaN with fewer than two.

        Liang and Zeger 1986: the sum over units of the squared sum of what their values are off, over n squared.
        """
        if self.units < 2 or not len(self.values):
            return nan
        return self.squares_around(self.mean) / len(self.values) ** 2 * self.units / (self.units - 1)

    def squares_around(self, mean: float) -> float:
        """Sum over units of the squared sum of what their values are off `mean`."""
        off = np.bincount(self.unit, weights=self.values - mean, minlength=self.units)
        return float(off @ off)


def sample_of(values: Floats, units: Ints) -> Sample:
    """units : whose each value is, any numbers. NaN is left out, and so are units without any other value."""
    known = ~np.isnan(values)
    names, unit = np.unique(units[known], return_inverse=True)
    return Sample(values[known], unit.astype(np.int64).reshape(-1), len(names))


def difference_variance(one: Sample, other: Sample) -> float:
    """Of the difference of two samples' means: the larger of two estimates. NaN where either is unknown.

    Each sample's own variance alone is far too small where it has met nothing rare yet: an arm of thirty units without
    a failure would be sure that it has none. Units of both together, as if there were no difference, know better; but
    they err where the smaller sample is the more uneven one.
    """
    values = len(one.values) + len(other.values)
    if isnan(one.mean_variance) or isnan(other.mean_variance):
        return nan
    mean = (one.mean * len(one.values) + other.mean * len(other.values)) / values
    units = one.units + other.units
    of_unit = (one.squares_around(mean) + other.squares_around(mean)) / (units - 1)
    together = of_unit * sum(sample.units / len(sample.values) ** 2 for sample in (one, other))
    return max(one.mean_variance + other.mean_variance, together)


def replicates(sample: Sample, quantiles: Sequence[float], count: int, rng: np.random.Generator) -> Floats:
    """Mean and quantiles of `count` samples of as many units, drawn anew with replacement.

    Shape (count, 1 + quantiles). A quantile is the smallest value that so much of the sample does not exceed.
    """
    order = np.argsort(sample.values, kind="stable")
    values, unit = sample.values[order], sample.unit[order]
    found = np.empty((count, 1 + len(quantiles)))
    for first, weights in _weights(sample.units, count, rng):
        each = weights[:, unit].astype(np.float64)
        reached = np.cumsum(each, axis=1)
        totals = reached[:, -1]
        rows = slice(first, first + len(weights))
        found[rows, 0] = each @ values / totals
        for place, q in enumerate(quantiles, start=1):
            at = (reached < q * totals[:, None]).sum(axis=1)
            found[rows, place] = values[np.minimum(at, len(values) - 1)]
    return found


def _weights(units: int, count: int, rng: np.random.Generator) -> Iterator[tuple[int, Ints]]:
    """How often each unit is drawn, a few replicates at a time, with the number of the first."""
    for first in range(0, count, REPLICATES_AT_ONCE):
        rows = min(REPLICATES_AT_ONCE, count - first)
        drawn = rng.integers(0, units, size=(rows, units)) + np.arange(rows)[:, None] * units
        yield first, np.bincount(drawn.ravel(), minlength=rows * units).reshape(rows, units)
