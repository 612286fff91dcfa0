"""What a chaos run comes to: the table of phases, the verdict, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isnan
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from loadtest.chaos.load import Outcome
from loadtest.chaos.run import Result

_COUNTED = ("ok", "refused", "failed", "cut")  # the others must not be, and are in the verdict


def passed(results: Sequence[Result]) -> bool:
    """Whether nothing was wrong and everything recovered in time."""
    return not any(result.wrong or result.slow for result in results)


def table_of(results: Sequence[Result]) -> Table:
    """A row for each phase. Times in seconds."""
    table = Table(title="Seconds; before, during, after: mean first token", title_justify="left", box=SIMPLE)
    table.collapse_padding, table.pad_edge = True, False  # fits 80 columns, as logs of builds have
    table.add_column("phase")
    for column in ("sent", *_COUNTED, "before", "during", "after", "shown", "back"):
        table.add_column(column, justify="right")
    for result in results:
        times = [seconds(value) for value in (result.before_s, result.during_s, result.after_s)]
        shown, recovered = (seconds(value, digits=1) for value in (result.shown_s, result.recovered_s))
        counts = [str(result.counts[name]) for name in _COUNTED]
        table.add_row(result.name, str(sum(result.counts.values())), *counts, *times, shown, recovered)
    return table


def verdict(results: Sequence[Result], *, took_s: float) -> str:
    """What was wrong, a line each, and what it all comes to."""
    problems = [f"{result.name}: {why}" for result in results for why in problems_of(result)]
    requests = sum(sum(result.counts.values()) for result in results)
    if problems:
        return "\n".join([*problems, f"FAILED: {len(problems)} problems in {requests} requests, {took_s:.0f} s."])
    slowest_s = max((result.recovered_s for result in results if result.recovered_s is not None), default=0.0)
    return (
        f"PASSED: each of {requests} requests had exactly one end, none hung or ended short, no booking and no socket"
        f" was left, and first tokens were as before within {slowest_s:.1f} s; {took_s:.0f} s."
    )


def problems_of(result: Result) -> list[str]:
    """Everything about one phase that makes a run fail."""
    return [*result.wrong, *([] if result.slow is None else [result.slow])]


def line_of(result: Result) -> str:
    """One phase in a line, while the run goes on."""
    counts = ", ".join(
        f"{result.counts[outcome.value]} {outcome.value}" for outcome in Outcome if result.counts[outcome.value]
    )
    times = " / ".join(seconds(value) for value in (result.before_s, result.during_s, result.after_s))
    word = "as it should be" if not problems_of(result) else "; ".join(problems_of(result)[:2])
    return f"{result.name:<9} {counts}; first token {times} s: {word}"


def as_values(results: Sequence[Result], *, seed: int, took_s: float) -> dict[str, Any]:
    """The run as plain values; what is unknown is None."""
    phases = []
    for result in results:
        values = {key: known(value) for key, value in asdict(result).items()}
        phases.append(values)
    return {"seed": seed, "took_s": took_s, "passed": passed(results), "phases": phases}


def known(value: Any) -> Any:
    """NaN as None, everything else as it is."""
    return None if isinstance(value, float) and isnan(value) else value


def seconds(value: float | None, *, digits: int = 3) -> str:
    """A time as the table has it; unknown is a dash."""
    return "-" if value is None or isnan(value) else f"{value:.{digits}f}"
