"""What a policy is given, what it returns, and the helpers all rules share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from estimators.estimates import Estimates, Few
from estimators.paths import PATHS, Path
from estimators.request import RequestFacts
from estimators.view import FleetView

Mask = npt.NDArray[np.bool_]


class Reason(Enum):
    """Why a candidate was taken. A closed set: it becomes a metric label."""

    ONLY_READY = "only_ready"  # no other replica could be chosen
    NEXT_IN_TURN = "next_in_turn"
    DRAWN = "drawn"  # by chance alone
    LOWER_LOAD = "lower_load"
    PREFIX_HASH = "prefix_hash"
    OVERFLOW = "overflow"  # the prefix's own replica was over its bound
    LONGEST_PREFIX = "longest_prefix"
    NO_PREFIX = "no_prefix"  # nobody had enough of the prompt
    BEST_SCORE = "best_score"
    LOWEST_ESTIMATE = "lowest_estimate"
    BEST_EFFORT = "best_effort"  # nobody meets the deadlines; the best of the late ones
    EXPLORED = "explored"  # by chance, to learn what would have happened


@dataclass(slots=True)  # not frozen: made for every decision; not to be changed all the same
class Choice:
    row: int  # replica, a row of the fleet view
    path: Path
    reason: Reason
    probability: float = 1.0  # of this choice; below 1 where the policy draws by chance


class Refused(Exception):
    """No replica is good enough for this request, by the rule's own limit; says which in one sentence."""


class Wait(Refused):
    """Nobody is good enough for it now, and it had better wait until somebody is; says who in one sentence."""


class Policy(Protocol):
    """One rule. `choose` is asked only when at least one (replica, path) is possible.

    It may be asked more than once, or for nothing, before a request is placed: what a rule counts of placements it
    counts when it is told of them, see `watcher.py`. A rule with a limit of its own may raise `Refused`.

    A class that says `reads_estimates = False` uses `possible` alone, by `usable_rows` and `path_at`; where nobody
    else reads the rest, it is then not worked out.
    """

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice: ...


class PolicyFactory(Protocol):
    """What an entry point of group `tfirst.policies` names.

    summary, reads, source : one line each, shown by `tfirst policies`
    """

    summary: str
    reads: str
    source: str

    def __call__(self, rng: np.random.Generator, **settings: Any) -> Policy: ...


def pick_smallest(values: npt.NDArray[np.float64], rng: np.random.Generator) -> tuple[int, float]:
    """Index of a smallest value, ties broken uniformly at random, and the probability of that index.

    values : one dimension, at least one finite. Ties are exact up to one part in 10^12.
    """
    smallest = values.min().item()
    tied = (values <= smallest + 1e-12 * abs(smallest)).nonzero()[0]
    if len(tied) == 1:
        return tied.item(), 1.0
    return int(rng.choice(tied)), 1.0 / len(tied)


def pick_smallest_of_few(values: Sequence[float], rng: np.random.Generator) -> tuple[int, float]:
    """`pick_smallest` of a handful of numbers: the same pick, with the same draw."""
    smallest = min(values)
    least = smallest + 1e-12 * abs(smallest)
    tied = [place for place, value in enumerate(values) if value <= least]
    if len(tied) == 1:
        return tied[0], 1.0
    return int(rng.choice(tied)), 1.0 / len(tied)


def smallest(values: npt.NDArray[np.float64], among: Mask) -> Mask:
    """Who of `among` (rows,), at least one, has the smallest of `values` (rows,), up to one part in 10^12."""
    masked = np.where(among, values, np.inf)
    least = masked.min().item()
    return np.asarray(masked <= least + 1e-12 * abs(least))


def draw(among: Mask, reason: Reason, estimates: Estimates, rng: np.random.Generator) -> Choice:
    """One replica of `among` (rows,), all of them usable, uniformly at random, by its best path."""
    rows = among.nonzero()[0]
    row = rows.item() if len(rows) == 1 else int(rng.choice(rows))
    return choice_of(row, reason, estimates, probability=1.0 / len(rows))


def choice_of(row: int, reason: Reason, estimates: Estimates, *, probability: float = 1.0) -> Choice:
    """`row` by its best path; the reason is another where nobody else could be chosen."""
    if np.count_nonzero(estimates.usable_rows) == 1:
        reason = Reason.ONLY_READY
    return Choice(row, estimates.path_at(row), reason, probability)


def choose_replica(
    values: npt.NDArray[np.float64], reason: Reason, estimates: Estimates, rng: np.random.Generator
) -> Choice:
    """The replica with the smallest of `values` (rows,) among those with a possible path."""
    return draw(smallest(values, estimates.usable_rows), reason, estimates, rng)


def choose_candidate(values: npt.NDArray[np.float64], estimates: Estimates, rng: np.random.Generator) -> Choice:
    """The (replica, path) with the smallest of `values` (paths, rows) among the possible."""
    masked = np.where(estimates.possible, values, np.inf)
    flat, probability = pick_smallest(masked.ravel(), rng)
    column, row = divmod(flat, masked.shape[1])
    reason = Reason.LOWEST_ESTIMATE if np.count_nonzero(estimates.usable_rows) > 1 else Reason.ONLY_READY
    return Choice(row, PATHS[column], reason, probability)


def choose_of_few(values: Sequence[float], few: Sequence[Few], rng: np.random.Generator) -> Choice:
    """`choose_candidate` among `few`, one value each."""
    place, probability = pick_smallest_of_few(values, rng)
    chosen = few[place]
    alone = all(one.row == chosen.row for one in few)
    return Choice(chosen.row, PATHS[chosen.column], Reason.ONLY_READY if alone else Reason.LOWEST_ESTIMATE, probability)
