"""What was played as Markdown tables and small plots, put into a page between two comments."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from pathlib import Path

from loadtest.replay import svg
from loadtest.replay.contest.marks import ENDED, FIRST, by_setting, lowest, marks, number
from loadtest.replay.contest.plan import STRONG, Table
from loadtest.replay.contest.play import YARDSTICK, Played
from loadtest.replay.measure import Group
from loadtest.replay.outputs import cell

BEGIN, END = "<!-- tables: written by loadtest.replay.contest -->", "<!-- end of tables -->"
HIGHEST_RATIO = 4.0  # of a plot; a rule beyond it is in the table


def into(page: str, tables: list[Table], played: Mapping[str, Played], plots: str) -> str:
    """`page` with everything between BEGIN and END made anew. plots : folder of the plots, as the page sees it

    Raises
    ------
    ValueError : the page lacks one of the two comments.
    """
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return "\n".join((before + BEGIN, "", written(tables, played, plots), END + after))


def written(tables: list[Table], played: Mapping[str, Played], plots: str) -> str:
    """All tables that were played, their marks first."""
    parts = ["### Marks\n", *(f"* {'reached' if ok else '**missed**'}: {words}" for ok, words in marks(tables, played))]
    for table in tables:
        if (own := played.get(table.name)) is not None:
            parts += ["", f"### {table.title}\n", _setting(table, own), "", *_numbers(own)]
            parts.append(f"\n![{table.title}]({plots}/{table.name}.svg)")
    return "\n".join(parts) + "\n"


def _setting(table: Table, played: Played) -> str:
    seeds = sorted({group.seeds for group in played.groups})
    often = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return (
        f"{played.requests:.0f} requests counted in each run, seeds: {often}. Mean first token, in brackets over that"
        f" of central_fcfs{'' if table.first_tokens_only else '; then mean end to end'}. Seconds; ± is half of a 95 %"
        f" interval. Processor time of all runs: {played.took_s / 60:.0f} min."
        + (f" {played.missing} runs of the table have not been played." if played.missing else "")
    )


def _numbers(played: Played) -> list[str]:
    settings = by_setting(played)
    sizes = {size for size, _load in settings}
    heads = [(f"{size} replicas, " if len(sizes) > 1 else "") + f"load {load:g}" for size, load in settings]
    names = list(dict.fromkeys(group.policy for group in played.groups))
    rivals = {at: {n: g for n, g in rules.items() if n != YARDSTICK} for at, rules in settings.items()}
    best = {at: lowest(rules, FIRST)[0] for at, rules in rivals.items() if rules}
    lines = ["| rule | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for name in names:
        cells = [_cell(rules.get(name), best.get(at) == name) for at, rules in settings.items()]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def _cell(group: Group | None, is_best: bool) -> str:
    if group is None:
        return "-"
    first = cell(group.numbers[FIRST], _seconds)
    ratio = number(group, "central_ratio")
    text = first if isnan(ratio) else f"{first} ({ratio:.2f})"
    text = f"**{text}**" if is_best else text
    has_answers = not isnan(number(group, "per_token_mean_s"))
    return f"{text}; {cell(group.numbers[ENDED], _seconds)}" if has_answers else text


def _seconds(value: float) -> str:
    return "-" if isnan(value) else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plot(played: Played) -> str:
    """Mean first token over central_fcfs by load on the largest fleet, of the strongest rules; as SVG."""
    size = max(group.replicas for group in played.groups)
    series = []
    for colour, name in zip(svg.PALETTE, STRONG, strict=False):
        points = [
            (group.load, min(number(group, "central_ratio"), HIGHEST_RATIO))
            for group in played.groups
            if group.policy == name and group.replicas == size and group.load is not None
        ]
        if points:
            series.append(svg.Series(name, colour, points))
    loads = [point[0] for one in series for point in one.points]
    x = svg.scale_over(loads, f"ideal cached load, {size} replicas")
    y = svg.scale_over([1.0, *(p[1] for s in series for p in s.points)], "mean first token / central_fcfs")
    chart = svg.line_chart(series, x, y, dots=True)
    names = [
        svg.text(svg.LEFT + 10, svg.TOP + 14 + 14 * place, one.name, colour=one.colour)
        for place, one in enumerate(series)
    ]
    return chart.replace("</svg>", "".join(names) + "</svg>")


def write_plots(played: Mapping[str, Played], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in played.items():
        (folder / f"{name}.svg").write_text(plot(own) + "\n", encoding="utf-8")
