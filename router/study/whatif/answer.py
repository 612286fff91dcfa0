"""The mean first token another rule would have given, and how sure that is.

Model     queues are simulated anew, once with the placements as they were and once with those of the rule; the answer
          is what was observed plus the difference of the two, so that what the model gets wrong on both cancels. One
          factor on prefill times makes the first simulation's mean what was observed; stretches of the receipts give
          it apart, which says how well it is known. Where receipts were explored (probability below 1), requests that
          the rule would have put where they went, weighted by 1 over that probability, say how far the model is off
          for just such placements, and the answer is shifted by that (doubly robust: right if either the model or the
          probabilities are)
          The interval is log-normal, of three parts: the factor, ties and block numbers, drawn and played anew; what
          the model leaves unexplained, by stretches of time; and a share of the answer, larger the farther it is from
          what was observed, for what is wrong with the model only there
Valid     streams answered well, from receipts that name what was possible; hundreds of requests. A replica serves the
          models whose requests it was a candidate of. The shares were set on the simulated engines (see
          docs/experiments.md), whose caches did not overflow
Blind to  clients that would have asked at other times had they been answered sooner
Source    Dudik, Langford, Li, ICML 2011 (doubly robust); Swaminathan and Joachims 2015 (self-normalised weights)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, nan, sqrt
from statistics import NormalDist

import msgspec
import numpy as np

from router.config import PolicyConfig
from router.errors import ConfigError
from router.fleet import Fleet
from router.receipts import Receipt
from router.rules import label
from router.study.groups import Floats, Mask
from router.study.whatif.played import Asked, Played, by_rule, fleet_in, placed, timed
from router.study.whatif.prompts import chains_of, renumbered
from router.study.whatif.service import Decoded, fitted, with_rates

LEAST_REQUESTS = 50
STRETCHES = 8  # of the receipts, for what is known apart
NORMAL_90 = 1.645
LEAST_FACTOR_DEVIATION = 0.02  # of the factor, relative: no model of a service time is better known
MODEL_SHARE = 0.15  # of the logarithm of answer over observed, one standard deviation: see above
LEVEL_SHARE = 0.1  # of the answer, likewise
LARGEST_DEVIATION = 2.0  # of the logarithm: beyond it nothing is known
LEAST_SHARE = 0.01  # of the observed mean: no rule is believed to be faster than that
EXPLORED_SHARE = 0.95  # of requests left to chance in part, from which on probabilities allow the shift
ENOUGH_WEIGHTS = 30.0  # effective number of requests that agree, for the shift
FACTORS = (0.2, 5.0)  # the factor is looked for between
HALVINGS = 12  # of that range: to a thousandth


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; NaN (null in JSON) is unknown.

    policy : the rule, with its settings where it was given some
    observed_s : mean first token as it was; mean_s : with the rule, within low_s to high_s with probability 0.9
    method : "model", or "doubly robust" where exploration shifted it
    agrees : share of requests that the rule puts where they went
    placed : share of requests by replica, with the rule; reused, reused_before : of prompt tokens
    """

    policy: str
    requests: int
    observed_s: float
    mean_s: float
    low_s: float
    high_s: float
    method: str
    agrees: float
    refused: int
    factor: float
    placed: dict[str, float]
    reused: float
    reused_before: float

    @property
    def sentence(self) -> str:
        """The answer in words."""
        low, high = self.low_s - self.observed_s, self.high_s - self.observed_s
        which = "a shorter" if high < 0 else "a longer" if low > 0 else "neither clearly a shorter nor a longer"
        return f"{self.policy} would have given {which} mean first token."


def what_if(
    receipts: Sequence[Receipt],
    policy: PolicyConfig,
    *,
    fleet: Fleet | None = None,
    draws: int = 8,
    seed: int = 0,
    on_drawn: Callable[[], None] = lambda: None,
) -> Answer:
    """What `policy` would have done with the requests of `receipts`, in order of arrival.

    fleet : they ran on; None: nothing is known of it but names
    draws : of the factor, of ties and of the numbers of blocks, >= 2; on_drawn hears of each that was played

    Raises
    ------
    ConfigError : too few usable receipts, or there is no such policy.
    """
    if not all(receipt.sampled for receipt in receipts):
        raise ConfigError("these receipts leave requests out (receipts: others: none), so no queue can be played again")
    requests = usable(receipts)
    if len(requests) < LEAST_REQUESTS:
        raise ConfigError(
            f"{len(requests)} of {len(receipts)} receipts can be played again (streams answered well, with their"
            f" candidates); at least {LEAST_REQUESTS} are needed"
        )
    model = _Model(requests, fleet)
    observed_s = float(model.observed_s.mean())
    runs = []
    for draw, factor in enumerate(model.factors(draws)):
        runs.append(model.run(policy, factor, seed + draw))
        on_drawn()
    shifts = [model.shift(run) for run in runs]
    each_s = [
        max(LEAST_SHARE * observed_s, observed_s + run.difference_s + shift)
        for run, shift in zip(runs, shifts, strict=True)
    ]
    mean_s = float(np.mean(each_s))
    deviation = sqrt(
        float(np.var(np.log(each_s), ddof=1))
        + (model.unexplained_s / observed_s) ** 2
        + (MODEL_SHARE * log(mean_s / observed_s)) ** 2
        + LEVEL_SHARE**2
    )
    width = exp(NORMAL_90 * min(deviation, LARGEST_DEVIATION))
    middle = runs[len(runs) // 2]
    return Answer(
        policy=label(policy),
        requests=len(requests),
        observed_s=observed_s,
        mean_s=mean_s,
        low_s=mean_s / width,
        high_s=mean_s * width,
        method="doubly robust" if model.explored and any(shifts) else "model",
        agrees=float(np.mean(middle.before.row == middle.after.row)),
        refused=int(np.sum(middle.after.row < 0)),
        factor=model.factor,
        placed={name: float(np.mean(middle.after.row == row)) for row, name in enumerate(model.names)},
        reused=float(middle.after.reused_tokens.sum()) / model.tokens,
        reused_before=float(middle.before.reused_tokens.sum()) / model.tokens,
    )


def usable(receipts: Sequence[Receipt]) -> list[Asked]:
    """What can be played again, in order of arrival."""
    kept = [
        one
        for one in sorted(receipts, key=lambda receipt: receipt.arrived_at)
        if one.outcome == "ok" and (one.first_token_s or 0.0) > 0.0 and one.choice is not None and one.prompt_tokens
    ]
    start_s = kept[0].arrived_at if kept else 0.0
    return [
        Asked(one, chain, one.arrived_at - start_s, one.block_tokens or 16)
        for one, chain in zip(kept, chains_of(kept), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """Both simulations with one factor."""

    before: Played
    after: Played

    @property
    def difference_s(self) -> float:
        """Mean first token with the rule less that as it was placed; of requests that the rule refused nothing."""
        return _mean(self.after.first_token_s) - _mean(self.before.first_token_s)


class _Model:
    """The requests, and replicas that are as fast as the receipts say."""

    def __init__(self, requests: Sequence[Asked], fleet: Fleet | None) -> None:
        self._requests = requests
        self._service = fitted([asked.receipt for asked in requests])
        self._fleet = fleet_in(self._service, fleet)
        self._tasks = placed(requests, self._service, self._fleet)
        self.names = self._service.names
        self.tokens = sum(asked.receipt.prompt_tokens for asked in requests)
        self.observed_s = np.array([asked.receipt.first_token_s or nan for asked in requests])
        self._probability = np.array([asked.receipt.probability or 1.0 for asked in requests])
        self._stretch = np.arange(len(requests)) * STRETCHES // len(requests)
        self.factor = self._solved(np.ones(len(requests), dtype=np.bool_))
        self._residual_s = self.observed_s - self._placed(self.factor).first_token_s
        self._service = with_rates(self._service, self._decoded(), self._fleet.step_tokens)

    @property
    def explored(self) -> bool:
        """Whether nearly every choice was left to chance in part, so that no placement was out of the question."""
        return float(np.mean(self._probability < 1.0)) >= EXPLORED_SHARE

    @property
    def unexplained_s(self) -> float:
        """Standard deviation of a mean of what the model gets wrong, by stretches of time; for both simulations."""
        return float(np.std(self._by_stretch(self._residual_s), ddof=1)) * sqrt(2.0 / STRETCHES)

    def factors(self, draws: int) -> list[float]:
        """Factors as likely as their places in a normal law: evenly spaced quantiles, which say more than chance."""
        apart = [self._solved(self._stretch == one) for one in range(STRETCHES)]
        deviation = max(float(np.std(np.log(apart), ddof=1)) / sqrt(STRETCHES), LEAST_FACTOR_DEVIATION)
        places = [(2 * draw + 1) / (2 * draws) for draw in range(draws)]
        return [self.factor * exp(deviation * NormalDist().inv_cdf(place)) for place in places]

    def run(self, policy: PolicyConfig, factor: float, seed: int) -> Run:
        """Both simulations. seed : of ties and of the numbers of blocks"""
        service = self._service.times(factor)
        numbered = [replace(asked, chain=renumbered(asked.chain, seed)) for asked in self._requests]
        return Run(self._placed(factor), by_rule(numbered, service, self._fleet, policy, seed))

    def shift(self, run: Run) -> float:
        """How far the model is off for placements the rule makes, as explored requests that went there say."""
        if not self.explored:
            return 0.0
        weight = np.where(run.before.row == run.after.row, 1.0 / self._probability, 0.0)
        if weight.sum() ** 2 < ENOUGH_WEIGHTS * (weight**2).sum() or not weight.any():
            return 0.0
        return float((weight * self._residual_s).sum() / weight.sum() - self._residual_s.mean())

    def _decoded(self) -> list[Decoded]:
        """Of each answer its row, its tokens after the first, and how long it decoded beside prefills and without."""
        played, replicas = timed(self._tasks, self._service.times(self.factor))
        told = []
        for asked, row in zip(self._requests, played.row.tolist(), strict=True):
            first_s, ended_s = asked.receipt.first_token_s or 0.0, asked.receipt.ended_s or 0.0
            busy_s = replicas.busy_between(row, asked.arrived_s + first_s, asked.arrived_s + ended_s)
            told.append((row, float((asked.receipt.output_tokens or 1) - 1), busy_s, ended_s - first_s - busy_s))
        return told

    def _placed(self, factor: float) -> Played:
        return timed(self._tasks, self._service.times(factor))[0]

    def _solved(self, counted: Mask) -> float:
        """The factor that gives `counted` requests, placed as they were, the mean they had.

        By halving on a logarithmic scale: the mean grows with the factor.
        """
        wanted_s = float(self.observed_s[counted].mean())
        low, high = log(FACTORS[0]), log(FACTORS[1])
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if float(self._placed(exp(middle)).first_token_s[counted].mean()) < wanted_s:
                low = middle
            else:
                high = middle
        return exp((low + high) / 2)

    def _by_stretch(self, values: Floats) -> Floats:
        return np.array([values[self._stretch == one].mean() for one in range(STRETCHES)])


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else nan
