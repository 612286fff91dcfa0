"""`tfirst calc startup`, `warmup` and `peaks`: backlogs, and the capacity that clears them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from estimators.planning.backlog import (
    StartUp,
    Stretch,
    backlog_over,
    capacity_for_peaks,
    service_to_drain_rps,
    start_to_drain_s,
    steps_to_repay,
)
from router.cli.calc.calculator import Answer, Calculator, Plot, Table, Value, new_axes
from router.cli.calc.inputs import MOST_SEQUENCES, count, number, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STARTUP_INPUTS = (
    number("arrival-rps", 3.5, "requests/s", "that come from the start on", above=True),
    number("ready-s", 10, "s", "until it serves"),
    numbers("service-rps", "4.55,4.17,3.02", "requests/s", "of each way to serve, once ready", above=True),
    number("by-s", 60, "s", "after the start, when the backlog is to be gone", above=True),
)


def answer_startup(*, arrival_rps: float, ready_s: float, service_rps: Sequence[float], by_s: float) -> Answer:
    starts = [StartUp(arrival_rps, rate, ready_s) for rate in service_rps]
    values = [
        Value("waiting", starts[0].waiting, "requests when it is ready"),
        Value("needed_rps", service_to_drain_rps(arrival_rps=arrival_rps, ready_s=ready_s, by_s=by_s), "requests/s"),
        Value("drained_at_s", [_or_never(one.drained_at_s) for one in starts], "s after the start"),
        Value("backlog_then", [one.backlog(by_s) for one in starts], f"requests at {by_s:g} s"),
    ]
    rows = [
        (
            one.service_rps,
            one.service_rps - arrival_rps,
            _or_never(one.drained_at_s),
            one.backlog(by_s),
            start_to_drain_s(arrival_rps=arrival_rps, service_rps=one.service_rps, by_s=by_s),
        )
        for one in starts
    ]
    columns = (
        "requests/s",
        "to spare",
        "backlog gone after, s",
        f"backlog at {by_s:g} s",
        f"longest start for {by_s:g} s, s",
    )
    return Answer(values, [Table("Once ready", columns, rows)])


def _or_never(seconds: float) -> float | str:
    return seconds if seconds < inf else "never"


def draw_startup(
    figure: Figure, *, arrival_rps: float, ready_s: float, service_rps: Sequence[float], by_s: float
) -> None:
    """Backlog from the start on, one line for each service rate."""
    axes = new_axes(figure, title="Backlog of a start", xlabel="s after the start", ylabel="requests waiting")[0]
    after_s = max(1.3 * by_s - ready_s, 0.3 * by_s)
    for rate in service_rps:
        before = [Stretch(ready_s, arrival_rps, 0.0)] if ready_s else []
        at_s, waiting = backlog_over([*before, Stretch(after_s, arrival_rps, rate)])
        axes.plot(at_s, waiting, label=f"{rate:g} requests/s")
    axes.axvline(by_s, linestyle=":", color="grey")
    axes.legend()


WARMUP_INPUTS = (
    number("extra-s", 10, "s", "longer start, for example to capture graphs"),
    number("saved-ms", 0.2, "ms", "saved in each step afterwards", above=True),
    count("batch", 32, "sequences", "in a step, each of which gets a token", low=1, high=MOST_SEQUENCES),
    number("steps-per-s", 36.4, "steps/s", "of one replica", above=True),
)


def answer_warmup(*, extra_s: float, saved_ms: float, batch: int, steps_per_s: float) -> Answer:
    steps = steps_to_repay(extra_s=extra_s, saved_per_step_s=saved_ms / 1e3)
    return Answer(
        [
            Value("steps", steps, "steps"),
            Value("tokens", steps * batch, "tokens"),
            Value("after_s", steps / steps_per_s, "s of steps"),
        ]
    )


PEAKS_INPUTS = (
    numbers("durations-s", "10,50", "s", "of the stretches of a cycle that repeats", above=True),
    numbers("arrivals", "12.25,1.75", "units/s", "in each stretch; requests, or GPU-seconds of one stage"),
    number("capacity", 4.67, "units/s", "served, in the same unit", above=True),
    number("most", 20, "units", "may wait at the worst moment"),
    count("cycles", 3, "cycles", "shown", low=1, high=1000),
)


def _cycle(durations_s: Sequence[float], arrivals: Sequence[float], capacity: float) -> list[Stretch]:
    if len(durations_s) != len(arrivals):
        raise ValueError(f"--durations-s names {len(durations_s)} stretches and --arrivals {len(arrivals)}")
    return [Stretch(seconds, inflow, capacity) for seconds, inflow in zip(durations_s, arrivals, strict=True)]


def answer_peaks(
    *, durations_s: Sequence[float], arrivals: Sequence[float], capacity: float, most: float, cycles: int
) -> Answer:
    cycle = _cycle(durations_s, arrivals, capacity)
    at_s, waiting = backlog_over(cycle * cycles)
    mean = sum(one.inflow * one.duration_s for one in cycle) / sum(one.duration_s for one in cycle)
    values = [
        Value("mean_arrivals", mean, "units/s"),
        Value("worst", max(waiting), "units waiting"),
        Value("left_at_the_end", waiting[-1], "units waiting"),
        Value("needed", capacity_for_peaks(cycle, most=most), f"units/s for at most {most:g} waiting"),
        Value("at_s", list(at_s), "s, corners of the backlog"),
        Value("waiting", list(waiting), "units at those"),
    ]
    table = Table("Backlog", ("s", "waiting"), list(zip(at_s, waiting, strict=True))[:25])
    notes = ["The backlog grows from cycle to cycle: capacity is below the mean."] if capacity < mean else []
    return Answer(values, [table], notes)


def draw_peaks(
    figure: Figure,
    *,
    durations_s: Sequence[float],
    arrivals: Sequence[float],
    capacity: float,
    most: float,
    cycles: int,
) -> None:
    """Backlog over some cycles."""
    axes = new_axes(figure, title="Backlog of a cycle", xlabel="s", ylabel="units waiting")[0]
    axes.plot(*backlog_over(_cycle(durations_s, arrivals, capacity) * cycles))
    axes.axhline(most, linestyle=":", color="grey")


STARTUP = (
    Calculator(
        "startup",
        "how long the backlog of a start is felt",
        STARTUP_INPUTS,
        answer_startup,
        (Plot("9-42", "backlog from the start on", draw_startup),),
    ),
    Calculator("warmup", "steps until a longer start has paid", WARMUP_INPUTS, answer_warmup),
    Calculator(
        "peaks",
        "backlog of arrivals that come in bunches, and the capacity for them",
        PEAKS_INPUTS,
        answer_peaks,
        (Plot("peaks", "backlog over some cycles", draw_peaks),),
    ),
)
