"""Plays the tables of a contest, and keeps every run as a line of its table's file: a stopped contest goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from zlib import crc32

import msgspec

from loadtest.replay.central import ORDERS
from loadtest.replay.contest.plan import Table
from loadtest.replay.jobs import Done, Job, Source, play_all
from loadtest.replay.measure import Group, Summary, grouped
from loadtest.replay.run import Conditions
from loadtest.replay.workload import Demand
from router.config import PolicyConfig

YARDSTICK = ORDERS[0]
NUMBER_FIELDS = [field.name for field in msgspec.structs.fields(Summary) if field.type is float]
WARM_UP, DEADLINE_S = 0.15, 5.0


class Played(msgspec.Struct, kw_only=True):
    """What was played of one table. took_s : processor time of all its runs"""

    groups: list[Group]
    requests: float  # counted in one run, after the warm-up
    took_s: float
    missing: int = 0  # runs of the table that were not played


Run = tuple[str, int, float | None, int]  # rule, replicas, load, seed: one of its table


def jobs_of(table: Table, trace: Path, part: tuple[float, float]) -> list[Job]:
    """Every run of `table` on the requests of `trace` in `part`; runs on the same requests stand together."""
    most = max(table.seeds.values())
    rules = {YARDSTICK: most} | table.seeds
    return [
        Job(
            source=Source(trace, replicas=size, cards=table.cards, store_gib=table.store_gib),
            demand=Demand(None, load, seed=seed, first_tokens_only=table.first_tokens_only, part=part),
            conditions=Conditions(
                policy=PolicyConfig(name=rule), seed=seed, estimator_error=table.error, directed=table.directed
            ),
            warm_up=WARM_UP,
            deadline_s=DEADLINE_S,
            bounds=False,
        )
        for size in table.sizes
        for load in table.loads
        for seed in range(most)
        for rule, seeds in rules.items()
        if seed < seeds
    ]


def play_missing(
    table: Table,
    trace: Path,
    part: tuple[float, float],
    folder: Path,
    *,
    processes: int,
    only: Collection[str] | None = None,
    on_run: Callable[[int, int], None] = lambda ended, of: None,
) -> None:
    """Every run of `table` that `folder` has no line of, in `processes` processes; each is kept as soon as it ended.

    only : rules that are played now; None: all
    on_run : told how many runs have ended, of how many
    """
    there = {run_of(summary) for summary in kept(table.name, folder)}
    jobs = [job for job in jobs_of(table, trace, part) if _run_of_job(job) not in there]
    if only is not None:
        jobs = [job for job in jobs if job.conditions.policy.name in only]
    if not jobs:
        return
    folder.mkdir(parents=True, exist_ok=True)
    forget(table.name, (), folder)  # only whole lines are left to append to
    ended = 0
    with file_of(table.name, folder).open("ab") as file:

        def keep(done: Done) -> None:
            nonlocal ended
            file.write(msgspec.json.encode(done.summary) + b"\n")
            file.flush()
            ended += 1
            on_run(ended, len(jobs))

        play_all(jobs, processes, lambda job, arrived: None, on_done=keep)


def read(table: Table, folder: Path) -> Played | None:
    """What was played of `table`, in the order of its runs; None: nothing was."""
    there = {run_of(summary): summary for summary in kept(table.name, folder)}
    wanted = [_run_of_job(job) for job in jobs_of(table, Path(), (0.0, 1.0))]
    runs = [there[run] for run in wanted if run in there]
    if not runs:
        return None
    hold_against_yardstick(runs)
    return Played(
        groups=grouped(runs),
        requests=runs[0].requests,
        took_s=sum(run.took_s for run in runs),
        missing=len(wanted) - len(runs),
    )


def hold_against_yardstick(runs: Sequence[Summary]) -> None:
    """Ratios to central_fcfs on the same requests, where both left as many unanswered: those that fit no replica."""
    of = {(run.replicas, run.load, run.seed): run for run in runs if run.policy == YARDSTICK}
    for run in runs:
        yardstick = of.get((run.replicas, run.load, run.seed))
        if yardstick is not None and run.refused == yardstick.refused:
            run.central_ratio = run.first_token_mean_s / yardstick.first_token_mean_s


class PlayedOf(msgspec.Struct):
    """What the runs in a folder were played of. traces : checksum of each by its name"""

    part: tuple[float, float]
    traces: dict[str, int]


def keep_apart(traces: Mapping[str, Path], part: tuple[float, float], folder: Path) -> None:
    """Let `folder` have runs of one part of the same traces only: a line does not say of what it is.

    Raises ValueError with a sentence if it has runs of others.
    """
    now = PlayedOf(part, {name: crc32(path.read_bytes()) for name, path in traces.items()})
    note = folder / "played_of.json"
    if note.exists():
        before = msgspec.json.decode(note.read_bytes(), type=PlayedOf)
        if before != now:
            differs = "other traces" if before.part == part else f"the part {before.part[0]:g}-{before.part[1]:g}"
            raise ValueError(f"{folder} has runs of {differs}; another --out keeps these apart")
        return
    folder.mkdir(parents=True, exist_ok=True)
    note.write_bytes(msgspec.json.encode(now))


def kept(name: str, folder: Path) -> Iterator[Summary]:
    """Runs of the table `name` that `folder` has lines of; a last line that was cut off is passed over."""
    path = file_of(name, folder)
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            plain = msgspec.json.decode(line)
            unknown = {field: nan for field in NUMBER_FIELDS if plain.get(field) is None}  # null is unknown
            yield msgspec.convert(plain | unknown, Summary)


def forget(name: str, rules: Collection[str], folder: Path) -> None:
    """Take the runs of `rules` out of the file of the table `name`, so that they are played again."""
    if file_of(name, folder).exists():
        lines = [msgspec.json.encode(run) + b"\n" for run in kept(name, folder) if run.policy not in rules]
        file_of(name, folder).write_bytes(b"".join(lines))


def run_of(summary: Summary) -> Run:
    return summary.policy, summary.replicas, summary.load, summary.seed


def _run_of_job(job: Job) -> Run:
    return job.conditions.policy.name, job.source.replicas, job.demand.load, job.conditions.seed


def file_of(name: str, folder: Path) -> Path:
    return folder / f"{name}.jsonl"
