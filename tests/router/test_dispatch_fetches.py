"""What a dispatcher promises on links and of the room for fetches, and gives back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from estimators.estimates import Estimator
from estimators.first_token import Discipline
from estimators.links import LinkTable
from estimators.paths import Path
from estimators.routes import Routes
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from router.actions import Cause
from tests.builders import NoHoldings, held
from tests.router.dispatch_bench import (
    FETCHED_BYTES,
    Bench,
    Takes,
    only_send,
)


def test_promises_taken_back_leave_those_of_others() -> None:
    """Two fetches of equal size share the network; the first is cancelled when a quarter of each has crossed."""
    bench = Bench("A100", "A100", where=held([0, 0], 512), network_bytes_per_s=1e9)
    first = bench.send(0.0, request_id="a")
    bench.send(0.0, request_id="b")
    now_s = 0.010 + FETCHED_BYTES / 1e9 / 2
    assert bench.on_links(now_s)[0] == pytest.approx(1.5 * FETCHED_BYTES)
    bench.dispatcher.cancelled(first, now_s)
    assert bench.on_links(now_s)[0] == pytest.approx(0.75 * FETCHED_BYTES)


@pytest.mark.parametrize(
    "end", ["first_token", "finished", "cancelled", "broken", "server_error", "client_error", "retried"]
)
def test_a_fetch_leaves_the_links_and_its_room_at_the_first_token_and_at_every_end(end: str) -> None:
    bench = Bench("A100", "A100", where=held([0, 0], 512), network_bytes_per_s=1e9, room_bytes=1e10)
    sent = bench.send(0.0)
    assert bench.on_links(0.0)[0] == pytest.approx(FETCHED_BYTES)
    assert bench.on_links(0.0)[1 + sent.row] == pytest.approx(FETCHED_BYTES)
    assert bench.room_taken[sent.row] == pytest.approx(FETCHED_BYTES)
    if end == "first_token":
        bench.dispatcher.first_token(sent, 0.1)
    elif end == "cancelled":
        bench.dispatcher.cancelled(sent, 0.1)
    elif end == "broken":
        bench.dispatcher.failed(sent, Cause.BROKEN, 0.1)
    elif end == "retried":
        again = only_send(bench.dispatcher.failed(sent, Cause.CONNECT, 0.1))
        assert bench.room_taken[sent.row] == 0
        assert bench.room_taken[again.row] == pytest.approx(FETCHED_BYTES)
        assert bench.on_links(0.1)[0] == pytest.approx(FETCHED_BYTES)  # of the second attempt alone
        bench.dispatcher.cancelled(again, 0.1)
    else:
        bench.finish(sent, 0.1, status={"finished": 200, "server_error": 500, "client_error": 400}[end])
    assert bench.on_links(0.1) == [0.0, 0.0, 0.0]
    assert bench.room_taken == [0.0, 0.0]


def test_a_first_token_and_then_the_end_give_back_once_what_others_hold_too() -> None:
    bench = Bench("A100", where=held([0], 512), network_bytes_per_s=1e9, room_bytes=1e10)
    first = bench.send(0.0, request_id="a")
    bench.dispatcher.first_token(first, 0.5)
    bench.send(0.5, request_id="b")
    bench.finish(first, 0.6)
    assert bench.room_taken == pytest.approx([FETCHED_BYTES])
    assert bench.on_links(0.6)[0] == pytest.approx(FETCHED_BYTES - (0.1 - 0.010) * 1e9)


def test_a_replica_without_room_for_one_more_fetch_computes_or_another_takes_it() -> None:
    bench = Bench("A100", where=held([0], 512), network_bytes_per_s=25e9, room_bytes=1.5 * FETCHED_BYTES)
    paths = [bench.send(0.0, request_id=f"r-{i}").path for i in range(3)]
    assert paths == [Path.REMOTE, Path.RECOMPUTE, Path.RECOMPUTE]
    bench = Bench("A100", "A100", where=held([0, 0], 512), network_bytes_per_s=25e9, room_bytes=1.5 * FETCHED_BYTES)
    sent = [bench.send(0.0, request_id=f"r-{i}") for i in range(2)]
    assert [one.path for one in sent] == [Path.REMOTE, Path.REMOTE]
    assert sent[0].row != sent[1].row


def test_a_fetch_that_starts_at_the_turn_is_not_on_the_network_before() -> None:
    def crossed_by(discipline: Discipline, now_s: float) -> float:
        """Bytes that have crossed of a fetch behind about 0.9 s of prefill."""
        bench = Bench("A100", where=held([0], 512), network_bytes_per_s=1e9, discipline=discipline)
        bench.dispatcher._placer._holdings = NoHoldings(held([0]))
        bench.send(0.0, request_id="ahead")
        bench.dispatcher._placer._holdings = NoHoldings(held([0], 512))
        assert bench.send(0.0, request_id="fetches").path is Path.REMOTE
        return FETCHED_BYTES - bench.on_links(now_s)[0]

    assert crossed_by(Discipline.OVERLAPPED, 0.5) == pytest.approx((0.5 - 0.010) * 1e9)
    for discipline in (Discipline.SERIAL, Discipline.BLOCKING, Discipline.LAYERWISE_IN_TURN):
        assert crossed_by(discipline, 0.5) == pytest.approx(0.0, abs=1.0), discipline
        assert crossed_by(discipline, 1.5) > 0.4e9, discipline


def with_peers(rows: int) -> Estimator:
    """A directed fleet: one link of 10 GB/s leaves each replica."""
    table = LinkTable(bytes_per_s=[10e9] * rows)
    return Estimator(
        costs=costs_of(QWEN3_8B),
        layers=QWEN3_8B.layers,
        rows=rows,
        routes=Routes(table=table, egress=list(range(rows))),
        engine_decides=False,
    )


def test_a_read_from_a_peer_names_it_and_is_promised_on_the_link_that_leaves_it() -> None:
    bench = Bench("A100", "A100", "A100", where=held([0, 512, 100]), estimator=with_peers(3))
    bench.dispatcher._placer._policy = Takes(2, Path.PEER)
    sent = bench.send(0.0)
    assert (sent.path, sent.source) == (Path.PEER, bench.view.names[1])
    gained_bytes = (8192 - 1600) * QWEN3_8B.kv_bytes_per_token
    assert bench.on_links(0.0) == pytest.approx([0.0, gained_bytes, 0.0])
    bench.dispatcher.cancelled(sent, 0.0)
    assert bench.on_links(0.0) == [0.0, 0.0, 0.0]


def test_of_two_peers_with_the_same_blocks_the_one_whose_link_is_free_is_read() -> None:
    bench = Bench("A100", "A100", "A100", where=held([512, 512, 0]), estimator=with_peers(3))
    bench.dispatcher._placer._policy = Takes(2, Path.PEER)
    sources = [bench.send(0.0, request_id=f"r-{i}").source for i in range(2)]
    assert sorted(map(str, sources)) == sorted(bench.view.names[:2])


def test_only_a_read_from_a_peer_has_a_source() -> None:
    bench = Bench("A100", "A100", where=held([512, 0]), estimator=with_peers(2))
    for row, path in ((0, Path.LOCAL), (1, Path.RECOMPUTE)):
        bench.dispatcher._placer._policy = Takes(row, path)
        assert bench.send(0.0).source is None


def test_sixteen_fetches_in_one_second_wait_for_each_other() -> None:
    bench = Bench("A100", "A100", where=held([0, 0], 512), network_bytes_per_s=25e9)
    waits_s = []
    for index in range(16):
        sent = bench.send(0.0, request_id=f"r-{index}", prompt_tokens=8448)
        bench.finish(sent, 0.0)
        assert bench.receipts[-1].choice is not None
        waits_s.append(bench.receipts[-1].choice.fetch_s)
    assert waits_s[0] == pytest.approx(0.010 + 2 * 0.0483, abs=1e-3)
    assert waits_s == [waits_s[0]] * 16  # each ended at once, so its promise was taken back

    bench = Bench("A100", "A100", where=held([0, 0], 512), network_bytes_per_s=25e9)
    for index in range(16):
        bench.send(0.0, request_id=f"r-{index}", prompt_tokens=8448)
    bench.finish(bench.send(0.0, request_id="last", prompt_tokens=8448), 5.0)
    assert bench.receipts[-1].choice is not None
    assert bench.receipts[-1].choice.fetch_s > 16 * 0.048


def test_receipts_mark_every_candidate_that_reuses_something_guessed() -> None:
    """Replica 1 is guessed: what is there and what others would read from it is no knowledge."""
    where = replace(held([100, 512, 0]), approximate=np.array([False, True, False]))
    bench = Bench("A100", "A100", "A100", where=where, estimator=with_peers(3))
    bench.dispatcher._placer._policy = Takes(2, Path.PEER)
    bench.finish(bench.send(0.0), 5.0)
    (receipt,) = bench.receipts
    marked = {(one.replica, one.path): one.approximate for one in receipt.candidates}
    first, guessed, last = bench.view.names
    assert {at for at, approximate in marked.items() if approximate} == {
        (guessed, "local"),
        (first, "peer"),
        (last, "peer"),
    }
    assert {(first, "local"), (last, "recompute")} <= marked.keys()
    assert receipt.choice is not None
    assert receipt.choice.approximate


@pytest.mark.parametrize("approximate", [None, np.array([False, False])])
def test_a_store_that_is_guessed_marks_those_that_would_read_it_alone(
    approximate: npt.NDArray[np.bool_] | None,
) -> None:
    where = replace(held([0, 512], 512), approximate=approximate, store_approximate=True)
    bench = Bench("A100", "A100", where=where, network_bytes_per_s=25e9)
    bench.dispatcher._placer._policy = Takes(0, Path.REMOTE)
    bench.finish(bench.send(0.0), 5.0)
    marked = {one.replica: (one.fetched_tokens > 0, one.approximate) for one in bench.receipts[0].candidates}
    assert marked == dict(zip(bench.view.names, [(True, True), (False, False)], strict=True))
