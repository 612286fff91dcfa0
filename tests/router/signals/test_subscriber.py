from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from router.directory import Directory
from router.signals.sequence import State
from router.signals.subscriber import EventSubscriber, Source
from router.signals.wire import Batch, frame
from tests.router.signals.events import BLOCK, MODEL, VECTORS, P, Q, chain_of, payload, stored_map
from tests.router.signals.publisher import END, Publisher


class Listener:
    """A subscriber that feeds a directory of one row, and says when something changed."""

    def __init__(self, source: Source, *, replay_deadline_s: float, forget_after_s: float) -> None:
        self.directory = Directory(BLOCK, 1)
        self.directory.add_source(0, MODEL)
        self.clears = 0
        self._changed = asyncio.Event()
        self.subscriber = EventSubscriber(
            source,
            self._apply,
            self._cleared,
            replay_deadline_s=replay_deadline_s,
            forget_after_s=forget_after_s,
            retry_s=0.01,
        )

    def _apply(self, batch: Batch) -> None:
        self.directory.apply(0, batch, 1.0)
        self._changed.set()

    def _cleared(self) -> None:
        self.clears += 1
        self.directory.clear(0)
        self._changed.set()

    def credit(self, tokens: list[int]) -> int:
        """Blocks of `tokens` the source is believed to hold."""
        return int(self.directory.match(chain_of(tokens)).hbm_blocks[0])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.01)
                except TimeoutError:
                    continue

    async def at(self, seq: int) -> None:
        await self.until(lambda: self.subscriber.sequence.last == seq and self.subscriber.state is not State.REPLAYING)


@asynccontextmanager
async def listening(
    source: Source, *, replay_deadline_s: float = 2.0, forget_after_s: float = 30.0
) -> AsyncIterator[Listener]:
    listener = Listener(source, replay_deadline_s=replay_deadline_s, forget_after_s=forget_after_s)
    listener.subscriber.start()
    try:
        yield listener
    finally:
        await listener.subscriber.stop()


def part(tokens: list[int], seq: int, *, first_hash: int, ts_s: float | None = None) -> bytes:
    """Batch `seq` of a sequence stored 32 blocks at a time."""
    start = seq * 32
    blocks = tokens[start * BLOCK : (start + 32) * BLOCK]
    parent = first_hash + start - 1 if start else None
    return payload(stored_map(blocks, first_hash + start, parent), ts_s=100.0 + seq if ts_s is None else ts_s)


def gone(*hashes: int, ts_s: float) -> bytes:
    return payload({"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}, ts_s=ts_s)


@pytest.mark.parametrize("new_framing", [False, True], ids=["old framing", "new framing"])
async def test_history_comes_by_replay_and_news_live(new_framing: bool) -> None:
    async with Publisher(new_framing=new_framing, topic=b"kv-events") as engine:
        for seq in range(3):
            await engine.publish(seq, part(P, seq, first_hash=1))
        async with listening(Source(engine.events, engine.replay)) as listener:
            await engine.subscribed()
            await listener.at(2)
            assert listener.credit(P) == 96
            await engine.publish(3, part(P, 3, first_hash=1))
            await listener.at(3)
            assert (listener.credit(P), listener.subscriber.state) == (128, State.LIVE)
        assert (engine.requests, listener.clears) == ([0], 0)


async def test_batches_sent_during_the_replay_are_applied_after_it_and_once() -> None:
    async with Publisher() as engine, listening(Source(engine.events, engine.replay)) as listener:
        await engine.subscribed()
        for seq in range(8):
            await engine.publish(seq, part(P, seq, first_hash=1, ts_s=100.0))
        await listener.at(7)
        await listener.until(lambda: listener.subscriber.sequence.live_last == 7)
        assert listener.credit(P) == 256
        await engine.publish(8, gone(*range(1, 257), ts_s=101.0))
        await listener.at(8)
        assert listener.credit(P) == 0, "a block counted twice would have survived its removal"
    assert listener.clears == 0


async def test_a_gap_is_filled_by_one_replay_from_the_missing_number_in_order() -> None:
    async with Publisher() as engine, listening(Source(engine.events, engine.replay)) as listener:
        await engine.subscribed()
        await listener.until(lambda: bool(engine.requests))
        await engine.publish(0, payload(stored_map(Q[:16], 9001), ts_s=90.0))
        for seq in (1, 2):
            await engine.publish(seq, part(P, seq - 1, first_hash=1))
        await listener.at(2)
        del engine.requests[:]
        await engine.publish(3, part(P, 2, first_hash=1), send=False)
        await engine.publish(4, gone(9001, ts_s=110.0), send=False)
        await engine.publish(5, part(P, 3, first_hash=1, ts_s=111.0))
        await listener.at(5)
        assert (listener.credit(P), listener.credit(Q)) == (128, 0)
        for seq in (6, 7):
            await engine.publish(seq, part(P, seq - 2, first_hash=1, ts_s=112.0))
        await listener.at(7)
    assert (engine.requests, listener.credit(P), listener.clears) == ([3], 192, 0)
    sequence = listener.subscriber.sequence
    assert (sequence.gaps, sequence.gap_batches, sequence.state) == (1, 2, State.LIVE)


async def test_a_replay_that_sends_more_than_was_asked_is_applied_once() -> None:
    async with Publisher() as engine, listening(Source(engine.events, engine.replay)) as listener:
        await engine.subscribed()
        await engine.publish(0, part(P, 0, first_hash=1))
        await listener.at(0)
        engine.replays_all = True
        await engine.publish(1, part(P, 1, first_hash=1), send=False)
        await engine.publish(2, gone(*range(1, 33), ts_s=110.0))
        await listener.at(2)
    assert (listener.credit(P), listener.clears, listener.subscriber.sequence.state) == (0, 0, State.LIVE)


async def test_a_gap_without_replay_drops_the_view_and_shows_it_until_the_source_clears() -> None:
    async with Publisher() as engine, listening(Source(engine.events)) as listener:
        await engine.subscribed()
        for seq in range(3):
            await engine.publish(seq, part(P, seq, first_hash=1))
        await listener.at(2)
        assert listener.subscriber.state is State.LIVE
        await engine.publish(5, payload(stored_map(Q[:32], 9001), ts_s=110.0))
        await listener.at(5)
        assert (listener.credit(P), listener.credit(Q), listener.subscriber.state) == (0, 2, State.DEGRADED)
        assert listener.subscriber.sequence.gap_batches == 2
        await engine.publish(6, payload({"type": "AllBlocksCleared"}, ts_s=111.0))
        await listener.at(6)
        assert listener.subscriber.state is State.LIVE


async def test_a_source_without_replay_first_heard_in_the_middle_is_degraded_not_wrong() -> None:
    async with Publisher() as engine, listening(Source(engine.events)) as listener:
        await engine.subscribed()
        await engine.publish(900, part(P, 1, first_hash=1))
        await engine.publish(901, part(Q, 0, first_hash=9001))
        await listener.at(901)
        assert (listener.credit(P), listener.credit(Q), listener.subscriber.state) == (0, 32, State.DEGRADED)
        assert (listener.subscriber.counts.unreplayable, listener.clears) == (1, 0)


async def test_a_late_start_asks_once_for_everything() -> None:
    async with Publisher() as engine:
        for seq in range(900, 904):
            await engine.publish(seq, part(P, seq - 900, first_hash=1))
        async with listening(Source(engine.events, engine.replay)) as listener:
            await listener.at(903)
            assert (listener.credit(P), listener.subscriber.state) == (128, State.DEGRADED)
        assert engine.requests == [0]


async def test_a_window_that_has_passed_the_gap_drops_what_could_be_stale() -> None:
    async with Publisher() as engine, listening(Source(engine.events, engine.replay)) as listener:
        await engine.subscribed()
        for seq in range(3):
            await engine.publish(seq, part(P, seq, first_hash=1))
        await listener.at(2)
        del engine.history[:]
        await engine.publish(8, payload(stored_map(Q[:32], 9001), ts_s=110.0))
        await engine.publish(9, payload(stored_map(Q[32:64], 9003, 9002), ts_s=111.0))
        await listener.at(9)
        assert (listener.credit(P), listener.credit(Q), listener.subscriber.state) == (0, 4, State.DEGRADED)


async def test_numbers_that_start_again_are_a_new_process() -> None:
    async with Publisher() as engine, listening(Source(engine.events, engine.replay)) as listener:
        await engine.subscribed()
        for seq in range(4):
            await engine.publish(seq, part(P, seq, first_hash=1))
        await listener.at(3)
        del engine.history[:]
        await engine.publish(0, payload(stored_map(Q[:16], 9001), ts_s=200.0))
        await listener.at(0)
        assert (listener.credit(P), listener.credit(Q), listener.subscriber.state) == (0, 1, State.LIVE)
        await engine.publish(5, part(P, 2, first_hash=1), keep=False)  # an old batch, sent again
        await engine.publish(1, payload(stored_map(Q[16:32], 9002, 9001), ts_s=201.0))
        await listener.until(lambda: listener.credit(Q) == 2)
        assert (listener.credit(P), listener.subscriber.sequence.restarts) == (0, 1)


async def test_a_new_process_on_the_same_port_is_noticed_before_it_says_anything() -> None:
    async with Publisher() as engine:
        async with listening(Source(engine.events, engine.replay)) as listener:
            await engine.subscribed()
            for seq in range(4):
                await engine.publish(seq, part(P, seq, first_hash=1))
            await listener.at(3)
            await engine.close()
            async with Publisher(port=engine.port, replay_port=engine.replay_port) as successor:
                for seq in range(6):  # it is already past the number its predecessor reached
                    await successor.publish(seq, part(Q, seq, first_hash=9001, ts_s=200.0 + seq), send=False)
                await listener.until(lambda: listener.subscriber.sequence.last == 5)
                assert (listener.credit(P), listener.credit(Q)) == (0, 192)
                await successor.publish(6, part(Q, 6, first_hash=9001, ts_s=210.0))
                await listener.at(6)
        assert (listener.credit(Q), listener.subscriber.counts.reconnects) == (224, 1)


async def test_a_publisher_that_starts_later_is_picked_up() -> None:
    async with Publisher() as first:
        events, replay = first.events, first.replay
        port, replay_port = first.port, first.replay_port
    async with listening(Source(events, replay)) as listener:
        assert listener.subscriber.state is State.NEVER_CONNECTED
        async with Publisher(port=port, replay_port=replay_port) as engine:
            await listener.until(lambda: listener.subscriber.state is State.SILENT)
            await engine.publish(0, part(P, 0, first_hash=1))
            await listener.at(0)
            assert (listener.credit(P), listener.subscriber.state) == (32, State.LIVE)


async def test_a_replay_that_never_ends_is_given_up_and_live_events_still_count() -> None:
    async with Publisher(answers=False) as engine:
        source = Source(engine.events, engine.replay)
        async with listening(source, replay_deadline_s=0.1) as listener:
            await engine.subscribed()
            await listener.until(lambda: listener.subscriber.counts.replays_failed == 1)
            await engine.publish(0, part(P, 0, first_hash=1))
            await listener.at(0)
            assert (listener.credit(P), listener.subscriber.state) == (32, State.LIVE)


async def test_a_publisher_that_stays_away_is_forgotten_and_whole_again_when_it_is_back() -> None:
    async with (
        Publisher() as engine,
        listening(Source(engine.events, engine.replay), forget_after_s=0.01) as listener,
    ):
        await engine.subscribed()
        for seq in range(2):
            await engine.publish(seq, part(P, seq, first_hash=1))
        await listener.at(1)
        await engine.close()
        await listener.until(lambda: listener.credit(P) == 0)
        assert (listener.subscriber.state, listener.subscriber.sequence.connected) == (State.DEGRADED, False)
        async with Publisher(port=engine.port, replay_port=engine.replay_port) as same:
            for seq in range(3):  # the same history: it was only the connection that broke
                await same.publish(seq, part(P, seq, first_hash=1), send=False)
            await listener.until(lambda: listener.credit(P) == 96 and listener.subscriber.state is State.LIVE)
            assert same.requests == [0]


async def test_a_publisher_that_is_back_at_once_is_still_believed() -> None:
    async with Publisher() as engine, listening(Source(engine.events, engine.replay)) as listener:
        await engine.subscribed()
        await engine.publish(0, part(P, 0, first_hash=1))
        await listener.at(0)
        await engine.close()
        await listener.until(lambda: not listener.subscriber.sequence.connected)
        assert (listener.credit(P), listener.subscriber.state) == (32, State.LIVE)


async def test_the_recorded_frames_are_what_is_asked_and_what_ends_a_replay() -> None:
    recorded = json.loads((VECTORS / "zmq_frames.json").read_text())
    start = bytes.fromhex(recorded["replay_request"]["example_hex"][1])
    assert start == (1).to_bytes(8, "big")
    assert [bytes.fromhex(part) for part in recorded["live"]["example_hex"][:2]] == [b"kv-events", start]
    for framing in ("replay_reply_old", "replay_reply_new"):
        end = [bytes.fromhex(part) for part in recorded[framing]["end"]]
        assert (end[-2], end[-1]) == (END, b"")
        for reply in recorded[framing]["dealer_receives"]:
            frames = [*(bytes.fromhex(part) for part in reply[:-1]), b"payload"]
            assert frame(frames) == (int.from_bytes(bytes.fromhex(reply[-2]), "big"), b"payload")


async def test_garbage_is_counted_and_costs_at_most_the_view_never_the_loop() -> None:
    async with Publisher() as engine, listening(Source(engine.events)) as listener:
        await engine.subscribed()
        await engine.publish(0, part(P, 0, first_hash=1))
        await listener.at(0)
        for frames in ([b""], [b"", b"short", b"x"], [b"", b"", b""]):
            await engine.send_raw(frames)
        await engine.publish(1, part(P, 1, first_hash=1))
        await listener.at(1)
        assert (listener.credit(P), listener.subscriber.counts.bad_frames) == (64, 3)
        await engine.publish(2, b"\xc1 not msgpack")
        await engine.publish(3, part(Q, 0, first_hash=9001))
        await listener.at(3)
        assert (listener.credit(P), listener.credit(Q), listener.subscriber.state) == (0, 32, State.DEGRADED)
        assert (listener.subscriber.counts.bad_frames, listener.subscriber.counts.errors) == (4, 0)


async def test_only_the_wanted_topic_is_heard() -> None:
    async with Publisher(topic=b"other") as engine, listening(Source(engine.events, topic="kv@")) as listener:
        await engine.subscribed()
        await engine.publish(0, part(P, 0, first_hash=1))
        engine.topic = b"kv@10.0.0.1:8000@m1"
        await engine.publish(0, part(Q, 0, first_hash=9001))
        await listener.at(0)
        assert (listener.credit(P), listener.credit(Q)) == (0, 32)


async def test_an_engine_may_connect_to_us() -> None:
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.XPUB)
    try:
        async with listening(Source("tcp://127.0.0.1:*")) as listener:
            await listener.until(lambda: listener.subscriber.address is not None)
            pub.connect(listener.subscriber.address or "")
            await asyncio.wait_for(pub.recv(), 5)
            await pub.send_multipart([b"", (0).to_bytes(8, "big"), part(P, 0, first_hash=1)])
            await listener.at(0)
            assert listener.credit(P) == 32
    finally:
        context.destroy(linger=0)


async def test_a_batch_that_cannot_be_applied_is_counted_and_the_next_ones_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken: list[float] = []
    done = asyncio.Event()

    def apply(batch: Batch) -> None:
        if batch.ts_s == 1.0:
            raise RuntimeError("poison")
        taken.append(batch.ts_s)
        if batch.ts_s == 3.0:
            done.set()

    async with Publisher() as engine:
        for seq in range(4):
            await engine.publish(seq, payload(["AllBlocksCleared"], ts_s=float(seq)))
        subscriber = EventSubscriber(Source(engine.events, engine.replay), apply, lambda: None)
        subscriber.start()
        await asyncio.wait_for(done.wait(), 5)
        await subscriber.stop()
    assert (taken, subscriber.counts.errors) == ([0.0, 2.0, 3.0], 1)
    assert "could not be applied" in caplog.text


async def test_an_address_that_cannot_be_used_is_retried_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(Source("nonsense://x")) as listener:
        await listener.until(lambda: listener.subscriber.counts.errors >= 2)
    assert "retrying" in caplog.text


def test_times_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        EventSubscriber(Source("tcp://127.0.0.1:1"), print, print, replay_deadline_s=0.0)
