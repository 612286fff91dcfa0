"""Whether `tfirst whatif` knows what another rule would have done.

Question  of how many runs does the 90 % interval for another rule's mean first token hold what the simulator gives
          when that rule really plays the same traffic?
Traffic   conversations of a public trace on four replicas (two A100, two H20), drawn and spread with each seed
Pairs     a rule whose receipts are read, at a load it sustains, and another that is asked about; one of the first
          draws its replica by chance, so that probabilities allow the doubly robust answer
Pass      at least 85 of 100 seeds, of each pair
Blind to  caches that overflow, other fleets, traffic that would have changed with the answers

    python -m loadtest.replay.bench_whatif --trace FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np

from loadtest.replay.fleets import Fleets, of_cards
from loadtest.replay.formats import Trace, read_trace
from loadtest.replay.run import Conditions, Replay
from loadtest.replay.workload import Demand, arrivals
from loadtest.traffic import TrafficRow
from router.config import PolicyConfig
from router.receipts import Receipt
from router.study.whatif.answer import Answer, what_if

CARDS, REPLICAS = ["A100", "H20"], 4
REQUESTS = 300
PASS_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Pair:
    """logged : rule whose receipts are read; asked : rule that is asked about; load : ideal cached load"""

    logged: str
    asked: str
    load: float


PAIRS = (
    Pair("least_request", "e2e", 0.4),
    Pair("e2e", "lmetric", 0.5),
    Pair("random", "e2e", 0.25),
    Pair("e2e", "least_request", 0.4),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One seed. truth_s : mean first token of the rule that was asked about, played"""

    answer: Answer
    truth_s: float

    @property
    def holds(self) -> bool:
        return self.answer.low_s <= self.truth_s <= self.answer.high_s


def trial(trace: Trace, fleets: Fleets, pair: Pair, seed: int, *, requests: int = REQUESTS) -> Trial:
    """Log one rule, ask about another, and play it."""
    rows = arrivals(trace, fleets, Demand(requests=requests, load=pair.load, seed=seed))
    receipts: list[Receipt] = []
    _play(trace, fleets, rows, pair.logged, seed, receipts)
    answer = what_if(receipts, PolicyConfig(name=pair.asked), fleet=fleets.router, draws=6, seed=seed)
    return Trial(answer, _play(trace, fleets, rows, pair.asked, seed, None))


def _play(
    trace: Trace, fleets: Fleets, rows: list[TrafficRow], policy: str, seed: int, keep: list[Receipt] | None
) -> float:
    """Mean first token in seconds; receipts go to `keep`."""
    conditions = Conditions(policy=PolicyConfig(name=policy), seed=seed)
    on_receipt = None if keep is None else keep.append
    replay = Replay(fleets, conditions, block_tokens=trace.block_tokens, on_receipt=on_receipt)
    return float(np.nanmean(replay.run(rows).first_token_s))


def line(pair: Pair, trials: Sequence[Trial]) -> str:
    """One row of the table."""
    held = sum(one.holds for one in trials)
    off = [abs(log(one.answer.mean_s / one.truth_s)) for one in trials]
    width = [log(one.answer.high_s / one.answer.low_s) / 2 for one in trials]
    observed = np.mean([one.answer.observed_s for one in trials])
    truth = np.mean([one.truth_s for one in trials])
    return (
        f"{pair.logged:>14} {pair.asked:>12} {pair.load:5.2f} {observed:9.2f} {truth:8.2f} {np.median(off):8.1%}"
        f" {np.median(width):10.1%} {trials[0].answer.method:>14} {held:4d} of {len(trials)}"
    )


HEAD = (
    f"{'receipts of':>14} {'asked about':>12} {'load':>5} {'was, s':>9} {'is, s':>8} {'off':>8}"
    f" {'half width':>10} {'method':>14}  held"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; status 1 when an interval holds the truth too rarely."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.replay.bench_whatif", description="What `whatif` knows.")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="default 100")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help="default %(default)s")
    args = parser.parse_args(argv)
    trace, fleets = read_trace(args.trace, None), of_cards(REPLICAS, CARDS)
    print(HEAD)
    passed = True
    for pair in PAIRS:
        trials = [trial(trace, fleets, pair, seed, requests=args.requests) for seed in range(args.seeds)]
        print(line(pair, trials), flush=True)
        passed &= sum(one.holds for one in trials) >= PASS_SHARE * len(trials)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
