"""The comparison of arms as a page of HTML that needs nothing else, and as a picture.

Model     for each arm the verdict, the checks, the intervals of mean and quantiles, the difference over the looks of
          the test with its interval, and the table by prompt length; charts are SVG within the page
Valid     finite numbers; what is not known is left out of charts and is "-" in tables
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

from router.errors import ConfigError
from router.study.ab import WORDS, Comparison, Difference, amount, before_change
from router.study.balance import SUSPICIOUS_MIX, SUSPICIOUS_RATIO

INK, MUTED, RULE, BLUE, BAND = "#1c2430", "#5d6878", "#e4e8ee", "#0072b2", "#cfe3f1"
WIDTH, LEFT, RIGHT = 640, 90, 20
STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;color:#1c2430;background:#fff;margin:0}
main{max-width:760px;margin:0 auto;padding:24px 20px 60px}h1{font-size:24px}h2{font-size:19px;margin:36px 0 6px}
p.verdict{font-size:17px;border-left:4px solid #0072b2;padding-left:12px}p{max-width:75ch}
svg{width:100%;height:auto;background:#fff}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:3px 14px 3px 0;text-align:right}td:first-child,th:first-child{text-align:left}
thead th{border-bottom:1px solid}.bad{color:#b3261e;font-weight:600}
@media(prefers-color-scheme:dark){body{color:#e6e9ee;background:#14181f}}
"""


def render(found: Sequence[Comparison]) -> str:
    """The page as text."""
    what = WORDS[found[0].metric] if found else ""
    body = "".join(_section(one) for one in found)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Arms by {escape(what)}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>Arms by {escape(what)}</h1>{body}</main></body></html>\n"
    )


def _section(one: Comparison) -> str:
    title = f"{escape(one.arm)} against {escape(one.control)}"
    rows = [_row(one, each.statistic, "", "", each) for each in one.differences]
    buckets = [
        _row(one, bucket.name, str(bucket.control_requests), str(bucket.arm_requests), bucket.difference)
        for bucket in one.buckets
    ]
    return (
        f"<h2>{title}</h2><p class=verdict>{escape(one.verdict)}</p>{_checks(one)}"
        f"{_forest(one)}{_over_time(one)}"
        f"<h3>Mean and quantiles</h3>{_table(one, ('', '', ''), rows)}"
        f"<h3>Means by prompt tokens</h3>{_table(one, ('', one.control, one.arm), buckets)}"
    )


def _checks(one: Comparison) -> str:
    checks = (
        ("sample ratio", one.ratio_p_value, SUSPICIOUS_RATIO),
        ("mix of prompt lengths", one.mix_p_value, SUSPICIOUS_MIX),
    )
    told = [
        f"<span{' class=bad' if value < limit else ''}>{name}: p = {value:.2g}</span>" for name, value, limit in checks
    ]
    sizes = (
        f"{one.control_requests} requests of {one.control_units} units in {escape(one.control)},"
        f" {one.arm_requests} of {one.arm_units} in {escape(one.arm)}"
    )
    left_out = f" {before_change(one)}." if one.before_change else ""
    return f"<p>{sizes}.{left_out} Checks of the assignment: {', '.join(told)}.</p>"


def _table(one: Comparison, counts: tuple[str, str, str], rows: Sequence[str]) -> str:
    wide = [f"<th>{escape(name)} requests</th>" for name in counts[1:] if name]
    head = "".join(f"<th>{escape(name)}</th>" for name in (one.control, one.arm, "difference", "from", "to"))
    return f"<table><thead><tr><th></th>{''.join(wide)}{head}</tr></thead>{''.join(rows)}</table>"


def _row(one: Comparison, name: str, control: str, arm: str, each: Difference) -> str:
    numbers = [amount(one.metric, value) for value in (each.control, each.arm, each.difference, each.low, each.high)]
    cells = [text for text in (control, arm) if text] + numbers
    return f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(text)}</td>' for text in cells)}</tr>"


class _Axis:
    """Values on a width, 0 always among them."""

    def __init__(self, values: Sequence[float]) -> None:
        known = [value for value in values if isfinite(value)]
        low, high = min([0.0, *known]), max([0.0, *known])
        room = 0.06 * (high - low) or 1.0
        self.low, self.high = low - room, high + room

    def at(self, value: float, start: float, stop: float) -> float:
        return start + (value - self.low) / (self.high - self.low) * (stop - start)


def _forest(one: Comparison) -> str:
    """Each statistic's difference with its interval, beside a line at none."""
    axis = _Axis([value for each in one.differences for value in (each.low, each.high, each.difference)])
    height = 34 * len(one.differences) + 30
    zero = axis.at(0.0, LEFT, WIDTH - RIGHT)
    parts = [_line(zero, 6, zero, height - 24, MUTED)]
    for place, each in enumerate(one.differences):
        y = 22 + 34 * place
        parts.append(_text(LEFT - 12, y + 4, each.statistic, "end"))
        if not (isfinite(each.low) and isfinite(each.high)):
            continue
        low, high, middle = (axis.at(v, LEFT, WIDTH - RIGHT) for v in (each.low, each.high, each.difference))
        words = f"{amount(one.metric, each.low)} to {amount(one.metric, each.high)}"
        parts.append(f"<g><title>{escape(words)}</title>{_line(low, y, high, y, BLUE, 3)}")
        parts.append(f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="{BLUE}"/></g>')
    parts.append(_text(zero, height - 6, f"{one.control} and {one.arm} alike", "middle"))
    return _svg(height, parts, f"difference of {one.arm} and {one.control}, mean and quantiles")


def _over_time(one: Comparison) -> str:
    """The difference of the means at each look, with the interval that holds at all of them."""
    looks = [look for look in one.looks if isfinite(look.low) and isfinite(look.high)]
    if len(looks) < 2:
        return ""
    axis, height = _Axis([value for look in looks for value in (look.low, look.high)]), 220
    last = looks[-1].requests

    def x(requests: int) -> float:
        return LEFT + requests / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return axis.at(value, height - 40, 10)

    edge = [(x(look.requests), y(look.high)) for look in looks] + [
        (x(look.requests), y(look.low)) for look in reversed(looks)
    ]
    line = [(x(look.requests), y(look.difference)) for look in looks]
    parts = [
        f'<polygon points="{_points(edge)}" fill="{BAND}"/>',
        _line(LEFT, y(0.0), WIDTH - RIGHT, y(0.0), MUTED),
        f'<polyline points="{_points(line)}" fill="none" stroke="{BLUE}" stroke-width="2"/>',
        _text(LEFT - 8, y(0.0) + 4, "0", "end"),
        *(_text(LEFT - 8, y(value) + 4, amount(one.metric, value), "end") for value in (axis.low, axis.high)),
        _text((LEFT + WIDTH - RIGHT) / 2, height - 8, f"requests seen, up to {last}", "middle"),
    ]
    return _svg(height, parts, "difference of the means over the looks, with its interval")


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _svg(height: float, parts: Sequence[str], words: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(words)}"'
        f' xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{INK}" text-anchor="{anchor}"'
        f' font-family="system-ui,sans-serif">{escape(words)}</text>'
    )


def draw(found: Sequence[Comparison], path: Path) -> None:
    """The same charts as a picture, one row for each arm.

    Raises
    ------
    ConfigError : matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("--png needs matplotlib: pip install 'tfirst[plots]'") from exc
    figure = Figure(figsize=(11, 3.6 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(found), 2, squeeze=False)
    for row, one in zip(axes, found, strict=True):
        _draw_forest(row[0], one)
        _draw_looks(row[1], one)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as exc:  # the latter: no format of that suffix
        raise ConfigError(f"--png {path}: {getattr(exc, 'strerror', None) or exc}") from exc


def _draw_forest(axes: Any, one: Comparison) -> None:
    names = [each.statistic for each in one.differences]
    axes.axvline(0.0, color=MUTED, linewidth=1)
    for place, each in enumerate(one.differences):
        axes.plot([each.low, each.high], [place, place], color=BLUE, linewidth=2.5)
        axes.plot([each.difference], [place], "o", color=BLUE)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(f"{WORDS[one.metric]}: {one.arm} less {one.control}", fontsize=10)
    axes.set_xlabel("share" if one.metric == "failures" else "seconds")


def _draw_looks(axes: Any, one: Comparison) -> None:
    requests = [look.requests for look in one.looks]
    axes.axhline(0.0, color=MUTED, linewidth=1)
    axes.fill_between(requests, [look.low for look in one.looks], [look.high for look in one.looks], color=BAND)
    axes.plot(requests, [look.difference for look in one.looks], color=BLUE)
    axes.set_title(f"mean, with the interval of {1 - one.alpha:.0%} at any time", fontsize=10)
    axes.set_xlabel("requests seen")
