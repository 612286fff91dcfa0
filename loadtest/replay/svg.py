"""Small charts as SVG text, so that a report is one file without any outside asset.

Model     a chart is a frame with two scales and marks inside it; colours are given by the caller, so that one thing
          keeps its colour through a whole report
Valid     finite values; others are left out. On a log scale values must be above 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

# Told apart by people with the common kinds of colour blindness: Okabe and Ito 2008, darkened for thin lines, then
# more hues for long comparisons.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#c2579b", "#b8860b", "#3a9bd9", "#5b4b8a", "#8c564b", "#6b6b6b", "#7a9a01")
INK, MUTED, RULE = "#1c2430", "#5d6878", "#e4e8ee"
WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 44
ROOM_BEHIND = 56  # a bar, for its number
LONGEST_BEFORE_A_BAR, NAME_HEIGHT = 24, 14  # characters of a name; longer ones stand above it


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis. low < high; both > 0 on a log scale. marks : what to write along it; none finds round values"""

    low: float
    high: float
    label: str
    log: bool = False
    marks: tuple[float, ...] = ()

    def share(self, value: float) -> float:
        """Where `value` lies between the ends, 0..1 and beyond."""
        if self.log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Values to write along the axis, if they are not given at most about eight round ones."""
        if self.marks:
            return list(self.marks)
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)

    def has(self, value: float) -> bool:
        return isfinite(value) and (value > 0 or not self.log)


def scale_over(values: Iterable[float], label: str, *, log: bool = False, zero: bool = False) -> Scale:
    """A scale that holds all `values`; `zero` starts it at 0. Something drawable comes out of anything."""
    known = [value for value in values if isfinite(value) and (value > 0 or not log)]
    low, high = (min(known), max(known)) if known else (1.0, 10.0)
    if log:
        return Scale(low / 1.15, max(high, low * 2) * 1.15, label, log=True)
    low = 0.0 if zero else low
    return Scale(low, high + (0.05 * (high - low) or 1.0), label)


def _linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * index for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = log10(high / low)
    factors: tuple[int, ...] = (1,) if decades > 4 else (1, 3) if decades > 2 else (1, 2, 5)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    marks = [factor * 10.0**power for power in powers for factor in factors]
    inside = [mark for mark in marks if low <= mark <= high]
    return inside if len(inside) > 2 else [mark for mark in _linear_ticks(low, high) if mark > 0]


def number(value: float) -> str:
    """A number as short as it can be read: 0.05, 3, 1.5k.

    >>> [number(v) for v in (0.0, 0.05, 3.0, 1500.0, 2e6)]
    ['0', '0.05', '3', '1.5k', '2M']
    """
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def short(name: str, most: int = 30) -> str:
    """A name that fits beside a mark: what does not is cut from its middle.

    >>> short("e2e:own_pace=0.5,queue_behind=2.5,running_decodes=1")
    'e2e:own_pace=0…nning_decodes=1'
    """
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one thing, in order. dashed : a bound or a reference, not a contestant"""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


class Frame:
    """Two scales on a fixed area; knows where a value is drawn."""

    def __init__(self, x: Scale, y: Scale, *, width: int = WIDTH, height: int = HEIGHT) -> None:
        self.x, self.y = x, y
        self.width, self.height = width, height

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.across(x), self.down(y)

    def across(self, x: float) -> float:
        return LEFT + self.x.share(x) * (self.width - LEFT - RIGHT)

    def down(self, y: float) -> float:
        return self.height - BOTTOM - self.y.share(y) * (self.height - TOP - BOTTOM)

    def holds(self, point: tuple[float, float]) -> bool:
        return self.x.has(point[0]) and self.y.has(point[1])

    def drawn(self, marks: Sequence[str]) -> str:
        """The whole chart: grid and axes below, `marks` above."""
        return svg(self.width, self.height, [*self._grid(), *marks])

    def _grid(self) -> list[str]:
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        parts = [_line(LEFT, bottom, right, bottom, MUTED)]
        for tick in self.x.ticks():
            x = self.across(tick)
            parts += [_line(x, TOP, x, bottom, RULE), text(x, bottom + 15, number(tick), anchor="middle")]
        for tick in self.y.ticks():
            y = self.down(tick)
            parts += [_line(LEFT, y, right, y, RULE), text(LEFT - 6, y + 3.5, number(tick), anchor="end")]
        middle = (LEFT + right) / 2
        parts.append(text(middle, self.height - 8, self.x.label, anchor="middle"))
        height = (TOP + bottom) / 2
        parts.append(text(14, height, self.y.label, anchor="middle", turn=f"rotate(-90 14 {height:.1f})"))
        return parts


def line_chart(series: Sequence[Series], x: Scale, y: Scale, *, dots: bool = False) -> str:
    """One line for each series; `dots` marks the points that were measured."""
    frame = Frame(x, y)
    marks = []
    for one in series:
        points = [frame.at(*point) for point in one.points if frame.holds(point)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        marks.append(
            f'<polyline points="{path}" fill="none" stroke="{one.colour}" stroke-width="1.8"{dash}>'
            f"<title>{escape(one.name)}</title></polyline>"
        )
        if dots:
            marks += [_dot(px, py, one.colour, 3.0, one.name) for px, py in points]
    return frame.drawn(marks)


def scatter(
    series: Sequence[Series], x: Scale, y: Scale, *, radius: float, labels: bool, diagonal: bool = False
) -> str:
    """Dots; `labels` writes each series' name beside its first dot, `diagonal` draws y = x."""
    frame = Frame(x, y)
    marks = []
    if diagonal:
        low, high = max(x.low, y.low), min(x.high, y.high)
        marks.append(_line(*frame.at(low, low), *frame.at(high, high), MUTED, dash="5 4"))
    written: list[tuple[float, float]] = []
    for one in series:
        points = [frame.at(*point) for point in one.points if frame.holds(point)]
        marks += [_dot(px, py, one.colour, radius, one.name, opacity=0.9 if labels else 0.45) for px, py in points]
        if labels and points:
            marks.append(_beside(frame, points[0], one, written))
    return frame.drawn(marks)


def _beside(frame: Frame, point: tuple[float, float], one: Series, written: list[tuple[float, float]]) -> str:
    """The name of a dot, beside it or as near above or below as no other name is in the way."""
    px, py = point
    right = px < frame.width * 0.7

    def is_free(y: float) -> bool:
        inside = TOP + 6 <= y <= frame.height - BOTTOM - 2
        return inside and not any(abs(y - other) < 12 and abs(px - at) < 100 for at, other in written)

    shifts = sorted((12.0 * step for step in range(-9, 10)), key=abs)
    y = next((py + 3.5 + shift for shift in shifts if is_free(py + 3.5 + shift)), py + 3.5)
    written.append((px, y))
    return text(px + (8 if right else -8), y, short(one.name), anchor="start" if right else "end", colour=one.colour)


def bar_rows(
    names: Sequence[str],
    parts: Sequence[Sequence[tuple[float, str, str]]],
    *,
    label: str,
    high: float,
    written: Callable[[float], str],
    marks: Sequence[float] = (),
) -> str:
    """Horizontal bars from 0 to `high`, one row for each name, each made of (value, colour, title) side by side.

    Names stand before the bars, or above them where one is long.
    written : how a value is written, behind a bar of one part, else inside every part that is wide enough
    marks : one value a row, as a dark tick
    """
    longest = max((len(name) for name in names), default=0)
    above = NAME_HEIGHT if longest > LONGEST_BEFORE_A_BAR else 0
    band = 30 + above
    height = TOP + band * len(names) + BOTTOM
    left = 14.0 if above else 14 + 6.6 * longest
    span = WIDTH - left - RIGHT - ROOM_BEHIND
    drawn = []
    for index, (name, row) in enumerate(zip(names, parts, strict=True)):
        y, x = TOP + float(band) * index + above, left
        if above:
            drawn.append(text(left, y - 3, name, colour=INK))
        else:
            drawn.append(text(left - 8, y + 16, name, anchor="end", colour=INK))
        for value, colour, title in row:
            width = span * value / high if isfinite(value) else 0.0
            drawn.append(
                f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{width:.1f}" height="20" fill="{colour}">'
                f"<title>{escape(title)}</title></rect>"
            )
            if len(row) > 1 and width > 36:
                drawn.append(text(x + width / 2, y + 16, written(value), anchor="middle", colour="#fff"))
            x += width
        if index < len(marks) and isfinite(marks[index]):
            at = left + span * marks[index] / high
            drawn.append(_line(at, y if above else y - 1, at, y + 25, INK, width=2))
            x = max(x, at)
        if len(row) == 1:
            drawn.append(text(x + 7, y + 16, written(row[0][0]), colour=INK))
    drawn.append(text(left + span / 2, height - 14, label, anchor="middle"))
    return svg(WIDTH, height, drawn)


def heat_map(names: Sequence[str], rows: Sequence[Sequence[float]], edges: Sequence[float], *, label: str) -> str:
    """Shares 0..1 as cells from white to dark blue: a row for each name, a column for each slice between `edges`."""
    band = max(5.0, min(16.0, 420.0 / max(1, len(names))))
    left = 14 + 6.2 * max((len(name) for name in names), default=0)
    height = TOP + band * len(names) + BOTTOM
    span = WIDTH - left - RIGHT
    cell = span / max(1, len(edges) - 1)
    drawn = []
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = TOP + band * index
        if band >= 9 or index % ceil(9 / band) == 0:
            drawn.append(text(left - 6, y + band / 2 + 3.5, name, anchor="end", size=10))
        for column, share in enumerate(row):
            drawn.append(
                f'<rect x="{left + cell * column:.1f}" y="{y:.1f}" width="{cell + 0.3:.1f}" height="{band - 0.6:.1f}"'
                f' fill="{_blue(share)}"><title>{escape(name)}: {share:.0%}</title></rect>'
            )
    x = Scale(edges[0], edges[-1], label)
    below = TOP + band * len(names) + 14
    drawn += [text(left + span * x.share(tick), below, number(tick), anchor="middle") for tick in x.ticks()]
    drawn.append(text(left + span / 2, height - 10, label, anchor="middle"))
    return svg(WIDTH, ceil(height), drawn)


def _blue(share: float) -> str:
    """White at 0, the palette's blue darkened at 1."""
    low, high = (245, 247, 250), (8, 69, 120)
    level = min(1.0, max(0.0, share))
    return "#" + "".join(f"{round(a + (b - a) * level):02x}" for a, b in zip(low, high, strict=True))


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = MUTED, size: int = 11, turn: str = ""
) -> str:
    turned = f' transform="{turn}"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{turned}>'
        f"{escape(words)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-width="{width:g}"{dashed}/>'
    )


def _dot(x: float, y: float, colour: str, radius: float, title: str, opacity: float = 0.9) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}" fill-opacity="{opacity}">'
        f"<title>{escape(title)}</title></circle>"
    )
