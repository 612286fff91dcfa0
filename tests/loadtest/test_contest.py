from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isnan, nan
from pathlib import Path

import pytest

from loadtest.replay.contest import page
from loadtest.replay.contest.__main__ import SLICES, chosen, main
from loadtest.replay.contest.marks import marks
from loadtest.replay.contest.plan import TRACES, Table, full, quick
from loadtest.replay.contest.play import (
    YARDSTICK,
    Played,
    file_of,
    forget,
    jobs_of,
    keep_apart,
    kept,
    play_missing,
    read,
)
from loadtest.replay.measure import NUMBERS, Group, Spread
from loadtest.traffic import read_traffic
from router.plugins import POLICIES, found

SMALL = Table(
    name="small",
    title="a small one",
    trace="conversation",
    sizes=(2,),
    cards=("A100",),
    loads=(0.5,),
    seeds={"e2e": 2, "least_request": 1},
)


FEW = (0.0, 0.04)  # of a slice: 60 requests


def group(policy: str, load: float = 0.5, **numbers: float) -> Group:
    known = {name: Spread(numbers.get(name, nan), nan) for name in NUMBERS}
    return Group(policy=policy, replicas=16, load=load, seeds=1, numbers=known)


def contestants(**first_s: float) -> list[Group]:
    """Rules by their mean first token, beside central_fcfs at 1 s."""
    return [
        group(name, first_token_mean_s=value, central_ratio=value, end_to_end_mean_s=10 * value)
        for name, value in {YARDSTICK: 1.0, **first_s}.items()
    ]


def played(groups: list[Group]) -> Played:
    return Played(groups=groups, requests=51, took_s=60.0)


def play(table: Table, folder: Path, only: set[str] | None = None) -> list[tuple[int, int]]:
    """Play what is missing; (ended, of) of every run that was played now."""
    runs: list[tuple[int, int]] = []
    source = SLICES / "conversation.jsonl.gz"
    play_missing(table, source, FEW, folder, processes=1, only=only, on_run=lambda *at: runs.append(at))
    return runs


# What is played


@pytest.mark.parametrize("tables", [full(), quick()])
def test_every_rule_of_a_contest_is_one_that_there_is(tables: list[Table]) -> None:
    assert {rule for table in tables for rule in table.seeds} <= found(POLICIES).keys()
    assert len({table.name for table in tables}) == len(tables)


def test_the_whole_contest_plays_every_rule_there_is_but_the_one_for_closed_batches() -> None:
    assert found(POLICIES).keys() - {rule for table in full() for rule in table.seeds} <= {"makespan"}


def test_every_rule_meets_the_same_requests_and_the_yardstick_meets_all_of_them() -> None:
    jobs = jobs_of(SMALL, SLICES / "conversation.jsonl.gz", FEW)
    by_rule: dict[str, list[int]] = {}
    for job in jobs:
        by_rule.setdefault(job.conditions.policy.name, []).append(job.demand.seed)
        assert job.demand.seed == job.conditions.seed
    assert by_rule == {YARDSTICK: [0, 1], "e2e": [0, 1], "least_request": [0]}


@pytest.mark.parametrize("trace", TRACES)
def test_slices_are_a_stretch_of_the_trace_in_order(trace: str) -> None:
    rows = read_traffic(SLICES / f"{trace}.jsonl.gz")
    assert len(rows) == 1500
    assert rows[0].at_s == 0.0
    assert all(a.at_s <= b.at_s for a, b in pairwise(rows))
    assert all(row.output_length >= 1 for row in rows)


def test_a_run_is_played_once_and_read_from_then_on(tmp_path: Path) -> None:
    assert read(SMALL, tmp_path) is None
    assert play(SMALL, tmp_path) == [(n, 5) for n in range(1, 6)]
    own = read(SMALL, tmp_path)
    assert own is not None
    assert own.missing == 0
    assert [(one.policy, one.seeds) for one in own.groups] == [(YARDSTICK, 2), ("e2e", 2), ("least_request", 1)]
    assert own.groups[0].numbers["central_ratio"].mean == pytest.approx(1.0)
    assert 0.9 < own.groups[1].numbers["central_ratio"].mean < 5.0
    assert isnan(own.groups[1].numbers["cost_per_request"].mean)
    assert play(SMALL, tmp_path) == []


def test_a_stopped_contest_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    play(SMALL, tmp_path)
    whole = file_of("small", tmp_path).read_bytes()
    before = read(SMALL, tmp_path)
    file_of("small", tmp_path).write_bytes(whole[: len(whole) - 100])
    cut = read(SMALL, tmp_path)
    assert cut is not None
    assert cut.missing == 1
    assert play(SMALL, tmp_path) == [(1, 1)]
    again = read(SMALL, tmp_path)
    assert before is not None
    assert again is not None
    assert [one.numbers["first_token_mean_s"] for one in again.groups] == [
        one.numbers["first_token_mean_s"] for one in before.groups
    ]


def test_one_rule_can_be_played_alone_and_once_more(tmp_path: Path) -> None:
    assert len(play(SMALL, tmp_path, {"e2e"})) == 2
    own = read(SMALL, tmp_path)
    assert own is not None
    assert own.missing == 3
    assert isnan(own.groups[0].numbers["central_ratio"].mean), "not known without the yardstick, and not zero"
    play(SMALL, tmp_path)
    forget("small", {"e2e"}, tmp_path)
    assert [run.policy for run in kept("small", tmp_path)] == [YARDSTICK, "least_request", YARDSTICK]
    assert len(play(SMALL, tmp_path)) == 2


def test_answers_of_one_token_leave_only_the_prefills(tmp_path: Path) -> None:
    table = replace(SMALL, seeds={"e2e": 1}, first_tokens_only=True)
    assert jobs_of(table, SLICES / "conversation.jsonl.gz", FEW)[0].demand.first_tokens_only
    play(table, tmp_path)
    own = read(table, tmp_path)
    assert own is not None
    for one in own.groups:
        assert one.numbers["first_token_mean_s"].mean == one.numbers["end_to_end_mean_s"].mean
        assert isnan(one.numbers["per_token_mean_s"].mean)


# Marks


def test_marks_name_the_best_of_ours_and_the_best_of_others() -> None:
    own = played(contestants(e2e=1.2, ttft=1.08, conductor=1.05, lmetric=2.0))
    (to_yardstick, words), (to_others, other_words) = marks(
        [replace(SMALL, mark=1.1, first_tokens_only=True)], {"small": own}
    )
    assert to_yardstick
    assert "`ttft` 1.08" in words
    assert not to_others
    assert "`conductor` 1.05" in other_words


def test_a_mixed_fleet_is_judged_by_e2e_in_one_run() -> None:
    own = played(contestants(e2e=1.0, lmetric=1.4, dynamo=1.2, conductor=0.9))
    reached = {words: ok for ok, words in marks([replace(SMALL, name="mixed", mark=None)], {"mixed": own})}
    assert [ok for words, ok in reached.items() if "`lmetric`" in words] == [True]
    assert [ok for words, ok in reached.items() if "`dynamo`" in words] == [False]
    assert [ok for words, ok in reached.items() if "ends" in words] == [False]
    assert [ok for words, ok in reached.items() if "at most 1.15" in words] == [True]


def test_a_wrong_estimator_is_held_against_the_right_one() -> None:
    tables = [replace(SMALL, name="error-x", error=0.2, first_tokens_only=True)]
    results = {"placement-x": played(contestants(e2e=1.0)), "error-x": played(contestants(e2e=1.15))}
    assert [ok for ok, _ in marks(tables, results)] == [False]
    results["error-x"] = played(contestants(e2e=1.09))
    assert [ok for ok, _ in marks(tables, results)] == [True]


def test_the_median_pace_is_held_against_least_request() -> None:
    groups = [group("least_request", per_token_p50_s=0.02), group("e2e", per_token_p50_s=0.03)]
    groups += [group("cost", per_token_p50_s=0.02)]
    assert [ok for ok, _ in marks([SMALL], {"small": played(groups)})] == [False, True]


def test_what_was_not_played_is_not_judged() -> None:
    assert list(marks(full(), {})) == []
    some = played(contestants(lmetric=1.4, conductor=0.9))
    for table in (replace(SMALL, mark=1.1), replace(SMALL, name="mixed"), replace(SMALL, name="error-x", error=0.2)):
        assert list(marks([table], {table.name: some, "placement-x": some})) == []


# The page


def test_only_what_is_between_the_comments_is_written_anew() -> None:
    before = f"# Results\n\nwords\n\n{page.BEGIN}\nold\n{page.END}\n\nmore words\n"
    own = {"small": played(contestants(e2e=1.0, lmetric=2.0))}
    after = page.into(before, [SMALL], own, "plots")
    assert after.startswith("# Results\n\nwords\n")
    assert after.endswith("more words\n")
    assert "old" not in after
    assert "| `e2e` | **1 (1.00)** |" in after
    assert "](plots/small.svg)" in after
    assert page.into(after, [SMALL], own, "plots") == after


def test_a_table_of_which_only_the_yardstick_was_played_is_written_too() -> None:
    own = {"small": played(contestants())}
    assert f"| `{YARDSTICK}` | 1 (1.00) |" in page.written([SMALL], own, "plots")


def test_a_page_without_the_comments_is_left_alone() -> None:
    with pytest.raises(ValueError, match="page has no"):
        page.into("# Results\n", [SMALL], {}, "plots")


def test_a_plot_cuts_what_is_far_beyond_the_others() -> None:
    drawn = page.plot(played([*contestants(e2e=1.1, lmetric=50.0)]))
    assert drawn.startswith("<svg")
    assert "lmetric" in drawn
    assert "50" not in drawn.replace("#5d6878", "").split("<text")[0]


def test_a_missing_trace_is_one_sentence_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "mooncake_conversation_trace.jsonl.gz is not there" in capsys.readouterr().err
    assert main(["--only", "nonsense", "--out", str(tmp_path)]) == 2


def test_a_contest_that_is_stopped_says_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loadtest.replay.contest.__main__.play_tables", stopped)
    assert main(["--quick", "--out", str(tmp_path)]) == 130
    assert "the same command goes on with it" in capsys.readouterr().err


def test_runs_of_another_part_are_not_mixed_with_those_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.replay.contest.__main__.play_tables", lambda *_args: None)
    assert [main(["--out", str(tmp_path), "--part", "0-0.04"]) for _ in range(2)] == [0, 0]
    assert main(["--out", str(tmp_path)]) == 2
    assert f"{tmp_path} has runs of the part 0-0.04; another --out keeps these apart" in capsys.readouterr().err


def test_runs_of_other_traces_are_not_mixed_either(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(b"one")
    for _ in range(2):
        keep_apart({"conversation": trace}, FEW, tmp_path / "out")
    trace.write_bytes(b"two")
    with pytest.raises(ValueError, match="has runs of other traces"):
        keep_apart({"conversation": trace}, FEW, tmp_path / "out")


def test_an_unknown_rule_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--out", str(tmp_path), "--rules", "e2e,nonsense"])
    assert refused.value.code == 2
    assert "nonsense is in no contest; there are central_fcfs, conductor" in capsys.readouterr().err


def test_tables_are_chosen_by_the_beginning_of_their_names() -> None:
    assert [table.name for table in chosen(full(), "mixed,error")] == [
        "error-conversation",
        "error-synthetic",
        "mixed",
    ]
    assert chosen(full(), None) == full()
