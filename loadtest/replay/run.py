"""Plays traffic through the router's own `Dispatcher` against the simulated engines, in virtual time.

Model     arrivals at their stated times; every event takes effect at the moment it happens: cache events reach the
          directory and first tokens reach the dispatcher without delay, and no load reports are sent
Valid     the fleet file read by both sides, events in their wire form
Blind to  network and event delay, faults, clients that leave
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from estimators.request import RequestFacts
from loadtest.traffic import TrafficRow, prompt_tokens
from router.actions import Ended, Send
from router.assemble import Core, assemble
from router.config import PolicyConfig, RouterConfig
from router.fleet import Fleet
from router.identity import Identity, chain
from router.receipts import Receipt
from router.signals.wire import decode
from sim_backends import event_wire
from sim_backends import fleet as sim_fleet
from sim_backends.requests import EngineRequest, Output
from sim_backends.world import World, build


@dataclass(slots=True)
class Replayed:
    """What one run gave. Receipts are in order of ending; the world can be asked for its engines' counters."""

    receipts: list[Receipt] = field(default_factory=list)
    world: World | None = None

    @property
    def failed(self) -> list[Receipt]:
        return [receipt for receipt in self.receipts if receipt.outcome != "ok"]


class Replay:
    """One run of one policy. seed : of the engines; the policy's comes from its configuration."""

    def __init__(self, fleet_file: Path, policy: PolicyConfig, seed: int = 0) -> None:
        fleet = msgspec.yaml.decode(fleet_file.read_bytes(), type=Fleet)
        located = [
            msgspec.structs.replace(replica, url=f"http://{replica.name}.invalid:8000") for replica in fleet.replicas
        ]
        self.result = Replayed()
        self._fleet = msgspec.structs.replace(fleet, replicas=located)
        self._core: Core = assemble(RouterConfig(policy=policy), self._fleet, on_receipt=self.result.receipts.append)
        self._world = self.result.world = build(sim_fleet.read(fleet_file), seed=seed, record_events=True)
        assert fleet.model is not None
        self._model = fleet.model.name
        self._store_wire = event_wire.MasterEncoder(
            model=self._model, block_tokens=self._core.prompts.block_tokens, backend_id="store"
        )
        self._open: dict[str, Send] = {}
        for row in range(len(located)):
            self._core.dispatcher.replica_up(row, frozenset({self._model}))
            self._core.directory.add_source(row, self._model)

    def run(self, rows: list[TrafficRow]) -> Replayed:
        """Play all `rows`, times divided by the fleet's speed, to the last token."""
        order = count()
        arrivals = [(row.at_s / self._fleet.speed, next(order), row) for row in rows]
        heapq.heapify(arrivals)
        while arrivals or self._open:
            due_s = self._world.next_due_s()
            if arrivals and (due_s is None or arrivals[0][0] <= due_s):
                now_s, _, row = heapq.heappop(arrivals)
                self._hear(now_s)
                self._arrive(row, now_s, f"replay-{next(order)}")
            else:
                assert due_s is not None, "requests are open but no engine has anything to do"
                self._hear(due_s)
        return self.result

    def _arrive(self, row: TrafficRow, now_s: float, request_id: str) -> None:
        tokens = prompt_tokens(row)
        block_tokens = self._core.prompts.block_tokens
        root = Identity(model=self._model, block_tokens=block_tokens).root()
        facts = RequestFacts(
            request_id=request_id,
            model=self._model,
            chain=chain(root, tokens[:-1], block_tokens),
            prompt_tokens=len(tokens),
            max_tokens=4096,
            streams=True,
            block_tokens=block_tokens,
        )
        for action in self._core.dispatcher.arrived(facts, now_s):
            assert isinstance(action, Send), f"refused: {action}"
            self._open[request_id] = action
            request = EngineRequest(request_id, tokens, 4096, output_tokens=max(1, row.output_length))
            self._world.submit(action.row, request, now_s)

    def _hear(self, now_s: float) -> None:
        """Everything that happened by `now_s`, told to the router in order of time."""
        for output in self._world.advance(now_s):
            self._token(output)
        for row, engine in enumerate(self._world.engines):
            for batch in engine.take_event_batches():
                payload = event_wire.encode_batch(
                    batch.events, unix_s=batch.at_s, block_tokens=self._core.prompts.block_tokens
                )
                self._core.directory.apply(row, decode(payload), now_s)
        if self._world.store is not None and (changes := self._world.store.take_changes()):
            for payload in self._store_wire.messages(changes, unix_offset_s=0.0):
                self._core.directory.apply_store(decode(payload), now_s)

    def _token(self, output: Output) -> None:
        sent = self._open[output.request_id]
        if output.index == 0:
            self._core.dispatcher.first_token(sent, output.at_s)
        if output.finish_reason is not None:
            del self._open[output.request_id]
            ended = Ended(200, output_tokens=output.index + 1, cached_tokens=output.cached_tokens)
            self._core.dispatcher.finished(sent, ended, output.at_s)
