from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from functools import partial
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
import zmq.asyncio

from sim_backends.publisher import PortTaken, ReplayingPublisher
from sim_backends.rank_publishers import Open, open_all, sources

FREE = "tcp://127.0.0.1:*"


@pytest_asyncio.fixture
async def open_one() -> AsyncIterator[Open]:
    context = zmq.asyncio.Context()

    def opened(address: str, replay_address: str) -> ReplayingPublisher:
        return ReplayingPublisher(context, address=address, replay_address=replay_address)

    yield opened
    context.term()


def ports(addresses: list[str]) -> list[int]:
    return [urlsplit(address).port or 0 for address in addresses]


async def test_ranks_listen_on_ports_that_count_up_from_the_first(open_one: Open) -> None:
    publishers = await open_all(open_one, events=FREE, replay=FREE, ranks=3)
    for found in (
        ports([publisher.address for publisher in publishers]),
        ports([publisher.replay_address for publisher in publishers]),
    ):
        assert found == list(range(found[0], found[0] + 3))
    assert list(sources(publishers)) == ["0", "1", "2"]
    assert sources(publishers)["2"]["endpoint"] == publishers[2].address
    for publisher in publishers:
        await publisher.close()


async def test_when_a_given_port_is_taken_nothing_stays_open(open_one: Open) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        second = taken.getsockname()[1]
        opened: list[ReplayingPublisher] = []

        def noted(address: str, replay_address: str) -> ReplayingPublisher:
            opened.append(open_one(address, replay_address))
            return opened[-1]

        base = f"tcp://127.0.0.1:{second - 1}"
        with pytest.raises(PortTaken):
            await open_all(noted, events=base, replay="tcp://127.0.0.1:*", ranks=1 + 1)
    assert not opened or all(publisher._live._socket.closed for publisher in opened)


async def test_runs_of_ports_that_would_meet_are_refused(open_one: Open) -> None:
    def near(address: str, replay_address: str) -> ReplayingPublisher:
        first = open_one(FREE, FREE)
        first.replay_address = first.address  # as close as it gets
        return first

    with pytest.raises(PortTaken, match="too close"):
        await open_all(near, events="tcp://h:1", replay="tcp://h:2", ranks=2)


async def test_one_rank_takes_exactly_the_addresses_it_is_given(open_one: Open) -> None:
    asked: list[tuple[str, str]] = []

    def noted(address: str, replay_address: str, note: partial[None]) -> ReplayingPublisher:
        note((address, replay_address))
        return open_one(FREE, FREE)

    [publisher] = await open_all(
        lambda address, replay: noted(address, replay, partial(asked.append)), events="tcp://h:1", replay="e", ranks=1
    )
    await publisher.close()
    assert asked == [("tcp://h:1", "e")]
