"""Arms of one experiment against each other: differences with intervals, checks of the assignment, a verdict.

Model     every arm is compared with the control. Differences of mean and quantiles have percentile intervals of a
          bootstrap over units; whether the means differ is decided by `sequential.py`, whose interval holds however
          often and whenever one looks, at the looks the file is divided into; it is given the difference as a share of
          the mean of both means, and tau as such a share. A failed check of the assignment (`balance.py`) makes every
          difference void
Valid     requests assigned at random by unit, each unit to one arm; requests whose client chose the policy are left
          out, and so are lines that are there only for what became of their request, and requests before the arms'
          shares last changed
Blind to  what arms do to each other: both run on the same replicas, so a rule that leaves queues behind harms the
          other arm's requests as much as its own, and the difference shows less than changing over would bring
Source    bootstrap: Efron 1979; clusters: Davison and Hinkley 1997, 3.8
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan

import msgspec
import numpy as np

from router.errors import ConfigError
from router.receipts import Receipt
from router.study import groups, sequential
from router.study.balance import SUSPICIOUS_MIX, SUSPICIOUS_RATIO, mix_p_value, ratio_p_value
from router.study.bars import seconds
from router.study.groups import Floats, Mask
from router.study.samples import Ints, Sample, difference_variance, replicates, sample_of

QUANTILES = (0.5, 0.9, 0.99)
STATISTICS = ("mean", *(f"p{100 * q:.0f}" for q in QUANTILES))
LOOKS = 40  # at most, equally far apart in requests
FIRST_LOOK = 100  # requests of the two arms together

METRICS: dict[str, Callable[[Receipt], float | None]] = {
    "first_token": groups.first_token_s,
    "end_to_end": groups.end_to_end_s,
    "per_token": groups.per_token_s,
    "failures": groups.failed,
}
WORDS = {
    "first_token": "first token",
    "end_to_end": "end-to-end time",
    "per_token": "time per output token",
    "failures": "share of failures",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """How to compare.

    alpha : probability of calling a difference that is none, 0..1
    effect : difference the test is sharpest for, as a share of the two means' mean, > 0
    replicates : of the bootstrap; seed : of its draws
    """

    alpha: float = 0.05
    effect: float = 0.1
    replicates: int = 1000
    seed: int = 0


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Arm less control, in the metric's unit; NaN (null in JSON) is unknown. low, high : interval of 1 - alpha"""

    statistic: str
    control: float
    arm: float
    difference: float
    low: float
    high: float


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What was known after so many requests of both arms; the interval holds at all looks together."""

    requests: int
    difference: float
    low: float
    high: float
    p_value: float  # at any time of stopping: the smallest so far


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Means by prompt length."""

    name: str
    control_requests: int
    arm_requests: int
    difference: Difference


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One arm against the control, by one metric."""

    metric: str
    control: str
    arm: str
    control_requests: int
    arm_requests: int
    control_units: int
    arm_units: int
    differences: list[Difference]
    looks: list[Look]
    ratio_p_value: float
    mix_p_value: float
    weighted: Difference  # of the means, each length group weighted by its share of all requests
    buckets: list[Bucket]
    alpha: float
    verdict: str
    before_change: int = 0  # requests left out, since the arms had other shares then

    @property
    def decided(self) -> bool:
        """Whether a difference was shown."""
        return bool(self.looks) and self.looks[-1].p_value <= self.alpha


def comparisons(
    receipts: Sequence[Receipt], metric: str = "first_token", control: str | None = None, rules: Rules | None = None
) -> list[Comparison]:
    """Every arm against the control (by default the one whose name comes first).

    Raises
    ------
    ConfigError : fewer than two arms, or no such arm or metric.
    """
    rules = rules or Rules()
    if metric not in METRICS:
        raise ConfigError(f"there is no metric {metric!r}; there are: {', '.join(METRICS)}")
    of_arms = [one for one in receipts if one.arm is not None and not one.override and one.sampled]
    taking_part = since_last_change(of_arms)
    arms = sorted({one.arm or "" for one in taking_part})
    control = control or (arms[0] if arms else "")
    if len(arms) < 2:
        raise ConfigError(f"two arms are needed, and these receipts have {', '.join(arms) or 'none'}")
    if control not in arms:
        raise ConfigError(f"there is no arm {control!r}; there are: {', '.join(arms)}")
    before = len(of_arms) - len(taking_part)
    return [
        msgspec.structs.replace(_compared(taking_part, metric, control, arm, rules), before_change=before)
        for arm in arms
        if arm != control
    ]


def since_last_change(receipts: Sequence[Receipt]) -> Sequence[Receipt]:
    """Those of the shares in force at the end: other shares move units between arms and are met by other counts.

    receipts : of arms, in order of arrival
    """
    latest: dict[str | None, float | None] = {}
    for index in reversed(range(len(receipts))):
        one = receipts[index]
        if latest.setdefault(one.arm, one.arm_share) != one.arm_share:
            return receipts[index + 1 :]
    return receipts


@dataclass(frozen=True, slots=True)
class Both:
    """Requests of two arms as columns, in order of arrival; each shape (requests,).

    values : of the metric, NaN unknown; units : whose, from 0; is_arm : of the arm, not of the control
    lengths : groups of prompt lengths
    """

    values: Floats
    units: Ints
    is_arm: Mask
    lengths: Ints

    @classmethod
    def of(cls, receipts: Sequence[Receipt], metric: str, control: str, arm: str) -> Both:
        """Those of `receipts` that are of one of the two."""
        own = [one for one in receipts if one.arm in (control, arm)]
        _names, units = np.unique([one.unit or one.request_id for one in own], return_inverse=True)
        return cls(
            values=groups.column(own, METRICS[metric]),
            units=units.reshape(-1).astype(np.int64),
            is_arm=np.array([one.arm == arm for one in own], dtype=np.bool_),
            lengths=np.array([groups.length_group(one.prompt_tokens) for one in own], dtype=np.int64),
        )

    def sample(self, *, of_arm: bool, until: int | None = None, length: int | None = None) -> Sample:
        chosen = self.is_arm == of_arm
        if until is not None:
            chosen &= np.arange(len(chosen)) < until
        if length is not None:
            chosen &= self.lengths == length
        return sample_of(self.values[chosen], self.units[chosen])


def _compared(receipts: Sequence[Receipt], metric: str, control: str, arm: str, rules: Rules) -> Comparison:
    both = Both.of(receipts, metric, control, arm)
    rng = np.random.default_rng(rules.seed)
    one, other = both.sample(of_arm=False), both.sample(of_arm=True)
    buckets = [
        _bucket(both, length, rules, rng)
        for length in sorted(set(both.lengths.tolist()))
        if len(both.sample(of_arm=False, length=length).values) and len(both.sample(of_arm=True, length=length).values)
    ]
    found = Comparison(
        metric=metric,
        control=control,
        arm=arm,
        control_requests=len(one.values),
        arm_requests=len(other.values),
        control_units=one.units,
        arm_units=other.units,
        differences=_differences(one, other, rules, rng),
        looks=looks_at(both, rules),
        ratio_p_value=_ratio(receipts, both, control, arm),
        mix_p_value=_mix(both, rng),
        weighted=_weighted(buckets),
        buckets=buckets,
        alpha=rules.alpha,
        verdict="",
    )
    return msgspec.structs.replace(found, verdict=verdict(found))


def _differences(one: Sample, other: Sample, rules: Rules, rng: np.random.Generator) -> list[Difference]:
    """Of the mean and of all quantiles."""
    seen = [[sample.mean, *(sample.quantile(q) for q in QUANTILES)] for sample in (one, other)]
    low = high = np.full(len(STATISTICS), nan)
    if one.units > 1 and other.units > 1:
        drawn = [replicates(sample, QUANTILES, rules.replicates, rng) for sample in (one, other)]
        ends = np.quantile(drawn[1] - drawn[0], (rules.alpha / 2, 1 - rules.alpha / 2), axis=0)
        low, high = np.where(ends[0] < ends[1], ends, nan)  # values that are all alike say nothing of their spread
    return [
        Difference(
            statistic=name,
            control=seen[0][place],
            arm=seen[1][place],
            difference=seen[1][place] - seen[0][place],
            low=float(low[place]),
            high=float(high[place]),
        )
        for place, name in enumerate(STATISTICS)
    ]


def _bucket(both: Both, length: int, rules: Rules, rng: np.random.Generator) -> Bucket:
    one, other = (both.sample(of_arm=of_arm, length=length) for of_arm in (False, True))
    return Bucket(
        name=groups.length_name(length),
        control_requests=len(one.values),
        arm_requests=len(other.values),
        difference=_differences(one, other, rules, rng)[0],
    )


def _weighted(buckets: Sequence[Bucket]) -> Difference:
    """Difference of the means if both arms had the same mix of lengths; its interval takes groups as independent."""
    sizes = np.array([bucket.control_requests + bucket.arm_requests for bucket in buckets], dtype=np.float64)
    shares = sizes / max(1.0, sizes.sum())
    each = [bucket.difference for bucket in buckets]
    control = float(sum(share * one.control for share, one in zip(shares, each, strict=True)))
    arm = float(sum(share * one.arm for share, one in zip(shares, each, strict=True)))
    halves = [share * (one.high - one.low) / 2 for share, one in zip(shares, each, strict=True)]
    half = float(np.sqrt(sum(part * part for part in halves)))
    return Difference(
        statistic="mean",
        control=control,
        arm=arm,
        difference=arm - control,
        low=arm - control - half,
        high=arm - control + half,
    )


def looks_at(both: Both, rules: Rules) -> list[Look]:
    """The test at every look, from the first on."""
    requests = len(both.values)
    looks: list[Look] = []
    smallest, low, high = 1.0, -inf, inf
    for until in sorted({*np.linspace(min(FIRST_LOOK, requests), requests, LOOKS).astype(int).tolist()}):
        one, other = (both.sample(of_arm=of_arm, until=until) for of_arm in (False, True))
        if min(one.units, other.units) < sequential.LEAST_UNITS:
            continue
        difference, mean = other.mean - one.mean, (abs(one.mean) + abs(other.mean)) / 2 or 1.0
        variance = difference_variance(one, other) / mean**2  # of the difference as a share of the mean
        half = mean * sequential.half_width(variance=variance, tau=rules.effect, alpha=rules.alpha)
        smallest = min(smallest, sequential.p_value(difference / mean, variance=variance, tau=rules.effect))
        low, high = max(low, difference - half), min(high, difference + half)  # it held at every look before, too
        if low > high:  # so it did not, which happens with probability alpha
            low, high = difference - half, difference + half
        looks.append(Look(requests=int(until), difference=difference, low=low, high=high, p_value=smallest))
    return looks


def _ratio(receipts: Sequence[Receipt], both: Both, control: str, arm: str) -> float:
    shares = {control: 1.0, arm: 1.0}
    for one in receipts:
        if one.arm in shares and one.arm_share is not None and one.arm_share > 0.0:
            shares[one.arm] = one.arm_share
    units = {
        name: len(np.unique(both.units[both.is_arm == of_arm])) for name, of_arm in ((control, False), (arm, True))
    }
    return ratio_p_value(units, shares)


def _mix(both: Both, rng: np.random.Generator) -> float:
    arms = np.zeros(both.units.max() + 1, dtype=np.int64)
    arms[both.units] = both.is_arm
    return mix_p_value(both.lengths.tolist(), both.units, arms, rng)


def verdict(found: Comparison) -> str:
    """One sentence that says what may be concluded."""
    what, control, arm = WORDS[found.metric], found.control, found.arm
    if found.ratio_p_value < SUSPICIOUS_RATIO:
        return (
            f"{arm} and {control} cannot be compared: {found.arm_units} to {found.control_units} units is not the share"
            f" they were meant to get (p = {found.ratio_p_value:.2g}), so something else than chance assigned them."
        )
    if not found.control_requests or not found.arm_requests:
        return f"Nothing can be said of {arm} and {control}: {_missing(found)}."
    if not found.looks:
        return (
            f"Nothing can be said of {arm} and {control} yet: at least {sequential.LEAST_UNITS} units of each are"
            f" needed, and there are {found.arm_units} and {found.control_units}."
        )
    last = found.looks[-1]
    between = f"between {_amount(found, last.low)} and {_amount(found, last.high)}"
    if not found.decided and last.low == last.high == 0.0:
        value = _amount(found, found.differences[0].control)
        return (
            f"No difference of {arm} and {control} in {what} has been seen: it is {value} throughout, which does not"
            " say how rare anything else is."
        )
    if not found.decided:
        return (
            f"No difference of {arm} and {control} in mean {what} has been shown: it is {between}"
            f" ({1 - found.alpha:.0%} at any time of looking){_mixed(found)}."
        )
    mean = found.differences[0]
    better = "less" if mean.difference < 0 else "more"
    share = abs(mean.difference / mean.control) if mean.control else nan
    relative = "" if isnan(share) else f", {share:.1%}"
    return (
        f"{arm} has {_amount(found, abs(mean.difference))}{relative} {better} mean {what} than {control}: a difference"
        f" {between} ({1 - found.alpha:.0%} at any time of looking), so {arm if mean.difference < 0 else control}"
        f" is the better{_mixed(found)}."
    )


def _missing(found: Comparison) -> str:
    """Why an arm has no value of the metric."""
    if found.metric == "per_token":
        return (
            "of one no answer says how many tokens it had, which `inject_usage` in the configuration asks of replicas"
        )
    return "one has no answer that ended well"


def _mixed(found: Comparison) -> str:
    if not found.mix_p_value < SUSPICIOUS_MIX:
        return ""
    return (
        f"; but the two had prompts of different lengths (p = {found.mix_p_value:.2g}): with the same mix the"
        f" difference would be {_amount(found, found.weighted.difference)}"
    )


def before_change(found: Comparison) -> str:
    """What is said of requests that were left out because the arms had other shares then."""
    return f"Requests before the arms' shares last changed are left out: {found.before_change}"


def _amount(found: Comparison, value: float) -> str:
    return amount(found.metric, value)


def amount(metric: str, value: float) -> str:
    """A value of a metric with its unit.

    >>> amount("first_token", -0.25), amount("failures", 0.013)
    ('-250 ms', '1.3 %')
    """
    if isnan(value):
        return "-"
    return f"{value * 100:.2g} %" if metric == "failures" else seconds(value)
