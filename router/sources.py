"""Which event streams are followed: those the fleet file names, those replicas say they have, and the store's.

A replica's stream is followed once the replica has said which model it serves, because that model is the root of
every block it announces. Replicas that share a URL are its data-parallel ranks and each follows its own rank; replicas
that share an event address have one socket, whose batches say whose they are. Stores and sidecars that cannot publish
over ZMQ post theirs (`pushed`). What a replica holds that was asked and names no source is guessed, until it does, from
what it is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import aiohttp
import zmq

from estimators.view import is_nobody
from router.blocks.config import DirectoryConfig
from router.directory import Directory
from router.errors import ConfigError
from router.fleet import STORE_NAME, Fleet
from router.signals import intake
from router.signals.discovery import Published, published
from router.signals.load import Load
from router.signals.load_push import LoadListener
from router.signals.ranks import configured_addresses, row_of_topic, rows_by_url
from router.signals.sequence import State
from router.signals.shared import SharedSubscriber
from router.signals.states import Carrier, SourceReport, SourceWatch, missing_report, report_of
from router.signals.stream import Stream
from router.signals.subscriber import EventSubscriber, Socket, Source
from router.signals.wire import Batch

log = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0  # between two questions to a replica that named no event source
STORE_FIRST_SEQ = 1  # the Mooncake master numbers its batches from 1
GRACE_S = 30.0  # engines need a moment after they come up before their first event
_WATCH_PERIOD_S = 1.0

Clock = Callable[[], float]
Reply = tuple[int, dict[str, Any]]  # HTTP status and what to answer


class EventSources:
    """Owner of all subscriptions and of the tasks that look for addresses. Made inside a running loop.

    on_pushed_load : (row, load, now_s) for each report of a load socket; without it load sockets are left alone
    grace_s : how long a replica that is given requests may be silent before an operator is warned
    beliefs : how long a publisher that is gone is believed, and what is guessed of a cache that nobody tells of

    Raises
    ------
    ConfigError : several replicas share a URL, and the event address of the first has no port to count on from
    """

    def __init__(
        self,
        fleet: Fleet,
        directory: Directory,
        session: aiohttp.ClientSession,
        clock: Clock,
        *,
        on_pushed_load: Callable[[int, Load, float], object] | None = None,
        grace_s: float = GRACE_S,
        beliefs: DirectoryConfig | None = None,
    ) -> None:
        self._fleet = fleet
        self._directory = directory
        self._session = session
        self._clock = clock
        self._on_pushed_load = on_pushed_load
        self._names: list[str]
        self._members: frozenset[str]
        self._urls: list[str | None]
        self._ranks: dict[str, list[int]]
        self._events: dict[int, str]
        self._replays: dict[int, str]
        self._sharing: Counter[str]
        self._tenures = [0] * len(fleet.replicas)  # replicas each row has had: what an earlier one said is not taken
        self._ending: set[asyncio.Task[None]] = set()  # what is being stopped
        self.members_changed()
        self._zmq: zmq.Context[Socket] = zmq.Context()
        self._searches: dict[str, asyncio.Task[None]] = {}  # by URL
        self._found: dict[int, Source] = {}  # what replicas said of themselves, by row
        self._models: dict[int, str] = {}  # base model each replica last said it serves, by row
        self._one_copy: dict[int, bool] = {}  # as registered with the directory, by row
        self._guessed: set[int] = set()  # rows without a source, whose content is guessed
        self._capacities: dict[int, int] = {}  # blocks each replica has room for, by row
        self._served: Counter[str] = Counter()
        self._watch = SourceWatch(grace_s=grace_s, served=lambda name: self._served[name])
        self._beliefs = beliefs or DirectoryConfig()
        self._watch_period_s = min(_WATCH_PERIOD_S, grace_s, self._beliefs.forget_after_s)
        self._watching: asyncio.Task[None] | None = None
        self._intake = intake.Intake(self._pushed_stream)
        self._posted_s: dict[str, float] = {}  # when each publisher that posts last did
        self.subscribers: dict[str, EventSubscriber] = {}  # by replica, and the store's
        self.shared: dict[str, SharedSubscriber] = {}  # by address
        self.load_listeners: dict[str, LoadListener] = {}  # by URL

    def members_changed(self) -> None:
        """The fleet's replicas are others than before: to be told before anything of a new one is.

        Raises
        ------
        ConfigError : as at the start
        """
        fleet = self._fleet
        self._events, self._replays = event_addresses(fleet), replay_addresses(fleet)
        self._names = [replica.name for replica in fleet.replicas]
        self._members = frozenset(name for name in self._names if not is_nobody(name))
        self._urls = [replica.url for replica in fleet.replicas]
        self._ranks = rows_by_url(self._urls)
        self._sharing = Counter(self._events.values())

    def removed(self, row: int) -> None:
        """The replica of `row` is gone: nothing of it is followed, and nothing it says still is taken.

        To be told while the fleet still names it.
        """
        name, url, address = self._names[row], (self._urls[row] or "").rstrip("/"), self._events.get(row)
        self._tenures[row] += 1
        for known in (self._found, self._models, self._one_copy, self._capacities):
            known.pop(row, None)
        self._guessed.discard(row)
        self._served.pop(name, None)
        self._watch.forget(name)
        self._intake.streams.pop(name, None)
        self._posted_s.pop(name, None)
        subscriber = self.subscribers.pop(name, None)
        if subscriber is not None:
            self._end(subscriber.stop())
        others = [other for other in self._ranks.get(url, ()) if other in self._models]
        if not others and (search := self._searches.pop(url, None)) is not None:
            search.cancel()
        if not others and (listener := self.load_listeners.pop(url, None)) is not None:
            self._end(listener.stop())
        if address is not None and (shared := self.shared.get(address)) is not None:
            shared.drop(name)
            if not any(self._events.get(other) == address for other in self._models):
                del self.shared[address]
                self._end(shared.stop())

    def _end(self, stopping: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(stopping)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def follow_store(self) -> None:
        """Follow the shared store's events, if the fleet file names their address."""
        store = self._fleet.store
        if store is None or store.events is None:
            return
        source = Source(events=store.events, first_seq=STORE_FIRST_SEQ)
        self._subscribe(STORE_NAME, source, self._apply_store, self._directory.clear_store)

    def replica_up(self, row: int, model: str) -> None:
        """`row` is up and serves the base model `model`: follow what it announces."""
        self._models[row] = model
        self._start_watching()
        if row in self._guessed:
            self._guess(row)  # it may serve another model now
        else:
            self._register(row, one_copy=self._one_copy.get(row, False))  # also without events: the store's name it
        address = self._events.get(row)
        if address is None:
            self._look_for(row)
        elif self._sharing[address] > 1:
            self._share(address)
        elif self._names[row] not in self.subscribers:
            self._follow(row, Source(events=address, replay=self._replays.get(row)))

    def capacity_reported(self, row: int, blocks: int) -> None:
        """`row` has room for that many blocks of the router's, >= 1."""
        if self._capacities.get(row) != blocks:
            self._capacities[row] = blocks
            if row in self._guessed:
                self._guess(row)

    def restarted(self, row: int, *, since_s: float) -> None:
        """The process of `row` is another one than at `since_s`, router's clock, and the old one's cache is gone.

        A stream that has noticed that by itself keeps what it has heard since. Another one forgets, and reads what the
        new process has said so far where it can be asked; else it is degraded until that process clears itself.
        """
        stream = self._stream_of(row)
        if stream is None or row in self._guessed:
            self._directory.clear(row)
        elif stream.began_s > since_s:
            return
        elif (subscriber := self.subscribers.get(self._names[row])) is not None:
            subscriber.start_over()
        else:  # the numbers heard so far stay: those of the new process are told from them
            stream.lose_history()

    def is_guessed(self, row: int) -> bool:
        """Whether what `row` holds is guessed from what was sent there."""
        return row in self._guessed

    def served(self, name: str) -> None:
        """The replica called `name` was given one more request, so it should have something to tell."""
        if name in self._members:
            self._served[name] += 1

    async def pushed(self, body: bytes, content_type: str) -> Reply:
        """Take in a POST of cache events, after those that came before it."""
        try:
            async with self._intake.turn():
                return await self._take_in(await intake.read_push(body, content_type))
        except intake.BadPush as exc:
            return 422, {"error": str(exc)}
        except intake.TooManyPosts:
            return 503, {"error": "too many posts wait to be taken in; post again"}

    def reports(self) -> list[SourceReport]:
        """Every replica's source, and the store's where it has one."""
        now_s = self._clock()
        members = [row for row, name in enumerate(self._names) if not is_nobody(name)]
        return [*(self._report(row, now_s) for row in members), *self._store_reports(now_s)]

    def unheard(self, up: Callable[[int], bool]) -> list[str]:
        """Replicas that are up, and the store, whose events are awaited and not followed yet."""
        now_s = self._clock()
        awaited = [row for row in range(len(self._names)) if up(row) and row not in self._guessed]
        reports = [*(self._report(row, now_s) for row in awaited), *self._store_reports(now_s)]
        return [report.name for report in reports if not report.connected or report.state is State.REPLAYING]

    async def stop(self) -> None:
        """End all tasks and sockets."""
        tasks = [*self._searches.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)
        await asyncio.gather(*(subscriber.stop() for subscriber in self.subscribers.values()))
        await asyncio.gather(*(shared.stop() for shared in self.shared.values()))
        await asyncio.gather(*(listener.stop() for listener in self.load_listeners.values()))
        self._zmq.destroy(linger=0)

    # What replicas say of themselves

    def _look_for(self, row: int) -> None:
        url = (self._urls[row] or "").rstrip("/")
        if row in self._found:
            self._follow(row, self._found[row])
        if url not in self._searches or self._searches[url].done():
            self._searches[url] = asyncio.get_running_loop().create_task(self._search(url))

    async def _search(self, url: str) -> None:
        """Ask an endpoint where it publishes, again from time to time until it says so."""
        while True:
            try:
                found = await published(self._session, url)
            except Exception:  # the top of this task: an answer nobody foresaw must not end the search unheard
                log.exception("%s answered something unforeseen about its cache events", url)
                found = Published()
            if found.load:
                await self._listen_for_load(url, found)
            if found.events:
                await self._take_up(url, found.events)
                return
            self._guess_for_want_of_events(url)
            await asyncio.sleep(ASK_AGAIN_S)

    async def _listen_for_load(self, url: str, found: Published) -> None:
        rows, known = self._ranks[url], self.load_listeners.get(url)
        if self._on_pushed_load is None or len(rows) not in (1, len(found.load)):
            return
        if known is not None:
            if known.addresses == found.load:
                return
            await known.stop()
        listener = LoadListener(
            found.load, found.load_topic, rows, self._on_pushed_load, context=self._zmq, clock=self._clock
        )
        self.load_listeners[url] = listener
        listener.start()

    async def _take_up(self, url: str, found: Sequence[Source]) -> None:
        rows = self._ranks[url]
        ranks = 1 + max(source.rank or 0 for source in found)
        if ranks > len(rows):
            log.warning(
                "%s has %d data-parallel ranks and %d of them in the fleet file: it picks one itself, so no cache is"
                " credited to it; list it once for each rank",
                *(url, ranks, len(rows)),
            )
            return
        for source in found:  # by its number: the others of a server that names only some of its ranks are unknown
            row = rows[source.rank or 0]
            self._found[row] = source
            if row in self._models:
                await self._follow_anew(row, source)

    async def _follow_anew(self, row: int, source: Source) -> None:
        known = self.subscribers.get(self._names[row])
        if known is not None and known.source != source:
            del self.subscribers[self._names[row]]
            await known.stop()
            self._directory.clear(row)
        self._follow(row, source)

    # Streams and the directory behind them

    def _guess_for_want_of_events(self, url: str) -> None:
        """Its ranks named no source."""
        for row in self._ranks[url]:
            name = self._names[row]
            if row not in self._models or row in self._events or name in self.subscribers or self._is_posted(name):
                continue
            if row not in self._guessed:
                log.warning(
                    "%s names no source of cache events, so what it holds is guessed from what it is sent: start it"
                    " with KV cache events on (`tfirst doctor` names the flag), or give their address in a fleet file",
                    name,
                )
            self._guess(row)

    def _guess(self, row: int) -> None:
        self._guessed.add(row)
        self._directory.add_routed(row, self._models[row], self._capacities.get(row, self._beliefs.guessed_blocks))

    def _register(self, row: int, *, one_copy: bool) -> None:
        self._guessed.discard(row)
        self._one_copy[row] = one_copy
        self._directory.add_source(row, self._models[row], one_copy=one_copy)

    def _apply(self, row: int, tenure: int, batch: Batch) -> None:
        if self._tenures[row] == tenure:
            self._directory.put(row, batch, self._clock())

    def _clear(self, row: int, tenure: int) -> None:
        if self._tenures[row] == tenure:
            self._directory.clear(row)

    def _into(self, row: int) -> tuple[Callable[[Batch], object], Callable[[], object]]:
        """Where a stream of the replica that `row` has now puts its batches, and how it has it forgotten."""
        tenure = self._tenures[row]
        return partial(self._apply, row, tenure), partial(self._clear, row, tenure)

    def _apply_store(self, batch: Batch) -> None:
        self._directory.apply_store(batch, self._clock())

    def _stream(self, row: int, *, one_copy: bool, first_seq: int) -> Stream:
        self._register(row, one_copy=one_copy)
        return Stream(self._names[row], *self._into(row), first_seq=first_seq, clock=self._clock)

    def _follow(self, row: int, source: Source) -> None:
        name = self._names[row]
        if name in self.subscribers or self._is_posted(name):
            return
        self._register(row, one_copy=source.one_copy)
        self._subscribe(name, source, *self._into(row))
        log.info("%s publishes cache events at %s", name, source.events)

    def _subscribe(
        self, name: str, source: Source, apply: Callable[[Batch], object], cleared: Callable[[], object]
    ) -> None:
        subscriber = EventSubscriber(
            source, apply, cleared, forget_after_s=self._beliefs.forget_after_s, clock=self._clock, context=self._zmq
        )
        self.subscribers[name] = subscriber
        subscriber.start()

    def _share(self, address: str) -> None:
        if address in self.shared:
            return

        def stream_of(topic: str, rank: int | None) -> Stream | None:
            rows = [row for row, named in self._events.items() if named == address]
            row = row_of_topic(topic, self._urls, rows, rank)
            return None if row not in self._models else self._stream(row, one_copy=False, first_seq=0)

        self.shared[address] = SharedSubscriber(address, "", stream_of, context=self._zmq)
        self.shared[address].start()

    # What is posted

    async def _take_in(self, push: intake.Push) -> Reply:
        refusal = self._refusal(push.source)
        if refusal is not None:
            return refusal
        self._start_watching()
        known = self._intake.streams.get(push.source)
        if known is None or not known.is_later_than(push):
            self._posted_s[push.source] = self._clock()
            if push.source != STORE_NAME and self._row(push.source) in self._guessed:
                self._register(self._row(push.source), one_copy=True)  # its sender may be back
        result = await self._intake.accept(push)
        assert result is not None, "a source that is not refused has a stream"
        return 200, {
            "applied": result.applied,
            "duplicates": result.duplicates,
            "stale": result.stale,
            "gaps": result.gaps,
            "state": result.state.value,
        }

    def _refusal(self, name: str) -> Reply | None:
        """Why a push of `name` cannot be taken; None when it can."""
        if name == STORE_NAME:
            known = self._fleet.store is not None
            followed = STORE_NAME in self.subscribers
        else:
            known = name in self._members
            followed = name in self.subscribers or (known and self._row(name) in self._events)
        if not known:
            store = [] if self._fleet.store is None else [STORE_NAME]
            return 404, {"error": f"no replica is called {name!r}", "sources": [*sorted(self._members), *store]}
        if followed:
            return 409, {"error": f"the events of {name} are followed over ZMQ; one publisher cannot be heard twice"}
        if name != STORE_NAME and self._row(name) not in self._models:
            return 503, {"error": f"{name} has not said yet which model it serves; post again"}
        return None

    def _is_posted(self, name: str) -> bool:
        """Whether somebody posts for `name` who is not taken to be gone."""
        posted = self._intake.streams.get(name)
        return posted is not None and posted.stream.sequence.connected

    def _row(self, name: str) -> int:
        return self._names.index(name)

    def _pushed_stream(self, name: str) -> Stream:
        if name != STORE_NAME:
            return self._stream(self._row(name), one_copy=True, first_seq=intake.FIRST_SEQ)
        clear = self._directory.clear_store
        return Stream(name, self._apply_store, clear, first_seq=intake.FIRST_SEQ, clock=self._clock)

    # What operators see

    def _stream_of(self, row: int) -> Stream | None:
        """What tells of `row`, whichever way it comes; None when nothing does, or has yet."""
        name = self._names[row]
        if name in self.subscribers:
            return self.subscribers[name].stream
        if name in self._intake.streams:
            return self._intake.streams[name].stream
        shared = self.shared.get(self._events.get(row, ""))
        streams = [] if shared is None else shared.streams.values()
        return next((stream for stream in streams if stream.name == name), None)

    def _store_reports(self, now_s: float) -> list[SourceReport]:
        """One, where the store has a source."""
        if STORE_NAME not in self.subscribers and STORE_NAME not in self._intake.streams:
            return []
        return [self._stream_report(STORE_NAME, now_s) or missing_report(STORE_NAME)]

    def _report(self, row: int, now_s: float) -> SourceReport:
        name = self._names[row]
        return self._stream_report(name, now_s) or self._shared_report(row, now_s) or missing_report(name)

    def _stream_report(self, name: str, now_s: float) -> SourceReport | None:
        subscriber = self.subscribers.get(name)
        if subscriber is not None:
            return report_of(name, Carrier.ZMQ, subscriber.source.events, subscriber.stream, now_s)
        pushed = self._intake.streams.get(name)
        return None if pushed is None else report_of(name, Carrier.HTTP, None, pushed.stream, now_s)

    def _shared_report(self, row: int, now_s: float) -> SourceReport | None:
        address = self._events.get(row)
        shared = None if address is None else self.shared.get(address)
        if shared is None:
            return None
        name = self._names[row]
        stream = next((stream for stream in shared.streams.values() if stream.name == name), None)
        if stream is None:
            return missing_report(name, Carrier.SHARED, address)
        return report_of(name, Carrier.SHARED, address, stream, now_s)

    def _start_watching(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._keep_watch(), name="event sources")

    async def _keep_watch(self) -> None:
        while True:
            self._forget_the_silent()
            self._warn_of_the_missing()
            await self._sweep()
            await asyncio.sleep(self._watch_period_s)

    async def _sweep(self) -> None:
        """Let the directory forget what replicas held that left; others get the loop after each slice."""
        while self._directory.sweep():  # noqa: ASYNC110  # it is this loop that makes it go on
            await asyncio.sleep(0)

    def _forget_the_silent(self) -> None:
        """Nothing says that a sender of posts is still there but its posts, so one that stopped is taken to be gone.

        What its replica said of itself counts again: its own publisher is followed, or its content is guessed. The
        stream stays, to tell repeats from news if the sender comes back.
        """
        now_s = self._clock()
        for name, posted in self._intake.streams.items():
            stream = posted.stream
            if stream.sequence.connected and now_s - self._posted_s[name] > self._beliefs.forget_after_s:
                log.warning(
                    "%s has posted nothing for %g s: what it said is forgotten", name, self._beliefs.forget_after_s
                )
                stream.sequence.connected = False
                stream.lose_history()
                row = None if name == STORE_NAME else self._row(name)
                if row in self._found:
                    self._follow(row, self._found[row])

    def _warn_of_the_missing(self) -> None:
        guessed = {self._names[row] for row in self._guessed}  # they were warned of by then
        known = [report for report in self.reports() if report.name not in guessed]
        for warning in self._watch.due(known, self._clock()):
            log.warning("%s", warning)


def event_addresses(fleet: Fleet) -> dict[int, str]:
    """Where each row's events are listened to, as far as the fleet file says: ranks count on from the first of a URL.

    Raises
    ------
    ConfigError : the address of the first rank has no port to count on from
    """
    return _by_rank(fleet, [replica.events for replica in fleet.replicas])


def replay_addresses(fleet: Fleet) -> dict[int, str]:
    """The same of their replay sockets."""
    return _by_rank(fleet, [replica.replay for replica in fleet.replicas])


def _by_rank(fleet: Fleet, named: Sequence[str | None]) -> dict[int, str]:
    addresses: dict[int, str] = {}
    for rows in rows_by_url([replica.url for replica in fleet.replicas]).values():
        try:
            addresses |= configured_addresses(dict(enumerate(named)), rows)
        except ValueError as exc:
            raise ConfigError(f"replicas of one URL are its ranks, but {exc}") from exc
    return addresses
