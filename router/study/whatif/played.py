"""The requests of receipts played once more: as they were placed, or as another rule would have placed them.

Model     a replica serves prefills in order of arrival, one at a time; its cache keeps every prompt from its prefill
          on, and so does the store, if there is one. Decodes go on at a slower rate while a prefill runs, and hold up
          nothing. Another rule is asked through the router's own `Dispatcher`, which books, believes and learns as in
          production, of the simulated outcomes
Valid     streams that were answered well; arrivals as they were, which clients that wait for answers would not repeat
Blind to  eviction, failures, traffic of others, output that would have been cut
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np

from estimators.request import RequestFacts
from router.actions import Ended, Send
from router.assemble import Core, assemble
from router.config import PolicyConfig, RouterConfig
from router.fleet import Fleet, ReplicaSpec
from router.receipts import Receipt
from router.signals.written_store import WrittenStore
from router.study.groups import Floats
from router.study.samples import Ints
from router.study.whatif.service import Service

FOR_EVER_S = 1e9
PLENTY = 1 << 20  # blocks of room in each cache: nothing is evicted here


@dataclass(frozen=True, slots=True)
class Played:
    """Of each request: first_token_s from arrival (NaN: refused), replica row (-1: none), reused tokens."""

    first_token_s: Floats
    row: Ints
    reused_tokens: Ints


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to be played. arrived_s : from the first one"""

    receipt: Receipt
    chain: list[int]
    arrived_s: float
    block_tokens: int

    def facts(self, index: int) -> RequestFacts:
        """As the router would see it."""
        receipt = self.receipt
        return RequestFacts(
            request_id=f"whatif-{index}",
            model=receipt.model,
            chain=self.chain,
            prompt_tokens=receipt.prompt_tokens,
            prompt_exact=receipt.prompt_exact,
            streams=True,
            path=receipt.endpoint,
            session=receipt.unit,
            block_tokens=self.block_tokens,
        )


@dataclass(frozen=True, slots=True)
class Sending:
    """One request under way. tokens : of its answer; reused : of its prompt"""

    sent: Send
    tokens: int
    reused: int


@dataclass(frozen=True, slots=True)
class Task:
    """One request where it is served: tokens of its prompt, reused, and of those fetched."""

    row: int
    arrived_s: float
    prompt: int
    reused: int
    fetched: int


class Replicas:
    """The replicas of `service`, idle and empty at first. Requests come in order of arrival.

    busy_s : of each replica, when its prefills began and ended, in order
    """

    def __init__(self, service: Service, *, store: bool, minimum_fetch_tokens: int) -> None:
        self._service = service
        self.busy_s: list[list[tuple[float, float]]] = [[] for _ in service.names]
        self._caches: list[set[int]] = [set() for _ in service.names]
        self._stored: set[int] | None = set() if store else None
        self._minimum = minimum_fetch_tokens

    def serve(self, asked: Asked, row: int) -> tuple[float, int]:
        """Moment of its first token on `row`, and the tokens it reuses there."""
        task = self._task(asked, row)
        return self.run(task, self._service), task.reused

    def tasks(self, requests: Sequence[Asked], rows: Sequence[int]) -> list[Task]:
        """What requests have to do where they are served; how long that takes makes no difference."""
        return [self._task(asked, row) for asked, row in zip(requests, rows, strict=True)]

    def run(self, task: Task, service: Service) -> float:
        """Moment of its first token, after all before it."""
        busy_s = self.busy_s[task.row]
        ready_s = task.arrived_s + (service.fetch_s(task.row, task.fetched) if task.fetched else 0.0)
        starts_s = max(busy_s[-1][1], ready_s) if busy_s else ready_s
        ends_s = starts_s + service.prefill_s(task.row, task.prompt - task.reused, task.reused)
        busy_s.append((starts_s, ends_s))
        return ends_s

    def _task(self, asked: Asked, row: int) -> Task:
        prompt, chain = asked.receipt.prompt_tokens, asked.chain
        local = min(_leading(chain, self._caches[row]) * asked.block_tokens, max(0, prompt - 1))
        reused = local
        if self._stored is not None:
            stored = min(_leading(chain, self._stored) * asked.block_tokens, max(0, prompt - 1))
            if stored >= local + max(1, self._minimum):
                reused = stored
            self._stored.update(chain)
        self._caches[row].update(chain)
        return Task(row, asked.arrived_s, prompt, reused, reused - local)

    def busy_between(self, row: int, from_s: float, until_s: float) -> float:
        """How long prefills ran on `row` between two moments."""
        spans = self.busy_s[row]
        at = bisect_right(spans, (from_s, inf)) - 1
        total_s = 0.0
        for start_s, end_s in spans[max(0, at) :]:
            if start_s >= until_s:
                break
            total_s += max(0.0, min(end_s, until_s) - max(start_s, from_s))
        return total_s


class Decodes:
    """What one replica decodes: each request gets a token at one rate while a prefill runs, at another while none does.

    busy_rate, idle_rate : tokens per second and request, > 0
    """

    def __init__(self, busy_rate: float, idle_rate: float) -> None:
        self._busy_rate, self._idle_rate = busy_rate, idle_rate
        self._busy_until_s = 0.0
        self._at_s = 0.0
        self._tokens = 0.0  # that a request would have got that was there from the beginning
        self._ends: list[tuple[float, int, Sending]] = []  # a heap: by that number, when each has all of its own

    def busy_until(self, ends_s: float, now_s: float) -> None:
        """Prefills now run until `ends_s`."""
        self._pass(now_s)
        self._busy_until_s = max(self._busy_until_s, ends_s)

    def begin(self, sending: Sending, tokens: float, now_s: float, number: int) -> None:
        """A request has its first token and wants `tokens` more."""
        self._pass(now_s)
        heappush(self._ends, (self._tokens + tokens, number, sending))

    @property
    def next_end_s(self) -> float:
        """When the next request has all its tokens, if nothing else comes; inf without any."""
        if not self._ends:
            return inf
        left = max(0.0, self._ends[0][0] - self._tokens)
        busy_s = max(0.0, self._busy_until_s - self._at_s)
        if left <= busy_s * self._busy_rate:
            return self._at_s + left / self._busy_rate
        return self._at_s + busy_s + (left - busy_s * self._busy_rate) / self._idle_rate

    def end(self, now_s: float) -> Sending:
        """Take off the request that ends now."""
        self._pass(now_s)
        return heappop(self._ends)[2]

    def _pass(self, now_s: float) -> None:
        busy_s = min(max(0.0, self._busy_until_s - self._at_s), max(0.0, now_s - self._at_s))
        self._tokens += busy_s * self._busy_rate + max(0.0, now_s - self._at_s - busy_s) * self._idle_rate
        self._at_s = max(self._at_s, now_s)


def _leading(chain: Sequence[int], cached: set[int]) -> int:
    """How many leading blocks are cached. What is there is there with all before it, so halves can be skipped."""
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] in cached:
            low = middle
        else:
            high = middle - 1
    return low


def placed(requests: Sequence[Asked], service: Service, fleet: Fleet) -> list[Task]:
    """What every request had to do where its receipt says it ran."""
    rows = {name: row for row, name in enumerate(service.names)}
    choices = [asked.receipt.choice for asked in requests]
    return replicas_of(service, fleet).tasks(requests, [rows[choice.replica] for choice in choices if choice])


def timed(tasks: Sequence[Task], service: Service) -> tuple[Played, Replicas]:
    """How long `tasks` take, and the replicas afterwards."""
    replicas = Replicas(service, store=False, minimum_fetch_tokens=0)
    ends_s = np.array([replicas.run(task, service) for task in tasks])
    played = Played(
        ends_s - np.array([task.arrived_s for task in tasks]),
        np.array([task.row for task in tasks], dtype=np.int64),
        np.array([task.reused for task in tasks], dtype=np.int64),
    )
    return played, replicas


def by_rule(requests: Sequence[Asked], service: Service, fleet: Fleet, policy: PolicyConfig, seed: int) -> Played:
    """Every request where `policy` puts it. Raises ConfigError when there is no such rule."""
    return _Run(requests, service, fleet, policy, seed).run()


class _Run:
    """One rule's run through the dispatcher, in virtual time."""

    def __init__(
        self, requests: Sequence[Asked], service: Service, fleet: Fleet, policy: PolicyConfig, seed: int
    ) -> None:
        self._requests = requests
        self._replicas = replicas_of(service, fleet)
        self._core = _core(fleet, policy, seed, requests)
        self._firsts: list[tuple[float, int, Sending]] = []  # a heap
        self._decodes = [Decodes(busy, idle) for busy, idle in service.rates.tolist()]
        self._order = count()
        self._played = _blank(len(requests))

    def run(self) -> Played:
        dispatcher = self._core.dispatcher
        for index, asked in enumerate(self._requests):
            self._hear(asked.arrived_s)
            for action in dispatcher.arrived(asked.facts(index), asked.arrived_s):
                if isinstance(action, Send):
                    self._send(action, asked, index)
        self._hear(inf)
        return self._played

    def _send(self, sent: Send, asked: Asked, index: int) -> None:
        at_s, reused = self._replicas.serve(asked, sent.row)
        played = self._played
        played.first_token_s[index] = at_s - asked.arrived_s
        played.row[index], played.reused_tokens[index] = sent.row, reused
        self._decodes[sent.row].busy_until(at_s, asked.arrived_s)
        sending = Sending(sent, max(1, asked.receipt.output_tokens or 1), reused)
        heappush(self._firsts, (at_s, next(self._order), sending))

    def _hear(self, until_s: float) -> None:
        """Tell the dispatcher of every first token and every end up to `until_s`."""
        dispatcher = self._core.dispatcher
        while True:
            first_s = self._firsts[0][0] if self._firsts else inf
            decodes = min(self._decodes, key=lambda one: one.next_end_s)
            end_s = decodes.next_end_s
            if min(first_s, end_s) > until_s or min(first_s, end_s) == inf:
                return
            if first_s <= end_s:
                _, number, sending = heappop(self._firsts)
                dispatcher.first_token(sending.sent, first_s)
                self._decodes[sending.sent.row].begin(sending, sending.tokens - 1, first_s, number)
            else:
                sending = decodes.end(end_s)
                ended = Ended(200, output_tokens=sending.tokens, cached_tokens=sending.reused)
                dispatcher.finished(sending.sent, ended, end_s)


def replicas_of(service: Service, fleet: Fleet) -> Replicas:
    """Idle and empty ones."""
    return Replicas(service, store=fleet.store is not None, minimum_fetch_tokens=fleet.fetch.minimum_tokens)


def _core(fleet: Fleet, policy: PolicyConfig, seed: int, requests: Sequence[Asked]) -> Core:
    """A router without sockets that hears no events: it remembers what it sent where, and what was written."""
    models = models_of(requests)
    written = None if fleet.store is None else WrittenStore(capacity_blocks=PLENTY, keep_s=FOR_EVER_S)
    core = assemble(
        RouterConfig(policy=policy, seed=seed),
        fleet,
        on_receipt=lambda receipt: None,
        block_tokens=requests[0].block_tokens,
        written=written,
        every_candidate=False,
    )
    for row, replica in enumerate(fleet.replicas):
        core.dispatcher.replica_up(row, frozenset(models[replica.name]), 0.0)
        for model in models[replica.name]:
            core.directory.add_routed(row, model, PLENTY)
    return core


def models_of(requests: Sequence[Asked]) -> dict[str, list[str]]:
    """By replica the models, adapters among them, whose requests it could have taken."""
    models: dict[str, dict[str, None]] = {}
    for asked in requests:
        for candidate in asked.receipt.candidates:
            models.setdefault(candidate.replica, {})[asked.receipt.model] = None
    return {replica: list(names) for replica, names in models.items()}


def _blank(requests: int) -> Played:
    return Played(np.full(requests, np.nan), np.full(requests, -1, dtype=np.int64), np.zeros(requests, dtype=np.int64))


def fleet_in(service: Service, known: Fleet | None) -> Fleet:
    """The fleet the receipts ran on, in the order of `service`: as `known`, and bare names where it is not."""
    if known is None:
        return Fleet(replicas=[ReplicaSpec(name=name) for name in service.names])
    by_name = {replica.name: replica for replica in known.replicas}
    replicas = [by_name.get(name, ReplicaSpec(name=name)) for name in service.names]
    return Fleet(**{**{key: getattr(known, key) for key in known.__struct_fields__}, "replicas": replicas})
