from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from sim_backends.publisher import END_OF_REPLAY, PortTaken, Publisher, ReplayingPublisher

FREE = "tcp://127.0.0.1:*"
TIMEOUT_S = 10.0


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def replay(context: zmq.asyncio.Context, address: str, start: int) -> list[list[bytes]]:
    """All frames a DEALER gets, the end marker included."""
    reader = context.socket(zmq.DEALER)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.connect(address)
    await reader.send_multipart([b"", start.to_bytes(8, "big")])
    got: list[list[bytes]] = []
    while not got or got[-1][-1]:
        got.append(await asyncio.wait_for(reader.recv_multipart(), TIMEOUT_S))
    reader.close()
    return got


async def test_old_batches_are_sent_again_and_the_end_is_marked(context: zmq.asyncio.Context) -> None:
    publisher = ReplayingPublisher(context, address=FREE, replay_address=FREE)
    publisher.start()
    for number in range(5):
        publisher.publish(b"payload%d" % number)
    frames = await replay(context, publisher.replay_address, 2)
    assert frames[:-1] == [[b"", b"", n.to_bytes(8, "big"), b"payload%d" % n] for n in (2, 3, 4)]
    assert frames[-1] == [b"", b"", END_OF_REPLAY, b""]
    assert await replay(context, publisher.replay_address, 99) == [[b"", b"", END_OF_REPLAY, b""]]
    await publisher.close()


async def test_the_older_framing_has_no_topic_frame(context: zmq.asyncio.Context) -> None:
    publisher = ReplayingPublisher(context, address=FREE, replay_address=FREE, topic="kv-events", topic_in_replay=False)
    publisher.start()
    publisher.publish(b"payload")
    frames = await replay(context, publisher.replay_address, 0)
    assert frames == [[b"", bytes(8), b"payload"], [b"", END_OF_REPLAY, b""]]
    await publisher.close()


async def test_the_newer_framing_repeats_the_topic_but_not_at_the_end(context: zmq.asyncio.Context) -> None:
    publisher = ReplayingPublisher(context, address=FREE, replay_address=FREE, topic="kv-events")
    publisher.start()
    publisher.publish(b"payload")
    frames = await replay(context, publisher.replay_address, 0)
    assert frames == [[b"", b"kv-events", bytes(8), b"payload"], [b"", b"", END_OF_REPLAY, b""]]
    await publisher.close()


async def test_after_a_restart_it_counts_from_zero_on_the_same_addresses(context: zmq.asyncio.Context) -> None:
    publisher = ReplayingPublisher(context, address=FREE, replay_address=FREE)
    publisher.start()
    publisher.publish(b"old")
    addresses = (publisher.address, publisher.replay_address)
    await publisher.restart()
    assert (publisher.address, publisher.replay_address) == addresses
    publisher.publish(b"new")
    assert (await replay(context, publisher.replay_address, 0))[:-1] == [[b"", b"", bytes(8), b"new"]]
    await publisher.close()


async def test_a_number_taken_for_good_is_a_gap_in_replays(context: zmq.asyncio.Context) -> None:
    publisher = ReplayingPublisher(context, address=FREE, replay_address=FREE)
    publisher.start()
    publisher.number(b"lost", replayable=False)
    assert publisher.number(b"late") == 1
    assert [frame[-1] for frame in await replay(context, publisher.replay_address, 0)] == [b"late", b""]
    await publisher.close()


async def test_a_full_buffer_is_replayed_whole_to_a_reader_that_started_late(context: zmq.asyncio.Context) -> None:
    publisher = ReplayingPublisher(context, address=FREE, replay_address=FREE, buffer_batches=3000)
    publisher.start()
    for number in range(3500):
        publisher.publish(b"%d" % number)
    frames = await replay(context, publisher.replay_address, 0)
    assert [int(frame[-1]) for frame in frames[:-1]] == list(range(500, 3500))
    await publisher.close()


async def test_a_malformed_request_is_ignored_and_the_next_one_answered(context: zmq.asyncio.Context) -> None:
    publisher = ReplayingPublisher(context, address=FREE, replay_address=FREE)
    publisher.start()
    publisher.publish(b"x")
    reader = context.socket(zmq.DEALER)
    reader.connect(publisher.replay_address)
    await reader.send_multipart([b"", b"short"])
    await reader.send_multipart([b"no", b"such", b"form"])
    assert len(await replay(context, publisher.replay_address, 0)) == 2
    assert not await reader.poll(0)
    reader.close()
    await publisher.close()


@pytest.mark.parametrize("first_seq", [0, 1])
async def test_a_subscriber_gets_three_frames_with_counted_sequence_numbers(
    context: zmq.asyncio.Context, first_seq: int
) -> None:
    publisher = Publisher(context, address=FREE, first_seq=first_seq)
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(publisher.address)
    subscriber.subscribe(b"")
    got: list[list[bytes]] = []
    while not got:  # until the subscription has reached the publisher
        publisher.publish(b"p")
        if await subscriber.poll(20):
            got.append(await subscriber.recv_multipart())
    seen = int.from_bytes(got[0][1], "big")
    publisher.publish(b"q")
    while got[-1][2] != b"q":
        got.append(await asyncio.wait_for(subscriber.recv_multipart(), TIMEOUT_S))
    assert [int.from_bytes(frames[1], "big") for frames in got] == list(range(seen, seen + len(got)))
    assert all(len(frames) == 3 and frames[0] == b"" for frames in got)
    assert publisher.published.next_seq == first_seq + publisher.published.messages
    subscriber.close()
    publisher.close()


async def test_a_taken_port_is_said_with_its_address(context: zmq.asyncio.Context) -> None:
    first = Publisher(context, address=FREE)
    with pytest.raises(PortTaken, match=f"cannot listen on {first.address}"):
        Publisher(context, address=first.address)
    first.close()
