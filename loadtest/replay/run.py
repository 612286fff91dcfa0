"""Plays traffic through the router's own `Dispatcher` against the simulated engines, in virtual time.

Model     arrivals at their stated times; first and last tokens reach the dispatcher at their moment, cache events
          the directory after a stated delay, load reports with a stated period; a replica is up from when its engine
          has started. Between two arrivals nothing is decided, so what happened meanwhile is told just before the
          next one, in order of time; of load reports between which nothing happens only the last is told
Valid     both readings of one fleet. Clients name no limit of output tokens, so an answer ends where the trace says,
          or where prompt and answer fill all a replica can hold (`Result.cut`)
Blind to  network delay, faults, clients that leave, the router's own time
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import floor, inf, nan
from operator import attrgetter, itemgetter
from typing import Any, Literal

import numpy as np

from estimators.estimates import Estimator
from estimators.paths import COLUMN, Path
from estimators.ranges import require
from estimators.request import RequestFacts
from loadtest.replay.block_events import plain_batch, plain_store_batch, wire_batch, wire_store_batches
from loadtest.replay.estimator_error import WrongEstimator
from loadtest.replay.fleets import Fleets, fetch_decided_by, with_blocks
from loadtest.replay.results import Result, blank, room_for_output
from loadtest.traffic import TrafficRow, prompt_tokens
from router.actions import Action, Ended, Send
from router.admission import AdmissionConfig
from router.assemble import Core, assemble
from router.config import LoadConfig, PolicyConfig, RouterConfig
from router.directing.directions import directions_of
from router.identity import Identity, chain
from router.receipts import Receipt
from router.receipts.writer import marks_of
from router.rules import label
from router.signals.wire import Batch
from sim_backends import directives, event_wire
from sim_backends.cache_events import EventBatch
from sim_backends.directives import Directive
from sim_backends.lifecycle import State
from sim_backends.requests import EngineRequest, Output, RequestRefused
from sim_backends.store import StoreChange
from sim_backends.world import World, build

FOR_EVER_S = 1e9  # a replay answers every request, however late
MASK = 2**64 - 1  # of a block's hash
PROGRESS_EVERY = 64  # requests
DRAIN_STEP_S = 60.0  # after the last arrival nothing is decided, so time may pass in large steps


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which a policy is played.

    seed : of the engines, the policy and the estimator's errors
    event_delay_s : from a cache event to the directory, >= 0
    load_period_s : between two load reports of each replica, > 0; None sends none
    estimator_error : standard deviation of the relative error of every estimate, >= 0
    directed : engines fetch only what the choice says; else they look the store up by themselves
    admission : limits on what a replica is given at a time, and the queue before all of them
    wire : real tokens and encoded events instead of block ids and plain ones; slow, gives the same receipts
    """

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    seed: int = 0
    event_delay_s: float = 0.0
    load_period_s: float | None = 0.5
    estimator_error: float = 0.0
    directed: bool = False
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    wire: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.event_delay_s < inf, "event_delay_s", self.event_delay_s)
        require(self.load_period_s is None or 0 < self.load_period_s < inf, "load_period_s", self.load_period_s)
        require(0 <= self.estimator_error < inf, "estimator_error", self.estimator_error)


class Replay:
    """One run of one policy.

    block_tokens : tokens behind one hash id of the traffic; with `wire` the fleet file's blocks are used instead
    on_receipt : given every finished receipt; without it none is kept
    """

    def __init__(
        self,
        fleets: Fleets,
        conditions: Conditions,
        *,
        block_tokens: int = 512,
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> None:
        self._wire = conditions.wire
        self._conditions = conditions
        self._on_receipt = on_receipt
        fleets = fetch_decided_by(fleets, "directed" if conditions.directed else "engine")
        self._fleets = fleets if self._wire else with_blocks(fleets, router_tokens=1, engine_tokens=block_tokens)
        self._engine_tokens = self._fleets.engines.block_tokens
        self._core = self._assembled()
        self._world = build(self._fleets.engines, seed=conditions.seed, record_events=True, outputs="ends")
        self._feed = _Feed(self._core, self._world, self._fleets, conditions)
        self._root = Identity(model=fleets.model, block_tokens=self._core.prompts.block_tokens).root()
        self._open: dict[str, Send] = {}
        self._rows: list[TrafficRow] = []
        self._chains: dict[str, list[int]] = {}  # of requests whose receipts are kept
        self._next_report = 1  # number of the load report that comes next; number n is sent after n periods
        self._result = blank(run_label(conditions), replicas=fleets.replicas, cards=fleets.cards, requests=0)
        self._starting = list(range(len(fleets.replicas)))
        self._meet_started(0.0)

    @property
    def core(self) -> Core:
        """The router's side, to be asked what it believes."""
        return self._core

    @property
    def world(self) -> World:
        """The engines, to be asked for their counters."""
        return self._world

    def run(self, rows: list[TrafficRow], on_progress: Callable[[int], None] | None = None) -> Result:
        """Play all `rows`, in order of arrival, to the last token. `on_progress` hears how many have arrived."""
        began_s = time.process_time()
        fleets = self._fleets
        self._rows = rows
        self._result = blank(
            run_label(self._conditions), replicas=fleets.replicas, cards=fleets.cards, requests=len(rows)
        )
        self._result.decisions_s = np.zeros(len(rows))
        for index, row in enumerate(rows):
            self._report_loads(row.at_s)
            self._hear(row.at_s)
            self._feed.deliver(row.at_s)
            self._arrive(index, row)
            if on_progress is not None and index % PROGRESS_EVERY == 0:
                on_progress(index)
        while self._open or self._core.dispatcher.queued:
            due_s = self._next_due_s()
            assert due_s is not None, "requests are open but nothing is due"
            self._hear(due_s + DRAIN_STEP_S)
            self._feed.deliver(due_s + DRAIN_STEP_S)
        self._result.fetched_bytes = self._fetched_bytes()
        self._result.took_s = time.process_time() - began_s
        return self._result

    # One request

    def _arrive(self, index: int, row: TrafficRow) -> None:
        now_s, result = row.at_s, self._result
        result.arrived_s[index] = now_s
        result.prompt_tokens[index] = row.input_length
        result.wanted_tokens[index] = row.output_length
        facts = self._facts(index, row)
        if self._on_receipt is not None:
            self._chains[facts.request_id] = facts.chain
        began_s = time.perf_counter()
        actions = self._core.dispatcher.arrived(facts, now_s)
        result.decisions_s[index] = time.perf_counter() - began_s
        self._obey(actions, now_s)

    def _obey(self, actions: list[Action], now_s: float) -> None:
        """Send on what may be sent; what waits or is refused is the dispatcher's and its receipts' matter."""
        for action in actions:
            if isinstance(action, Send):
                index = number_of(action.request.request_id)
                self._result.row[index] = action.row
                self._send(action, self._rows[index], now_s)

    def _facts(self, index: int, row: TrafficRow) -> RequestFacts:
        tokens = prompt_tokens(row) if self._wire else row.hash_ids
        # An engine always computes the last token, so a block that ends with it is never reused.
        reusable = (row.input_length - 1) // self._engine_tokens * (self._engine_tokens if self._wire else 1)
        return RequestFacts(
            request_id=f"replay-{index}",
            model=self._fleets.model,
            chain=chain(self._root, tokens[:reusable], self._core.prompts.block_tokens),
            prompt_tokens=row.input_length,
            max_tokens=None,  # any number could tell the router something about the answer to come
            streams=True,
            block_tokens=self._engine_tokens,
        )

    def _send(self, sent: Send, row: TrafficRow, now_s: float) -> None:
        request_id = sent.request.request_id
        asked = {**self._prompt(row), **(direction(sent) if self._conditions.directed else {})}
        room = room_for_output(self._world.engines[sent.row], row)
        request = EngineRequest(request_id=request_id, max_tokens=room, output_tokens=row.output_length, **asked)
        self._open[request_id] = sent
        try:
            self._world.submit(sent.row, request, now_s)
        except RequestRefused:  # longer than the engine's memory: it would answer 400
            del self._open[request_id]
            self._obey(self._core.dispatcher.finished(sent, Ended(400), now_s), now_s)

    def _prompt(self, row: TrafficRow) -> dict[str, Any]:
        if self._wire:
            return {"prompt": prompt_tokens(row)}
        full = row.input_length // self._engine_tokens
        return {"block_ids": row.hash_ids[:full], "prompt_tokens": row.input_length}

    # What happened meanwhile

    def _report_loads(self, until_s: float) -> None:
        """Load of every replica that is up, each time it is reported up to `until_s`."""
        period_s = self._conditions.load_period_s
        while period_s is not None and (now_s := self._next_report * period_s) <= until_s:
            self._hear(now_s)
            for row, engine in enumerate(self._world.engines):
                if row not in self._starting:
                    self._core.dispatcher.load_reported(
                        row,
                        running=engine.running,
                        waiting=engine.waiting,
                        sent_s=now_s,
                        now_s=now_s,
                        kv_used_share=engine.cache.used_share,
                    )
            # While nothing happens all reports say the same: the last one is as good as all, however many they are.
            self._next_report = max(self._next_report + 1, floor(self._quiet_until_s(until_s) / period_s))

    def _quiet_until_s(self, until_s: float) -> float:
        """Until when no engine does anything, `until_s` at the latest."""
        due_s = self._world.next_due_s()
        return until_s if due_s is None else min(due_s, until_s)

    def _hear(self, now_s: float) -> None:
        """Every token that came by `now_s`, told to the router in order of time."""
        while self._core.dispatcher.queued and (due_s := self._next_due_s()) is not None and due_s <= now_s:
            self._step(due_s)
        self._step(now_s)
        self._meet_started(now_s)

    def _step(self, now_s: float) -> None:
        """The same where nobody waits, or nothing happens before `now_s`: what the router does about it comes after."""
        for output in self._world.advance(now_s):
            self._token(output)
        if self._core.dispatcher.queued:
            self._feed.deliver(now_s)
            self._obey(self._core.dispatcher.due(now_s), now_s)

    def _next_due_s(self) -> float | None:
        """When an engine or the router has something to do; None: neither ever has."""
        times_s = (self._world.next_due_s(), self._core.dispatcher.next_due_s)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _meet_started(self, now_s: float) -> None:
        """Tell the router of replicas that answer by now and did not before."""
        for row in list(self._starting):
            if self._world.engines[row].lifecycle.state is State.READY:
                self._starting.remove(row)
                self._core.dispatcher.replica_up(row, frozenset({self._fleets.model}), now_s)
                self._core.dispatcher.capacity_reported(
                    row, float(self._world.engines[row].cache.size * self._engine_tokens)
                )
                self._core.directory.add_source(row, self._fleets.model)

    def _token(self, output: Output) -> None:
        sent = self._open.get(output.request_id)
        if sent is None:  # a driver that is told every token hears of ended requests no more
            return
        if output.index == 0:
            self._obey(self._core.dispatcher.first_token(sent, output.at_s), output.at_s)
        if output.finish_reason is not None:
            del self._open[output.request_id]
            ended = Ended(200, output_tokens=output.index + 1, cached_tokens=output.cached_tokens)
            self._obey(self._core.dispatcher.finished(sent, ended, output.at_s), output.at_s)

    # What is kept

    def _note(self, receipt: Receipt) -> None:
        result, index = self._result, number_of(receipt.request_id)
        choice = receipt.choice
        if choice is not None:
            result.predicted_s[index] = choice.expected_s
            result.predicted_p90_s[index] = known(choice.first_token_p90_s)
            result.predicted_p99_s[index] = known(choice.first_token_p99_s)
            result.local_tokens[index] = choice.local_tokens
            result.fetched_tokens[index] = choice.fetched_tokens
            result.path[index] = COLUMN[Path(choice.path)]
        if receipt.outcome == "ok" and receipt.first_token_s is not None and receipt.ended_s is not None:
            result.first_token_s[index] = receipt.first_token_s
            result.ended_s[index] = receipt.ended_s
            result.output_tokens[index] = receipt.output_tokens or 0
            result.cached_tokens[index] = receipt.cached_tokens or 0
        if self._on_receipt is not None:
            blocks = self._chains.pop(receipt.request_id)
            receipt.marks = [f"{mark & MASK:x}" for mark in marks_of(blocks)]
            receipt.blocks, receipt.block_tokens = len(blocks), self._engine_tokens
            self._on_receipt(receipt)

    def _fetched_bytes(self) -> float:
        """What was read from the store or a peer and used; a replica's own host and disk are none."""
        fetchers = [engine.fetcher for engine in self._world.engines if engine.fetcher is not None]
        tokens = sum(fetcher.fetched_tokens["store"] + fetcher.fetched_tokens["peer"] for fetcher in fetchers)
        return float(tokens * self._fleets.engines.model.kv_bytes_per_token)

    def _assembled(self) -> Core:
        conditions = self._conditions
        period_s = conditions.load_period_s
        config = RouterConfig(
            policy=conditions.policy,
            seed=conditions.seed,
            admission=conditions.admission,
            load=LoadConfig() if period_s is None else LoadConfig(period_s=period_s),
        )
        core = assemble(
            config,
            self._fleets.router,
            on_receipt=self._note,
            wrap_estimator=lambda right: wrong(right, conditions),
            every_candidate=self._on_receipt is not None,
        )
        directions_of(self._fleets.router, core.dispatcher.view, aside=False)  # nobody here moves state ahead
        return core


def queued(order: Literal["fcfs", "wspt"], *, max_prefills: int = 1, stretch: float | None = None) -> AdmissionConfig:
    """A queue before all replicas that refuses nobody. stretch : of wspt; None: the default"""
    return AdmissionConfig(
        order=order,
        max_prefills=max_prefills,
        stretch=AdmissionConfig().stretch if stretch is None else stretch,
        max_queued=10**9,
        queue_timeout_s=FOR_EVER_S,
    )


def run_label(conditions: Conditions) -> str:
    """What runs under `conditions` are called: the rule, and its queue if it has one.

    >>> run_label(Conditions(admission=queued("wspt", max_prefills=2)))
    'e2e+wspt:2'
    """
    admission, rule = conditions.admission, label(conditions.policy)
    return rule if admission.max_prefills is None else f"{rule}+{admission.order}:{admission.max_prefills}"


def number_of(request_id: str) -> int:
    """Place in the traffic of the request that was given this id."""
    return int(request_id.rpartition("-")[2])


def known(value: float | None) -> float:
    """A number as columns hold it: unknown is NaN."""
    return nan if value is None else value


def direction(sent: Send) -> dict[str, Any]:
    """What a directed engine is told: to read the store, or a peer, only when the choice was to fetch from there.

    A replica's own memory and tiers are always used, so the other paths are told alike.
    """
    if sent.path is Path.PEER:
        return {"directive": Directive(directives.Path.PEER, source=sent.source)}
    remote = sent.path is Path.REMOTE
    return {"directive": Directive(directives.Path.REMOTE if remote else directives.Path.LOCAL)}


def wrong(right: Estimator, conditions: Conditions) -> Estimator:
    """The estimator of these conditions: with errors of the stated size, if any."""
    if conditions.estimator_error <= 0:
        return right
    chance = np.random.default_rng([conditions.seed, 0xE7707])  # a stream of its own beside the policy's
    return WrongEstimator(right, share=conditions.estimator_error, chance=chance)


class _Feed:
    """Cache events on their way from engines and store to the directory, in order of time."""

    def __init__(self, core: Core, world: World, fleets: Fleets, conditions: Conditions) -> None:
        self._directory = core.directory
        self._world = world
        self._model = fleets.model
        self._wire = conditions.wire
        self._block_tokens = core.prompts.block_tokens
        self._delay_s = conditions.event_delay_s
        self._encoder = event_wire.MasterEncoder(model=self._model, block_tokens=self._block_tokens, backend_id="store")
        self._replica_batches: deque[tuple[float, int, EventBatch]] = deque()
        self._store_batches: deque[tuple[float, Batch]] = deque()

    def _collect(self) -> None:
        """Take what engines and store have to say since the last time."""
        new = [
            (batch.at_s + self._delay_s, row, batch)
            for row, engine in enumerate(self._world.engines)
            for batch in engine.take_event_batches()
        ]
        new.sort(key=itemgetter(0))
        self._replica_batches += new
        self._collect_store()

    def _tell(self, row: int, batches: Sequence[EventBatch]) -> None:
        """What one replica said since the last question, all at the time of the last of it."""
        heard_s = batches[-1].at_s + self._delay_s
        if self._wire:
            for batch in batches:
                self._directory.put(row, wire_batch(batch, self._block_tokens), heard_s)
        else:
            self._directory.put(row, plain_batch(batches), heard_s)

    def _collect_store(self) -> None:
        store = self._world.store
        changes = [] if store is None else store.take_changes()
        if not self._delay_s:  # all of it is there at once
            self._tell_store(changes, 0.0)
            return
        for at_s, together in groupby(changes, key=attrgetter("at_s")):
            self._tell_store(list(together), at_s + self._delay_s)

    def _tell_store(self, changes: list[StoreChange], heard_s: float) -> None:
        if changes and self._wire:
            self._store_batches += [(heard_s, batch) for batch in wire_store_batches(changes, self._encoder)]
        elif changes:
            self._store_batches.append((heard_s, plain_store_batch(changes, self._model)))

    def deliver(self, now_s: float) -> None:
        """Apply everything that has arrived by `now_s`. Wanted before a decision: only then it is asked about."""
        self._collect()
        waiting = self._replica_batches
        by_row: dict[int, list[EventBatch]] = {}
        while waiting and waiting[0][0] <= now_s:
            _heard_s, row, batch = waiting.popleft()
            by_row.setdefault(row, []).append(batch)
        for row, batches in by_row.items():
            self._tell(row, batches)
        stored = self._store_batches
        while stored and stored[0][0] <= now_s:
            self._directory.apply_store(stored.popleft()[1], now_s)
