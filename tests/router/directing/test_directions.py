"""What belongs to which placement, who is told no more, and what is taken back; plain objects, no socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from estimators.first_token import Discipline
from estimators.paths import Path
from estimators.view import spare_name
from router.actions import Aside, Cause, Ended, Hint, Hold, Means, Send, Withdraw
from router.admission import AdmissionConfig
from router.decider import TimedDecider
from router.directing.directions import Directions, Listener
from router.directing.rests import FIRST_REST_S, MOST_FAILURES
from router.directing.settings import ToldSpec
from router.placing import Placement
from tests.builders import a_request, held
from tests.estimators.test_told import an_estimator, told
from tests.router.dispatch_bench import Bench, only_send

BLOCKS = 512


class Told:
    """Three replicas before a dispatcher; the last one has the prompt and is down but for being read."""

    def __init__(
        self, told: ToldSpec, *, store: int = 0, discipline: Discipline = Discipline.OVERLAPPED, **more: Any
    ) -> None:
        where = held([0, 0, BLOCKS], store)
        estimator = an_estimator(3, decides=False)
        self.bench = Bench("A100", "A100", "A100", where=where, estimator=estimator, discipline=discipline, **more)
        listeners = [Listener(f"a100-{row}", told, f"10.0.0.{row}", 8000) for row in range(3)]
        self.directions = Directions(listeners, self.bench.view)
        self.asides: list[Aside] = []
        self.decider = TimedDecider(
            self.bench.dispatcher,
            took=lambda s: None,
            answered=lambda *told: None,
            ranks=[None] * 3,
            directions=self.directions,
            aside=self.asides.append,
        )

    def busy(self, row: int, seconds: float) -> None:
        self.bench.view.head_ends_s[row] = self.bench.view.head_compute_s[row] = seconds

    def send(self, now_s: float = 0.0, **changes: Any) -> Send:
        return only_send(self.decider.arrived(a_request(**changes), now_s))

    def finish(self, sent: Send, now_s: float, **ended: Any) -> None:
        self.decider.finished(sent, Ended(**{"status": 200, "output_tokens": 5, **ended}), now_s)


def told_peer(way: Any = "header", **more: Any) -> Told:
    """The holder of the prompt is busy, so that another one reads it."""
    fleet = Told(ToldSpec(peer=way, store="never"), **more)
    fleet.busy(2, 60.0)
    return fleet


def receipt_of(sent: Send) -> Any:
    assert isinstance(sent.placement, Placement)
    return sent.placement.receipt


def test_a_header_names_the_peer_that_was_chosen_and_the_receipt_says_so() -> None:
    sent = told_peer().send()
    assert (sent.path, sent.source) == (Path.PEER, "a100-2")
    assert sent.extra_headers == [(b"x-kv-cache-source-host-port", b"10.0.0.2:8000")]
    assert sent.members == {}
    assert (receipt_of(sent).directed, receipt_of(sent).edited) == ("header", ())


def test_a_body_names_it_with_an_id_of_its_own_for_each_attempt() -> None:
    fleet = told_peer("body")
    first = fleet.send()
    second = only_send(fleet.decider.failed(first, Cause.CONNECT, 0.1))
    sources = [json.loads("{" + one.members["kv_transfer_params"].decode() + "}") for one in (first, second)]
    ids = {source["remote_kv_source"].pop("kv_request_id") for source in sources}
    assert len(ids) == 2
    assert sources == [{"remote_kv_source": {"remote_host": "10.0.0.2", "remote_port": 8000}}] * 2
    assert (receipt_of(second).directed, receipt_of(second).edited) == ("body", ("kv_transfer_params",))


def test_two_requests_to_which_clients_gave_one_id_are_told_apart() -> None:
    moved, read = ahead(ToldSpec(peer="move", store="never")), told_peer("body")
    first, second = (moved.send(0.0, request_id="same") for _ in range(2))
    hints = [aside for aside in moved.asides if isinstance(aside, Hint)]
    assert [hint.request for hint in hints] == [first.request, second.request]
    moved.decider.cancelled(first, 0.1)
    assert [aside.hint for aside in moved.asides if isinstance(aside, Withdraw)] == hints[:1]
    members = [read.send(0.0, request_id="same").members["kv_transfer_params"] for _ in range(2)]
    assert members[0].replace(b"same", b"") != members[1].replace(b"same", b"")


def test_who_holds_the_prompt_and_is_free_is_told_nothing() -> None:
    sent = Told(ToldSpec(peer="header", store="never")).send()
    assert (sent.row, sent.path) == (2, Path.LOCAL)
    assert (sent.extra_headers, receipt_of(sent).directed) == ([], None)


def test_a_replica_without_a_word_reads_no_peer() -> None:
    fleet = Told(ToldSpec())
    fleet.busy(2, 60.0)
    sent = fleet.send()
    assert (sent.path, sent.extra_headers, sent.members) == (Path.RECOMPUTE, [], {})


def test_an_engine_that_does_not_obey_is_left_alone_and_tried_again_later() -> None:
    fleet = told_peer()
    now_s = 0.0
    asked: dict[int, int] = {}
    while (sent := fleet.send(now_s)).path is Path.PEER:
        asked[sent.row] = asked.get(sent.row, 0) + 1
        now_s += 0.01
        fleet.finish(sent, now_s, cached_tokens=0)
        assert sum(asked.values()) <= 2 * MOST_FAILURES
    assert asked == {0: MOST_FAILURES, 1: MOST_FAILURES}
    fleet.finish(sent, now_s, cached_tokens=0)
    assert fleet.directions.report(now_s)["resting"] == {"a100-0": "header", "a100-1": "header"}
    later_s = now_s + FIRST_REST_S + 0.1
    fleet.busy(2, later_s + 60.0)
    again = fleet.send(later_s)
    assert again.path is Path.PEER
    fleet.finish(again, later_s + 0.1, cached_tokens=0)  # one is enough now
    rests = fleet.directions.report(later_s + 0.1)["resting"]
    assert rests == {again.replica: "header"}


@pytest.mark.parametrize(
    ("ended", "counted"),
    [
        ({"cached_tokens": BLOCKS * 16}, "worked"),
        ({"cached_tokens": 0}, "failed"),
        ({"cached_tokens": None}, None),
        ({"status": 500, "cached_tokens": 0}, None),
        ({"status": 400}, "failed"),
    ],
)
def test_whether_it_was_read_is_learned_from_the_tokens_the_engine_reused(
    ended: dict[str, Any], counted: str | None
) -> None:
    fleet = told_peer("body")
    sent = fleet.send()
    fleet.finish(sent, 1.0, **ended)
    results = {result for _, result in fleet.directions.counts} - {"told"}
    assert results == (set() if counted is None else {counted})


# Aside


def ahead(told: ToldSpec, **more: Any) -> Told:
    """Engines that look at their turn; all are busy for a while, the holder for longer."""
    fleet = Told(told, discipline=Discipline.SERIAL, **more)
    keep_busy(fleet, 0.0)
    return fleet


def keep_busy(fleet: Told, now_s: float) -> None:
    for row, seconds in enumerate((5.0, 6.0, 60.0)):
        fleet.busy(row, now_s + seconds)


def only_hint(fleet: Told) -> Hint:
    (hint,) = fleet.asides
    assert isinstance(hint, Hint)
    return hint


@pytest.mark.parametrize(
    ("told", "store", "means", "source"),
    [
        (ToldSpec(peer="move", store="never"), 0, Means.MOVE, 2),
        (ToldSpec(store="prefetch"), BLOCKS, Means.PREFETCH, -1),
    ],
)
def test_state_is_called_for_when_a_request_is_placed_behind_others(
    told: ToldSpec, store: int, means: Means, source: int
) -> None:
    fleet = ahead(told, store=store)
    sent = fleet.send()
    hint = only_hint(fleet)
    assert (hint.means, hint.row, hint.source) == (means, sent.row, source)
    assert (sent.row, receipt_of(sent).directed) == (0, means.value)
    assert (sent.extra_headers, sent.members) == ([], {})


@pytest.mark.parametrize("end", ["cancelled", "failed", "error"])
def test_it_is_taken_back_when_the_request_ends_before_its_first_token(end: str) -> None:
    fleet = ahead(ToldSpec(store="prefetch"), store=BLOCKS)
    sent = fleet.send()
    hint = only_hint(fleet)
    if end == "cancelled":
        fleet.decider.cancelled(sent, 1.0)
    elif end == "failed":
        fleet.decider.failed(sent, Cause.CONNECT, 1.0)
    else:
        fleet.finish(sent, 1.0, status=500)
    taken_back = fleet.asides[1]
    assert isinstance(taken_back, Withdraw)
    assert taken_back.hint is hint


@pytest.mark.parametrize("streams", [True, False])
def test_it_is_not_taken_back_once_it_has_been_used(streams: bool) -> None:
    fleet = ahead(ToldSpec(store="prefetch"), store=BLOCKS)
    sent = fleet.send(streams=streams)
    if streams:
        fleet.decider.first_token(sent, 1.0)
        fleet.decider.cancelled(sent, 2.0)
    else:
        fleet.finish(sent, 2.0)
    assert len(fleet.asides) == 1
    assert fleet.directions.report(2.0)["open"] == 0


def a_hold(row: int, path: Path = Path.REMOTE) -> Hold:
    return Hold(a_request(), row=row, path=path)


def test_who_waits_for_a_known_replica_has_its_state_called_for_at_once_and_only_once() -> None:
    fleet = ahead(ToldSpec(store="prefetch"), store=BLOCKS)
    hold = a_hold(0)
    assert [type(aside) for aside in fleet.directions.directed([hold], 0.0)] == [Hint]
    sent = only_send(fleet.decider.arrived(hold.request, 0.0))  # once there is room on the same replica
    assert sent.row == 0
    assert fleet.asides == []


def test_who_waited_for_one_and_goes_to_another_has_it_called_for_there_instead() -> None:
    fleet = ahead(ToldSpec(store="prefetch"), store=BLOCKS)
    hold = a_hold(1)
    (first,) = fleet.directions.directed([hold], 0.0)
    fleet.decider.arrived(hold.request, 0.0)
    taken_back, second = fleet.asides
    assert isinstance(taken_back, Withdraw)
    assert isinstance(second, Hint)
    assert (taken_back.hint, second.row) == (first, 0)


def test_who_waits_for_any_replica_has_nothing_called_for() -> None:
    fleet = ahead(ToldSpec(store="prefetch"), store=BLOCKS)
    assert fleet.directions.directed([a_hold(-1)], 0.0) == []


def test_a_client_that_leaves_the_queue_takes_it_back() -> None:
    fleet = ahead(ToldSpec(store="prefetch"), store=BLOCKS)
    hold = a_hold(0)
    (hint,) = fleet.directions.directed([hold], 0.0)
    (taken_back,) = fleet.directions.over(hold)
    assert isinstance(taken_back, Withdraw)
    assert taken_back.hint is hint


def test_a_service_that_fails_is_asked_no_more_and_nothing_is_expected_of_it() -> None:
    fleet = ahead(ToldSpec(store="prefetch"), store=BLOCKS)
    for number in range(MOST_FAILURES):
        keep_busy(fleet, 0.0)
        sent = fleet.send(number / 100, request_id=f"r{number}")
        hint = fleet.asides[-1]
        assert isinstance(hint, Hint)
        fleet.directions.reported(hint, "failed", number / 100)
        fleet.decider.cancelled(sent, number / 100)
    asked = len(fleet.asides)
    keep_busy(fleet, 0.0)
    sent = fleet.send(0.1, request_id="last")
    assert (sent.path, len(fleet.asides)) == (Path.RECOMPUTE, asked)
    assert fleet.directions.counts[Means.PREFETCH, "rest"] == 1
    keep_busy(fleet, 10.0)
    assert fleet.send(10.0, request_id="later").path is Path.REMOTE


def test_who_is_placed_while_the_service_rests_is_not_said_to_have_been_told() -> None:
    """What it has of the prompt itself is used all the same, so the path stays; it is just not pinned."""
    fleet = ahead(ToldSpec(own="pin", store="never"))
    hint = Hint(Means.PIN, a_request(), 0)
    for _ in range(MOST_FAILURES):
        fleet.directions.reported(hint, "failed", 0.0)
    sent = fleet.send()
    sent.path = Path.HOST
    assert fleet.directions.directed([sent], 0.1) == []
    assert receipt_of(sent).directed is None
    assert [type(aside) for aside in fleet.directions.directed([sent], 0.1 + FIRST_REST_S)] == [Hint]
    assert receipt_of(sent).directed == "pin"


def test_replicas_are_told_nothing_aside_where_nobody_would() -> None:
    bench = Bench("A100", "A100", where=held([0, 0], BLOCKS), estimator=an_estimator(2, decides=False))
    listeners = [Listener(f"a100-{row}", ToldSpec(store="prefetch"), "h", 1) for row in range(2)]
    directions = Directions(listeners, bench.view, aside=False)
    assert directions.directed([a_hold(0)], 0.0) == []
    assert bench.view.told is not None
    assert not bench.view.told.store.any()


@pytest.mark.parametrize("told_peer", [True, False])
def test_who_could_go_but_waits_for_a_full_replica_says_for_which_and_how(told_peer: bool) -> None:
    """The fast card is full, and worth waiting for; its state would come from the slow one, if it can be told."""
    bench = Bench(
        "H20",
        "A100",
        where=held([BLOCKS, 0]),
        estimator=an_estimator(2, decides=False),
        admission=AdmissionConfig(max_in_flight=1),
    )
    bench.view.told = told(2, peer=told_peer)
    bench.view.ready[:] = True
    only_send(bench.dispatcher.arrived(a_request(64, request_id="first", only="a100-1"), 0.0))
    (hold,) = bench.dispatcher.arrived(a_request(60_000, request_id="second"), 0.0)
    assert isinstance(hold, Hold)
    assert (hold.row, hold.path) == (1, Path.PEER if told_peer else Path.RECOMPUTE)
    assert hold.source == ("h20-0" if told_peer else None)


def test_a_replica_that_comes_is_told_and_one_that_left_is_not() -> None:
    fleet = told_peer()
    nobody = Listener(spare_name(2), ToldSpec(), "", 0)
    fleet.directions.renew([*fleet.directions.listeners[:2], nobody])
    assert fleet.bench.view.told is not None
    assert fleet.bench.view.told.peer.tolist() == [True, True, False]
    fleet.directions.renew(
        [*fleet.directions.listeners[:2], Listener("a100-2", ToldSpec(peer="header"), "10.0.0.9", 1)]
    )
    assert fleet.bench.view.told.peer.tolist() == [True, True, True]
    assert fleet.send().extra_headers == [(b"x-kv-cache-source-host-port", b"10.0.0.9:1")]


def test_who_did_not_listen_rests_but_whoever_takes_its_row_does_not() -> None:
    fleet = told_peer()
    for _ in range(MOST_FAILURES):
        fleet.directions.reported(Hint(Means.HEADER, a_request(), 0), "failed", 1.0)
    fleet.directions.look(1.0)
    assert fleet.bench.view.told is not None
    assert fleet.bench.view.told.peer.tolist() == [False, True, True]
    same = fleet.directions.listeners
    fleet.directions.renew(list(same))  # somebody else came: this one goes on resting
    fleet.directions.look(1.0)
    assert fleet.bench.view.told.peer.tolist() == [False, True, True]
    fleet.directions.renew([Listener("new", ToldSpec(peer="header"), "10.0.0.7", 8000), *same[1:]])
    assert fleet.bench.view.told.peer.tolist() == [True, True, True]
