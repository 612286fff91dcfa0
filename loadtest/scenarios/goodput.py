"""What a run was worth to its users: requests within their deadlines, and the two tables that say so.

Model     goodput = requests that were answered whole and within every deadline set for them, per second of the
          measured span, which begins when the warm-up is over and ends with the run
Valid     requests that came in the span; what the end of the run cut off is counted apart and judged as nothing
Blind to  what is not yet answered when a run ends: let it finish (`--stop-timeout`), or long answers are missing
Source    goodput under deadlines: Zhong et al., DistServe, OSDI 2024
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

NAN = float("nan")


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """What one request must keep; seconds, None for none."""

    first_token_s: float | None = None
    per_token_s: float | None = None
    end_s: float | None = None

    def __str__(self) -> str:
        set_ones = [
            f"{name} {value:g} s"
            for name, value in (
                ("first token", self.first_token_s),
                ("per token", self.per_token_s),
                ("end", self.end_s),
            )
            if value is not None
        ]
        return ", ".join(set_ones) or "none"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its user saw it. Seconds; `at_s` since the run began. What did not happen is None.

    name : the kind of user; tenant : on whose account, "" for nobody's
    late_s : by how much the generator sent it after it was due; counted in all times of the request
    """

    name: str
    at_s: float
    first_token_s: float | None = None
    per_token_s: float | None = None
    longest_gap_s: float | None = None
    end_s: float | None = None
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    tenant: str = ""
    late_s: float = 0.0
    deadlines: Deadlines = Deadlines()

    @property
    def good(self) -> bool:
        """Answered whole, within every deadline. Nothing is between two tokens of an answer of one."""
        limits = self.deadlines
        return self.error is None and all(
            limit is None or value is None or value <= limit
            for value, limit in (
                (self.first_token_s, limits.first_token_s),
                (self.per_token_s, limits.per_token_s),
                (self.end_s, limits.end_s),
            )
        )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run as it is kept in a file.

    warm_up_s : requests due before it are in `samples` and in no figure
    length_s : from the run's beginning to its end
    pass_good_share : least share of good requests for the run to pass
    """

    scenario: str
    url: str
    seed: int
    warm_up_s: float
    length_s: float
    pass_good_share: float
    samples: list[Sample]

    def measured(self) -> list[Sample]:
        """Samples that count."""
        return [sample for sample in self.samples if sample.at_s >= self.warm_up_s]

    def span_s(self) -> float:
        """Seconds over which they were sent; NaN when the run ended within its warm-up."""
        span_s = self.length_s - self.warm_up_s
        return span_s if span_s > 0.0 else NAN


@dataclass(frozen=True, slots=True)
class Figures:
    """What is told of a set of requests. Times in seconds over answered ones, shares 0..1, NaN of nothing."""

    requests: int
    errors: int
    first_token_s: tuple[float, float, float]  # mean, median, 99th percentile; so are the next
    per_token_s: tuple[float, float, float]
    end_s: tuple[float, float, float]
    longest_gap_s: float
    cached_share: float
    good_share: float
    goodput_rps: float
    late_s: float


def three(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, median and 99th percentile."""
    return (fmean(values), quantile(values, 0.5), quantile(values, 0.99)) if values else (NAN, NAN, NAN)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share does not exceed; NaN of nothing. share : 0..1"""
    if not values:
        return NAN
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def figures(samples: Sequence[Sample], *, span_s: float) -> Figures:
    """Of requests that were sent within `span_s`."""
    answered = [sample for sample in samples if sample.error is None]
    told = [sample for sample in answered if sample.cached_tokens is not None and sample.prompt_tokens]
    good = sum(sample.good for sample in samples)
    return Figures(
        requests=len(samples),
        errors=len(samples) - len(answered),
        first_token_s=three(_known(sample.first_token_s for sample in answered)),
        per_token_s=three(_known(sample.per_token_s for sample in answered)),
        end_s=three(_known(sample.end_s for sample in answered)),
        longest_gap_s=max(_known(sample.longest_gap_s for sample in answered), default=NAN),
        cached_share=_cached_share(told),
        good_share=good / len(samples) if samples else NAN,
        goodput_rps=good / span_s,
        late_s=max((sample.late_s for sample in samples), default=NAN),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _cached_share(told: Sequence[Sample]) -> float:
    prompt = sum(sample.prompt_tokens or 0 for sample in told)
    return sum(sample.cached_tokens or 0 for sample in told) / prompt if prompt else NAN


def by_kind(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples by kind of user and tenant, in order of first sight; "all" is last when there are several."""
    kinds: dict[str, list[Sample]] = {}
    everything = []
    for sample in samples:
        kinds.setdefault(f"{sample.name} {sample.tenant}".strip(), []).append(sample)
        everything.append(sample)
    return kinds if len(kinds) == 1 else {**kinds, "all": everything}


def passes(run: Run) -> bool:
    """Whether the run has its share of good requests; one without any has not."""
    return figures(run.measured(), span_s=run.span_s()).good_share >= run.pass_good_share


ROWS = (
    "requests",
    "errors",
    "first token, mean",
    "  p50",
    "  p99",
    "per output token, mean",
    "  p99",
    "longest gap",
    "end to end, mean",
    "  p50",
    "  p99",
    "prompt tokens not computed",
    "within deadlines",
    "goodput",
    "sent late, most",
)


def cells(told: Figures) -> list[str]:
    """What stands in the rows of `ROWS`."""
    return [
        str(told.requests),
        str(told.errors),
        *(seconds(value) for value in told.first_token_s),
        seconds(told.per_token_s[0]),
        seconds(told.per_token_s[2]),
        seconds(told.longest_gap_s),
        *(seconds(value) for value in told.end_s),
        percent(told.cached_share),
        percent(told.good_share),
        _or_dash(told.goodput_rps, f"{told.goodput_rps:.2f}/s"),
        seconds(told.late_s),
    ]


def seconds(value: float) -> str:
    """In ms below one second."""
    return _or_dash(value, f"{value * 1e3:.1f} ms" if value < 1.0 else f"{value:.2f} s")


def percent(share: float) -> str:
    return _or_dash(share, f"{share:.1%}" if share < 1.0 else "100%")


def _or_dash(value: float, text: str) -> str:
    return "-" if value != value else text


def table(columns: Mapping[str, Sequence[str]], rows: Sequence[str] = ROWS) -> str:
    """Plain text, a column for each name."""
    body = [["", *columns], *([row, *(column[at] for column in columns.values())] for at, row in enumerate(rows))]
    widths = [max(len(line[at]) for line in body) for at in range(len(body[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in body
    )


def by_tenths(run: Run) -> list[tuple[float, float]]:
    """Requests per second, and the share of good ones, in each tenth of the measured span."""
    span_s = run.span_s()
    tenths: list[list[Sample]] = [[] for _ in range(10)]
    for sample in run.measured() if span_s == span_s else ():
        tenths[min(9, int(10 * (sample.at_s - run.warm_up_s) / span_s))].append(sample)
    return [(len(tenth) / (span_s / 10), figures(tenth, span_s=span_s / 10).good_share) for tenth in tenths]


def report(run: Run) -> str:
    """The run by kinds of users, and whether it passes."""
    measured, span_s = run.measured(), run.span_s()
    if not measured:
        return (
            f"{run.scenario} at {run.url}, seed {run.seed}: nothing was measured: no request ended after the"
            f" {run.warm_up_s:g} s of warm-up (--warm-up-s, and -t for the whole)\n"
            f"FAILS: {run.pass_good_share:.0%} within deadlines are wanted"
        )
    columns = {kind: cells(figures(samples, span_s=span_s)) for kind, samples in by_kind(measured).items()}
    deadlines = {f"{sample.name} {sample.tenant}".strip(): sample.deadlines for sample in measured}
    tenths = by_tenths(run)
    first_error = next((sample.error for sample in measured if sample.error is not None), None)
    return "\n".join(
        [
            f"{run.scenario} at {run.url}, seed {run.seed}: {len(measured)} requests in {span_s:.1f} s"
            f" after {run.warm_up_s:g} s of warm-up",
            table(columns),
            *(f"deadlines of {kind}: {limits}" for kind, limits in deadlines.items()),
            f"requests/s by tenths:       {' '.join(f'{rate:6.2f}' for rate, _ in tenths)}",
            f"within deadlines by tenths: {' '.join(f'{percent(good):>6}' for _, good in tenths)}",
            *([f"first error: {first_error}"] if first_error is not None else []),
            f"{'passes' if passes(run) else 'FAILS'}: {run.pass_good_share:.0%} within deadlines are wanted",
        ]
    )


def comparison(runs: Mapping[str, Run]) -> str:
    """Runs of one scenario side by side; of two, with the change from the first to the second.

    Raises
    ------
    ValueError : the runs are not of one scenario, seed and warm-up, so that a comparison would say nothing.
    """
    first, *others = runs.values()
    for other in others:
        mine, its = _what(first), _what(other)
        if mine != its:
            raise ValueError(f"these runs cannot be compared: one is of {mine}, the other of {its}")
    told = {name: figures(run.measured(), span_s=run.span_s()) for name, run in runs.items()}
    columns = {name: cells(one) for name, one in told.items()}
    if len(told) == 2:
        before, after = (_numbers(one) for one in told.values())
        columns["change"] = [_change(was, now) for was, now in zip(before, after, strict=True)]
    return f"{first.scenario}, seed {first.seed}\n{table(columns)}"


def _what(run: Run) -> str:
    return f"{run.scenario}, seed {run.seed}, warm-up {run.warm_up_s:g} s"


def _numbers(told: Figures) -> list[Any]:
    return [
        told.requests,
        told.errors,
        *told.first_token_s,
        told.per_token_s[0],
        told.per_token_s[2],
        told.longest_gap_s,
        *told.end_s,
        told.cached_share,
        told.good_share,
        told.goodput_rps,
        told.late_s,
    ]


def _change(was: float, now: float) -> str:
    if was != was or now != now or was == 0.0:
        return "-"
    return f"{now / was - 1.0:+.0%}"
