from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from router.signals.load import Load
from router.signals.load_push import LoadListener
from tests.router.signals.events import vector
from tests.router.signals.publisher import until


def message(rank: int, running: int, waiting: int) -> list[bytes]:
    return [b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", running, waiting, 10, 100, rank])]


class Told:
    def __init__(self) -> None:
        self.loads: list[tuple[int, float | None, float | None]] = []

    def __call__(self, row: int, load: Load, now_s: float) -> None:
        self.loads.append((row, load.running, load.waiting))


def a_listener(told: Told, rows: list[int], ranks: int, clock: Callable[[], float] = lambda: 0.0) -> LoadListener:
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(7001, 7001 + ranks)]
    return LoadListener(addresses, "load", rows, told, context=zmq.Context.instance(), clock=clock)


def test_of_messages_that_came_together_the_newest_of_each_rank_counts() -> None:
    told = Told()
    a_listener(told, [4, 5], 2).heard([message(0, 1, 1), message(1, 2, 2), message(0, 3, 0)])
    assert sorted(told.loads) == [(4, 3, 0), (5, 2, 2)]


def test_a_row_that_stands_for_all_ranks_is_told_their_sum_once_all_have_spoken() -> None:
    told = Told()
    listener = a_listener(told, [4], 2)
    listener.heard([message(0, 1, 1)])
    assert told.loads == []
    listener.heard([message(1, 2, 2)])
    listener.heard([message(0, 5, 0)])
    assert told.loads == [(4, 3, 3), (4, 7, 2)]


def test_a_rank_that_has_stopped_is_not_taken_for_as_busy_as_it_last_was() -> None:
    told, now_s = Told(), [0.0]
    listener = a_listener(told, [4], 2, clock=lambda: now_s[0])
    listener.heard([message(0, 1, 1), message(1, 2, 2)])
    for now_s[0] in (1.0, 2.0, 3.0, 4.0):
        listener.heard([message(0, 1, 1)])
    assert told.loads == [(4, 3, 3)] * 4
    listener.heard([message(1, 0, 0)])
    assert told.loads[-1] == (4, 1, 1)


@pytest.mark.parametrize("frames", [[b"x"], [b"load", bytes(8), b"\xc1"], message(2, 1, 1), message(-1, 1, 1)])
def test_what_cannot_be_read_or_is_nobodys_is_counted(frames: list[bytes]) -> None:
    told = Told()
    listener = a_listener(told, [4, 5], 2)
    listener.heard([frames])
    assert (told.loads, listener.bad_frames, listener.messages) == ([], 1, 0)


async def test_an_engine_pushes_its_load_over_a_socket() -> None:
    told = Told()
    context: zmq.Context[Any] = zmq.Context()
    pub = context.socket(zmq.XPUB)
    address = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
    listener = LoadListener([address], "load", [3], told, context=context)
    listener.start()
    try:
        await until(lambda: bool(pub.poll(0)))
        assert pub.recv() == b"\x01load"
        pub.send_multipart([b"load", bytes(8), vector("load_sglang_0.5.23_loadstat")])
        await until(lambda: bool(told.loads))
    finally:
        await listener.stop()
        context.destroy(linger=0)
    assert told.loads == [(3, 7, 3)]


async def test_an_address_that_cannot_be_used_is_retried_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[Any] = zmq.Context()
    listener = LoadListener(["nonsense://x"], "", [0], Told(), context=context, retry_s=0.001)
    listener.start()
    await until(lambda: listener.errors >= 2)
    await listener.stop()
    context.destroy(linger=0)
    assert "retrying" in caplog.text


def test_rows_must_be_one_or_one_for_each_address() -> None:
    with pytest.raises(ValueError, match="rows"):
        a_listener(Told(), [1, 2, 3], 2)
