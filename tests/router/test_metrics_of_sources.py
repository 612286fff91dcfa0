from __future__ import annotations

from router.metrics import Metrics
from router.signals.load import Load
from router.signals.load_board import LoadBoard
from router.signals.sequence import State
from router.signals.states import Carrier, SourceReport, missing_report


def test_every_source_shows_its_age_connection_and_counters_and_unknown_is_not_zero() -> None:
    metrics = Metrics()
    reports = [SourceReport("a", Carrier.ZMQ, "tcp://h:1", State.LIVE, True, 2.5, {"gaps": 3}), missing_report("b")]
    metrics.follow_sources(lambda: reports)
    lines = metrics.text().decode().splitlines()
    assert {
        'tfirst_event_source_age_seconds{carrier="zmq",source="a"} 2.5',
        'tfirst_event_source_age_seconds{carrier="none",source="b"} NaN',
        'tfirst_event_source_connected{carrier="zmq",source="a"} 1.0',
        'tfirst_event_source_connected{carrier="none",source="b"} 0.0',
        'tfirst_event_source_incidents_total{kind="gaps",source="a"} 3.0',
    } <= set(lines)
    assert not any("incidents_total" in line and '"b"' in line for line in lines)


def test_load_reports_are_counted_by_origin_with_what_was_wrong() -> None:
    metrics, board = Metrics(), LoadBoard(1, lambda *told: None)
    metrics.follow_load(board)
    board.polled(0, Load(running=1.0, anomalies=2), 1.0, 1.1)
    board.pushed(0, Load(running=1.0, waiting=0.0), 1.2)
    lines = set(metrics.text().decode().splitlines())
    assert {
        'tfirst_load_reports_total{origin="poll"} 1.0',
        'tfirst_load_reports_total{origin="push"} 1.0',
        'tfirst_load_reports_total{origin="response"} 0.0',
        'tfirst_load_anomalies_total{origin="poll"} 2.0',
        'tfirst_load_incomplete_total{origin="poll"} 1.0',
        'tfirst_load_incomplete_total{origin="push"} 0.0',
    } <= lines
