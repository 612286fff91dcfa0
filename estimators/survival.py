"""Whether copies of blocks in one tier of one holder are still there, by the time since they were last used.

Model     P(there at age a) = c S(a)
            c     the directory told the truth about the copy; Beta
            S(a)  not evicted since: one hazard for each age band, Gamma each, so that S(a) is the product over bands
                  of (rate / (rate + time in band)) ** shape: the mean over what the hazards can be
          A hit counts for c and exposes every band up to its age. A miss is shared out over its causes (never there,
          evicted in band j) by their present probabilities: one step of expectation maximisation, closed form.
          Each observation fades the past. Once a run of outcomes is far likelier if hits (or misses) are four times
          rarer than believed, most of what was learned before that run is dropped
Valid     ages in seconds, >= 0; NaN, unknown, reads as the mean over the ages seen
Blind to  which block: all copies share the curve
Source    piecewise exponential survival from current-status data: Sun 2006, The Statistical Analysis of
          Interval-censored Failure Time Data; change of the odds: Page 1954 (CUSUM)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, log, log1p
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.ranges import require
from estimators.stored import number, weights

Array = npt.NDArray[np.float64]

# Start values, not measurements; small, so that about thirty hits outweigh them.
PRIOR_TRUE, PRIOR_FALSE = 1.9, 0.1  # Beta of c: 0.95 with the weight of two observations
PRIOR_EVICTIONS = 0.1  # Gamma shape of each hazard; its rate is this times the prior lifetime

BAND_STARTS_S = (0.0, 2.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0)
BAND_ENDS_S = (*BAND_STARTS_S[1:], inf)
BANDS = len(BAND_STARTS_S)
BAND_TIMES_S = tuple(zip(BAND_STARTS_S, BAND_ENDS_S, strict=True))

# Ages the curve is tabulated at, two an octave to 36 h; an age in between reads the older one, any beyond the last.
AGES_S: Array = 0.0625 * 2.0 ** (np.arange(43) / 2.0)
OLDEST_S = float(AGES_S[-1])
AGE_EDGES_S: Array = np.append(AGES_S, inf)
COLUMNS = len(AGE_EDGES_S) + 1  # the last is for an unknown age: NaN sorts behind inf
USUAL_AGE_S = 64.0  # stands in for an unknown age

RARER = 4.0  # factor on hits, or on misses, that the alarm looks for
ALARM = log(3e4)  # a false alarm in about 30,000 observations (Page's bound); it costs memory
LARGEST_STEP = 3.0  # of one observation: it takes four in a row at least
KEPT = 0.02  # of what was learned before the run that raised an alarm


def _table_time_s() -> Array:
    """Seconds a copy of each tabulated age has spent in each band, shape (ages, bands)."""
    ages_s = np.append(AGES_S, OLDEST_S)[:, None]
    return np.asarray(np.clip(ages_s - np.array(BAND_STARTS_S), 0.0, np.subtract(BAND_ENDS_S, BAND_STARTS_S)))


TABLE_TIME_S = _table_time_s()

# Places in the list of counts; evictions and exposure have one for each band.
TRUE, FALSE, HITS, MISSES = range(4)
EVICTIONS = slice(4, 4 + BANDS)
EXPOSURE_S = slice(4 + BANDS, 4 + 2 * BANDS)
COUNTS = EXPOSURE_S.stop


class SurvivalCurve:
    """One tier of one holder.

    lifetime_s : prior mean time to eviction, > 0
    memory : observations looked back on, >= 1

    seen : weight of the observations, faded; >= 0. Alarms do not lower it
    """

    __slots__ = ("_counts", "_memory", "_prior_rate_s", "_watches", "seen")

    def __init__(self, *, lifetime_s: float, memory: float) -> None:
        require(0.0 < lifetime_s < inf, "lifetime_s", lifetime_s)
        require(1.0 <= memory < inf, "memory", memory)
        self._prior_rate_s = PRIOR_EVICTIONS * lifetime_s
        self._memory = memory
        self._counts = [0.0] * COUNTS
        self._watches = (_Watch(1.0 / RARER), _Watch(RARER))
        self.seen = 0.0

    def at(self, age_s: float) -> float:
        """P(there at `age_s`), 0..1; NaN: the mean over the ages seen."""
        if age_s != age_s:
            usual, prior = self.at(USUAL_AGE_S), PRIOR_TRUE + PRIOR_FALSE
            hits, misses = self._counts[HITS], self._counts[MISSES]
            return (hits + prior * usual) / (hits + misses + prior)
        survival = self._truth()
        for passed, _ in self._bands(age_s):
            survival *= passed
        return survival

    def table(self) -> Array:
        """`at` for each of `AGE_EDGES_S` and for an unknown age, shape (COLUMNS,)."""
        shape = np.array(self._counts[EVICTIONS]) + PRIOR_EVICTIONS
        rate_s = np.array(self._counts[EXPOSURE_S]) + self._prior_rate_s
        curve = np.empty(COLUMNS)
        curve[:-1] = self._truth() * np.exp(-(np.log1p(TABLE_TIME_S / rate_s) @ shape))
        curve[-1] = self.at(float("nan"))
        return curve

    def learn(self, *, share: float, weight: float, age_s: float) -> None:
        """`weight` (> 0) observations of copies last used `age_s` ago, of which `share` (0..1) were there."""
        bands = self._bands(USUAL_AGE_S if age_s != age_s else age_s)
        truth = believed = self._truth()
        evicted = []
        for passed, _ in bands:
            evicted.append(believed * (1.0 - passed))
            believed *= passed
        suspicions = [watch.sees(self._counts, believed, share=share, weight=weight) for watch in self._watches]
        self.fade(exp(-weight / self._memory))

        counts = self._counts
        hit, missed = weight * share, weight * (1.0 - share)
        per_miss = missed / max(1.0 - believed, 1e-12)
        passed_on = hit + per_miss * (truth - believed)  # all that were there at first
        counts[TRUE] += passed_on
        counts[FALSE] += per_miss * (1.0 - truth)
        counts[HITS] += hit
        counts[MISSES] += missed
        eviction, exposure, prior_rate_s = EVICTIONS.start, EXPOSURE_S.start, self._prior_rate_s
        for (_, time_s), gone in zip(bands, evicted, strict=True):
            blame = per_miss * gone
            passed_on -= blame
            # When in the band it went: half-way, or after a mean lifetime where that is sooner.
            lifetime_s = (counts[exposure] + prior_rate_s) / (counts[eviction] + PRIOR_EVICTIONS)
            went_s = time_s / 2.0 if time_s / 2.0 < lifetime_s else lifetime_s
            counts[eviction] += blame
            counts[exposure] += passed_on * time_s + blame * went_s
            eviction += 1
            exposure += 1
        self.seen += weight
        if max(suspicions) >= ALARM:
            self._forget_before(self._watches[suspicions.index(max(suspicions))])

    def fade(self, left: float) -> None:
        """Keep this part of what was learned, 0..1."""
        self.seen *= left
        self._counts = [count * left for count in self._counts]
        for watch in self._watches:
            watch.left *= left

    def state(self) -> dict[str, Any]:
        """What was learned, as plain numbers and lists."""
        counts = self._counts
        return {
            "true": counts[TRUE],
            "false": counts[FALSE],
            "hits": counts[HITS],
            "misses": counts[MISSES],
            "seen": self.seen,
            "evictions": counts[EVICTIONS],
            "exposure_s": counts[EXPOSURE_S],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; `ValueError` for anything else, and then nothing has changed."""
        names = ("true", "false", "hits", "misses", "seen")
        *single, seen = (number(state.get(name), name, least=0.0) for name in names)
        bands = [weights(state.get(name), name, BANDS) for name in ("evictions", "exposure_s")]
        self._counts = [*single, *bands[0], *bands[1]]
        self.seen = seen
        for watch in self._watches:
            watch.suspicion = 0.0

    def _truth(self) -> float:
        true, false = self._counts[TRUE] + PRIOR_TRUE, self._counts[FALSE] + PRIOR_FALSE
        return true / (true + false)

    def _bands(self, age_s: float) -> list[tuple[float, float]]:
        """(probability to pass it, seconds in it) for each band that a copy of this age has entered."""
        age_s = min(age_s, OLDEST_S)
        counts, prior_rate_s, bands = self._counts, self._prior_rate_s, []
        eviction, exposure = EVICTIONS.start, EXPOSURE_S.start
        for start_s, end_s in BAND_TIMES_S:
            if age_s <= start_s:
                break
            time_s = (age_s if age_s < end_s else end_s) - start_s
            shape, rate_s = counts[eviction] + PRIOR_EVICTIONS, counts[exposure] + prior_rate_s
            bands.append((exp(-shape * log1p(time_s / rate_s)), time_s))
            eviction += 1
            exposure += 1
        return bands

    def _forget_before(self, alarmed: _Watch) -> None:
        """Drop most of what was learned before the run that `alarmed` saw."""
        dropped = (1.0 - KEPT) * alarmed.left
        pairs = zip(self._counts, alarmed.before, strict=True)
        self._counts = [max(0.0, count - dropped * before) for count, before in pairs]
        for watch in self._watches:
            watch.suspicion = 0.0


class _Watch:
    """Suspicion that hits have become rarer (factor < 1) or misses have (> 1), and what was learned before it began.

    before, left : counts at that moment, and the part of them that fading has left
    """

    __slots__ = ("_factor", "before", "left", "suspicion")

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.suspicion = 0.0
        self.before: list[float] = [0.0] * COUNTS
        self.left = 1.0

    def sees(self, counts: list[float], believed: float, *, share: float, weight: float) -> float:
        """Suspicion after this observation; `counts` are those without it."""
        if self.suspicion == 0.0:
            self.before, self.left = counts, 1.0
        believed = min(max(believed, 1e-6), 1.0 - 1e-6)
        other = believed * self._factor if self._factor < 1.0 else 1.0 - (1.0 - believed) / self._factor
        step = share * log(other / believed) + (1.0 - share) * log((1.0 - other) / (1.0 - believed))
        self.suspicion = max(0.0, self.suspicion + weight * max(-LARGEST_STEP, min(LARGEST_STEP, step)))
        return self.suspicion
