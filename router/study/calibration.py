"""How right the estimates were: error of the first token, what quantiles cover, and what was regretted.

Model     error is observed over expected first token, less 1, both from the last choice on: its median (a bias) and
          the median of its size. A quantile covers what came at or before it. Regret is the first token less what was
          expected of the best other candidate
Valid     streamed answers that ended well and whose receipts hold an estimate
Blind to  candidates that were not taken: nobody saw how they would have ended; lines that are there only for what
          became of their request
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan

import msgspec
import numpy as np

from router.receipts import Candidate, Receipt
from router.study.groups import Floats, arm_of, column, length_group, length_name

OVERRIDDEN = "(chosen by clients)"


class Rightness(msgspec.Struct, frozen=True, kw_only=True):
    """Of one group. Shares 0..1, seconds; NaN (null in JSON) where nothing can be said."""

    name: str
    requests: int
    bias: float  # median of observed / expected - 1
    error: float  # median of its size
    covered_p90: float
    covered_p99: float


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """Of one arm, seconds; NaN (null in JSON) where nothing can be said."""

    name: str
    requests: int
    mean_s: float
    p50_s: float
    p90_s: float
    regretted: float  # share of requests whose best other candidate was expected to be sooner than what came


@dataclass(frozen=True, slots=True)
class Calibration:
    """outcomes : requests by how they ended; late : share of first tokens after their deadline or p99"""

    requests: int
    outcomes: dict[str, int]
    late: float
    whole: Rightness
    by_replica: list[Rightness]
    by_path: list[Rightness]
    by_length: list[Rightness]
    regret: list[Regret]


def calibration_of(receipts: Sequence[Receipt]) -> Calibration:
    """Everything `tfirst receipts` shows, of the lines that stand for all requests."""
    receipts = [one for one in receipts if one.sampled]
    outcomes: dict[str, int] = {}
    for receipt in receipts:
        outcomes[receipt.outcome or "unknown"] = outcomes.get(receipt.outcome or "unknown", 0) + 1
    seen = [one for one in receipts if one.outcome == "ok" and one.choice is not None and (one.waited_s or 0.0) > 0.0]
    lengths = _grouped(seen, lambda one: f"{length_group(one.prompt_tokens)}")
    return Calibration(
        requests=len(receipts),
        outcomes=dict(sorted(outcomes.items())),
        late=_mean(column(receipts, lambda one: None if one.late is None else float(one.late))),
        whole=rightness("all", seen),
        by_replica=[rightness(name, some) for name, some in _grouped(seen, _replica).items()],
        by_path=[rightness(name, some) for name, some in _grouped(seen, _path).items()],
        by_length=[rightness(length_name(int(group)), some) for group, some in lengths.items()],
        regret=[regret(name, some) for name, some in _grouped(receipts, _arm).items()],
    )


def rightness(name: str, receipts: Sequence[Receipt]) -> Rightness:
    """receipts : with a choice and a first token"""
    waited_s = column(receipts, lambda one: one.waited_s)
    expected_s = _of_choice(receipts, lambda choice: choice.expected_s)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        error = np.where(expected_s > 0.0, waited_s / expected_s - 1.0, nan)
    return Rightness(
        name=name,
        requests=len(receipts),
        bias=_median(error),
        error=_median(np.abs(error)),
        covered_p90=_covered(waited_s, _of_choice(receipts, lambda choice: choice.first_token_p90_s)),
        covered_p99=_covered(waited_s, _of_choice(receipts, lambda choice: choice.first_token_p99_s)),
    )


def regret(name: str, receipts: Sequence[Receipt]) -> Regret:
    """Of receipts that hold one; a request without another candidate has none."""
    values = column(receipts, lambda one: one.regret_s)
    known = values[~np.isnan(values)]
    p50_s, p90_s = np.quantile(known, (0.5, 0.9)).tolist() if len(known) else (nan, nan)
    return Regret(
        name=name,
        requests=len(known),
        mean_s=_mean(known),
        p50_s=p50_s,
        p90_s=p90_s,
        regretted=_mean((known > 0.0).astype(np.float64)),
    )


def _grouped(receipts: Sequence[Receipt], key: Callable[[Receipt], str]) -> dict[str, list[Receipt]]:
    """Receipts by what `key` says, in the order of its names."""
    groups: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        groups.setdefault(key(receipt), []).append(receipt)
    return dict(sorted(groups.items()))


def _of_choice(receipts: Sequence[Receipt], read: Callable[[Candidate], float | None]) -> Floats:
    """One number of each chosen candidate."""
    return column(receipts, lambda one: None if one.choice is None else read(one.choice))


def _arm(receipt: Receipt) -> str:
    """Whose numbers it counts among: of no arm where the client chose the rule, as in `tfirst ab`."""
    return OVERRIDDEN if receipt.override else arm_of(receipt)


def _replica(receipt: Receipt) -> str:
    return receipt.choice.replica if receipt.choice is not None else ""


def _path(receipt: Receipt) -> str:
    return receipt.choice.path if receipt.choice is not None else ""


def _covered(waited_s: Floats, quantile_s: Floats) -> float:
    known = ~np.isnan(quantile_s)
    return _mean((waited_s[known] <= quantile_s[known]).astype(np.float64))


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else nan


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else nan
