from __future__ import annotations

import pytest

from router.signals.load import Load
from router.signals.load_board import LoadBoard, Origin

HEADER = [(b"endpoint-load-metrics", b"TEXT named_metrics.num_requests_waiting=4.0")]


class Told:
    """A board of two rows, and what it told."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, Load, float, float]] = []
        self.board = LoadBoard(2, lambda *told: self.loads.append(told), fresh_s=2.0)

    @property
    def last(self) -> tuple[int, Load, float, float]:
        return self.loads[-1]


def test_a_poll_alone_is_told_as_it_is_with_its_own_times() -> None:
    told = Told()
    told.board.polled(1, Load(running=2.0, waiting=1.0), 10.0, 10.1)
    assert told.loads == [(1, Load(running=2.0, waiting=1.0), 10.0, 10.1)]


def test_a_header_that_knows_only_the_queue_leaves_the_rest_known_and_the_older_time() -> None:
    told = Told()
    told.board.polled(0, Load(running=2.0, waiting=1.0, block_size=16), 10.0, 10.1)
    assert told.board.load_from_response(0, HEADER, 10.5)
    assert told.last == (0, Load(running=2.0, waiting=4.0, block_size=16), 10.0, 10.1)
    told.board.polled(0, Load(running=3.0, waiting=0.0, block_size=16), 11.0, 11.1)
    assert told.last == (0, Load(running=3.0, waiting=0.0, block_size=16), 11.0, 11.1)


def test_what_a_report_no_longer_says_is_unknown_unless_another_fresh_one_says_it() -> None:
    told = Told()
    told.board.polled(0, Load(running=2.0, waiting=1.0), 10.0, 10.1)
    told.board.polled(0, Load(running=2.0), 11.0, 11.1)
    assert told.last[1].waiting is None
    told.board.load_from_response(0, HEADER, 11.2)
    told.board.polled(0, Load(running=2.0), 12.0, 12.1)
    assert told.last[1].waiting == 4.0
    told.board.polled(0, Load(running=2.0), 13.9, 14.0)
    assert told.last[1].waiting is None, "a header of 2.8 seconds ago counts no more"


def test_a_push_that_says_everything_is_as_young_as_it_came() -> None:
    told = Told()
    told.board.polled(0, Load(running=9.0, waiting=9.0, kv_usage=0.5), 10.0, 10.1)
    told.board.pushed(0, Load(running=2.0, waiting=0.0), 10.7)
    assert told.last == (0, Load(running=2.0, waiting=0.0, kv_usage=0.5), 10.7, 10.7)


def test_rows_do_not_mix() -> None:
    told = Told()
    told.board.polled(0, Load(running=9.0, waiting=9.0), 10.0, 10.1)
    told.board.pushed(1, Load(running=1.0), 10.2)
    assert told.last == (1, Load(running=1.0), 10.2, 10.2)


def test_a_response_without_a_report_changes_nothing() -> None:
    told = Told()
    assert not told.board.load_from_response(0, [(b"content-type", b"text/plain")], 1.0)
    assert told.loads == []


def test_ages_are_by_origin_and_every_report_and_anomaly_is_counted() -> None:
    told = Told()
    told.board.polled(0, Load(anomalies=2), 10.0, 10.1)
    told.board.load_from_response(0, HEADER, 10.5)
    assert told.board.age_s(0, 11.0) == {Origin.POLL: pytest.approx(0.9), Origin.RESPONSE: 0.5}
    assert told.board.age_s(1, 11.0) == {}
    assert told.board.counts == {Origin.POLL: 1, Origin.PUSH: 0, Origin.RESPONSE: 1}
    assert told.board.anomalies[Origin.POLL] == 2


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="rows"):
        LoadBoard(0, print)
    with pytest.raises(ValueError, match="fresh_s"):
        LoadBoard(1, print, fresh_s=0.0)
