"""Plays the tables of a contest, each into its own JSON file, so that a stopped contest goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from pathlib import Path

import msgspec

from loadtest.replay.central import ORDERS
from loadtest.replay.contest.plan import Table
from loadtest.replay.jobs import Job, Source, play_all
from loadtest.replay.measure import Group, Summary, grouped
from loadtest.replay.run import Conditions
from loadtest.replay.workload import Demand
from router.config import PolicyConfig

YARDSTICK = ORDERS[0]
WARM_UP, DEADLINE_S = 0.15, 5.0


class Played(msgspec.Struct, kw_only=True):
    """What one table's file holds. took_s : processor time of all its runs"""

    name: str
    title: str
    groups: list[Group]
    requests: float  # counted in one run, after the warm-up
    took_s: float


def jobs_of(table: Table, trace: Path, part: tuple[float, float]) -> list[Job]:
    """Every run of `table` on the requests of `trace` in `part`; runs on the same requests stand together."""
    most = max(table.seeds.values())
    rules = {YARDSTICK: most} | table.seeds
    return [
        Job(
            source=Source(trace, None, None, size, table.cards),
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


def play(
    table: Table,
    trace: Path,
    part: tuple[float, float],
    *,
    processes: int,
    on_progress: Callable[[int, int], None] = lambda job, arrived: None,
) -> Played:
    """Every run of `table`, in `processes` processes."""
    runs = [done.summary for done in play_all(jobs_of(table, trace, part), processes, on_progress)]
    hold_against_yardstick(runs)
    return Played(
        name=table.name,
        title=table.title,
        groups=grouped(runs),
        requests=runs[0].requests,
        took_s=sum(run.took_s for run in runs),
    )


def hold_against_yardstick(runs: list[Summary]) -> None:
    """Ratios to central_fcfs on the same requests, where both left as many unanswered: those that fit no replica."""
    of = {(run.replicas, run.load, run.seed): run for run in runs if run.policy == YARDSTICK}
    for run in runs:
        yardstick = of[run.replicas, run.load, run.seed]
        if run.refused == yardstick.refused:
            run.central_ratio = run.first_token_mean_s / yardstick.first_token_mean_s


def write(played: Played, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file_of(played.name, folder).write_bytes(msgspec.json.format(msgspec.json.encode(played), indent=1) + b"\n")


def read(name: str, folder: Path) -> Played | None:
    """What was played of the table `name`; None: it was not."""
    path = file_of(name, folder)
    if not path.exists():
        return None
    plain = msgspec.json.decode(path.read_bytes())
    for group in plain["groups"]:
        for spread in group["numbers"].values():
            spread.update({key: nan for key, value in spread.items() if value is None})  # null is unknown
    return msgspec.convert(plain, Played)


def file_of(name: str, folder: Path) -> Path:
    return folder / f"{name}.json"
