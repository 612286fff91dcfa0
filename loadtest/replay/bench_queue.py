"""What the router's queue is worth, and what its guard against starvation costs.

Question  how much more load does a fleet bear when requests wait in the router, ordered by expected work, than with
          late binding in order of arrival and a perfect cache (`central_fcfs`)?
Traffic   a public trace, arrivals spread with a seed, at several shares of its ideal cached load
Measure   goodput: the load at which the share of first tokens inside the deadline falls under 90 %, straight between
          the loads played; slowdown at the 99th percentile
Pass      at every load played the ordered queue's p99 slowdown is no worse than that of central_fcfs, and its goodput
          at least FACTOR times as high
Blind to  network delay: with one request before its first token on each replica, news take no time here

    python -m loadtest.replay.bench_queue --trace FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from pathlib import Path

from loadtest.replay.central import ORDERS
from loadtest.replay.flags import numbers
from loadtest.replay.jobs import Job, Source, play
from loadtest.replay.measure import Summary
from loadtest.replay.run import Conditions, queued
from loadtest.replay.workload import Demand
from router.admission import AdmissionConfig
from router.config import PolicyConfig

FACTOR = 1.2
SHARE = 0.9  # of first tokens inside the deadline
STRETCHES = (1.0, 5.0, 20.0, 100.0, 1000.0)
YARDSTICK, ORDERED = ORDERS[0], "e2e wspt 20"


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to place and order. stretch : of a queue by expected work"""

    name: str
    rule: str
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)


def kinds() -> list[Kind]:
    """The yardsticks, the rule without a queue, and its queue in every order."""
    ordered = [Kind(f"e2e wspt {stretch:g}", "e2e", queued("wspt", stretch=stretch)) for stretch in STRETCHES]
    central = [Kind(order, order) for order in ORDERS]
    return [*central, Kind("e2e", "e2e"), Kind("e2e fcfs", "e2e", queued("fcfs")), *ordered]


def played(
    kind: Kind, trace: Path, *, load: float, replicas: int, requests: int, seed: int, deadline_s: float
) -> Summary:
    """One run."""
    job = Job(
        source=Source(trace, replicas=replicas, cards=("A100",)),
        demand=Demand(requests, load, seed=seed),
        conditions=Conditions(policy=PolicyConfig(name=kind.rule), seed=seed, admission=kind.admission),
        warm_up=0.15,
        deadline_s=deadline_s,
        bounds=False,
    )
    return play(job).summary


def crossing(loads: Sequence[float], shares: Sequence[float], share: float = SHARE) -> float:
    """The load at which `shares` fall under `share`, straight between those played; NaN when none or all do.

    >>> crossing([0.5, 0.6, 0.7], [1.0, 0.95, 0.85])
    0.65
    """
    for (load, inside), (next_load, next_inside) in pairwise(zip(loads, shares, strict=True)):
        if inside >= share > next_inside:
            return round(load + (next_load - load) * (inside - share) / (inside - next_inside), 6)
    return nan


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each kind and load, then the goodput of each kind; 1 when the ordered queue fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--loads", type=numbers(float, "loads above 0"), default=[0.4, 0.5, 0.6, 0.7, 0.8])
    parser.add_argument("--seeds", type=numbers(int, "seeds of at least 0", low=0), default=[0, 1, 2])
    parser.add_argument("--deadline-s", type=float, default=5.0)
    args = parser.parse_args(arguments)
    inside: dict[str, list[float]] = {}
    slowdowns: dict[str, list[float]] = {}
    print(f"{'':14} {'load':>5} {'inside':>7} {'mean s':>7} {'p90 s':>7} {'p99 s':>7} {'slow p99':>9} {'reused':>7}")
    for load in sorted(args.loads):
        for kind in kinds():
            runs = [
                played(
                    kind,
                    args.trace,
                    load=load,
                    replicas=args.replicas,
                    requests=args.requests,
                    seed=seed,
                    deadline_s=args.deadline_s,
                )
                for seed in args.seeds
            ]
            inside.setdefault(kind.name, []).append(mean([run.inside_deadline for run in runs]))
            slowdowns.setdefault(kind.name, []).append(mean([run.slowdown_p99 for run in runs]))
            print(
                f"{kind.name:14} {load:>5} {inside[kind.name][-1]:>7.1%} "
                f"{mean([run.first_token_mean_s for run in runs]):>7.2f} "
                f"{mean([run.first_token_p90_s for run in runs]):>7.2f} "
                f"{mean([run.first_token_p99_s for run in runs]):>7.2f} "
                f"{slowdowns[kind.name][-1]:>9.1f} {mean([run.hit_rate for run in runs]):>7.1%}",
                flush=True,
            )
    return verdict(sorted(args.loads), inside, slowdowns)


def verdict(loads: Sequence[float], inside: dict[str, list[float]], slowdowns: dict[str, list[float]]) -> int:
    """Print the goodput of each kind, and whether the ordered queue passes: 0 when it does."""
    goodput = {name: crossing(loads, shares) for name, shares in inside.items()}
    for name, load in goodput.items():
        print(f"goodput {name:14} {load:>6.3f}  {load / goodput[YARDSTICK]:>5.2f} x {YARDSTICK}")
    fair = all(own <= other for own, other in zip(slowdowns[ORDERED], slowdowns[YARDSTICK], strict=True))
    passes = goodput[ORDERED] >= FACTOR * goodput[YARDSTICK] and fair
    print("passes" if passes else "fails")
    return 0 if passes else 1


if __name__ == "__main__":
    raise SystemExit(main())
