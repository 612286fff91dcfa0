"""The numbers of one run, and of several runs of one rule over seeds.

Model     the first `warm_up` share of the requests is dropped everywhere but in totals of the whole run (fetched
          bytes, imbalance). Slowdown is T_first over the best this request could have had. Intervals over seeds
          are Student's, at 95 %
Valid     one trace at one load; NaN where nothing was observed
Blind to  how wide a predicted quantile is: one that is far too large covers everything
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt

import msgspec
import numpy as np
import numpy.typing as npt

from estimators.paths import Path, main_source
from loadtest.replay.bounds import best_possible_s, ideal_cached_tokens, mean_bound, prefill_alone_s
from loadtest.replay.results import NOWHERE, Floats, Ints, Result
from loadtest.traffic import TrafficRow
from sim_backends.fleet import Fleet

# Two-sided 95 % points of Student's t for 1 to 10 degrees of freedom, then the normal one: any table of the
# distribution has them, and more seeds than eleven are not worth another digit.
STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What no rule can beat on this traffic, computed once for all of them.

    best_s : per request, alone on an idle fleet with a perfect cache; shape (requests,)
    ideal_cached_tokens : per request, what a perfect cache would have; shape (requests,)
    mean_bound_s : lower bound of the mean T_first after the warm-up; NaN where nobody asked
    warm : how many requests are dropped
    """

    best_s: Floats
    ideal_cached_tokens: Ints
    mean_bound_s: float
    warm: int


def ceiling(
    fleet: Fleet, rows: Sequence[TrafficRow], *, block_tokens: int, warm_up: float, with_mean_bound: bool = True
) -> Ceiling:
    """fleet : the engines' reading, blocks of `block_tokens`; warm_up : share dropped, 0 <= warm_up < 1."""
    warm = min(int(len(rows) * warm_up), len(rows) - 1)
    mean_bound_s = nan
    if with_mean_bound:
        mean_bound_s = mean_bound(fleet, rows, tokens_per_id=block_tokens, first=warm).bound_s
    return Ceiling(
        best_s=best_possible_s(fleet, rows, tokens_per_id=block_tokens),
        ideal_cached_tokens=ideal_cached_tokens(rows, block_tokens=block_tokens, tokens_per_id=block_tokens),
        mean_bound_s=mean_bound_s,
        warm=warm,
    )


class Summary(msgspec.Struct, kw_only=True):
    """One run. Seconds, bytes and shares 0..1 as named; NaN (null in JSON) is unknown or does not apply."""

    policy: str  # with its settings, if it was given any
    replicas: int
    load: float | None  # ideal cached load; None where times were not scaled to one
    seed: int
    requests: int  # counted, without the warm-up
    refused: int  # of those, not answered
    cut: int  # of those, answered with fewer tokens than in the trace: more did not fit into a replica
    first_token_mean_s: float
    first_token_p50_s: float
    first_token_p90_s: float
    first_token_p99_s: float
    slowdown_p50: float
    slowdown_p99: float
    end_to_end_mean_s: float
    end_to_end_p99_s: float
    per_token_mean_s: float
    per_token_p50_s: float = nan
    hit_rate: float  # prompt tokens not computed
    hit_ceiling: float  # with one perfect cache
    inside_deadline: float  # share of all counted requests whose first token came in time
    fetched_bytes: float  # whole run
    imbalance: float  # busiest replica's prefill seconds over the mean; whole run
    cost_per_request: float  # inside the deadline, in the unit of the prices
    decision_mean_s: float  # wall time on this machine
    decision_p99_s: float
    bound_s: float  # no rule's mean T_first can be lower
    bound_ratio: float  # mean T_first over that
    central_ratio: float = nan  # mean T_first over that of central_fcfs on the same requests, once that is known
    prediction_error_p50: float  # |predicted - observed| / observed
    coverage_p90: float  # share of first tokens at or under their predicted 90 % quantile: right is 0.9
    coverage_p99: float
    local_share: float  # requests by where most of their prompt came from
    remote_share: float
    recompute_share: float
    took_s: float  # processor time of the run


# Everything in a summary that can be averaged over seeds.
NUMBERS = tuple(name for name in Summary.__struct_fields__ if name not in ("policy", "replicas", "load", "seed"))


def summary(
    result: Result,
    limit: Ceiling,
    fleet: Fleet,
    *,
    load: float | None,
    seed: int,
    deadline_s: float,
    card_prices: dict[str, float] | None = None,
) -> Summary:
    """The numbers of `result`. deadline_s : of the first token, > 0; card_prices : money per hour, by card."""
    counted = np.arange(len(result.arrived_s)) >= limit.warm
    ok = counted & result.answered
    first_s, ended_s = result.first_token_s[ok], result.ended_s[ok]
    slowdown = first_s / limit.best_s[ok]
    in_time = int((first_s <= deadline_s).sum())
    prompt = result.prompt_tokens
    shares = source_shares(result, counted)
    decisions_s = result.decisions_s[limit.warm :]
    return Summary(
        policy=result.label,
        replicas=len(result.replicas),
        load=load,
        seed=seed,
        requests=int(counted.sum()),
        refused=int((counted & ~result.answered).sum()),
        cut=int((counted & result.cut).sum()),
        first_token_mean_s=mean(first_s),
        first_token_p50_s=quantile(first_s, 0.5),
        first_token_p90_s=quantile(first_s, 0.9),
        first_token_p99_s=quantile(first_s, 0.99),
        slowdown_p50=quantile(slowdown, 0.5),
        slowdown_p99=quantile(slowdown, 0.99),
        end_to_end_mean_s=mean(ended_s),
        end_to_end_p99_s=quantile(ended_s, 0.99),
        per_token_mean_s=mean(result.pace_s[ok]),
        per_token_p50_s=quantile(result.pace_s[ok], 0.5),
        hit_rate=ratio(float(result.cached_tokens[ok].sum()), float(prompt[ok].sum())),
        hit_ceiling=ratio(float(limit.ideal_cached_tokens[counted].sum()), float(prompt[counted].sum())),
        inside_deadline=ratio(in_time, int(counted.sum())),
        fetched_bytes=result.fetched_bytes,
        imbalance=imbalance(result, fleet),
        cost_per_request=cost_per_request(result, in_time, card_prices or {}, warm=limit.warm),
        decision_mean_s=mean(decisions_s),
        decision_p99_s=quantile(decisions_s, 0.99),
        bound_s=limit.mean_bound_s,
        # The bound holds for all requests together: a mean without the refused ones may be below it.
        bound_ratio=ratio(mean(first_s), limit.mean_bound_s) if ok.sum() == counted.sum() else nan,
        prediction_error_p50=quantile(np.abs(result.predicted_s[ok] - first_s) / first_s, 0.5),
        coverage_p90=coverage(result.predicted_p90_s[ok], first_s),
        coverage_p99=coverage(result.predicted_p99_s[ok], first_s),
        local_share=shares[Path.LOCAL],
        remote_share=shares[Path.REMOTE],
        recompute_share=shares[Path.RECOMPUTE],
        took_s=result.took_s,
    )


def mean(values: Floats) -> float:
    """Mean of what is known; NaN of nothing."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else nan


def quantile(values: Floats, share: float) -> float:
    """Quantile of what is known; NaN of nothing."""
    known = values[~np.isnan(values)]
    return float(np.quantile(known, share)) if len(known) else nan


def coverage(predicted_s: Floats, observed_s: Floats) -> float:
    """Share of what was observed at or under what was predicted, where anything was; NaN where nothing was."""
    told = ~np.isnan(predicted_s)
    return ratio(int((observed_s[told] <= predicted_s[told]).sum()), int(told.sum()))


def ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else nan


def source_shares(result: Result, counted: npt.NDArray[np.bool_]) -> dict[Path, float]:
    """Share of placed requests whose prompt came mainly from each source, as believed at the choice.

    REMOTE is whatever came from outside HBM: the store, a peer, or a tier of the replica.
    """
    placed = np.flatnonzero(counted & (result.path >= 0))
    sources = [
        main_source(
            local_tokens=int(result.local_tokens[index]),
            remote_tokens=int(result.fetched_tokens[index]),
            prompt_tokens=int(result.prompt_tokens[index]),
        )
        for index in placed
    ]
    return {path: ratio(sources.count(path), len(sources)) for path in (Path.LOCAL, Path.REMOTE, Path.RECOMPUTE)}


def prefill_work_s(result: Result, fleet: Fleet) -> Floats:
    """GPU seconds of each request's prefill on the replica it ran on, alone and exact; NaN where it did not run."""
    prompt = np.maximum(result.prompt_tokens, 1)
    cached = np.minimum(result.cached_tokens, prompt - 1)
    by_card = prefill_alone_s(fleet, prompt_tokens=prompt, cached_tokens=cached)
    work_s = np.full(len(prompt), np.nan)
    cards = np.array([*result.cards, ""])[result.row]  # NOWHERE is the last entry
    for card, own_s in by_card.items():
        there = (cards == card) & result.answered
        work_s[there] = own_s[there]
    slow = np.array([*(replica.slow for replica in fleet.replicas), 1.0])[result.row]
    return np.asarray(work_s * slow)


def busy_s(result: Result, fleet: Fleet) -> Floats:
    """Prefill seconds of each replica over the whole run; shape (replicas,)."""
    work_s = prefill_work_s(result, fleet)
    ran = (result.row != NOWHERE) & ~np.isnan(work_s)
    return np.bincount(result.row[ran], weights=work_s[ran], minlength=len(result.replicas)).astype(np.float64)


def imbalance(result: Result, fleet: Fleet) -> float:
    busy = busy_s(result, fleet)
    return ratio(float(busy.max()), float(busy.mean()))


def cost_per_request(result: Result, in_time: int, card_prices: dict[str, float], *, warm: int = 0) -> float:
    """Price of the whole fleet for each request inside its deadline; NaN when a card has no price.

    in_time : of the requests from number `warm` on; the fleet is paid from the arrival of that one.
    """
    if in_time == 0 or not all(card in card_prices for card in result.cards):
        return nan
    hours = (float(np.nanmax(result.arrived_s + result.ended_s)) - float(result.arrived_s[warm])) / 3600
    return sum(card_prices[card] for card in result.cards) * hours / in_time


def utilisation(result: Result, fleet: Fleet, *, bins: int) -> tuple[Floats, Floats]:
    """Share of each slice of time each replica spends on prefill: edges (bins + 1,), shares (replicas, bins).

    A prefill is taken to end with its first token and to run without a pause, so chunks beside others come late.
    """
    work_s = prefill_work_s(result, fleet)
    ran = np.flatnonzero((result.row != NOWHERE) & ~np.isnan(work_s))
    ends_s = result.arrived_s[ran] + result.first_token_s[ran]
    edges_s = np.linspace(0.0, float(ends_s.max()) if len(ends_s) else 1.0, bins + 1)
    busy = np.zeros((len(result.replicas), bins))
    for row, end_s, own_s in zip(result.row[ran].tolist(), ends_s.tolist(), work_s[ran].tolist(), strict=True):
        busy[row] += np.clip(np.minimum(edges_s[1:], end_s) - np.maximum(edges_s[:-1], end_s - own_s), 0.0, None)
    return edges_s, np.minimum(busy / np.diff(edges_s), 1.0)


class Spread(msgspec.Struct):
    """A number over seeds. half_width : of its 95 % interval; NaN for one seed."""

    mean: float
    half_width: float


class Group(msgspec.Struct, kw_only=True):
    """All seeds of one policy on one fleet at one load."""

    policy: str
    replicas: int
    load: float | None
    seeds: int
    numbers: dict[str, Spread]


def hold_against(runs: Sequence[Summary], reference: str) -> None:
    """Write into each run how its mean compares with that of the policy `reference` on the same requests.

    Left unknown where the reference was not played, or where either of them left a request unanswered: means of
    different requests do not compare.
    """

    def requests_of(run: Summary) -> tuple[int, float | None, int]:
        return run.replicas, run.load, run.seed

    known_s = {requests_of(run): run.first_token_mean_s for run in runs if run.policy == reference and not run.refused}
    for run in runs:
        if not run.refused:
            run.central_ratio = ratio(run.first_token_mean_s, known_s.get(requests_of(run), nan))


def grouped(runs: Sequence[Summary]) -> list[Group]:
    """Runs of the same policy, fleet and load together, in order of first appearance."""
    together: dict[tuple[str, int, float | None], list[Summary]] = {}
    for run in runs:
        together.setdefault((run.policy, run.replicas, run.load), []).append(run)
    return [
        Group(
            policy=policy,
            replicas=replicas,
            load=load,
            seeds=len(same),
            numbers={name: spread_of([float(getattr(run, name)) for run in same]) for name in NUMBERS},
        )
        for (policy, replicas, load), same in together.items()
    ]


def spread_of(values: Sequence[float]) -> Spread:
    """Mean over seeds and half of its 95 % interval."""
    array = np.array(values)
    count = len(array)
    if count < 2:
        return Spread(float(array.mean()), nan)
    point = STUDENT_95[count - 2] if count - 2 < len(STUDENT_95) else NORMAL_95
    return Spread(float(array.mean()), float(point * array.std(ddof=1) / sqrt(count)))


class Goodput(msgspec.Struct):
    """Highest load of a sweep up to which at least `share` of the requests are inside the deadline; NaN: none is."""

    policy: str
    replicas: int
    share: float
    load: float


def goodput(groups: Sequence[Group], shares: Sequence[float] = (0.9, 0.99)) -> list[Goodput]:
    """For each policy, fleet and share, over the loads that were played; empty without loads."""
    swept: dict[tuple[str, int], list[tuple[float, Group]]] = {}
    for group in groups:
        if group.load is not None:
            swept.setdefault((group.policy, group.replicas), []).append((group.load, group))
    return [
        Goodput(policy, replicas, share, _highest(own, share))
        for (policy, replicas), own in swept.items()
        for share in shares
    ]


def _highest(own: Sequence[tuple[float, Group]], share: float) -> float:
    best = nan
    for load, group in sorted(own, key=lambda item: item[0]):
        if not group.numbers["inside_deadline"].mean >= share:
            break
        best = load
    return best
