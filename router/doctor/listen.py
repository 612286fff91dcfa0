"""Listens to a server's cache events for a bounded time, through the router's own subscriber and directory.

Model     one subscriber for each source and one directory for all; a source's history is asked for as the router does
          it, so a replay that works here works there
Valid     sources that can be reached from this machine
Blind to  events of an idle engine: they come only when its cache changes, see the probe
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import zmq

from router.directory import Directory
from router.doctor.facts import SourceFacts
from router.signals.sequence import State
from router.signals.subscriber import EventSubscriber, Socket, Source
from router.signals.wire import Batch

_LOOK_AGAIN_S = 0.02  # a socket says nothing when it connects, so it is looked at


class Ears:
    """Subscriptions to all sources of one server. Use as an async context manager.

    sources : at least one
    raw : rank -> address as the engine says it
    model : base model behind the server
    block_tokens : of the router's chain, >= 1
    """

    def __init__(self, sources: Sequence[Source], raw: dict[int, str], *, model: str, block_tokens: int) -> None:
        self.directory = Directory(block_tokens, len(sources))
        self._raw = raw
        self._news = asyncio.Event()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._subscribers = [
            EventSubscriber(
                source,
                partial(self._apply, row),
                partial(self.directory.clear, row),
                context=self._context,
                replay_deadline_s=2.0,
            )
            for row, source in enumerate(sources)
        ]
        for row, source in enumerate(sources):
            self.directory.add_source(row, model, one_copy=source.one_copy)

    async def __aenter__(self) -> Ears:
        for subscriber in self._subscribers:
            subscriber.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(subscriber.stop() for subscriber in self._subscribers))
        self._context.destroy(linger=0)

    @property
    def batches(self) -> int:
        """Taken in so far, over all sources."""
        return sum(subscriber.counts.batches for subscriber in self._subscribers)

    def matches(self, chain: Sequence[int]) -> list[int]:
        """Leading blocks of a chain that each source holds in device memory, in the order of the sources."""
        blocks: list[int] = self.directory.match(chain).hbm_blocks.tolist()
        return blocks

    async def settled(self, wait_s: float, *, connected_is_enough: bool) -> None:
        """Wait until each source has shown what it will show, `wait_s` at most.

        That is: its history is read, or it sent something. A source without replay that is silent takes the whole time,
        unless it is enough that it accepts subscribers.
        """

        def has_shown(subscriber: EventSubscriber) -> bool:
            if subscriber.source.replay is None and connected_is_enough:
                return subscriber.sequence.connected
            asked = subscriber.counts.replays > 0
            return subscriber.state in (State.LIVE, State.DEGRADED) or (
                asked and subscriber.state is not State.REPLAYING
            )

        await self.until(lambda: all(map(has_shown, self._subscribers)), wait_s)

    async def until(self, holds: Callable[[], bool], wait_s: float) -> bool:
        """Whether it came to hold within `wait_s`."""
        end_s = time.monotonic() + wait_s
        while not holds():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_AGAIN_S, left_s)):
                    await self._news.wait()
        return True

    def facts(self) -> tuple[SourceFacts, ...]:
        """Every source as it is now."""
        return tuple(self._facts(subscriber) for subscriber in self._subscribers)

    def _apply(self, row: int, batch: Batch) -> None:
        self.directory.apply(row, batch, time.monotonic())
        self._news.set()

    def _facts(self, subscriber: EventSubscriber) -> SourceFacts:
        source, counts = subscriber.source, subscriber.counts
        return SourceFacts(
            rank=source.rank,
            address=source.events,
            replay=source.replay,
            topic=source.topic,
            raw_address=self._raw.get(source.rank or 0),
            state=subscriber.state,
            connected=subscriber.sequence.connected,
            batches=counts.batches,
            pair_events=counts.pair_events,
            bad_frames=counts.bad_frames,
            errors=counts.errors,
            replays=counts.replays,
            replays_failed=counts.replays_failed,
        )
