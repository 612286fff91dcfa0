"""Which event streams are followed: those the fleet file names, those replicas say they have, and the store's.

A replica's stream is followed once the replica has said which model it serves, because that model is the root of
every block it announces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import aiohttp
import zmq

from router.directory import Directory
from router.fleet import STORE_NAME, Fleet, ReplicaSpec
from router.signals.discovery import event_sources
from router.signals.subscriber import EventSubscriber, Source
from router.signals.wire import Batch

log = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0  # between two questions to a replica that named no event source
STORE_FIRST_SEQ = 1  # the Mooncake master numbers its batches from 1

Clock = Callable[[], float]


class EventSources:
    """Owner of all subscriptions and of the tasks that look for addresses. Made inside a running loop."""

    def __init__(self, fleet: Fleet, directory: Directory, session: aiohttp.ClientSession, clock: Clock) -> None:
        self._fleet = fleet
        self._directory = directory
        self._session = session
        self._clock = clock
        self._zmq = zmq.Context[zmq.Socket[bytes]]()
        self._searches: dict[int, asyncio.Task[None]] = {}  # by row
        self._models: dict[int, str] = {}  # base model each replica last said it serves, by row
        self.subscribers: dict[str, EventSubscriber] = {}  # by replica, and the store's

    def follow_store(self) -> None:
        """Follow the shared store's events, if the fleet file names their address."""
        store = self._fleet.store
        if store is None or store.events is None:
            return

        def apply(batch: Batch) -> None:
            self._directory.apply_store(batch, self._clock())

        source = Source(events=store.events, first_seq=STORE_FIRST_SEQ)
        self._subscribe(STORE_NAME, source, apply, self._directory.clear_store)

    def replica_up(self, row: int, model: str) -> None:
        """`row` is up and serves the base model `model`: follow what it announces."""
        self._models[row] = model
        replica = self._fleet.replicas[row]
        subscriber = self.subscribers.get(replica.name)
        if subscriber is not None:
            self._directory.add_source(row, model, one_copy=subscriber.source.one_copy)
        if replica.events is not None:
            if subscriber is None:
                self._follow(row, replica, Source(events=replica.events, replay=replica.replay))
        elif row not in self._searches or self._searches[row].done():
            self._searches[row] = asyncio.get_running_loop().create_task(self._search(row, replica))

    async def stop(self) -> None:
        """End all tasks and sockets."""
        for search in self._searches.values():
            search.cancel()
        await asyncio.gather(*self._searches.values(), return_exceptions=True)
        await asyncio.gather(*(subscriber.stop() for subscriber in self.subscribers.values()))
        self._zmq.destroy(linger=0)

    async def _search(self, row: int, replica: ReplicaSpec) -> None:
        """Ask a replica where it publishes, again from time to time until it says so."""
        warned = False
        while True:
            try:
                found = await event_sources(self._session, replica.url or "")
            except Exception:  # the top of this task: an answer nobody foresaw must not end the search unheard
                log.exception("%s answered something unforeseen about its cache events", replica.name)
                found = []
            if found:
                await self._found(row, replica, found)
                return
            if not warned:
                warned = True
                log.warning("%s names no cache events: what it holds is unknown (see README)", replica.name)
            await asyncio.sleep(ASK_AGAIN_S)

    async def _found(self, row: int, replica: ReplicaSpec, found: list[Source]) -> None:
        if len(found) > 1:
            log.warning(
                "%s has %d data-parallel ranks behind one URL: it picks one itself, so no cache is credited to it",
                *(replica.name, len(found)),
            )
            return
        known = self.subscribers.get(replica.name)
        if known is not None and known.source == found[0]:
            return
        if known is not None:
            await known.stop()
            self._directory.clear(row)
        self._follow(row, replica, found[0])
        log.info("%s publishes cache events at %s", replica.name, found[0].events)

    def _follow(self, row: int, replica: ReplicaSpec, source: Source) -> None:
        def apply(batch: Batch) -> None:
            self._directory.apply(row, batch, self._clock())

        self._directory.add_source(row, self._models[row], one_copy=source.one_copy)
        self._subscribe(replica.name, source, apply, partial(self._directory.clear, row))

    def _subscribe(
        self, name: str, source: Source, apply: Callable[[Batch], object], cleared: Callable[[], object]
    ) -> None:
        subscriber = EventSubscriber(source, apply, cleared, clock=self._clock, context=self._zmq)
        self.subscribers[name] = subscriber
        subscriber.start()
