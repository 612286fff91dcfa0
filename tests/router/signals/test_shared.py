from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from router.directory import Directory
from router.signals.sequence import State
from router.signals.shared import SharedSubscriber
from router.signals.stream import Stream
from router.signals.wire import Batch
from tests.router.signals.events import BLOCK, MODEL, P, Q, chain_of, stored_map
from tests.router.signals.publisher import payload_of_rank, until


class Rows:
    """Two rows behind one socket, told apart by rank; topics that start with `x` are nobody's."""

    def __init__(self) -> None:
        self.directory = Directory(BLOCK, 2)

    def stream_of(self, topic: str, rank: int | None) -> Stream | None:
        if topic.startswith("x") or rank not in (0, 1):
            return None
        self.directory.add_source(rank, MODEL)

        def apply(batch: Batch) -> None:
            self.directory.apply(rank, batch, 1.0)

        return Stream(f"r{rank}", apply, lambda: self.directory.clear(rank), first_seq=0, clock=lambda: 1.0)

    def credit(self, tokens: list[int]) -> list[int]:
        return [int(blocks) for blocks in self.directory.match(chain_of(tokens)).hbm_blocks]


def message(seq: int, rank: int | None, *events: object, topic: bytes = b"kv@a@m1", ts_s: float = 1.0) -> list[bytes]:
    return [topic, seq.to_bytes(8, "big"), payload_of_rank(rank, *events, ts_s=ts_s)]


def a_subscriber(rows: Rows) -> SharedSubscriber:
    return SharedSubscriber("tcp://127.0.0.1:*", "", rows.stream_of, context=zmq.Context.instance())


def test_ranks_that_share_topic_and_numbers_do_not_disturb_each_other() -> None:
    rows = Rows()
    socket = a_subscriber(rows)
    socket.heard(message(0, 0, stored_map(P, 1)))
    socket.heard(message(0, 1, stored_map(Q, 9001)))
    for seq in (1, 2):
        for rank in (0, 1):
            socket.heard(message(seq, rank, stored_map(P[:16], 7, medium="CPU")))
    assert (rows.credit(P), rows.credit(Q)) == ([256, 0], [0, 256])
    assert {stream.sequence.state for stream in socket.streams.values()} == {State.LIVE}
    socket.heard(message(3, 1, {"type": "AllBlocksCleared"}))
    assert (rows.credit(P), rows.credit(Q)) == ([256, 0], [0, 0])
    socket.heard(message(0, 0, stored_map(Q[:16], 9001), ts_s=2.0))
    assert (rows.credit(P), rows.credit(Q[:16])) == ([0, 0], [1, 0])
    assert [stream.sequence.restarts for stream in socket.streams.values()] == [1, 0]


def test_what_nobody_can_read_or_own_is_counted() -> None:
    socket = a_subscriber(Rows())
    for frames in ([b"x"], [b"t", b"short", b""], [b"t", bytes(8), b"\xc1"], [b"\xff", bytes(8), b"\x90"]):
        socket.heard(frames)
    socket.heard(message(0, 5, stored_map(P, 1)))
    socket.heard(message(0, 0, stored_map(P, 1), topic=b"x"))
    assert (socket.bad_frames, socket.unrouted, socket.streams) == (4, 2, {})


def test_a_replica_heard_under_another_topic_is_a_new_process_and_nothing_of_the_old_one_is_believed() -> None:
    rows = Rows()
    socket = a_subscriber(rows)
    socket.heard(message(0, 1, stored_map(P[:32], 1)))
    socket.heard(message(0, 0, stored_map(P, 1)))
    socket.heard(message(0, 0, stored_map(Q, 1), topic=b"kv@a@m2"))
    assert (rows.credit(P), rows.credit(Q)) == ([0, 2], [256, 0])
    assert {key: stream.sequence.state for key, stream in socket.streams.items()} == {
        ("kv@a@m1", 1): State.LIVE,
        ("kv@a@m2", 0): State.LIVE,
    }
    assert [stream.counts.batches for stream in socket.streams.values()] == [1, 2]


def test_two_publishers_of_one_replica_are_never_believed_together() -> None:
    rows = Rows()
    socket = a_subscriber(rows)
    for seq in range(3):
        socket.heard(message(seq, 0, stored_map(P, 1)))
        socket.heard(message(seq, 0, stored_map(Q, 9001), topic=b"kv@a@m2"))
        assert (rows.credit(P), rows.credit(Q)) == ([0, 0], [256, 0])
    assert [stream.sequence.state for stream in socket.streams.values()] == [State.DEGRADED]


def test_topics_without_end_do_not_fill_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    socket = a_subscriber(Rows())
    for number in range(99):
        socket.heard(message(0, 0, topic=b"kv@%d@m" % number))
    assert (len(socket.streams), socket.replaced, len(caplog.records)) == (1, 98, 1)


@asynccontextmanager
async def engines(address: str, count: int) -> AsyncIterator[list[zmq.asyncio.Socket]]:
    """Publishers that dial the router, as llm-d's do."""
    context = zmq.asyncio.Context()
    sockets = [context.socket(zmq.XPUB) for _ in range(count)]
    try:
        for socket in sockets:
            socket.connect(address)
            await asyncio.wait_for(socket.recv(), 5)  # the router's subscription has arrived
        yield sockets
    finally:
        context.destroy(linger=0)


async def test_engines_that_dial_one_bound_socket_each_feed_their_own_row() -> None:
    rows = Rows()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = SharedSubscriber("tcp://127.0.0.1:*", "", rows.stream_of, context=context)
    socket.start()
    try:
        await until(lambda: socket.bound is not None)
        async with engines(socket.bound or "", 2) as publishers:
            await publishers[0].send_multipart(message(0, 0, stored_map(P, 1)))
            await publishers[1].send_multipart(message(0, 1, stored_map(Q, 9001)))
            await until(lambda: (rows.credit(P), rows.credit(Q)) == ([256, 0], [0, 256]))
    finally:
        await socket.stop()
        context.destroy(linger=0)


async def test_an_address_that_cannot_be_used_is_retried_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = SharedSubscriber("nonsense://x", "", lambda topic, rank: None, context=context, retry_s=0.001)
    socket.start()
    await until(lambda: socket.errors >= 2)
    await socket.stop()
    context.destroy(linger=0)
    assert "retrying" in caplog.text
