"""All runs as one HTML file that needs nothing else: tables, and charts as SVG inside it.

Model     a policy keeps its colour through the whole report. Plots of single requests show one load and one size of the
          fleet (the middle ones of a sweep) and the first seed; everything else shows means over seeds
Valid     up to about ten policies; more share colours
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite, isnan
from typing import TypeVar

import numpy as np

from loadtest.replay import svg
from loadtest.replay.central import ORDERS
from loadtest.replay.jobs import Done
from loadtest.replay.measure import Group, Summary, utilisation
from loadtest.replay.outputs import ROWS, Report, cell, heading, known, percent, played, seconds, setting_of
from loadtest.replay.results import Floats
from loadtest.replay.svg import Series, line_chart, scale_over, scatter
from sim_backends.fleet import Fleet

Step = TypeVar("Step")  # of a sweep
Point = tuple[float, Group]  # where on the axis of a sweep

SWEEP_WORDS = "Dashed: bounds no router can reach; black is the strict lower bound of the mean."
CURVE_POINTS = 200  # of a distribution: more cannot be seen
CLOUD_POINTS = 600  # of a scatter plot, evenly taken
SLICES = 72  # of time, in the map of utilisation
PATH_COLOURS = ("#009e73", "#0072b2", "#8a94a3")

STYLE = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:#1c2430;background:#fff;margin:0}
main{max-width:1010px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:25px;margin:0 0 4px}h2{font-size:18px;margin:38px 0 4px}h3{font-size:14px;margin:0 0 2px}
p{margin:4px 0 12px;color:#5d6878;max-width:75ch}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(460px,1fr));gap:26px 30px;margin-top:14px}
figure{margin:0}figcaption{font-size:13px;color:#5d6878;min-height:20px}
svg{width:100%;height:auto;display:block;font-family:inherit}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:10px 0 0;font-size:13px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:3px 14px 3px 0;text-align:right;white-space:nowrap;font-weight:400}
td:first-child,th:first-child{text-align:left;white-space:pre;color:#5d6878}
summary{cursor:pointer;margin:10px 0 4px;color:#5d6878}
thead th{border-bottom:1px solid #1c2430;font-weight:600}tr.rule td{border-bottom:1px solid #e4e8ee}
"""


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    caption: str
    chart: str


def render(report: Report, details: Sequence[Done], engines: Fleet) -> str:
    """The report as text. details : runs with their requests, one for each policy; engines : the fleet played."""
    policies = list(dict.fromkeys(group.policy for group in report.groups))
    colours = {name: svg.PALETTE[index % len(svg.PALETTE)] for index, name in enumerate(policies)}
    size, load = middle(report.setting.sizes), middle(_loads(report))
    groups = [group for group in report.groups if (group.replicas, group.load) == (size, load)]
    at = _on(report, size) + _at(load)
    sections = [
        _section("All numbers", "", _tables(report, (size, load))),
        _sweeps(report, size, load, colours),
        _section(f"Waiting{at}", *_waiting(groups, details, colours)),
        _section(f"State and where it came from{at}", *_state(groups, colours)),
        _section(f"Utilisation{at}", *_replicas(details, engines)),
        _section(f"Predicted and observed{at}", *_predictions(details, colours)),
    ]
    body = f"<h1>Replay of {escape(report.setting.trace)}</h1>{_intro(report)}{_legend(colours)}{''.join(sections)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Replay of {escape(report.setting.trace)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def middle(swept: Sequence[Step]) -> Step:
    """Of the loads or fleets of a sweep the one whose single requests are plotted."""
    return swept[len(swept) // 2]


def _loads(report: Report) -> list[float | None]:
    return list(dict.fromkeys(group.load for group in report.groups))


def _on(report: Report, size: int) -> str:
    return f" on {size} replicas" if len(report.setting.sizes) > 1 else ""


def _at(load: float | None) -> str:
    return "" if load is None else f", at ideal cached load {load:g}"


def _intro(report: Report) -> str:
    setting = report.setting
    kinds = ", ".join(f"{setting.cards.count(card)} x {card}" for card in dict.fromkeys(setting.cards))
    left_out = f" ({setting.left_out} without prompt or output left out)" if setting.left_out else ""
    told = "no load reports" if setting.load_period_s is None else f"load reports every {setting.load_period_s:g} s"
    by = "the router" if setting.fetch == "directed" else "the engines"
    sizes = f"{', '.join(map(str, setting.sizes))} simulated replicas ({kinds}"
    if len(setting.sizes) > 1:
        sizes += f" where there are {len(setting.replicas)}"
    first, last = setting.part
    part = "" if (first, last) == (0, 1) else f", of which those from {first:.0%} to {last:.0%} were played"
    sentences = (
        f"{sizes}) behind the router's own dispatcher in virtual time.",
        f"Trace in the format {setting.format}, {setting.rows} rows{left_out}{part};",
        f"the first {setting.warm_up:.0%} of each run are not counted.",
        f"Deadline of the first token {setting.deadline_s:g} s. Cache events {setting.event_delay_s:g} s late, {told},",
        f"estimates wrong by {setting.estimator_error:.0%}, fetches decided by {by}. tfirst {report.version}.",
    )
    return f"<p>{escape(' '.join(sentences))}</p>"


def _legend(colours: dict[str, str]) -> str:
    items = "".join(f'<span><i style="background:{c}"></i>{escape(name)}</span>' for name, c in colours.items())
    return f'<div class="legend">{items}</div>'


def _section(title: str, words: str, figures: Sequence[Figure] | str) -> str:
    if isinstance(figures, str):
        inside = figures
    else:
        drawn = "".join(
            f"<figure><h3>{escape(one.title)}</h3><figcaption>{escape(one.caption)}</figcaption>{one.chart}</figure>"
            for one in figures
        )
        inside = f'<div class="charts">{drawn}</div>'
    return f"<h2>{escape(title)}</h2>{f'<p>{escape(words)}</p>' if words else ''}{inside}"


def _tables(report: Report, opened: tuple[int, float | None]) -> str:
    return "".join(
        _table([g for g in report.groups if (g.replicas, g.load) == one], opened=one == opened)
        for one in played(report)
    )


def _table(groups: Sequence[Group], *, opened: bool) -> str:
    head = "".join(f"<th>{escape(heading(group.policy)).replace(chr(10), '<br>')}</th>" for group in groups)
    lines = []
    for label, field, written, rule in ROWS:
        cells = [cell(group.numbers[field], written) for group in groups]
        if any(one != "-" for one in cells):
            row = "".join(f"<td>{escape(one)}</td>" for one in cells)
            lines.append(f"<tr{' class=rule' if rule else ''}><td>{escape(label)}</td>{row}</tr>")
    seeds = f", {groups[0].seeds} seeds, intervals of 95 %" if groups[0].seeds > 1 else ""
    counted = f"{groups[0].numbers['requests'].mean:.0f} requests on {setting_of(groups[0])}"
    return (
        f"<details{' open' if opened else ''}><summary>{counted}{seeds}</summary>"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>{"".join(lines)}</table></div></details>'
    )


# Sweeps


def _sweeps(report: Report, size: int, load: float | None, colours: dict[str, str]) -> str:
    """What was swept: over the load on a fleet of `size` replicas, over the size at `load`."""
    loads = [one for one in _loads(report) if one is not None]
    sizes = tuple(float(one) for one in report.setting.sizes)
    shown = ""
    if len(loads) > 1:
        x = svg.Scale(min(loads) - 0.02, max(loads) + 0.02, "ideal cached load")
        along = [(g.load, g) for g in report.groups if g.replicas == size and g.load is not None]
        shown += _section(f"Load{_on(report, size)}", SWEEP_WORDS, _sweep(report, along, x, colours))
    if len(sizes) > 1:
        x = svg.Scale(min(sizes) / 1.1, max(sizes) * 1.1, "replicas, log scale", log=True, marks=sizes)
        along = [(float(g.replicas), g) for g in report.groups if g.load == load]
        shown += _section(f"Size of the fleet{_at(load)}", SWEEP_WORDS, _sweep(report, along, x, colours))
    return shown


def _sweep(report: Report, along: Sequence[Point], x: svg.Scale, colours: dict[str, str]) -> list[Figure]:
    bounds = sorted({at: known(group, "bound_s") for at, group in along}.items())
    first = [*_lines(along, "first_token_mean_s", colours), Series("lower bound", svg.INK, bounds, dashed=True)]
    figures = [
        Figure("First token, mean", "seconds, log scale", _chart(first, x, "seconds", log=True)),
        Figure(
            "End to end, mean",
            "seconds, log scale",
            _chart(_lines(along, "end_to_end_mean_s", colours), x, "seconds", log=True),
        ),
        Figure(
            f"First token inside {report.setting.deadline_s:g} s",
            "share of all requests; goodput is where a line crosses 0.9 or 0.99",
            _chart(_lines(along, "inside_deadline", colours), x, "share", log=False),
        ),
    ]
    over = _lines(along, "central_ratio", colours)
    if any(isfinite(ratio) for one in over for _at, ratio in one.points):
        chart = _chart(over, x, "times, log scale", log=True)
        figures.append(Figure("First token, mean, over central_fcfs", "late binding with a perfect cache is 1", chart))
    return figures


def _lines(along: Sequence[Point], field: str, colours: dict[str, str]) -> list[Series]:
    return [
        Series(
            policy,
            colour,
            sorted((at, known(group, field)) for at, group in along if group.policy == policy),
            dashed=policy in ORDERS,
        )
        for policy, colour in colours.items()
    ]


def _chart(series: Sequence[Series], x: svg.Scale, label: str, *, log: bool) -> str:
    y = scale_over([point[1] for one in series for point in one.points], label, log=log, zero=not log)
    return line_chart(series, x, y, dots=True)


# Waiting


def _waiting(groups: Sequence[Group], details: Sequence[Done], colours: dict[str, str]) -> tuple[str, list[Figure]]:
    firsts = [(done, *_counted(done)) for done in details]
    ttft = [_curve(done, first_s, colours) for done, first_s, _best_s in firsts]
    slow = [_curve(done, first_s / best_s, colours) for done, first_s, best_s in firsts]
    pairs = [
        Series(g.policy, colours[g.policy], [(known(g, "first_token_mean_s"), known(g, "end_to_end_mean_s"))])
        for g in groups
    ]
    x = scale_over([one.points[0][0] for one in pairs], "first token, mean, seconds", log=True)
    y = scale_over([one.points[0][1] for one in pairs], "end to end, mean, seconds", log=True)
    bars = svg.bar_rows(
        [g.policy for g in groups],
        [
            [(known(g, "first_token_mean_s"), colours[g.policy], seconds(known(g, "first_token_mean_s")))]
            for g in groups
        ],
        label="seconds; the tick is the lower bound",
        high=_largest([known(g, "first_token_mean_s") for g in groups]),
        written=seconds,
        marks=[known(g, "bound_s") for g in groups],
    )
    return "", [
        Figure("First token", "share of requests within a time", _distribution(ttft, "seconds")),
        Figure("Slowdown", "first token over this request's own best possible", _distribution(slow, "times the best")),
        Figure(
            "First token against end to end",
            "lower left is better; log scales",
            scatter(pairs, x, y, radius=5, labels=True),
        ),
        Figure("First token, mean", "seconds", bars),
    ]


def _largest(values: Sequence[float]) -> float:
    """End of a scale from 0 that holds all of `values`."""
    return max((value for value in values if isfinite(value) and value > 0), default=1.0)


def _counted(done: Done) -> tuple[Floats, Floats]:
    """First tokens after the warm-up that came, and the best possible ones of the same requests."""
    assert done.result is not None, "a run with its requests"
    assert done.limit is not None, "a run with its requests"
    kept = done.result.answered.copy()
    kept[: done.limit.warm] = False
    return done.result.first_token_s[kept], done.limit.best_s[kept]


def _curve(done: Done, values: Floats, colours: dict[str, str]) -> Series:
    shares = np.linspace(0.0, 1.0, CURVE_POINTS)
    name = done.summary.policy
    points = list(zip(np.quantile(values, shares).tolist(), shares.tolist(), strict=True)) if len(values) else []
    return Series(name, colours[name], points, dashed=name in ORDERS)


def _distribution(series: Sequence[Series], label: str) -> str:
    x = scale_over([point[0] for one in series for point in one.points], label, log=True)
    return line_chart(series, x, svg.Scale(0.0, 1.0, "share of requests"))


# State


def _state(groups: Sequence[Group], colours: dict[str, str]) -> tuple[str, list[Figure]]:
    routed = [group for group in groups if not isnan(known(group, "local_share"))]
    hits = svg.bar_rows(
        [g.policy for g in groups],
        [[(known(g, "hit_rate"), colours[g.policy], percent(known(g, "hit_rate")))] for g in groups],
        label="share of prompt tokens; the tick is one perfect cache",
        high=_largest([known(g, field) for g in groups for field in ("hit_rate", "hit_ceiling")]),
        written=percent,
        marks=[known(g, "hit_ceiling") for g in groups],
    )
    kinds = ("local", "remote", "recompute")
    paths = svg.bar_rows(
        [g.policy for g in routed],
        [
            [
                (known(g, f"{kind}_share"), colour, f"{kind} {percent(known(g, f'{kind}_share'))}")
                for kind, colour in zip(kinds, PATH_COLOURS, strict=True)
            ]
            for g in routed
        ],
        label="share of requests: green own memory, blue the store, grey computed",
        high=1.0,
        written=percent,
    )
    return "", [
        Figure("Prompt tokens not computed", "by the engines' own count", hits),
        Figure("Where most of a prompt came from", "as believed at the choice", paths),
    ]


# Replicas


def _replicas(details: Sequence[Done], engines: Fleet) -> tuple[str, list[Figure]]:
    words = "Share of each slice of time spent on prefill, from white (none) to dark blue (all)."
    return words, [_map(done, engines) for done in details]


def _map(done: Done, engines: Fleet) -> Figure:
    assert done.result is not None, "a run with its requests"
    edges_s, shares = utilisation(done.result, engines, bins=SLICES)
    chart = svg.heat_map(done.result.replicas, shares.tolist(), edges_s.tolist(), label="seconds")
    return Figure(done.summary.policy, f"busiest over mean {done.summary.imbalance:.2f}", chart)


# Predictions


def _predictions(details: Sequence[Done], colours: dict[str, str]) -> tuple[str, list[Figure]]:
    clouds = [(done, _cloud(done, colours)) for done in details if not isnan(done.summary.prediction_error_p50)]
    values = [value for _done, cloud in clouds for point in cloud.points for value in point]
    x = scale_over(values, "predicted first token, seconds", log=True)
    y = scale_over(values, "observed, seconds", log=True)
    return "One dot a request; on the dashed line the prediction was right.", [
        Figure(
            done.summary.policy,
            _how_right(done.summary),
            scatter([cloud], x, y, radius=2, labels=False, diagonal=True),
        )
        for done, cloud in clouds
    ]


def _how_right(run: Summary) -> str:
    words = f"median error {percent(run.prediction_error_p50)}"
    if isnan(run.coverage_p90) and isnan(run.coverage_p99):
        return words
    return f"{words}; p90 covers {percent(run.coverage_p90)}, p99 {percent(run.coverage_p99)}"


def _cloud(done: Done, colours: dict[str, str]) -> Series:
    assert done.result is not None, "a run with its requests"
    assert done.limit is not None, "a run with its requests"
    result = done.result
    kept = np.flatnonzero(result.answered & ~np.isnan(result.predicted_s))
    kept = kept[kept >= done.limit.warm]
    few = kept[:: max(1, len(kept) // CLOUD_POINTS)]
    pairs = zip(result.predicted_s[few].tolist(), result.first_token_s[few].tolist(), strict=True)
    return Series(done.summary.policy, colours[done.summary.policy], list(pairs))
