from __future__ import annotations

from router.metrics import Metrics
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
