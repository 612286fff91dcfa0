"""What time alone does in a replay: load reports, replicas that start, and long stretches in which nothing happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadtest.replay.fleets import Fleets, of_file, of_text
from loadtest.replay.results import NOWHERE, Result
from loadtest.replay.run import Conditions, Replay
from loadtest.traffic import TrafficRow, read_traffic
from router.config import PolicyConfig
from router.receipts import Receipt

DEMO = Path(__file__).parents[2] / "loadtest" / "demo"
WEEK_S = 7 * 86_400.0


def demo_rows(requests: int, *, gap_s: float = 0.0) -> list[TrafficRow]:
    """The demo's first requests, those of the second half later by `gap_s`."""
    rows = read_traffic(DEMO / "traffic.jsonl.gz")[:requests]
    late = requests // 2
    return [msgspec.structs.replace(row, at_s=row.at_s + gap_s * (i >= late)) for i, row in enumerate(rows)]


def a_fleet(*replicas: str, more: str = "") -> Fleets:
    """The demo's fleet with these replicas, each as in the file; `more` is another section of it."""
    text = (DEMO / "fleet.yaml").read_text().split("replicas:")[0]
    return of_text(f"{text}replicas: [{', '.join(replicas)}]\n{more}", "test")


class Counted:
    """A run whose load reports are counted."""

    def __init__(self, kind: type[Replay] = Replay, **conditions: Any) -> None:
        self.receipts: list[Receipt] = []
        self.run = kind(of_file(DEMO / "fleet.yaml"), Conditions(**conditions), on_receipt=self.receipts.append)
        self.moments_s: list[float] = []
        dispatcher = self.run.core.dispatcher
        report = dispatcher.load_reported

        def counted(row: int, **told: Any) -> None:
            self.moments_s.append(told["now_s"])
            report(row, **told)

        dispatcher.load_reported = counted  # type: ignore[method-assign]


def played(fleets: Fleets, rows: list[TrafficRow], policy: str = "round_robin") -> tuple[Result, list[Receipt]]:
    receipts: list[Receipt] = []
    run = Replay(fleets, Conditions(policy=PolicyConfig(name=policy)), on_receipt=receipts.append)
    return run.run(rows), receipts


def test_a_week_in_which_nothing_happens_costs_no_more_reports_than_an_hour() -> None:
    counts = []
    for gap_s in (3600.0, WEEK_S):
        counted = Counted()
        assert counted.run.run(demo_rows(20, gap_s=gap_s)).answered.all()
        counts.append(len(counted.moments_s))
    assert abs(counts[0] - counts[1]) <= 4, "four replicas, one moment more or less"
    assert counts[0] < 1000


def test_after_a_week_the_router_has_seen_the_latest_report() -> None:
    counted = Counted(load_period_s=0.5)
    counted.run.run(demo_rows(20, gap_s=WEEK_S))
    late = [receipt for receipt in counted.receipts if receipt.arrived_at > WEEK_S]
    ages_s = [candidate.signal_age_s for receipt in late for candidate in receipt.candidates]
    assert len(ages_s) >= 40, "ten requests, four replicas"
    assert all(age_s is not None and 0 <= age_s < 0.5 for age_s in ages_s)


class TellingEvery(Replay):
    """A run that takes no moment for quiet, so that every report is told."""

    def _quiet_until_s(self, until_s: float) -> float:
        return 0.0


def test_reports_left_out_change_no_decision() -> None:
    few, every = Counted(load_period_s=0.1), Counted(TellingEvery, load_period_s=0.1)
    results = [counted.run.run(demo_rows(60)) for counted in (few, every)]
    assert set(few.moments_s) < set(every.moments_s)
    assert few.receipts == every.receipts
    assert results[0].ended_s.tolist() == results[1].ended_s.tolist()


def test_reports_come_at_whole_periods() -> None:
    counted = Counted(load_period_s=0.3)
    counted.run.run(demo_rows(40))
    periods = np.array(counted.moments_s) / 0.3
    assert np.abs(periods - np.round(periods)).max() < 1e-6
    assert counted.moments_s == sorted(counted.moments_s)


def test_a_replica_gets_requests_from_when_it_has_started() -> None:
    rows = demo_rows(120)
    start_s = rows[60].at_s + 0.001
    result, receipts = played(a_fleet("{name: a, card: A100}", f"{{name: b, card: A100, start_s: {start_s}}}"), rows)
    assert result.answered.all()
    assert set(result.row[:61].tolist()) == {0}
    assert sorted(set(result.row[61:].tolist())) == [0, 1]
    for receipt in receipts:
        named = {candidate.replica for candidate in receipt.candidates}
        assert named == ({"a"} if receipt.arrived_at < start_s else {"a", "b"})


def test_while_no_replica_has_started_requests_are_refused_and_counted() -> None:
    rows = demo_rows(20)
    start_s = rows[7].at_s
    result, receipts = played(a_fleet(f"{{name: a, card: A100, start_s: {start_s}}}"), rows, "e2e")
    assert result.answered.tolist() == [index >= 7 for index in range(20)]
    assert (result.row == NOWHERE).tolist() == [index < 7 for index in range(20)]
    assert [receipt.outcome for receipt in receipts[:7]] == ["refused"] * 7


def test_a_replica_that_starts_reports_no_load_before() -> None:
    rows = demo_rows(60)
    start_s = rows[30].at_s
    _result, receipts = played(
        a_fleet("{name: a, card: A100}", f"{{name: b, card: A100, start_s: {start_s}}}"), rows, "least_request"
    )
    ages_s = [
        candidate.signal_age_s
        for receipt in receipts
        for candidate in receipt.candidates
        if candidate.replica == "b" and candidate.signal_age_s is not None
    ]
    assert ages_s
    assert max(ages_s) < 0.5, "the default period: the first report comes at most so long after the start"


@pytest.mark.parametrize("policy", ["round_robin", "e2e"])
def test_ranks_behind_one_url_are_played_as_replicas_of_their_own(policy: str) -> None:
    """Without jitter, which follows the names."""
    ranked, listed = (
        played(a_fleet(*replicas, more="engine: {jitter: 0}"), demo_rows(120), policy)[0]
        for replicas in (
            ["{name: a, card: A100, ranks: 2}", "{name: b, card: H20}"],
            ["{name: x, card: A100}", "{name: y, card: A100}", "{name: b, card: H20}"],
        )
    )
    assert ranked.replicas == ["a/0", "a/1", "b"]
    assert set(ranked.row.tolist()) == {0, 1, 2}
    assert ranked.row.tolist() == listed.row.tolist()
    assert ranked.ended_s.tolist() == listed.ended_s.tolist()
    assert ranked.cached_tokens.tolist() == listed.cached_tokens.tolist()
