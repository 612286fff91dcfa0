"""What replicas tell about themselves, handed to whom it concerns: load, restarts, models, coming and going."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from math import inf

import aiohttp

from router.assemble import Core
from router.fleet import Fleet, ReplicaSpec
from router.http.contract import Clock
from router.learning import PrefixCounters
from router.prompts.production import Prompts
from router.signals.fetch import body_of
from router.signals.load import Load
from router.signals.meaning import sizes_fit
from router.signals.poller import MAX_PAGE_BYTES
from router.signals.prometheus_text import load_of
from router.sources import EventSources

log = logging.getLogger(__name__)


class Reported:
    """Called by the poller and the load board, for rows of the fleet.

    spoke : whether bytes of an answer of a row came since this was last asked
    look : to be called when the dispatcher was told something: who waits may go
    """

    def __init__(
        self,
        fleet: Fleet,
        core: Core,
        sources: EventSources,
        prompts: Prompts,
        clock: Clock,
        *,
        spoke: Callable[[int], bool],
        look: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._core = core
        self._sources = sources
        self._prompts = prompts
        self._clock = clock
        self._spoke = spoke
        self._look = look
        self._progress = [Progress() for _ in fleet.replicas]
        self._known_down: set[int] = set()
        self._alive_s: dict[int, float] = {}  # when a row that told its load was last asked for it
        self._warned_sizes: set[int] = set()

    def load(self, row: int, load: Load, sent_s: float, received_s: float) -> None:
        """A replica told its load, in an answer to what was asked at sent_s."""
        dispatcher, block_tokens = self._core.dispatcher, self._core.prompts.block_tokens
        capacity_tokens = load.max_tokens or (load.num_gpu_blocks or 0) * (load.block_size or 0)
        if capacity_tokens:
            dispatcher.capacity_reported(row, float(capacity_tokens))
        if capacity_tokens >= block_tokens:
            self._sources.capacity_reported(row, int(capacity_tokens) // block_tokens)
        if load.max_running:
            dispatcher.most_running_reported(row, max(1, int(load.max_running)))
        counters = None
        if load.prefix_queries is not None and load.prefix_hits is not None:
            counters = PrefixCounters(load.prefix_queries, load.prefix_hits)
        dispatcher.load_reported(
            row,
            running=load.running,
            waiting=load.waiting,
            sent_s=sent_s,
            now_s=received_s,
            kv_used_share=load.kv_usage,
            prefix=counters,
        )
        self._progress[row].told(load)
        if load.asleep:  # it holds nothing, whether or not its event stream said so
            self._core.directory.clear(row)
        if load.started_s is not None:
            self._identify(row, {"started": load.started_s})
        self._alive_s[row] = sent_s
        self._look()
        fits = load.block_size is None or sizes_fit(block_tokens, load.block_size)
        if not fits and row not in self._warned_sizes:
            self._warned_sizes.add(row)
            log.warning(
                "%s has blocks of %s tokens, the router expects %d: its cache cannot be matched; set block_tokens in a"
                " fleet file, or start the router after the replicas",
                *(self._fleet.replicas[row].name, load.block_size, block_tokens),
            )

    def up(self, row: int, models: tuple[str, ...], parents: Mapping[str, str], roots: Mapping[str, str]) -> None:
        """A replica answers and serves `models`. parents : adapter -> its base model; roots : adapter -> its weights"""
        replica = self._fleet.replicas[row]
        for adapter in self._core.names.listed(row, models, parents, roots):
            log.info("%s unloaded the adapter %s, or loaded it anew", replica.name, adapter)
            self._core.directory.drop_adapter(row, adapter)
        self._core.dispatcher.replica_up(row, frozenset(models), self._clock())
        self._known_down.discard(row)
        base, _ = self._core.names.resolve(models[0] if models else "")
        if models:  # further names and adapters come and go
            self._identify(row, {"model": base})
        self._sources.replica_up(row, base)
        self._prompts.replica_up(replica.name, replica.url or "", model=base, name=models[0] if models else "")
        log.info("%s is up and serves %s", replica.name, ", ".join(models) or "what it does not say")
        if not models:
            log.warning("%s named no models (does it want a key? api_key_env): no prompt is matched", replica.name)

    def forget(self, row: int) -> None:
        """`row` is nobody's, or somebody else's, from now on."""
        self._progress[row] = Progress()
        self._known_down.discard(row)
        self._alive_s.pop(row, None)
        self._warned_sizes.discard(row)
        self._spoke(row)

    def probed(self, rows: Collection[int], reason: str | None) -> bool:
        """A server, which runs `rows`, was asked for its health. reason : what was wrong; None: it answered well.

        Whether any of them is up still: a miss is none while answers of the same server come.
        """
        dispatcher, now_s = self._core.dispatcher, self._clock()
        heard = sum(map(self._spoke, rows)) > 0  # all are asked: what one of them has said, their server has
        for row in rows:
            if heard:
                dispatcher.heard(row, now_s)
            moved, running = self._progress[row].since_last()
            dispatcher.probed(row, now_s, alive=reason is None, progress=moved, running=running)
        up = any(dispatcher.is_up(row) for row in rows)
        if reason is not None and not up:
            for row in set(rows) - self._known_down:
                self._went_down(row, reason)
        self._look()
        return up

    def _went_down(self, row: int, reason: str) -> None:
        self._known_down.add(row)
        self._core.dispatcher.replica_down(row)
        if self._sources.is_guessed(row):  # nobody will announce what it lost
            self._core.directory.clear(row)
        log.warning("%s is down: %s", self._fleet.replicas[row].name, reason)

    def _identify(self, row: int, facts: Mapping[str, Hashable]) -> None:
        """Notice another process at the same address: what the old one held is gone."""
        if self._core.dispatcher.identified(row, facts, self._clock()):
            log.warning("%s was restarted: what it held is forgotten", self._fleet.replicas[row].name)
            self._sources.restarted(row, since_s=self._alive_s.get(row, -inf))


class Progress:
    """Whether the counters of one replica move between two probes."""

    def __init__(self) -> None:
        self._before: float | None = None  # tokens, at the last probe for which they were known
        self._told: Load | None = None  # since the last probe

    def told(self, load: Load) -> None:
        """It reported its load."""
        self._told = load

    def since_last(self) -> tuple[bool | None, float | None]:
        """Whether its counters moved since this was last asked, and requests that ran; None where unknown."""
        load, self._told = self._told, None
        if load is None or load.generated_tokens is None:
            return None, None
        tokens = load.generated_tokens + (load.prompt_tokens or 0.0)
        before, self._before = self._before, tokens
        return None if before is None else tokens != before, load.running


async def reported_block_tokens(session: aiohttp.ClientSession, fleet: Fleet, timeout_s: float) -> int | None:
    """Block size the replicas report, when the fleet file does not say: the first answer wins, None without any."""
    if fleet.block_tokens is not None:
        return None
    timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def ask(replica: ReplicaSpec) -> int | None:
        try:
            async with session.get(f"{replica.url}/metrics", timeout=timeout) as response:
                page = await body_of(response, MAX_PAGE_BYTES)
                return load_of(page.decode("utf-8", errors="replace")).block_size
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    sizes = await asyncio.gather(*(ask(replica) for replica in fleet.replicas))
    return next((size for size in sizes if size is not None), None)
