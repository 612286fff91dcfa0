"""How far estimates are off once a router has watched a fleet for a while, from start values that were wrong.

Question  does the router learn how fast replicas really are: from cards taken to be three times as fast or slow as
          they are, on idle and on loaded replicas, after a replica has slowed down, and among absurd outliers?
Work      conversations with shared beginnings (written here, seeded), or a trace; every run with the router's own
          dispatcher against the simulated engines in virtual time, all replicas of the fleet reading their cards
          from a wrong data sheet. Links are as they are
Load      shares of what the engines sustain: the highest arrival rate, found by halving, at which first tokens do not
          grow over the run (mean of the second half under twice that of the first; a queue that grows gives three
          times). Idle is one request at a time, long apart
Measure   relative error of the first token predicted at the choice, against the one that came, from each replica's
          request after the first 500 on (idle and nothing fetched: that is C alone)
            slower    every replica takes twice as long from the middle of the run on; from 200 requests later on
            outliers  2 % of first tokens are heard 50 times too late, at the latest with the end of the answer; they
                      are left out of the measure, not of what the router learns from
            whole     no answer is streamed: the error is that of the whole answer's time, its length known; what is
                      decided later beside it makes much of that, so it stands beside the same with streams
Pass      median at most 10 %, also for each path; with outliers at most 1 % more than without; without streams at most
          5 % more than with them
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf, log
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from estimators.hardware import CARDS
from estimators.paths import main_source
from estimators.request import RequestFacts
from loadtest.replay.fleets import Fleets, of_cards
from loadtest.replay.formats import read_trace
from loadtest.replay.run import Conditions, Replay
from loadtest.replay.workload import Demand, arrivals
from loadtest.traffic import TOKENS_PER_ID, TrafficRow
from router.config import PolicyConfig
from router.receipts import Receipt
from sim_backends.engine import Engine
from sim_backends.requests import Output

STARTS = (1.0, 3.0, 1 / 3)
LOADS = (0.3, 0.7, 0.9)
WATCHED, FOLLOWED = 500, 200  # requests of a replica before its errors count: from the start, and after a change
IDLE_GAP_S = 15.0
SLOWER, OUTLIER_SHARE, OUTLIER_FACTOR = 2.0, 0.02, 50.0
LIMIT, MORE_WITH_OUTLIERS, MORE_WITHOUT_STREAMS = 0.10, 0.01, 0.05
HALVINGS = 6


# Work


def conversations(requests: int, seed: int, *, longest_tokens: int = 40_000) -> list[TrafficRow]:
    """Turns of conversations at one request a second on average; each repeats all that was said before it.

    A conversation starts with the system prompt of one of four applications; some two hundred are under way.
    """
    chance, fresh = random.Random(f"{seed}/conversations"), count()
    applications = [[next(fresh) for _ in range(blocks)] for blocks in (1, 2, 2, 4)]
    open_: list[tuple[list[int], int, int]] = []  # ids, tokens, turns left
    rows: list[TrafficRow] = []
    at_s = 0.0
    while len(rows) < requests:
        at_s += chance.expovariate(1.0)
        if len(open_) > 200 or (open_ and chance.random() < 0.6):
            ids, tokens, turns = open_.pop(chance.randrange(len(open_)))
        else:
            ids, turns = list(chance.choice(applications)), 1 + int(chance.expovariate(0.3))
            tokens = len(ids) * TOKENS_PER_ID
        tokens = min(tokens + drawn(chance, median=900, sigma=1.3), longest_tokens)
        ids = ids + [next(fresh) for _ in range(-(-tokens // TOKENS_PER_ID) - len(ids))]
        output = min(drawn(chance, median=150, sigma=0.8), 2000)
        rows.append(TrafficRow(at_s, tokens, output, ids))
        if turns > 1 and tokens < longest_tokens:
            open_.append((ids, tokens + output, turns - 1))
    return rows


def drawn(chance: random.Random, *, median: float, sigma: float) -> int:
    """A log-normal number of tokens, >= 1."""
    return max(1, int(chance.lognormvariate(log(median), sigma)))


def at_rate(rows: Sequence[TrafficRow], rps: float) -> list[TrafficRow]:
    """The same requests at `rps` (> 0) on average."""
    factor = (len(rows) - 1) / rows[-1].at_s / rps
    return [msgspec.structs.replace(row, at_s=row.at_s * factor) for row in rows]


def one_at_a_time(rows: Sequence[TrafficRow]) -> list[TrafficRow]:
    """The same requests, each on an idle fleet, with short answers."""
    return [
        msgspec.structs.replace(row, at_s=index * IDLE_GAP_S, output_length=min(row.output_length, 20))
        for index, row in enumerate(rows)
    ]


def misread(fleets: Fleets, start: float) -> Fleets:
    """The same fleet whose cards the router takes to be `start` (> 0) times as fast as their data sheets say."""
    cards = {**CARDS, **fleets.router.cards}
    used = {name: cards[name].faster(start) for name in {*fleets.router.cards, *fleets.cards}}
    return Fleets(msgspec.structs.replace(fleets.router, cards=used), fleets.engines)


# Runs


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens in a run. slower_from : index of the request at which all engines become `SLOWER` times as slow

    outlier_share : of first tokens that are heard `OUTLIER_FACTOR` times too late; whole : no answer is streamed
    """

    slower_from: int | None = None
    outlier_share: float = 0.0
    whole: bool = False


NOTHING = Disturbance()


@dataclass(slots=True)
class Seen:
    """What one run left behind: receipts in order of arrival, and the requests whose first token was held back."""

    receipts: list[Receipt] = field(default_factory=list)
    outliers: set[str] = field(default_factory=set)


class DisturbedReplay(Replay):
    """A replay in which something goes wrong on purpose."""

    def __init__(self, fleets: Fleets, conditions: Conditions, disturbance: Disturbance) -> None:
        self.seen = Seen()
        super().__init__(fleets, conditions, block_tokens=TOKENS_PER_ID, on_receipt=self.seen.receipts.append)
        self._disturbance = disturbance
        self._chance = random.Random(f"{conditions.seed}/outliers")
        self._arrived_at_s: dict[str, float] = {}
        self._late: list[tuple[float, str, Output]] = []  # first tokens that are still to be heard

    def _arrive(self, index: int, row: TrafficRow) -> None:
        if index == self._disturbance.slower_from:
            for engine in self.world.engines:
                slow_down(engine)
        self._hear_late(row.at_s)
        self._arrived_at_s[f"replay-{index}"] = row.at_s
        super()._arrive(index, row)

    def _facts(self, index: int, row: TrafficRow) -> RequestFacts:
        return replace(super()._facts(index, row), streams=not self._disturbance.whole)

    def _token(self, output: Output) -> None:
        self._hear_late(output.at_s)
        if output.index > 0 or output.finish_reason is not None:
            self._hear_now(output)
            super()._token(output)
        elif self._disturbance.outlier_share > self._chance.random():
            self.seen.outliers.add(output.request_id)
            took_s = output.at_s - self._arrived_at_s[output.request_id]
            heapq.heappush(self._late, (output.at_s + (OUTLIER_FACTOR - 1) * took_s, output.request_id, output))
        elif not self._disturbance.whole:
            super()._token(output)

    def _hear_late(self, now_s: float) -> None:
        """First tokens that were held back until now."""
        while self._late and self._late[0][0] <= now_s:
            at_s, _, output = heapq.heappop(self._late)
            super()._token(replace(output, at_s=at_s))

    def _hear_now(self, ended: Output) -> None:
        """An answer that ends has had its first token."""
        for entry in self._late:
            if entry[1] == ended.request_id:
                self._late.remove(entry)
                heapq.heapify(self._late)
                super()._token(replace(entry[2], at_s=ended.at_s))
                return


def slow_down(engine: Engine) -> None:
    """From its next step on, `engine` takes `SLOWER` times as long; its stream of jitter goes on."""
    times = vars(engine._times)  # a simulated replica has no such fault, so its durations are changed in place
    for name in times:
        if name.endswith("_s"):
            times[name] *= SLOWER


def play(fleets: Fleets, rows: Sequence[TrafficRow], conditions: Conditions, disturbance: Disturbance) -> Seen:
    """One run; what it left behind."""
    if disturbance.whole:  # the first token of an answer of one is its end, which is always seen
        rows = [msgspec.structs.replace(row, output_length=max(2, row.output_length)) for row in rows]
    replay = DisturbedReplay(fleets, conditions, disturbance)
    replay.run(list(rows))
    replay.seen.receipts.sort(key=lambda receipt: receipt.arrived_at)
    return replay.seen


def sustained_rps(fleets: Fleets, rows: Sequence[TrafficRow], conditions: Conditions) -> float:
    """The highest arrival rate at which first tokens do not grow over the run."""
    low, high = 0.0, 2.0 * burst_rps(fleets, rows, conditions)
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        low, high = (rate, high) if keeps_up(fleets, at_rate(rows, rate), conditions) else (low, rate)
    return low


def keeps_up(fleets: Fleets, rows: Sequence[TrafficRow], conditions: Conditions) -> bool:
    first_s = Replay(fleets, conditions, block_tokens=TOKENS_PER_ID).run(list(rows)).first_token_s
    middle = len(first_s) // 2
    return bool(np.nanmean(first_s[middle:]) < 2.0 * np.nanmean(first_s[:middle]))


def burst_rps(fleets: Fleets, rows: Sequence[TrafficRow], conditions: Conditions) -> float:
    """Requests that end in a second while all of them are there at once."""
    result = Replay(fleets, conditions, block_tokens=TOKENS_PER_ID).run(at_rate(rows, 1e3))
    ended_s = np.sort((result.arrived_s + result.ended_s)[result.answered])
    first, last = len(ended_s) // 5, len(ended_s) * 7 // 10
    return float((last - first) / (ended_s[last] - ended_s[first]))


# Errors


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of the predictions that count, signed; by path: what gave the larger part of the prompt."""

    by_path: dict[str, list[float]]

    @property
    def all(self) -> list[float]:
        return [error for errors in self.by_path.values() for error in errors]

    def median(self, path: str | None = None) -> float:
        """Median size, of one path or of all; NaN where nothing counts."""
        errors = self.all if path is None else self.by_path.get(path, [])
        return float(np.median(np.abs(errors))) if errors else float("nan")

    def p90(self) -> float:
        return float(np.quantile(np.abs(self.all), 0.9)) if self.all else float("nan")

    def bias(self) -> float:
        return float(np.median(self.all)) if self.all else float("nan")


def errors_of(seen: Seen, *, watched: int = WATCHED, from_index: int = 0, whole: bool = False) -> Errors:
    """Errors from each replica's request after its first `watched` on, counted from the request `from_index` on."""
    placed: Counter[str] = Counter()
    by_path: dict[str, list[float]] = defaultdict(list)
    for receipt in seen.receipts[from_index:]:
        choice = receipt.choice
        if choice is None or receipt.outcome != "ok":
            continue
        placed[choice.replica] += 1
        if placed[choice.replica] <= watched or receipt.request_id in seen.outliers:
            continue
        path = main_source(
            local_tokens=choice.local_tokens, remote_tokens=choice.fetched_tokens, prompt_tokens=receipt.prompt_tokens
        )
        by_path[path.value].append(whole_error(receipt) if whole else first_token_error(receipt))
    return Errors(dict(by_path))


def first_token_error(receipt: Receipt) -> float:
    assert receipt.choice is not None
    assert receipt.first_token_s is not None
    return receipt.choice.first_token_s / receipt.first_token_s - 1.0


def whole_error(receipt: Receipt) -> float:
    """Of the time to the last token, its length known: what an answer that is not streamed can show."""
    assert receipt.choice is not None
    assert receipt.ended_s is not None
    later = (receipt.output_tokens or 1) - 1
    return (receipt.choice.first_token_s + later * receipt.choice.pace_s) / receipt.ended_s - 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """One run's errors and the most their median may be; `LIMIT` holds for each path too."""

    run: str
    start: float
    load: str
    errors: Errors
    limit: float

    def failures(self) -> Iterator[str]:
        """What does not pass, a sentence each."""
        for path in (None, *(sorted(self.errors.by_path) if self.limit == LIMIT else ())):
            median = self.errors.median(path)
            if not median <= self.limit:
                name = f"{self.run}, start {self.start:.2f}, load {self.load}, {path or 'all paths'}"
                yield f"{name}: median error {median:.1%}, more than {self.limit:.1%}"


@dataclass(frozen=True, slots=True)
class Bench:
    """All runs of one fleet and piece of traffic. capacity_rps : what the engines sustain"""

    fleets: Fleets
    rows: list[TrafficRow]
    conditions: Conditions
    capacity_rps: float

    def lines(self) -> Iterator[Line]:
        """Every run, one after the other."""
        for start in STARTS:
            yield self._line("idle", start, None, LIMIT)
        for load in LOADS:
            for start in STARTS:
                yield self._line("loaded", start, load, LIMIT)
        yield from self._disturbed()

    def _disturbed(self) -> Iterator[Line]:
        middle = len(self.rows) // 2
        slower = Disturbance(slower_from=middle)
        for load in (None, 0.35):  # of what the engines sustain before; they sustain half of it after
            yield self._line("slower", 1.0, load, LIMIT, slower, watched=FOLLOWED, from_index=middle)
        for load in (None, 0.7):
            clean = self._line("without", 1.0, load, LIMIT)
            most = clean.errors.median() + MORE_WITH_OUTLIERS
            yield clean
            yield self._line("outliers", 1.0, load, most, Disturbance(outlier_share=OUTLIER_SHARE))
        streamed = self._line("streamed", 1.0, 0.3, inf, whole=True)
        most = streamed.errors.median() + MORE_WITHOUT_STREAMS
        yield streamed
        for start in STARTS:
            yield self._line("whole", start, 0.3, most, Disturbance(whole=True), whole=True)

    def _line(
        self,
        run: str,
        start: float,
        load: float | None,
        limit: float,
        disturbance: Disturbance = NOTHING,
        *,
        watched: int = WATCHED,
        from_index: int = 0,
        whole: bool = False,
    ) -> Line:
        rows = one_at_a_time(self.rows) if load is None else at_rate(self.rows, load * self.capacity_rps)
        conditions = self.conditions
        if load is None:  # else the best of idle replicas would get them all
            conditions = replace(conditions, policy=PolicyConfig(name="round_robin"))
        seen = play(misread(self.fleets, start), rows, conditions, disturbance)
        errors = errors_of(seen, watched=watched, from_index=from_index, whole=whole)
        return Line(run, start, "idle" if load is None else f"{load:g}", errors, limit)


def table(lines: Sequence[Line], title: str) -> Table:
    """A row for each run."""
    paths = ("local", "remote", "recompute")
    shown = Table("run", "start", "load", "requests", "median", "p90", "bias", *paths, "limit", title=title)
    for line in lines:
        errors = line.errors
        shown.add_row(
            line.run,
            f"{line.start:.2f}",
            line.load,
            str(len(errors.all)),
            f"{errors.median():.1%}",
            f"{errors.p90():.0%}",
            f"{errors.bias():+.1%}",
            *(f"{errors.median(path):.1%}" for path in paths),
            "-" if line.limit == inf else f"{line.limit:.1%}",
        )
    return shown


def rows_of(trace: Path | None, fleets: Fleets, requests: int, seed: int) -> list[TrafficRow]:
    """The traffic: a part of `trace`, or conversations."""
    if trace is None:
        return conversations(requests, seed)
    return arrivals(read_trace(trace), fleets, Demand(requests=requests, load=0.5, seed=seed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", default="A100,H20", help="of the replicas, one each (default A100,H20)")
    parser.add_argument("--policy", default="e2e", help="rule of the loaded runs (default e2e)")
    parser.add_argument("--requests", type=int, default=1100, help="for each replica (default 1100)")
    parser.add_argument("--trace", type=Path, help="trace with 512-token blocks instead of the conversations")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic and of all chance in the runs (default 1)")
    args = parser.parse_args()
    cards = args.cards.split(",")
    fleets = of_cards(len(cards), cards)
    rows = rows_of(args.trace, fleets, args.requests * len(cards), args.seed)
    conditions = Conditions(policy=PolicyConfig(name=args.policy), seed=args.seed)
    capacity_rps = sustained_rps(fleets, rows, conditions)
    lines = list(Bench(fleets, rows, conditions, capacity_rps).lines())
    title = f"{args.cards}, {args.policy}, seed {args.seed}; the engines sustain {capacity_rps:.2f} requests/s"
    console = Console(width=132)
    console.print(table(lines, title))
    wrong = [sentence for line in lines for sentence in line.failures()]
    console.print("\n".join(wrong) or "passes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
