from __future__ import annotations

import pytest

from router.signals.sequence import State
from router.signals.states import Carrier, SourceReport, SourceWatch, missing_report, report_of
from router.signals.stream import Stream
from tests.router.signals.events import P, batch, stored


def a_report(name: str, state: State, carrier: Carrier = Carrier.ZMQ) -> SourceReport:
    return SourceReport(name, carrier, "tcp://h:5557", state, False, None, {})


def a_watch(served: int = 3) -> SourceWatch:
    return SourceWatch(grace_s=30.0, served=lambda name: served)


@pytest.mark.parametrize("state", [State.NEVER_CONNECTED, State.SILENT])
def test_a_missing_source_is_named_once_after_the_grace_time(state: State) -> None:
    watch, reports = a_watch(), [a_report("b", state)]
    given = [watch.due(reports, now_s) for now_s in (0.0, 29.0, 30.0, 31.0, 300.0)]
    assert [len(warnings) for warnings in given] == [0, 0, 1, 0, 0]
    assert given[2][0].startswith("b was given 3 requests")
    assert "tcp://h:5557" in given[2][0]


def test_each_missing_source_gets_a_warning_of_its_own() -> None:
    watch = a_watch()
    reports = [a_report("a", State.LIVE), a_report("b", State.SILENT), missing_report("c")]
    watch.due(reports, 0.0)
    assert [warning[0] for warning in watch.due(reports, 31.0)] == ["b", "c"]


def test_a_source_nobody_has_given_work_may_be_silent() -> None:
    watch = a_watch(served=0)
    watch.due([a_report("b", State.SILENT)], 0.0)
    assert watch.due([a_report("b", State.SILENT)], 1000.0) == []


@pytest.mark.parametrize("state", [State.LIVE, State.REPLAYING, State.DEGRADED])
def test_a_source_that_is_heard_is_not_missing(state: State) -> None:
    watch = a_watch()
    watch.due([a_report("b", state)], 0.0)
    assert watch.due([a_report("b", state)], 1000.0) == []


def test_a_second_outage_is_named_again_after_its_own_grace_time() -> None:
    watch = a_watch()
    gone, live = [a_report("b", State.SILENT)], [a_report("b", State.LIVE)]
    watch.due(gone, 0.0)
    assert len(watch.due(gone, 30.0)) == 1
    watch.due(live, 40.0)
    watch.due(gone, 50.0)
    assert (watch.due(gone, 79.0), len(watch.due(gone, 80.0))) == ([], 1)


def test_a_report_tells_age_by_the_routers_clock_and_unknown_as_none() -> None:
    stream = Stream("a", lambda batch: None, lambda: None, first_seq=0, clock=lambda: 5.0)
    assert report_of("a", Carrier.ZMQ, "x", stream, 9.0).age_s is None
    stream.heard(0, batch(stored(P[:16], 1)))
    report = report_of("a", Carrier.ZMQ, "x", stream, 9.0)
    assert (report.age_s, report.state, report.counts["batches"], report.counts["gaps"]) == (4.0, State.LIVE, 1, 0)


def test_the_grace_time_is_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        SourceWatch(grace_s=0.0, served=len)
