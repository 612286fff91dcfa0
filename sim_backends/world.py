"""All engines, links and the store of one fleet, moved through virtual time together.

Order of things at one time: the store's link, then the replicas' own links, then the engines, each in the order
of the fleet file; within one of them in the order they were told. Requests are told at a time and a step that
starts at that time comes after all of them. The same calls with the same seed give the same outputs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from sim_backends import fleet as fleet_file
from sim_backends.engine import Engine
from sim_backends.fleet import Fleet
from sim_backends.links import FairLink
from sim_backends.requests import EngineRequest, EngineSettings, Output
from sim_backends.service_times import ServiceTimes
from sim_backends.store import SharedStore, StoreReader

_DUE = attrgetter("due_s")


@dataclass(slots=True)
class World:
    """Engines in fleet order. The caller's times never go back."""

    engines: list[Engine]
    links: list[FairLink] = field(default_factory=list)
    store: SharedStore | None = None
    _outputs: list[Output] = field(default_factory=list)
    _parts: list[Engine | FairLink] = field(init=False)

    def __post_init__(self) -> None:
        self._parts = [*self.links, *self.engines]

    def submit(self, row: int, request: EngineRequest, now_s: float) -> None:
        """Give a request to the engine in `row`. Raises requests.RequestRefused for one that can never run."""
        self._run_until(now_s, inclusive=False)
        self.engines[row].submit(request, now_s)

    def abort(self, row: int, request_id: str, now_s: float) -> bool:
        """Drop a request; False when it is over. Outputs before `now_s` are still handed out by `advance`."""
        self._run_until(now_s, inclusive=False)
        return self.engines[row].abort(request_id, now_s)

    def advance(self, now_s: float) -> list[Output]:
        """Everything due by `now_s`; the outputs carry their own times, in order."""
        self._run_until(now_s, inclusive=True)
        outputs, self._outputs = self._outputs, []
        return outputs

    def next_due_s(self) -> float | None:
        """When `advance` has something to do; None while all is idle."""
        due_s = min(self._parts, key=_DUE).due_s
        return None if due_s == inf else due_s

    def _run_until(self, now_s: float, *, inclusive: bool) -> None:
        parts, outputs = self._parts, self._outputs
        while True:
            part = min(parts, key=_DUE)  # the first of equals: the order of parts is the rank
            if part.due_s > now_s or (part.due_s == now_s and not inclusive):
                return
            made = part.run_due()
            if made:
                outputs.extend(made)


def build(fleet: Fleet, *, seed: int | None = None, use_store: bool = True, record_events: bool = False) -> World:
    """The world of a fleet file; `seed` stands in for the file's. One row for each replica, in order."""
    extra = fleet.engine or fleet_file.Engine()
    use_seed = extra.seed if seed is None else seed
    store, network, hosts = _tiers(fleet, use_store=use_store, record_changes=record_events)
    engines = [
        _engine(fleet, row, seed=use_seed, reader=_reader(fleet, store, network, hosts, row), record=record_events)
        for row in range(len(fleet.replicas))
    ]
    links = [network, *hosts] if network is not None else []
    return World(engines, links, store)


def _tiers(
    fleet: Fleet, *, use_store: bool, record_changes: bool
) -> tuple[SharedStore | None, FairLink | None, list[FairLink]]:
    section = fleet.store
    if section is None or not use_store:
        return None, None, []
    capacity = int(section.capacity_gib * 2**30 // (fleet.model.kv_bytes_per_token * fleet.block_tokens))
    store = SharedStore(capacity_blocks=max(1, capacity), record_changes=record_changes)
    return store, _link(fleet, section.network), [_link(fleet, section.host) for _ in fleet.replicas]


def _link(fleet: Fleet, name: str) -> FairLink:
    link = fleet.links[name]
    return FairLink(rate_bytes_per_s=link.gb_s * 1e9 * fleet.speed, start_s=link.start_ms / 1e3 / fleet.speed)


def _reader(
    fleet: Fleet, store: SharedStore | None, network: FairLink | None, hosts: list[FairLink], row: int
) -> StoreReader | None:
    if store is None or network is None:
        return None
    fetch = fleet.fetch or fleet_file.Fetch()
    return StoreReader(
        store=store,
        network=network,
        host=hosts[row],
        discipline=fetch.discipline,
        minimum_tokens=fetch.minimum_tokens,
        bytes_per_block=fleet.model.kv_bytes_per_token * fleet.block_tokens,
        parts=fleet.model.layers,
    )


def _engine(fleet: Fleet, row: int, *, seed: int, reader: StoreReader | None, record: bool) -> Engine:
    extra = fleet.engine or fleet_file.Engine()
    replica = fleet.replicas[row]
    times = ServiceTimes(
        fleet.model,
        fleet.cards[replica.card],
        speed=fleet.speed,
        jitter=extra.jitter,
        rng=random.Random(f"{seed}/{replica.name}/steps"),
    )
    settings = EngineSettings(
        name=replica.name,
        vocab=fleet.model.vocab,
        kv_blocks=fleet.kv_blocks(replica.card),
        block_tokens=fleet.block_tokens,
        token_budget=extra.token_budget,
        max_running=extra.max_running,
        max_model_len=extra.max_model_len,
        median_output_tokens=extra.median_output_tokens,
        sigma_output_tokens=extra.sigma_output_tokens,
        seed=seed,
    )
    return Engine(settings, times, reader=reader, record_events=record)
