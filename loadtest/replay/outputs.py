"""The numbers of all runs as a table for the terminal, as JSON and as CSV.

Valid     runs of one trace; several loads or sizes of the fleet make several tables
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from math import isnan, nan

import msgspec
from rich.table import Table

import router
from loadtest.replay.measure import Goodput, Group, Spread, Summary

# Raised when a field changes its meaning or leaves; new fields alone do not raise it. In 1 `load` was by the router's
# start values, since 2 it is by the engines' service times.
SCHEMA = 2


class Setting(msgspec.Struct, kw_only=True):
    """What was played, as far as it is the same for all runs."""

    trace: str
    format: str
    rows: int  # of the trace
    left_out: int  # of those, without prompt or output
    part: tuple[float, float]  # from which to which share of its requests was played
    fleet: str
    sizes: list[int]  # replicas of each fleet that was played
    replicas: list[str]  # of the fleet whose single requests are plotted: the middle one
    cards: list[str]
    requests: int | None
    speedup: float | None
    warm_up: float
    deadline_s: float
    event_delay_s: float
    load_period_s: float | None
    estimator_error: float
    fetch: str


class Report(msgspec.Struct, kw_only=True):
    """The whole JSON file. null is unknown or does not apply."""

    schema: int = SCHEMA
    version: str = router.__version__
    setting: Setting
    runs: list[Summary]
    groups: list[Group]
    goodput: list[Goodput]


Written = Callable[[float], str]


def seconds(value: float) -> str:
    """Seconds with three digits that count."""
    return "-" if isnan(value) else f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value:.3g} s"


def percent(value: float) -> str:
    return "-" if isnan(value) else f"{value:.1%}"


def times(value: float) -> str:
    return "-" if isnan(value) else f"{value:.3g}x" if value < 1000 else f"{value:,.0f}x"


def gigabytes(value: float) -> str:
    return "-" if isnan(value) else f"{value / 1e9:.4g} GB"


def microseconds(value: float) -> str:
    return "-" if isnan(value) else f"{value * 1e6:.0f} us"


def money(value: float) -> str:
    return "-" if isnan(value) else f"{value:.3g}"


def whole(value: float) -> str:
    return "-" if isnan(value) else f"{value:.0f}"


# (label, field, how it is written, whether a rule follows)
ROWS: tuple[tuple[str, str, Written, bool], ...] = (
    ("first token, mean", "first_token_mean_s", seconds, False),
    ("  p50", "first_token_p50_s", seconds, False),
    ("  p90", "first_token_p90_s", seconds, False),
    ("  p99", "first_token_p99_s", seconds, False),
    ("  over the lower bound", "bound_ratio", times, False),
    ("  over central_fcfs", "central_ratio", times, True),
    ("slowdown, p50", "slowdown_p50", times, False),
    ("  p99", "slowdown_p99", times, True),
    ("end to end, mean", "end_to_end_mean_s", seconds, False),
    ("  p99", "end_to_end_p99_s", seconds, False),
    ("time per output token, mean", "per_token_mean_s", seconds, False),
    ("  p50", "per_token_p50_s", seconds, True),
    ("inside the deadline", "inside_deadline", percent, False),
    ("refused", "refused", whole, False),
    ("answers cut short", "cut", whole, False),
    ("cost per request inside", "cost_per_request", money, True),
    ("prompt tokens reused", "hit_rate", percent, False),
    ("  with one perfect cache", "hit_ceiling", percent, False),
    ("fetched from the store", "fetched_bytes", gigabytes, False),
    ("path local (mainly own memory)", "local_share", percent, False),
    ("  remote (mainly the store)", "remote_share", percent, False),
    ("  recompute (mainly computed)", "recompute_share", percent, True),
    ("busiest replica over mean", "imbalance", times, False),
    ("prediction error, median", "prediction_error_p50", percent, False),
    ("predicted p90 covers", "coverage_p90", percent, False),
    ("  p99 covers", "coverage_p99", percent, False),
    ("time of a decision, mean", "decision_mean_s", microseconds, False),
    ("  p99", "decision_p99_s", microseconds, False),
    ("processor time of the run", "took_s", seconds, False),
)


# What is shown of a rule over the sizes of a fleet: (what, field, how it is written).
SIZE_ROWS: tuple[tuple[str, str, Written], ...] = (
    ("first token, mean", "first_token_mean_s", seconds),
    ("over central_fcfs", "central_ratio", times),
    ("inside the deadline", "inside_deadline", percent),
)

LABEL_WIDTH, EDGES_WIDTH = 36, 3  # of the first column with its edges, and of a cell's own


def tables(report: Report, width: int) -> list[Table]:
    """For each fleet and load a column for each policy, in several tables where `width` characters do not hold all.

    Last ones compare the sizes of the fleet where those were swept, and have the goodput where loads were.
    """
    shown = []
    for replicas, load in played(report):
        groups = [group for group in report.groups if (group.replicas, group.load) == (replicas, load)]
        fit = max(1, (width - LABEL_WIDTH) // _cell_width(groups))
        shown += [_numbers_table(groups[start : start + fit]) for start in range(0, len(groups), fit)]
    loads = dict.fromkeys(group.load for group in report.groups)
    if len(report.setting.sizes) > 1:
        shown += [_sizes_table(report, load) for load in loads]
    if len(loads) > 1:
        shown.append(_goodput_table(report))
    return shown


def played(report: Report) -> list[tuple[int, float | None]]:
    """Size of the fleet and load of everything that was played, in order."""
    return list(dict.fromkeys((group.replicas, group.load) for group in report.groups))


def setting_of(group: Group) -> str:
    """On how many replicas and at which load, in words."""
    at = "" if group.load is None else f" at ideal cached load {group.load:g}"
    return f"{group.replicas} replica{'s' if group.replicas > 1 else ''}{at}"


def heading(policy: str) -> str:
    """A policy's name over its settings, a line each.

    >>> heading("e2e:own_pace=0.5,queue_behind=2").splitlines()
    ['e2e', 'own_pace=0.5', 'queue_behind=2']
    """
    return policy.replace(":", "\n", 1).replace(",", "\n")


def _cell_width(groups: Sequence[Group]) -> int:
    """Characters of the widest cell of these groups, with its edges."""
    cells = [cell(group.numbers[field], written) for group in groups for _label, field, written, _rule in ROWS]
    heads = [line for group in groups for line in heading(group.policy).splitlines()]
    return EDGES_WIDTH + max(map(len, [*cells, *heads]))


def _numbers_table(groups: Sequence[Group]) -> Table:
    counted = groups[0].numbers["requests"].mean
    seeds = f", mean of {groups[0].seeds} seeds with 95 % intervals" if groups[0].seeds > 1 else ""
    table = Table(title=f"{counted:.0f} requests on {setting_of(groups[0])}{seeds}", title_justify="left")
    table.add_column("")
    for group in groups:
        table.add_column(heading(group.policy), justify="right")
    for label, field, written, rule in ROWS:
        cells = [cell(group.numbers[field], written) for group in groups]
        if any(one != "-" for one in cells):
            table.add_row(label, *cells, end_section=rule)
    return table


def _sizes_table(report: Report, load: float | None) -> Table:
    """Policies by the size of the fleet at one load."""
    at = "" if load is None else f" at ideal cached load {load:g}"
    table = Table(title=f"size of the fleet{at}", title_justify="left")
    table.add_column("replicas", overflow="fold")
    sizes = report.setting.sizes
    for size in sizes:
        table.add_column(f"{size}", justify="right")
    policies = list(dict.fromkeys(group.policy for group in report.groups))
    for what, field, written in SIZE_ROWS:
        table.add_row(what)
        for policy in policies:
            own = {g.replicas: g.numbers[field] for g in report.groups if (g.policy, g.load) == (policy, load)}
            table.add_row(
                f"  {policy}", *(cell(own[size], written) for size in sizes), end_section=policy == policies[-1]
            )
    return table


def cell(spread: Spread, written: Written) -> str:
    """A number, with half of its interval when there is one."""
    if isnan(spread.half_width) or isnan(spread.mean):
        return written(spread.mean)
    return f"{written(spread.mean)} ±{written(spread.half_width)}"


def _goodput_table(report: Report) -> Table:
    table = Table(title="goodput", title_justify="left")
    table.add_column(f"highest load with first tokens inside {report.setting.deadline_s:g} s", overflow="fold")
    if is_swept := len(report.setting.sizes) > 1:
        table.add_column("replicas", justify="right")
    for share in dict.fromkeys(one.share for one in report.goodput):
        table.add_column(f"for {share:.0%}", justify="right")
    for policy, replicas in dict.fromkeys((one.policy, one.replicas) for one in report.goodput):
        own = [_load(one.load) for one in report.goodput if (one.policy, one.replicas) == (policy, replicas)]
        table.add_row(policy, *([str(replicas)] if is_swept else []), *own)
    return table


def _load(value: float) -> str:
    return "none" if isnan(value) else f"{value:g}"


def as_json(report: Report) -> bytes:
    """The whole report; NaN becomes null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def as_csv(runs: Sequence[Summary]) -> str:
    """A line for each run, a column for each field; unknown is empty."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Summary.__struct_fields__)
    for run in runs:
        writer.writerow([_plain(getattr(run, name)) for name in Summary.__struct_fields__])
    return text.getvalue()


def _plain(value: object) -> object:
    return "" if value is None or (isinstance(value, float) and isnan(value)) else value


def known(group: Group, field: str) -> float:
    """Mean of one number of a group; NaN when it is not there."""
    spread = group.numbers.get(field)
    return nan if spread is None else spread.mean
