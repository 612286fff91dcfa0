from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from io import StringIO
from math import log10, nan
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console

from loadtest.replay import svg
from loadtest.replay.fleets import of_cards
from loadtest.replay.html_report import render
from loadtest.replay.jobs import Done, Job, Source
from loadtest.replay.measure import Summary, goodput, grouped, hold_against, summary
from loadtest.replay.outputs import ROWS, Report, Setting, as_csv, as_json, seconds, tables
from loadtest.replay.run import Conditions
from loadtest.replay.svg import Frame, Scale, Series
from loadtest.replay.workload import Demand
from router.config import PolicyConfig
from tests.loadtest.results import a_ceiling, a_result

FLEET = of_cards(2, ["A100"]).engines


def a_run(
    policy: str, *, load: float | None = None, seed: int = 0, slower: float = 1.0, replicas: int | None = None
) -> Done:
    """A finished run of twenty requests; the first five are warm-up. `replicas` says how many it is taken for."""
    first_s = np.linspace(1.0, 3.0, 20) * slower
    first_s[7] = nan
    result, limit = a_result(first_s.tolist(), label=policy), a_ceiling(20, warm=5)
    numbers = summary(result, limit, FLEET, load=load, seed=seed, deadline_s=2.5)
    numbers.replicas = replicas or numbers.replicas
    conditions = Conditions(policy=PolicyConfig(name=policy), seed=seed)
    job = Job(Source(Path("t.jsonl")), Demand(load=load, seed=seed), conditions, warm_up=0.25, deadline_s=2.5)
    return Done(job, numbers, result, limit)


def a_report(runs: list[Summary]) -> Report:
    groups = grouped(runs)
    setting = Setting(
        trace="t<&>.jsonl",
        format="mooncake",
        rows=20,
        left_out=0,
        part=(0.3, 1.0),
        fleet="made from --replicas and --cards",
        sizes=list(dict.fromkeys(run.replicas for run in runs)),
        replicas=["one", "two"],
        cards=["A100", "A100"],
        requests=None,
        speedup=None,
        warm_up=0.25,
        deadline_s=2.5,
        event_delay_s=0.0,
        load_period_s=None,
        estimator_error=0.0,
        fetch="engine",
    )
    return Report(setting=setting, runs=runs, groups=groups, goodput=goodput(groups))


def printed(report: Report, width: int = 160) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    for table in tables(report, width):
        console.print(table)
    return console.export_text()


class Outline(HTMLParser):
    """What a page holds, and whether every element is closed in order."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def sweep() -> list[Done]:
    return [
        a_run(policy, load=load, slower=slower * load)
        for load in (0.5, 0.7, 0.9)
        for policy, slower in (("round_robin", 3.0), ("e2e", 1.0))
    ]


def test_the_table_has_a_column_for_each_policy_and_every_known_number() -> None:
    text = printed(a_report([a_run("round_robin").summary, a_run("e2e", slower=0.5).summary]))
    header = next(line for line in text.splitlines() if "round_robin" in line)
    assert "e2e" in header
    # no prices, nobody decided, and one refused request leaves no bound to compare with
    unknown = {"cost_per_request", "decision_mean_s", "decision_p99_s", "bound_ratio", "central_ratio"}
    unknown |= {"coverage_p90", "coverage_p99"}
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 4]
    assert rows == [label.strip() for label, field, _written, _rule in ROWS if field not in unknown]


def test_coverage_of_predicted_quantiles_is_shown_where_it_is_known_and_a_dash_where_not() -> None:
    told, silent = a_run("told"), a_run("silent")
    told.summary.coverage_p90 = 0.875
    text = printed(a_report([told.summary, silent.summary]))
    line = next(line for line in text.splitlines() if "predicted p90 covers" in line)
    assert line.replace("│", " ").split()[-2:] == ["87.5%", "-"]
    page = render(a_report([told.summary, silent.summary]), [told, silent], FLEET)
    assert "<td>87.5%</td><td>-</td>" in page
    assert "p90 covers 87.5%, p99 -" in page


def test_a_narrow_window_gets_several_tables_and_no_broken_lines() -> None:
    policies = ["round_robin", "least_request", "prefix_hash", "ttft", "e2e"]
    text = printed(a_report([a_run(name).summary for name in policies]), width=80)
    heads = [line for line in text.splitlines() if line.startswith("┃")]
    assert len(heads) > 1
    assert [name for line in heads for name in line.replace("┃", " ").split()] == policies
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_several_seeds_show_their_interval() -> None:
    runs = [a_run("e2e", seed=seed, slower=1.0 + 0.1 * seed).summary for seed in range(3)]
    assert "3 seeds" in printed(a_report(runs))
    assert "±" in printed(a_report(runs))
    assert "±" not in printed(a_report(runs[:1]))


def test_a_sweep_shows_each_load_and_the_goodput() -> None:
    text = printed(a_report([done.summary for done in sweep()]))
    assert [load for load in ("0.5", "0.7", "0.9") if f"ideal cached load {load}" in text] == ["0.5", "0.7", "0.9"]
    assert "highest load with first tokens inside 2.5 s" in text


def test_json_says_its_schema_and_has_null_for_unknown() -> None:
    decoded = msgspec.json.decode(as_json(a_report([a_run("e2e").summary])))
    assert decoded["schema"] == 2
    assert decoded["setting"]["part"] == [0.3, 1.0]
    assert decoded["runs"][0]["policy"] == "e2e"
    assert decoded["runs"][0]["cost_per_request"] is None
    assert decoded["groups"][0]["numbers"]["refused"]["mean"] == 1.0


def test_csv_has_a_line_for_each_run_and_nothing_for_unknown() -> None:
    runs = [a_run("e2e").summary, a_run("ttft", load=0.7).summary]
    lines = list(csv.DictReader(as_csv(runs).splitlines()))
    assert [line["policy"] for line in lines] == ["e2e", "ttft"]
    assert [line["load"] for line in lines] == ["", "0.7"]
    assert lines[0]["cost_per_request"] == ""
    assert float(lines[0]["first_token_mean_s"]) == runs[0].first_token_mean_s


@pytest.mark.parametrize(("value", "text"), [(0.0123, "12.3 ms"), (1.234, "1.23 s"), (nan, "-")])
def test_seconds_are_written_short(value: float, text: str) -> None:
    assert seconds(value) == text


def test_the_page_is_whole_and_asks_for_nothing_outside() -> None:
    runs = sweep()
    page = render(a_report([done.summary for done in runs]), [done for done in runs if done.summary.load == 0.7], FLEET)
    outline = Outline(page)
    assert outline.open == []
    assert outline.addresses == []
    assert {"script", "link", "img", "iframe"}.isdisjoint(outline.seen)
    assert re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page) == []


def test_names_from_outside_cannot_become_markup() -> None:
    page = render(a_report([a_run("e2e").summary]), [a_run("e2e")], FLEET)
    assert "t<&>.jsonl" not in page
    assert "t<&>.jsonl" in Outline(page).words


def test_the_page_of_a_sweep_has_every_plot() -> None:
    runs = sweep()
    page = render(a_report([done.summary for done in runs]), [done for done in runs if done.summary.load == 0.7], FLEET)
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles == [
        *("First token, mean", "End to end, mean", "First token inside 2.5 s"),
        *("First token", "Slowdown", "First token against end to end", "First token, mean"),
        *("Prompt tokens not computed", "Where most of a prompt came from"),
        *("round_robin", "e2e"),  # utilisation
        *("round_robin", "e2e"),  # predictions
    ]
    assert page.count("<svg") == len(titles)


def test_one_load_and_one_fleet_have_no_sweep() -> None:
    page = render(a_report([a_run("e2e").summary]), [a_run("e2e")], FLEET)
    assert "<h2>Load" not in page
    assert "<h2>Size of the fleet" not in page


def fleets_swept() -> list[Done]:
    """Two rules on three fleets at two loads, a yardstick among them."""
    runs = [
        a_run(policy, load=load, slower=slower * load * replicas / 4, replicas=replicas)
        for replicas in (4, 8, 64)
        for load in (0.5, 0.9)
        for policy, slower in (("e2e", 1.5), ("central_fcfs", 1.0))
    ]
    for done in runs:
        done.summary.refused, done.summary.bound_s = 0, 0.25
    hold_against([done.summary for done in runs], "central_fcfs")
    return runs


def test_a_sweep_over_fleets_has_a_table_of_each_and_one_that_compares_them() -> None:
    text = printed(a_report([done.summary for done in fleets_swept()]))
    for size in (4, 8, 64):
        assert f"on {size} replicas at ideal cached load 0.9" in text
    lines = [line.replace("│", " ").split() for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if line[:6] == ["size", "of", "the", "fleet", "at", "ideal"])
    over = next(i for i in range(start, len(lines)) if lines[i] == ["over", "central_fcfs"])
    assert lines[over + 1 : over + 3] == [["e2e", "1.5x", "1.5x", "1.5x"], ["central_fcfs", "1x", "1x", "1x"]]
    assert [line[:2] for line in lines if line[:1] == ["e2e"]][-3:] == [["e2e", "4"], ["e2e", "8"], ["e2e", "64"]]


def test_names_too_long_for_a_window_are_folded_and_never_cut() -> None:
    names = [f"e2e:own_pace={weight},queue_behind=2.125,running_decodes=0.25,more=1" for weight in (0.1, 0.9)]
    runs = [a_run(name, load=load, replicas=size) for name in names for load in (0.5, 0.9) for size in (4, 8)]
    text = printed(a_report([done.summary for done in runs]), width=60)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 60


def test_the_page_of_a_sweep_over_fleets_draws_each_number_over_their_sizes() -> None:
    runs = fleets_swept()
    shown = [done for done in runs if (done.summary.replicas, done.summary.load) == (8, 0.9)]
    page = render(a_report([done.summary for done in runs]), shown, FLEET)
    sections = {part.split("</h2>")[0]: part for part in page.split("<h2>")[1:]}
    assert "Load on 8 replicas" in sections
    section = sections["Size of the fleet, at ideal cached load 0.9"]
    charts = re.findall(r"<h3>(.*?)</h3>.*?(<svg.*?</svg>)", section, re.DOTALL)
    assert [title for title, _chart in charts] == [
        *("First token, mean", "End to end, mean", "First token inside 2.5 s"),
        "First token, mean, over central_fcfs",
    ]
    ticks = [element.text for element in ElementTree.fromstring(charts[0][1]).iter("{http://www.w3.org/2000/svg}text")]
    assert ticks[:3] == ["4", "8", "64"]
    assert charts[0][1].count("stroke-dasharray") == 2, "the yardstick and the strict bound"
    assert charts[0][1].count("<circle") == 3 * 3


def test_settings_of_a_rule_stand_below_its_name_and_long_names_above_their_bars() -> None:
    names = [f"e2e:own_pace={weight},queue_behind=2,running_decodes=0.25" for weight in (0.1, 0.9)]
    runs = [a_run(name) for name in names]
    text = printed(a_report([done.summary for done in runs]), width=90)
    assert "own_pace=0.1" in text
    assert "own_pace=0.9" in text
    assert max(map(len, text.splitlines())) <= 90
    page = render(a_report([done.summary for done in runs]), runs, FLEET)
    assert "<th>e2e<br>own_pace=0.1<br>queue_behind=2<br>running_decodes=0.25</th>" in page
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(chart)
        for bar in root.iter("{http://www.w3.org/2000/svg}rect"):
            assert float(bar.attrib["width"]) >= 0
            assert 0 <= float(bar.attrib["x"]) < svg.WIDTH


def test_every_chart_is_well_formed_and_inside_its_frame() -> None:
    runs = sweep()
    page = render(a_report([done.summary for done in runs]), [done for done in runs if done.summary.load == 0.7], FLEET)
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(chart)
        _, _, width, height = (float(part) for part in root.attrib["viewBox"].split())
        for dot in root.iter("{http://www.w3.org/2000/svg}circle"):
            assert 0 <= float(dot.attrib["cx"]) <= width
            assert 0 <= float(dot.attrib["cy"]) <= height


def test_a_page_of_runs_in_which_nothing_was_answered_can_still_be_made() -> None:
    result, limit = a_result([nan] * 4, label="e2e"), a_ceiling(4)
    numbers = summary(result, limit, FLEET, load=None, seed=0, deadline_s=1.0)
    page = render(a_report([numbers]), [Done(a_run("e2e").job, numbers, result, limit)], FLEET)
    assert Outline(page).open == []


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3000.0), (-5.0, 5.0), (0.001, 0.0017)])
def test_ticks_of_a_linear_scale_are_few_round_and_inside(low: float, high: float) -> None:
    ticks = Scale(low, high, "x").ticks()
    assert 3 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


@pytest.mark.parametrize("decades", [0.2, 1, 2, 3, 6])
def test_ticks_of_a_log_scale_are_few_and_inside(decades: float) -> None:
    ticks = Scale(0.03, 0.03 * 10**decades, "x", log=True).ticks()
    assert 2 <= len(ticks) <= 9
    assert all(0.03 <= tick <= 0.03 * 10**decades for tick in ticks)


def test_a_value_is_drawn_where_the_scale_says() -> None:
    frame = Frame(Scale(0.0, 10.0, "x"), Scale(1.0, 100.0, "y", log=True))
    left, bottom = frame.at(0.0, 1.0)
    right, top = frame.at(10.0, 100.0)
    assert list(frame.at(5.0, 10.0)) == pytest.approx([(left + right) / 2, (top + bottom) / 2])
    assert frame.y.share(30.0) == pytest.approx(log10(30.0) / 2)


def test_values_that_cannot_be_drawn_are_left_out() -> None:
    x = svg.scale_over([0.0, 1.0, 10.0, nan], "x", log=True)
    points = [(0.0, 1.0), (nan, 2.0), (5.0, 3.0)]
    chart = svg.scatter([Series("s", "#000", points)], x, Scale(0.0, 4.0, "y"), radius=2, labels=False)
    assert chart.count("<circle") == 1


def test_names_of_dots_that_lie_together_are_written_apart() -> None:
    both = [Series(name, "#000", [(1.0, 1.0)]) for name in ("first", "second")]
    chart = svg.scatter(both, Scale(0.0, 4.0, "x"), Scale(0.0, 4.0, "y"), radius=2, labels=True)
    heights = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>(?:first|second)</text>', chart)]
    assert abs(heights[0] - heights[1]) >= 11
