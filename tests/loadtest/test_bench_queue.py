"""The benchmark of the queue, on a slice small enough for a test, and what `tfirst replay --queue` plays."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest

from loadtest.replay.bench_queue import ORDERED, YARDSTICK, crossing, main, verdict
from loadtest.replay.jobs import Job, Source, play
from loadtest.replay.run import Conditions, queued, run_label
from loadtest.replay.workload import Demand
from router.admission import AdmissionConfig
from router.config import PolicyConfig

TRACE = Path(__file__).parents[2] / "loadtest" / "demo" / "traffic.jsonl.gz"


def played(admission: AdmissionConfig, load: float = 1.2) -> Job:
    return Job(
        source=Source(TRACE, replicas=2, cards=("A100",)),
        demand=Demand(200, load),
        conditions=Conditions(policy=PolicyConfig(name="e2e"), admission=admission),
        warm_up=0.0,
        deadline_s=5.0,
        detail=True,
        bounds=False,
    )


@pytest.mark.parametrize("order", ["fcfs", "wspt"])
def test_a_replay_with_a_queue_answers_every_request(order: str) -> None:
    done = play(played(queued(order)))  # type: ignore[arg-type]
    assert done.summary.refused == 0
    assert done.summary.policy == f"e2e+{order}:1"
    assert done.result is not None
    assert (done.result.first_token_s > 0).all()


def test_the_same_run_twice_gives_the_same_numbers() -> None:
    first, second = (play(played(queued("wspt"))).summary for _ in range(2))
    assert first.first_token_p99_s == second.first_token_p99_s
    assert first.end_to_end_mean_s == second.end_to_end_mean_s


def test_limits_that_are_never_reached_change_nothing() -> None:
    without = play(played(AdmissionConfig(), load=0.3)).result
    wide = play(played(queued("fcfs", max_prefills=10**6), load=0.3)).result
    assert without is not None
    assert wide is not None
    assert (without.first_token_s == wide.first_token_s).all()
    assert (without.row == wide.row).all()


def test_runs_with_a_queue_have_a_name_of_their_own() -> None:
    assert run_label(Conditions()) == "e2e"
    assert run_label(Conditions(admission=queued("fcfs"))) == "e2e+fcfs:1"


def test_goodput_is_where_the_share_falls_under_the_mark_and_unknown_when_it_does_not() -> None:
    assert crossing([0.4, 0.6], [0.95, 0.85]) == pytest.approx(0.5)
    assert isnan(crossing([0.4, 0.6], [0.99, 0.95]))
    assert isnan(crossing([0.4, 0.6], [0.8, 0.7]))


@pytest.mark.parametrize(
    ("ordered", "slowdown", "status"),
    [([0.95, 0.92, 0.8], 10.0, 0), ([0.95, 0.9, 0.5], 99.0, 1), ([0.91, 0.5, 0.2], 10.0, 1)],
)
def test_the_queue_passes_only_with_more_goodput_and_no_worse_slowdown(
    ordered: list[float], slowdown: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = {YARDSTICK: [0.92, 0.85, 0.5], ORDERED: ordered}
    slowdowns = {YARDSTICK: [20.0] * 3, ORDERED: [slowdown] * 3}
    assert verdict([0.4, 0.6, 0.8], inside, slowdowns) == status
    assert capsys.readouterr().out.endswith("passes\n" if status == 0 else "fails\n")


def test_it_prints_every_kind_at_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--trace", str(TRACE), "--requests", "60", "--replicas", "2", "--loads", "0.5,0.9", "--seeds", "0"])
    printed = capsys.readouterr().out
    assert printed.count("wspt") == 5 * 2 + 5
    assert printed.count("goodput") == 9
