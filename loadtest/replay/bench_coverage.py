"""Whether predicted quantiles of the first token cover what they claim, while replicas drift.

Question  how many first tokens are at or under their predicted p90 and p99, by prompt length?
Traffic   a public trace at a load its fleet sustains, arrivals spread with a seed
Drift     from the middle of the run on some replicas take twice as long, and nobody tells the router
Pass      p99 covers 98.5 to 99.5 %, and p90 88.5 to 91.5 %, of every prompt length with at least 1,600 requests
Blind to  overload: while queues grow without end, a first token comes too late to correct the next thousand

    python -m loadtest.replay.bench_coverage --trace FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from estimators.conformal import BUCKET_EDGES_TOKENS, bucket_of
from loadtest.replay.bench_calibration import slow_down
from loadtest.replay.fleets import Fleets, of_cards
from loadtest.replay.formats import Trace, read_trace
from loadtest.replay.results import Result
from loadtest.replay.run import Conditions, Replay
from loadtest.replay.workload import Demand, arrivals
from loadtest.traffic import TrafficRow
from router.config import PolicyConfig

ENOUGH = 1600  # requests of one prompt length: of fewer a share says little
BANDS = {"p90": (0.885, 0.915), "p99": (0.985, 0.995)}
DRIFTS = ((0.5, 0), (0.4, 4), (0.3, 16))  # load, replicas of 16 that become slow


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt length of one run. slow : replicas that became slow; p90, p99 : shares covered, 0..1"""

    load: float
    slow: int
    tokens: str
    requests: int
    p90: float
    p99: float

    @property
    def passes(self) -> bool:
        """Whether both shares are within their bands, or too few requests were seen to say."""
        within = all(low <= getattr(self, name) <= high for name, (low, high) in BANDS.items())
        return within or self.requests < ENOUGH


class Drifting(Replay):
    """A replay in which the first `slow` engines become slow at the request `from_index`."""

    def __init__(
        self, fleets: Fleets, conditions: Conditions, *, block_tokens: int, slow: int, from_index: int
    ) -> None:
        super().__init__(fleets, conditions, block_tokens=block_tokens)
        self._slow, self._from_index = slow, from_index

    def _arrive(self, index: int, row: TrafficRow) -> None:
        if index == self._from_index:
            for engine in self.world.engines[: self._slow]:
                slow_down(engine)
        super()._arrive(index, row)


def lines(trace: Trace, *, load: float, slow: int, replicas: int, requests: int, seed: int) -> list[Line]:
    """The coverage of one run, by prompt length."""
    fleets = of_cards(replicas, ["A100"])
    rows = arrivals(trace, fleets, Demand(requests=requests, load=load, seed=seed))
    conditions = Conditions(policy=PolicyConfig(name="e2e"), seed=seed)
    run = Drifting(fleets, conditions, block_tokens=trace.block_tokens, slow=slow, from_index=len(rows) // 2)
    return by_length(run.run(rows), load=load, slow=slow)


def by_length(result: Result, *, load: float, slow: int) -> list[Line]:
    """Shares covered, of the answered requests of each prompt length."""
    buckets = np.array([bucket_of(int(tokens)) for tokens in result.prompt_tokens])
    names = [f"< {edge}" for edge in BUCKET_EDGES_TOKENS] + [f">= {BUCKET_EDGES_TOKENS[-1]}"]
    found = []
    for bucket in np.unique(buckets):
        which = (buckets == bucket) & result.answered
        p90, p99 = (
            covered(result.first_token_s[which], predicted[which])
            for predicted in (result.predicted_p90_s, result.predicted_p99_s)
        )
        found.append(Line(load, slow, names[bucket], int(which.sum()), p90, p99))
    return found


def covered(observed_s: npt.NDArray[np.float64], predicted_s: npt.NDArray[np.float64]) -> float:
    return float((observed_s <= predicted_s).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each prompt length of each run; 1 when one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    trace, failed = read_trace(args.trace, None), 0
    print(f"{'load':>5} {'slow':>5} {'prompt tokens':>14} {'requests':>9} {'p90':>7} {'p99':>7}")
    for load, slow in DRIFTS:
        for line in lines(trace, load=load, slow=slow, replicas=args.replicas, requests=args.requests, seed=args.seed):
            verdict = "" if line.passes else "  outside"
            failed += not line.passes
            print(
                f"{load:>5} {slow:>5} {line.tokens:>14} {line.requests:>9} {line.p90:>7.2%} {line.p99:>7.2%}{verdict}",
                flush=True,
            )
    print("passes" if not failed else f"{failed} outside their bands")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
