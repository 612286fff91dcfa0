"""Event publishers of all ranks of one server: rank r listens r ports above the bases, as vLLM's do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from sim_backends.publisher import HIGH_WATER_MARK, PortTaken, ReplayingPublisher
from sim_backends.ranks import shifted

_TRIES = 50  # for runs of free ports where the system chooses the first

Open = Callable[[str, str], ReplayingPublisher]


async def open_all(open_one: Open, *, events: str, replay: str, ranks: int) -> list[ReplayingPublisher]:
    """One publisher a rank. Raises PortTaken, and then none is open.

    open_one : opens a publisher at these two addresses, or raises PortTaken
    events, replay : bases; `tcp://HOST:*` has the system choose a run of ports
    """
    free = events.endswith(":*") or replay.endswith(":*")
    for tries_left in range(_TRIES if free and ranks > 1 else 1, 0, -1):
        publishers: list[ReplayingPublisher] = []
        try:
            publishers.append(open_one(events, replay))
            _keep_apart(publishers[0], ranks)
            for rank in range(1, ranks):
                first = publishers[0]
                publishers.append(open_one(shifted(first.address, rank), shifted(first.replay_address, rank)))
        except PortTaken:
            for publisher in publishers:
                await publisher.close()
            if tries_left == 1:
                raise
        else:
            return publishers
    raise AssertionError("the last try returns or raises")


def sources(publishers: Sequence[ReplayingPublisher]) -> dict[str, dict[str, Any]]:
    """The answer of /kv_event_sources: where each rank's events are."""
    return {str(rank): _source(publisher) for rank, publisher in enumerate(publishers)}


def _source(publisher: ReplayingPublisher) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.address,
        "replay_endpoint": publisher.replay_address,
        "buffer_steps": publisher.buffer_batches,
        "hwm": HIGH_WATER_MARK,
        "max_queue_size": HIGH_WATER_MARK,
        "topic": "",
    }


def _keep_apart(first: ReplayingPublisher, ranks: int) -> None:
    """Raises PortTaken when the two runs of ports would meet."""
    events, replay = urlsplit(first.address).port, urlsplit(first.replay_address).port
    assert events is not None, "bound"
    assert replay is not None, "bound"
    if abs(events - replay) < ranks:
        raise PortTaken(first.replay_address, f"too close to {first.address} for {ranks} ranks")
