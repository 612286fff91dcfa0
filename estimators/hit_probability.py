"""Whether a copy is still there when a request's turn comes, learned from what engines reused.

Model     survival.py for each (tier, replica) and for the fleet, which sees every observation. A replica is read as
          a mixture of its own curve and the fleet's, by the weight of its own evidence; both fade with time towards
          the prior. Evidence comes at three levels with falling weight, and a weaker one is passed over while a
          stronger one keeps coming:
            reported   the answer's count of reused tokens
            counters   growth of a replica's prefix cache counters against what was expected in that window
            residual   the first token's time alone: posterior of hit against miss under a robust likelihood
Valid     ages in seconds since a copy was last used or announced, >= 0, or NaN where unknown
Blind to  why a block was not reused: eviction, a lost event and an engine that refuses to reuse look alike
Source    levels and weights are ours; likelihood: Student t with 4 degrees of freedom (Lange et al. 1989)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from math import erf, exp, inf, isfinite, log, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.counter_window import CounterWindow
from estimators.ranges import require
from estimators.stored import mapping, weights
from estimators.survival import (
    AGE_EDGES_S,
    PRIOR_FALSE,
    PRIOR_TRUE,
    SurvivalCurve,
)
from estimators.tiers import Tier
from estimators.view import is_nobody

Array = npt.NDArray[np.float64]

TIERS: tuple[Tier, ...] = (Tier.HBM, Tier.HOST, Tier.DISK, Tier.REMOTE)
TIER_ROW: dict[Tier, int] = {tier: row for row, tier in enumerate(TIERS)}

# Prior mean time to an eviction nobody announced: start values in the order of how long each tier keeps its blocks
# under load (AI Infra textbook, section 9.5.2), not measurements.
PRIOR_LIFETIME_S: dict[Tier, float] = {Tier.HBM: 600.0, Tier.HOST: 3600.0, Tier.DISK: 86400.0, Tier.REMOTE: 86400.0}


class Evidence(Enum):
    """What a hit probability rests on, strongest first. A closed set: it becomes receipt text."""

    REPORTED = "reported"  # the answer's own count of reused tokens
    COUNTERS = "counters"  # the replica's prefix cache counters
    RESIDUAL = "residual"  # only when the first token came
    NONE = "none"  # the prior, or the fleet


LEVELS: tuple[Evidence, ...] = (Evidence.REPORTED, Evidence.COUNTERS, Evidence.RESIDUAL)
# Of one request. Counters mix requests and their windows do not match ours; a time is only indirect.
WEIGHT: dict[Evidence, float] = {Evidence.REPORTED: 1.0, Evidence.COUNTERS: 0.5, Evidence.RESIDUAL: 0.25}
FRESH = 1.0  # weight from which a level counts as evidence: one report, two counted requests, four times
MOST_FRESH = 4.0  # weight a level is remembered with at most, so that one that stopped is soon replaced
PASSED_OVER = 0.9  # what a request with only weaker evidence leaves of the stronger levels

OWN_AFTER = 2.0  # weight of own evidence at which it counts as much as the fleet's
COUNTED_AT_ONCE = 8  # requests a counter window must hold, so that those across its borders matter less
MOST_AT_ONCE = 32.0  # requests a counter window may count for, however many it held
STILL = 0.999  # a curve faded by less is read as it is
OBSERVATIONS_REFRESH = 8  # replicas, on average, whose mixture with the fleet is renewed for one observation


def hit_posterior(*, prior: float, observed_s: float, hit_s: float, miss_s: float, scale: float) -> float:
    """Probability that it was a hit, given when the first token came.

    prior : probability of a hit before, 0..1
    observed_s, hit_s, miss_s : first token seen, predicted for a hit and for a miss, > 0
    scale : of log(observed / predicted), > 0; the tails are heavy, so a wild time says little

    >>> hit_posterior(prior=0.5, observed_s=1.0, hit_s=0.5, miss_s=2.0, scale=0.2)
    0.5
    """
    hit, miss = (_density(log(observed_s / expected_s) / scale) for expected_s in (hit_s, miss_s))
    return prior * hit / (prior * hit + (1.0 - prior) * miss)


def _density(z: float) -> float:
    return float((1.0 + z * z / 4.0) ** -2.5)


class _Copies:
    """One tier of one replica, or of the fleet: its curve, and the weight of each level as of `heard_s`."""

    __slots__ = ("curve", "heard_s", "levels")

    def __init__(self, curve: SurvivalCurve) -> None:
        self.curve = curve
        self.levels = [0.0] * len(LEVELS)
        self.heard_s = -inf

    def fade(self, left: float) -> None:
        self.curve.fade(left)
        self.levels = [weight * left for weight in self.levels]

    def outranked(self, rank: int, count: float) -> bool:
        """Whether a stronger level than `rank` speaks here; each of `count` requests without it wears it down."""
        stronger = self.levels[:rank]
        self.levels[:rank] = [weight * PASSED_OVER**count for weight in stronger]
        return any(weight >= FRESH for weight in stronger)

    def state(self) -> dict[str, Any]:
        return {"curve": self.curve.state(), "levels": list(self.levels)}

    def restore(self, state: Mapping[str, Any], now_s: float) -> None:
        levels = weights(state.get("levels"), "levels", len(LEVELS))
        self.curve.restore(mapping(state.get("curve"), "curve"))
        self.levels, self.heard_s = levels, now_s


class HitProbability:
    """Owns what was learned. Arrays have shape (rows,) or (tiers, rows), in the order of `names` and `TIERS`.

    names : of the replicas, in the order of the fleet view, all different
    memory : observations the curve of one (tier, replica) looks back on, >= 1
    memory_s : seconds after which evidence counts 1/e, > 0
    """

    def __init__(self, names: Sequence[str], *, memory: float = 200.0, memory_s: float = 1800.0) -> None:
        require(1.0 <= memory < inf, "memory", memory)
        require(0.0 < memory_s < inf, "memory_s", memory_s)
        require(len(set(names)) == len(names), "names", names, "not all different")
        self.names = tuple(names)
        self._memory = memory
        self._memory_s = memory_s
        rows = len(names)
        self._copies: list[list[_Copies | None]] = [[None] * rows for _ in TIERS]
        self._fleet = [self._untouched(tier) for tier in range(len(TIERS))]
        self._windows: dict[tuple[int, int], CounterWindow] = {}
        self._prior = np.stack([copies.curve.table() for copies in self._fleet])
        self._unknown = self._prior[:, -1].tolist()  # at an unknown age
        self._line = self._prior.copy()  # the fleet's curves, mixed with the prior
        self._own = np.repeat(self._prior[..., None], rows, axis=2)  # (tiers, ages, rows): read age by age
        self._read = self._own.copy()  # own curves mixed with the fleet's: what is looked up
        self._seen = np.zeros((len(TIERS), rows))  # weight of a replica's own observations, as of `_heard_s`
        self._heard_s = np.full((len(TIERS), rows), -inf)
        self._stale = [0] * len(TIERS)  # observations since all replicas were mixed anew
        self._row_offset = np.arange(rows)

    def survival(self, tier: Tier, age_s: Array | None, now_s: float) -> Array:
        """Probability that a copy last used `age_s` ago is there, 0..1; shapes (rows,). NaN: age unknown.

        None: no age is known. What comes back is lent, not to be written.
        """
        index = TIER_ROW[tier]
        prior: Array | float
        if age_s is None:
            found, prior = self._read[index, -1], self._unknown[index]
        else:
            column = AGE_EDGES_S.searchsorted(age_s)
            found = self._read[index].take(column * len(self.names) + self._row_offset)
            prior = self._prior[index].take(column)
        left = self._left(index, now_s)
        return np.asarray(found if left == 1.0 else left * found + (1.0 - left) * prior)

    def uncertainty(self, tier: Tier, survival: Array, now_s: float) -> Array:
        """Standard deviation of what `survival` returned, shape (rows,); widest where there is no evidence."""
        index = TIER_ROW[tier]
        own = self._seen[index] * np.exp(np.minimum(self._heard_s[index] - now_s, 0.0) / self._memory_s)
        fleet = self._fleet[index]
        # However much the fleet has seen, it stands in for one replica with a bounded weight.
        pooled = min(fleet.curve.seen * self._faded(fleet.heard_s, now_s), OWN_AFTER)
        weight = PRIOR_TRUE + PRIOR_FALSE + pooled + own
        return np.asarray(np.sqrt(survival * (1.0 - survival) / (1.0 + weight)))

    def evidence(self, row: int, tier: Tier, now_s: float) -> Evidence:
        """The strongest level that is still fresh for this replica and tier."""
        copies = self._copies[TIER_ROW[tier]][row]
        if copies is None:
            return Evidence.NONE
        left = self._faded(copies.heard_s, now_s)
        fresh = (level for level, weight in zip(LEVELS, copies.levels, strict=True) if weight * left >= FRESH)
        return next(fresh, Evidence.NONE)

    def reported(
        self, row: int, tier: Tier, *, expected_blocks: float, reported_blocks: float, age_s: float, now_s: float
    ) -> None:
        """An answer said how many leading blocks it reused.

        expected_blocks : leading blocks that should have been reused from this tier, > 0
        reported_blocks : reused, >= 0; as many or more: all survived; fewer: the chain broke there, and counts
            as that share of a hit, which keeps the expected reuse right
        """
        require(0.0 < expected_blocks < inf, "expected_blocks", expected_blocks)
        require(0.0 <= reported_blocks < inf, "reported_blocks", reported_blocks)
        require(not age_s < 0.0, "age_s", age_s)
        share = min(1.0, reported_blocks / expected_blocks)
        self._observe(row, tier, Evidence.REPORTED, [(share, 1.0, age_s)], known=1.0, now_s=now_s)

    def expected(self, row: int, tier: Tier, *, reuse_tokens: float, prompt_tokens: float, age_s: float) -> None:
        """A request has started there, so its counters include it: to be told at its first token.

        reuse_tokens : tokens it should have reused from this tier, >= 0, <= prompt_tokens
        """
        self._window(row, tier).expect(reuse_tokens=reuse_tokens, prompt_tokens=prompt_tokens, age_s=age_s)

    def counted(self, row: int, tier: Tier, *, hit_tokens: float, query_tokens: float, now_s: float) -> None:
        """The counters of this tier of this replica grew by so many tokens, both >= 0, since they were last told."""
        window = self._window(row, tier)
        window.count(hit_tokens=hit_tokens, query_tokens=query_tokens)
        if 0 < window.requests < COUNTED_AT_ONCE:
            return
        index = TIER_ROW[tier]
        del self._windows[index, row]  # also when nothing of ours was in it: others' tokens must not pile up
        ages_s = window.ages_s
        if ages_s:
            shares, known = window.shares([self._believed(index, row, age_s, now_s) for age_s in ages_s])
            counts = [window.requests * part for part in window.parts]
            outcomes = list(zip(shares, counts, ages_s, strict=True))
            self._observe(row, tier, Evidence.COUNTERS, outcomes, known=known, now_s=now_s)

    def timed(
        self,
        row: int,
        tier: Tier,
        *,
        observed_s: float,
        hit_s: float,
        miss_s: float,
        scale: float,
        age_s: float,
        now_s: float,
    ) -> None:
        """A first token came after `observed_s`; a hit should have taken `hit_s`, a miss `miss_s`; all > 0.

        scale : of log(observed / predicted), > 0. The closer the two predictions on that scale, the less it counts.
        """
        for name, value in (("observed_s", observed_s), ("hit_s", hit_s), ("miss_s", miss_s), ("scale", scale)):
            require(0.0 < value < inf, name, value)
        require(not age_s < 0.0, "age_s", age_s)
        prior = self._believed(TIER_ROW[tier], row, age_s, now_s)
        share = hit_posterior(prior=prior, observed_s=observed_s, hit_s=hit_s, miss_s=miss_s, scale=scale)
        # Total variation between two normals this far apart: 0 the same, 1 never mistaken; squared, as variances go.
        known = erf(abs(log(miss_s / hit_s)) / scale / sqrt(8.0)) ** 2
        self._observe(row, tier, Evidence.RESIDUAL, [(share, 1.0, age_s)], known=known, now_s=now_s)

    def forget(self, row: int) -> None:
        """The replica restarted: what was learned of its tiers is void. The store is outside it and stays."""
        for tier, index in TIER_ROW.items():
            if tier is not Tier.REMOTE:
                self._copies[index][row] = None
                self._windows.pop((index, row), None)
                self._seen[index, row] = 0.0
                self._heard_s[index, row] = -inf
                self._read[index, :, row] = self._line[index]

    def renew(self, row: int, name: str) -> None:
        """`row` is that of another replica, called `name`: it is read as the fleet until it has evidence of its own."""
        self.name(row, name)
        self.forget(row)
        index = TIER_ROW[Tier.REMOTE]
        self._copies[index][row] = None
        self._windows.pop((index, row), None)
        self._seen[index, row] = 0.0
        self._heard_s[index, row] = -inf
        self._read[index, :, row] = self._line[index]
        self._own[:, :, row] = self._prior

    def name(self, row: int, name: str) -> None:
        """`row` is called so from now on."""
        require(name not in self.names[:row] + self.names[row + 1 :], "name", name, "that of another row")
        self.names = (*self.names[:row], name, *self.names[row + 1 :])

    def state_of(self, row: int, now_s: float) -> dict[str, Any]:
        """What was learned of one replica, as plain values, faded to `now_s`."""
        copies_of = {tier: self._copies[index][row] for tier, index in TIER_ROW.items()}
        return {tier.value: self._stored(copies, now_s) for tier, copies in copies_of.items() if copies}

    def restore_row(self, row: int, state: Mapping[str, Any], *, now_s: float, age_s: float) -> None:
        """Take over what `state_of` returned `age_s` (>= 0) ago. Raises ValueError for anything else, as `restore`."""
        require(0.0 <= age_s < inf, "age_s", age_s)
        for index, copies in self._restored(state, now_s, exp(-age_s / self._memory_s)).items():
            self._copies[index][row] = copies
            self._publish(index, row, copies)
            self._mix_one(index, row)

    def state(self, now_s: float) -> dict[str, Any]:
        """What was learned, as plain values, faded to `now_s`; replicas go by name."""
        replicas = {name: self.state_of(row, now_s) for row, name in enumerate(self.names) if not is_nobody(name)}
        fleet = {tier.value: self._stored(self._fleet[index], now_s) for tier, index in TIER_ROW.items()}
        return {"replicas": replicas, "fleet": fleet}

    def restore(self, state: Mapping[str, Any], *, now_s: float, age_s: float = 0.0) -> None:
        """Take over what `state` returned `age_s` (>= 0) ago; replicas it does not name stay as they are.

        Raises
        ------
        ValueError : it is nothing that `state` returned; then nothing has changed.
        """
        require(0.0 <= age_s < inf, "age_s", age_s)
        left = exp(-age_s / self._memory_s)
        fleet = self._restored(state.get("fleet"), now_s, left)
        replicas = mapping(state.get("replicas"), "replicas")
        restored = {name: self._restored(tiers, now_s, left) for name, tiers in replicas.items()}
        for index, copies in fleet.items():
            self._fleet[index] = copies
        for row, name in enumerate(self.names):
            for index, copies in restored.get(name, {}).items():
                self._copies[index][row] = copies
                self._publish(index, row, copies)
        for index in range(len(TIERS)):
            self._mix(index, now_s)

    def _untouched(self, index: int) -> _Copies:
        return _Copies(SurvivalCurve(lifetime_s=PRIOR_LIFETIME_S[TIERS[index]], memory=self._memory))

    def _window(self, row: int, tier: Tier) -> CounterWindow:
        require(0 <= row < len(self.names), "row", row)
        return self._windows.setdefault((TIER_ROW[tier], row), CounterWindow())

    def _faded(self, since_s: float, now_s: float) -> float:
        return exp(min(0.0, since_s - now_s) / self._memory_s)

    def _left(self, index: int, now_s: float) -> float:
        """What time has left of the curves as they are read; 1 while next to nothing has faded."""
        heard_s = self._fleet[index].heard_s
        if heard_s == -inf:
            return 1.0
        left = self._faded(heard_s, now_s)
        return 1.0 if left >= STILL else left

    def _believed(self, index: int, row: int, age_s: float, now_s: float) -> float:
        column = int(AGE_EDGES_S.searchsorted(age_s))
        prior = float(self._prior[index, column])
        return prior + self._left(index, now_s) * (float(self._read[index, column, row]) - prior)

    def _observe(
        self,
        row: int,
        tier: Tier,
        level: Evidence,
        outcomes: Sequence[tuple[float, float, float]],
        *,
        known: float,
        now_s: float,
    ) -> None:
        """Outcomes of some requests, each (share that hit, requests, age in seconds), `known` (0..1) that well."""
        require(0 <= row < len(self.names), "row", row)
        require(isfinite(now_s), "now_s", now_s)
        index, rank = TIER_ROW[tier], LEVELS.index(level)
        copies = self._copies[index][row] or self._untouched(index)
        self._copies[index][row] = copies
        requests = sum(count for _, count, _ in outcomes)
        if copies.outranked(rank, requests) or known <= 0.0:
            return
        weight = WEIGHT[level] * known * min(1.0, MOST_AT_ONCE / requests)
        for holder in (copies, self._fleet[index]):
            holder.fade(self._faded(holder.heard_s, now_s))
            holder.heard_s = max(holder.heard_s, now_s)
            holder.levels[rank] = min(MOST_FRESH, holder.levels[rank] + weight * requests)
            for share, count, age_s in outcomes:
                holder.curve.learn(share=share, weight=weight * count, age_s=age_s)
        self._publish(index, row, copies)
        self._stale[index] += 1
        if self._stale[index] * OBSERVATIONS_REFRESH >= len(self.names):
            self._mix(index, now_s)
        else:
            self._mix_one(index, row)

    def _publish(self, index: int, row: int, copies: _Copies) -> None:
        self._own[index, :, row] = copies.curve.table()
        self._seen[index, row] = copies.curve.seen
        self._heard_s[index, row] = copies.heard_s

    def _mix(self, index: int, now_s: float) -> None:
        """Mix every replica's curve with the fleet's as it is now, and that with the prior."""
        fleet, prior = self._fleet[index], self._prior[index]
        share = fleet.curve.seen / (fleet.curve.seen + OWN_AFTER)
        line = prior + share * (fleet.curve.table() - prior)
        seen = self._seen[index] * np.exp(np.minimum(self._heard_s[index] - now_s, 0.0) / self._memory_s)
        self._line[index] = line
        self._read[index] = line[:, None] + seen / (seen + OWN_AFTER) * (self._own[index] - line[:, None])
        self._stale[index] = 0

    def _mix_one(self, index: int, row: int) -> None:
        seen, line = self._seen[index, row], self._line[index]
        self._read[index, :, row] = line + seen / (seen + OWN_AFTER) * (self._own[index, :, row] - line)

    def _stored(self, copies: _Copies, now_s: float) -> dict[str, Any]:
        """As `state` would be after fading a copy: reading changes nothing."""
        copy = self._untouched(0)
        copy.restore(copies.state(), now_s)
        copy.fade(self._faded(copies.heard_s, now_s))
        return copy.state()

    def _restored(self, tiers: object, now_s: float, left: float) -> dict[int, _Copies]:
        restored = {}
        for value, stored in mapping(tiers, "tiers").items():
            require(value in {tier.value for tier in TIERS}, "tier", value, "unknown")
            index = TIER_ROW[Tier(value)]
            restored[index] = copies = self._untouched(index)
            copies.restore(mapping(stored, "tier"), now_s)
            copies.fade(left)
        return restored
