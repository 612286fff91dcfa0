"""Many runs, each a policy at a load with a seed, in as many processes as are wanted.

Model     a job says everything by value, so that it means the same in any process; runs share nothing but what each
          process keeps of the last trace, traffic and bounds
Valid     jobs >= 1 processes; results come in the order of the jobs whatever the order of ending
"""

from __future__ import annotations

import gc
import multiprocessing
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from loadtest.replay import fleets
from loadtest.replay.central import ORDERS, Central
from loadtest.replay.fleets import Fleets
from loadtest.replay.formats import Trace, read_trace
from loadtest.replay.measure import Ceiling, Summary, ceiling, summary
from loadtest.replay.results import Result
from loadtest.replay.run import Conditions, Replay, run_label
from loadtest.replay.workload import Demand, arrivals
from loadtest.traffic import TrafficRow
from router.receipts import Receipt

POLL_S = 0.1  # how often the parent looks for progress


@dataclass(frozen=True, slots=True)
class Source:
    """Where traffic and fleet come from. Without `fleet_file` a fleet of `cards` is made.

    store_gib : size of its shared store, > 0; None leaves it as it is
    """

    trace: Path
    format: str | None = None
    fleet_file: Path | None = None
    replicas: int = 4
    cards: tuple[str, ...] = ("A100", "H20")
    store_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    receipts : file to write them to
    detail : keep every request's numbers, not only the summary
    bounds : find the lower bound of the mean
    """

    source: Source
    demand: Demand
    conditions: Conditions
    warm_up: float
    deadline_s: float
    card_prices: tuple[tuple[str, float], ...] = ()
    receipts: Path | None = None
    detail: bool = False
    bounds: bool = True

    @property
    def label(self) -> str:
        load = "" if self.demand.load is None else f" at {self.demand.load:g}"
        size = "" if self.source.fleet_file is not None else f" on {self.source.replicas}"
        return f"{run_label(self.conditions)}{size}{load}, seed {self.conditions.seed}"


@dataclass(frozen=True, slots=True)
class Done:
    """What a job gave. result, limit : only with `detail`"""

    job: Job
    summary: Summary
    result: Result | None = None
    limit: Ceiling | None = None


Progress = Callable[[int, int], None]  # number of the job, requests that have arrived
Keep = Callable[[Done], None]


def trace_of(source: Source) -> Trace:
    """The trace, read once in each process whatever the fleet. Raises BadTrace."""
    return _read_once(source.trace, source.format)


@lru_cache(maxsize=1)
def _read_once(path: Path, format_name: str | None) -> Trace:
    return read_trace(path, format_name)


@lru_cache(maxsize=1)
def fleet_of(source: Source) -> Fleets:
    """Both readings of the fleet. Raises ConfigError."""
    if source.fleet_file is not None:
        fleet = fleets.of_file(source.fleet_file)
    else:
        fleet = fleets.of_cards(source.replicas, list(source.cards))
    return fleet if source.store_gib is None else fleets.with_store(fleet, source.store_gib)


@lru_cache(maxsize=1)
def traffic_of(source: Source, demand: Demand, warm_up: float, bounds: bool) -> tuple[list[TrafficRow], Ceiling]:
    """The arrivals of a run and what no rule can beat on them: the same for every policy."""
    trace, fleet = trace_of(source), fleet_of(source)
    rows = arrivals(trace, fleet, demand)
    engines = _blocks(fleet, trace).engines
    return rows, ceiling(engines, rows, block_tokens=trace.block_tokens, warm_up=warm_up, with_mean_bound=bounds)


def _blocks(fleet: Fleets, trace: Trace) -> Fleets:
    return fleets.with_blocks(fleet, router_tokens=1, engine_tokens=trace.block_tokens)


def play(job: Job, on_progress: Callable[[int], None] | None = None) -> Done:
    """Run one job in this process."""
    trace, fleet = trace_of(job.source), fleet_of(job.source)
    rows, limit = traffic_of(job.source, job.demand, job.warm_up, job.bounds)
    engines = _blocks(fleet, trace).engines
    name = job.conditions.policy.name
    if name in ORDERS:
        tokens = trace.block_tokens
        central = Central(engines, rows, order=name, tokens_per_id=tokens, seed=job.conditions.seed)
        result = central.run(on_progress)
    else:
        with ExitStack() as stack:
            stack.enter_context(_rare_collections())
            keep = None if job.receipts is None else stack.enter_context(_receipt_file(job.receipts))
            run = Replay(fleet, job.conditions, block_tokens=trace.block_tokens, on_receipt=keep)
            result = run.run(rows, on_progress)
    if on_progress is not None:
        on_progress(len(rows))
    numbers = summary(
        result,
        limit,
        engines,
        load=job.demand.load,
        seed=job.conditions.seed,
        deadline_s=job.deadline_s,
        card_prices=dict(job.card_prices),
    )
    return Done(job, numbers, result, limit) if job.detail else Done(job, numbers)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cycles seldom: a run makes hardly any, and its trace and caches, which are no garbage, are searched."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def _receipt_file(path: Path) -> Iterator[Callable[[Receipt], None]]:
    """Receipts as JSON lines, written as they come."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:

        def write(receipt: Receipt) -> None:
            file.write(encoder.encode(receipt) + b"\n")

        yield write


def play_all(
    jobs: Sequence[Job], processes: int, on_progress: Progress, *, on_done: Keep = lambda done: None
) -> list[Done]:
    """All of `jobs`, in their order. With one process nothing is started.

    on_done : told of each run in this process as soon as it has ended, in order of ending
    """
    if processes <= 1 or len(jobs) <= 1:
        return [_play_here(number, job, on_progress, on_done) for number, job in enumerate(jobs)]
    context = multiprocessing.get_context("spawn")  # nothing of the parent's threads and files comes along
    news: Any = context.Queue()
    with ProcessPoolExecutor(
        min(processes, len(jobs)), mp_context=context, initializer=_listen_to, initargs=(news,)
    ) as pool:
        futures: list[Future[Done]] = [pool.submit(_play_there, number, job) for number, job in enumerate(jobs)]
        try:
            _wait_for(futures, news, on_progress, on_done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _play_here(number: int, job: Job, on_progress: Progress, on_done: Keep) -> Done:
    done = play(job, lambda arrived: on_progress(number, arrived))
    on_done(done)
    return done


def _wait_for(futures: Sequence[Future[Done]], news: Any, on_progress: Progress, on_done: Keep) -> None:
    """Pass on progress and what has ended until every future is done, or raise what the first failed one raised."""
    left = set(futures)
    while left:
        done, left = wait(left, timeout=POLL_S, return_when=FIRST_COMPLETED)
        for number, arrived in _waiting_in(news):
            on_progress(number, arrived)
        for future in done:
            on_done(future.result())


def _waiting_in(news: Any) -> Iterator[tuple[int, int]]:
    while True:
        try:
            yield news.get_nowait()
        except queue.Empty:
            return


_news: Any = None  # of a worker process: where its progress goes; set once, before its first job


def _listen_to(news: Any) -> None:
    global _news
    _news = news


def _play_there(number: int, job: Job) -> Done:
    return play(job, lambda arrived: _news.put((number, arrived)))
