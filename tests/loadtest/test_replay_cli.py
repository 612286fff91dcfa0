"""`tfirst replay` as a person starts it, on a small piece of the demo's traffic."""

from __future__ import annotations

import csv
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from loadtest.replay.central import ORDERS
from loadtest.replay.cli import progress_bar
from loadtest.replay.formats import read_trace
from loadtest.replay.jobs import Job, Source
from loadtest.replay.run import Conditions
from loadtest.replay.workload import Demand
from router.cli.main import main
from router.config import PolicyConfig
from tests.loadtest.test_formats import AZURE_2023, BAILIAN, BURSTGPT, MOONCAKE

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"
TRACE = str(DEMO / "traffic.jsonl.gz")
FEW = ["--requests", "40", "--jobs", "1"]
WITH_BOUNDS = ["replay", "--trace", TRACE, "--fleet", str(DEMO / "fleet.yaml"), *FEW]
SMALL = [*WITH_BOUNDS[:-2], "--no-bounds", *WITH_BOUNDS[-2:]]


def numbers(path: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())["runs"]
    return runs


def test_one_call_compares_rules_and_writes_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html")}
    flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    status = main(
        [*WITH_BOUNDS, "--load", "0.4,0.7", "--policy", "round_robin,e2e", "--receipts", str(tmp_path / "r"), *flags]
    )
    assert status == 0
    shown = capsys.readouterr().out
    assert "round_robin" in shown
    assert "ideal cached load 0.7" in shown
    keys = [(run["policy"], run["load"]) for run in numbers(files["json"])]
    rules = ["round_robin", "e2e"]
    assert keys == [(policy, load) for load in (0.4, 0.7) for policy in [*rules, "central_fcfs"]]
    assert len(list(csv.reader(files["csv"].read_text().splitlines()))) == 7
    assert files["html"].read_text().count("<svg") == 15
    written = sorted(path.name for path in (tmp_path / "r").iterdir())
    assert written == sorted(f"{policy}-load{load:g}-seed0.jsonl" for policy, load in keys if policy in rules)


def test_receipts_of_a_run_can_be_replayed_themselves(tmp_path: Path) -> None:
    assert main([*SMALL, "--policy", "e2e", "--receipts", str(tmp_path)]) == 0
    receipts = tmp_path / "e2e-seed0.jsonl"
    out = tmp_path / "again.json"
    assert main(["replay", "--trace", str(receipts), "--policy", "e2e", "--jobs", "1", "--json", str(out)]) == 0
    setting = msgspec.json.decode(out.read_bytes())["setting"]
    assert (setting["format"], setting["rows"]) == ("receipts", len(receipts.read_text().splitlines()))


@pytest.mark.parametrize(
    "text", [MOONCAKE, BAILIAN, BURSTGPT, AZURE_2023], ids=["mooncake", "bailian", "burstgpt", "azure"]
)
def test_every_public_format_can_be_played(tmp_path: Path, text: str) -> None:
    trace, out = tmp_path / "trace", tmp_path / "out.json"
    trace.write_text(text)
    flags = ["--policy", "e2e", "--warm-up", "0", "--jobs", "1", "--json", str(out)]
    assert main(["replay", "--trace", str(trace), *flags]) == 0
    assert numbers(out)[0]["requests"] == 2


def test_processes_side_by_side_give_the_numbers_of_one(tmp_path: Path) -> None:
    runs = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        command = [*SMALL[:-1], jobs, "--policy", "round_robin,e2e", "--json", str(out)]
        subprocess.run(
            [sys.executable, "-m", "router.cli.main", *command], check=True, capture_output=True, timeout=120
        )
        runs.append(numbers(out))
    clocks = {"took_s", "decision_mean_s", "decision_p99_s"}
    alone, together = ([{k: v for k, v in run.items() if k not in clocks} for run in one] for one in runs)
    assert alone == together


def test_seeds_differ_and_the_same_seed_does_not(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    for out in (first, second):
        assert main([*SMALL, "--policy", "e2e", "--seeds", "3,4", "--load", "0.5", "--json", str(out)]) == 0
    means = [[run["first_token_mean_s"] for run in numbers(out)] for out in (first, second)]
    assert means[0] == means[1]
    assert means[0][0] != means[0][1]


def test_the_bounds_stand_beside_the_rules_and_below_them(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*WITH_BOUNDS, "--load", "0.8", "--policy", ",".join(["e2e", *ORDERS]), "--json", str(out)]) == 0
    mean_s = {run["policy"]: run["first_token_mean_s"] for run in numbers(out)}
    bound_s = numbers(out)[0]["bound_s"]
    assert bound_s <= mean_s["central_sjf"] * 1.02  # the bound is exact only without jitter
    assert mean_s["central_sjf"] <= mean_s["e2e"]


def test_late_binding_is_played_beside_the_rules_and_they_are_held_against_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*WITH_BOUNDS, "--load", "0.8", "--policy", "e2e", "--json", str(out)]) == 0
    rule, yardstick = numbers(out)
    assert (rule["policy"], yardstick["policy"]) == ("e2e", "central_fcfs")
    assert rule["central_ratio"] == pytest.approx(rule["first_token_mean_s"] / yardstick["first_token_mean_s"])
    assert (yardstick["central_ratio"], rule["bound_ratio"]) == (1.0, rule["first_token_mean_s"] / rule["bound_s"])


def test_without_bounds_nothing_is_held_against_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main([*SMALL, "--load", "0.8", "--policy", "e2e", "--json", str(out)]) == 0
    (rule,) = numbers(out)
    assert (rule["central_ratio"], rule["bound_s"], rule["bound_ratio"]) == (None, None, None)
    assert " over " not in capsys.readouterr().out.replace("over mean", "")


def test_variants_of_one_rule_are_played_side_by_side_under_names_that_tell_them_apart(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    rules = ["--policy", "e2e:queue_behind=0,own_pace=0,e2e:queue_behind=8", "--policy", "e2e"]
    flags = ["--load", "0.9", "--receipts", str(tmp_path / "r"), "--json", str(out)]
    assert main([*SMALL, *rules, *flags]) == 0
    runs = numbers(out)
    assert [run["policy"] for run in runs] == ["e2e:own_pace=0,queue_behind=0", "e2e:queue_behind=8", "e2e"]
    assert len({run["end_to_end_mean_s"] for run in runs}) == 3
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        *("e2e-load0.9-seed0.jsonl", "e2e-own_pace=0-queue_behind=0-load0.9-seed0.jsonl"),
        "e2e-queue_behind=8-load0.9-seed0.jsonl",
    ]


def test_several_sizes_of_a_fleet_are_each_loaded_as_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html")}
    flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    sizes = ["--replicas", "2,4,8", "--cards", "A100", "--load", "0.5", "--policy", "e2e"]
    assert main(["replay", "--trace", TRACE, *FEW, *sizes, *flags]) == 0
    keys = [(run["replicas"], run["policy"], run["load"]) for run in numbers(files["json"])]
    assert keys == [(size, policy, 0.5) for size in (2, 4, 8) for policy in ("e2e", "central_fcfs")]
    setting = msgspec.json.decode(files["json"].read_bytes())["setting"]
    assert (setting["sizes"], len(setting["replicas"])) == ([2, 4, 8], 4)
    assert [line["replicas"] for line in csv.DictReader(files["csv"].read_text().splitlines())] == list("224488")
    assert "size of the fleet at ideal cached load 0.5" in capsys.readouterr().out
    page = files["html"].read_text()
    assert "<h2>Size of the fleet, at ideal cached load 0.5</h2>" in page
    assert "2, 4, 8 simulated replicas (4 x A100 where there are 4)" in page


def test_parts_of_a_trace_are_played_apart_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for name in ("train", "test", "0.3-0.5"):
        out = tmp_path / f"{name}.json"
        flags = ["--trace", TRACE, "--slice", name, "--warm-up", "0", "--policy", "round_robin", "--no-bounds"]
        assert main(["replay", *flags, "--jobs", "1", "--json", str(out)]) == 0
        counts.append(numbers(out)[0]["requests"])
    setting = msgspec.json.decode((tmp_path / "train.json").read_bytes())["setting"]
    assert counts[0] + counts[1] == setting["rows"]
    assert counts[2] == pytest.approx(0.2 * setting["rows"], abs=1)
    assert setting["part"] == [0.0, 0.3]
    assert "Played were the requests from 30% to 100% of the trace." in capsys.readouterr().out


def test_wrong_estimates_and_late_events_make_another_run(tmp_path: Path) -> None:
    seen = []
    for number, flags in enumerate(([], ["--estimator-error", "0.5"], ["--event-delay-ms", "60000"])):
        out = tmp_path / f"{number}.json"
        assert main([*SMALL, "--policy", "e2e", "--load", "0.7", *flags, "--json", str(out)]) == 0
        seen.append(numbers(out)[0]["first_token_mean_s"])
    assert len(set(seen)) == 3


def test_a_made_fleet_with_prices_has_a_cost(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--replicas", "3", "--cards", "H20", "--card-price", "H20=2", "--policy", "e2e", "--json", str(out)]
    assert main(["replay", "--trace", TRACE, "--requests", "30", "--jobs", "1", *flags]) == 0
    assert numbers(out)[0]["cost_per_request"] > 0


def test_requests_that_were_not_answered_make_the_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 3, "hash_ids": []}\n'
    trace.write_text("".join(line % (1000 * i, length) for i, length in enumerate([600, 600, 200_000])))
    assert main(["replay", "--trace", str(trace), "--policy", "e2e", "--jobs", "1"]) == 1
    assert "1 counted requests were not answered" in capsys.readouterr().out


def test_any_card_the_router_knows_can_be_played_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "20", "--policy", "e2e", "--no-bounds", "--jobs", "1", "--cards"]
    assert main(["replay", "--trace", TRACE, *flags, "H100,L40S"]) == 0
    capsys.readouterr()
    assert main(["replay", "--trace", TRACE, *flags, "H100,H1000"]) == 2
    assert "--cards: there is no card 'H1000'; there are A10, A100" in capsys.readouterr().err


def test_a_part_too_small_to_hold_a_request_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--slice", "0.5-0.5001"]) == 2
    assert capsys.readouterr().err.strip().endswith("--slice 0.5-0.5001 of 450 requests holds none")


def test_rows_left_out_and_answers_cut_short_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": []}\n'
    lengths = [(600, 3), (600, 0), (131_000, 500)]
    trace.write_text("".join(line % (1000 * i, *both) for i, both in enumerate(lengths)))
    flags = ["--policy", "e2e", "--warm-up", "0", "--jobs", "1", "--html", str(tmp_path / "out.html")]
    assert main(["replay", "--trace", str(trace), *flags]) == 0
    shown = capsys.readouterr().out
    assert "Left out: 1 row of the trace without a prompt or an output." in shown
    assert "1 counted answers were cut short" in shown
    assert "3 rows (1 without prompt or output left out)" in (tmp_path / "out.html").read_text()


def test_progress_shows_all_runs_together_and_those_under_way() -> None:
    screen = StringIO()
    demand = Demand(requests=100)
    rules = ("ttft", "e2e", "least_request")
    jobs = [
        Job(Source(Path(TRACE)), demand, Conditions(policy=PolicyConfig(name=rule)), warm_up=0.0, deadline_s=5.0)
        for rule in rules
    ]
    with progress_bar(
        Console(file=screen, force_terminal=True, width=100), jobs, read_trace(Path(TRACE))
    ) as on_progress:
        on_progress(0, 107)  # whole conversations: a few more than were asked for
        on_progress(1, 50)
    shown = screen.getvalue()
    assert "3 runs" in shown
    assert "e2e on 4" in shown
    assert " 50%" in shown
    assert "ttft" not in shown, "it is over"
    assert "least_request" not in shown, "it has not begun"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "nonsense"], "there is no policy 'nonsense'"),
        (["--policy", ","], "--policy names no policy"),
        (["--policy", "e2e:own_speed=2"], "e2e has no setting 'own_speed'; it has explore, slo_ttft_ms"),
        (["--policy", "round_robin:x=1"], "round_robin has no setting 'x'; it has none"),
        (["--policy", "e2e:own_pace=fast"], "own_pace must be a number, not 'fast'"),
        (["--policy", "e2e:own_pace=-1"], "own_pace"),
        (["--policy", "e2e:own_pace"], "'own_pace' is not a setting; it is written NAME=VALUE"),
        (["--policy", "e2e,own_pace=1"], "'own_pace=1' is a setting without a rule"),
        (["--policy", "central_fcfs:x=1"], "central_fcfs has no settings"),
        (["--replicas", "4"], "--fleet already says which replicas there are"),
        (["--card-price", "B200=3"], "the fleet has no card 'B200'"),
        (["--card-price", "A100=free"], "--card-price A100=free"),
        (["--html", "/nowhere/at/all.html"], "--html /nowhere/at/all.html"),
        (["--format", "azure"], "it is not in the format 'azure'"),
    ],
)
def test_a_wrong_flag_is_one_clear_sentence(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--load", "0"), ("--load", "much"), ("--seeds", "-1"), ("--warm-up", "1"), ("--jobs", "0"), ("--speedup", "nan")]
    + [("--slice", text) for text in ("half", "0.5", "0.5-0.2", "0-1.5", "nan-1")]
    + [("--replicas", "4,0")],
)
def test_a_number_out_of_range_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*SMALL, flag, value])
    assert caught.value.code == 2
    assert f"argument {flag}" in capsys.readouterr().err


def test_a_load_and_a_speed_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--load", "0.5", "--speedup", "2"])
    assert "not allowed with argument --load" in capsys.readouterr().err


def test_what_is_no_trace_is_one_clear_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("roses are red\n")
    assert main(["replay", "--trace", str(path)]) == 2
    assert (
        capsys.readouterr().err.strip().startswith(f"tfirst replay: trace {path}: its first line is that of no known")
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--html", "{tmp}"], "it is a folder"),
        (["--estimator-error", "1e200"], "--estimator-error"),
        (["--load-report-period-ms", "1e-9"], "--load-report-period-ms"),
    ],
)
def test_what_could_only_fail_after_a_long_run_is_refused_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main([*SMALL, "--policy", "e2e", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("time", ["nan", "inf", "1e308"])
def test_a_time_that_is_no_time_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], time: str) -> None:
    trace = tmp_path / "burst.csv"
    head, first, *_ = BURSTGPT.splitlines()
    trace.write_text("\n".join([head, first, f"{time},{first.split(',', 1)[1]}"]))
    assert main(["replay", "--trace", str(trace), "--policy", "e2e", "--jobs", "1"]) == 2
    assert "finite" in capsys.readouterr().err


def test_a_rule_named_twice_is_played_once(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*SMALL, "--policy", "ttft,ttft", "--json", str(out)]) == 0
    assert [run["policy"] for run in numbers(out)] == ["ttft"]
