"""All engines, links, stores and alarms of one fleet, moved through virtual time together.

Order of things at one time: the store's link, then the replicas' own links, then alarms, then the engines, each in the
order of the fleet file; within one of them in the order they were told. Requests are told at a time and a step that
starts at that time comes after all of them. The same calls with the same seed give the same outputs.

Shared by all: the store's network link, the alarms. Shared by replicas of one model: the store (its capacity is split
evenly between models, whose states are of no use to each other), and what peers can read of each other. Each rank's
own: its card, its links to host memory and disk, the link that leaves it, its tiers and its prefetch space.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from sim_backends import content
from sim_backends import fleet as fleet_file
from sim_backends.alarms import Alarms
from sim_backends.bringing import Bring, bring
from sim_backends.disciplines import DISCIPLINES
from sim_backends.engine import Engine, Outputs
from sim_backends.fetch import Peer
from sim_backends.fetching import Fetcher, Holder, Place
from sim_backends.fleet import Fleet, Model, Replica
from sim_backends.links import FairLink
from sim_backends.prefetch_space import PrefetchSpace
from sim_backends.requests import EngineRequest, EngineSettings, Output
from sim_backends.roles import Role
from sim_backends.service_times import ServiceTimes
from sim_backends.store import SharedStore
from sim_backends.tiers import TierStack

_DUE = attrgetter("due_s")


@dataclass(slots=True)
class World:
    """Engines in fleet order, the ranks of a replica one after the other. The caller's times never go back.

    stores : by name of the model whose blocks it holds; store : that of the fleet's first model
    rows : of each replica of the fleet file, its engines
    network, hosts : the link to the store, and of each row the link to its own host memory, where there are such
    """

    engines: list[Engine]
    links: list[FairLink] = field(default_factory=list)
    store: SharedStore | None = None
    alarms: Alarms = field(default_factory=Alarms)
    stores: dict[str, SharedStore] = field(default_factory=dict)
    rows: list[range] = field(default_factory=list)
    network: FairLink | None = None
    hosts: list[FairLink | None] = field(default_factory=list)
    _outputs: list[Output] = field(default_factory=list)
    _brings: list[tuple[int, str | None, Bring]] = field(default_factory=list)  # with where to and where from
    _parts: list[Engine | FairLink | Alarms] = field(init=False)
    _passed_s: float = field(default=-inf, init=False)  # all that is due by then has been done

    def __post_init__(self) -> None:
        self._parts = [*self.links, self.alarms, *self.engines]

    def submit(self, row: int, request: EngineRequest, now_s: float) -> None:
        """Give a request to the engine in `row`.

        Raises
        ------
        requests.RequestRefused : it can never run there.
        lifecycle.NotServing : the replica takes no requests now.
        """
        self._come_to(row, now_s)
        self.engines[row].submit(request, now_s)

    def abort(self, row: int, request_id: str, now_s: float) -> bool:
        """Drop a request; False when it is over. Outputs before `now_s` are still handed out by `advance`."""
        self._come_to(row, now_s)
        return self.engines[row].abort(request_id, now_s)

    def bring(self, row: int, digests: Sequence[bytes], source: str | None, now_s: float) -> Bring | None:
        """Begin to bring the leading blocks `digests` into the host memory of `row`; None when there is nothing to.

        source : name of the peer that has them; None: the store
        """
        self._come_to(row, now_s)
        fetcher = self.engines[row].fetcher
        host = None if fetcher is None else fetcher.tiers.tiers.get("host")
        if fetcher is None or host is None:
            return None
        holder: Holder | None
        if source is None:
            holder, route = fetcher.store, self.network
        else:
            peer = fetcher.peers.get(source)
            holder, route = (None, None) if peer is None else (peer, peer.egress)
        if holder is None or route is None:
            return None
        self._brings = [one for one in self._brings if not one[2].over]
        begun = bring(fetcher, digests, holder, route, now_s)
        if begun is not None:
            self._brings.append((row, source, begun))
        return begun

    def drain(self, row: int, now_s: float) -> None:
        """The engine takes nothing new and finishes what it has."""
        self._come_to(row, now_s)
        self.engines[row].drain()

    def resume(self, row: int, now_s: float) -> None:
        """End a drain."""
        self._come_to(row, now_s)
        self.engines[row].lifecycle.resume()

    def crash(self, row: int, now_s: float, *, back_after_s: float = inf) -> None:
        """The engine loses everything; its requests end with `error`, handed out by `advance`.

        It takes requests again, empty, after `back_after_s` >= 0; inf stays down.
        """
        self._come_to(row, now_s)
        name = self.engines[row].settings.name
        for at, source, begun in self._brings:
            if row == at or source == name:
                begun.stop(now_s)
        self._outputs += self.engines[row].crash(now_s, back_after_s=back_after_s)
        self.alarms.at(now_s, lambda _at_s: None)  # so that a driver comes for the ends

    def advance(self, now_s: float) -> list[Output]:
        """Everything due by `now_s`; the outputs carry their own times, in order."""
        self._run_until(now_s, inclusive=True)
        self._passed_s = now_s
        outputs, self._outputs = self._outputs, []
        return outputs

    def next_due_s(self) -> float | None:
        """When `advance` has something to do; None while all is idle."""
        due_s = min(self._parts, key=_DUE).due_s
        return None if due_s == inf else due_s

    def _come_to(self, row: int, now_s: float) -> None:
        """Before something is told at `now_s`. Steps that end then are over only if `advance` has come so far."""
        self._run_until(now_s, inclusive=False)
        if now_s <= self._passed_s:
            self.engines[row].catch_up(now_s)

    def _run_until(self, now_s: float, *, inclusive: bool) -> None:
        parts, outputs = self._parts, self._outputs
        while True:
            part = min(parts, key=_DUE)  # the first of equals: the order of parts is the rank
            if part.due_s > now_s or (part.due_s == now_s and not inclusive):
                return
            made = part.run_due()
            if made:
                outputs.extend(made)


def build(
    fleet: Fleet,
    *,
    seed: int | None = None,
    use_store: bool = True,
    record_events: bool = False,
    outputs: Outputs = "all",
    started_s: float = 0.0,
) -> World:
    """The world of a fleet file; `seed` stands in for the file's. One row for each rank of each replica, in order.

    `outputs` "ends" hands out only the first and last token of each request, for a driver that streams nothing:
    far fewer things are then due, see `engine`. `started_s` is when the processes were started: start-up times count
    from it.
    """
    extra = fleet.engine or fleet_file.Engine()
    builder = _Builder(fleet, extra.seed if seed is None else seed, use_store=use_store, record=record_events)
    fresh_ids = content.fresh_ids()
    engines: list[Engine] = []
    rows: list[range] = []
    for replica in fleet.replicas:
        rows.append(range(len(engines), len(engines) + replica.ranks))
        for rank in range(replica.ranks):
            name = replica.name if replica.ranks == 1 else f"{replica.name}/{rank}"
            settings, times = builder.engine_parts(replica, name)
            fetcher = builder.fetcher(replica)
            engine = Engine(
                settings,
                times,
                fetcher=fetcher,
                alarms=builder.alarms,
                role=Role(replica.role),
                record_events=record_events,
                outputs=outputs,
                fresh_ids=fresh_ids,
            )
            builder.join(engine, replica, fetcher)
            engine.lifecycle.start(started_s, replica.start_s / fleet.speed)
            engines.append(engine)
    return World(
        engines,
        builder.links,
        builder.stores.get(fleet.model.name),
        alarms=builder.alarms,
        stores=builder.stores,
        rows=rows,
        network=builder.network,
        hosts=[_host_link(engine) for engine in engines],
    )


def _host_link(engine: Engine) -> FairLink | None:
    """All that comes from a tier or the store ends on it."""
    fetcher = engine.fetcher
    return fetcher.remote[-1].route[-1] if fetcher is not None and fetcher.remote else None


@dataclass(slots=True)
class _Builder:
    """What has been built so far of one world."""

    fleet: Fleet
    seed: int
    use_store: bool
    record: bool
    alarms: Alarms = field(default_factory=Alarms)
    stores: dict[str, SharedStore] = field(init=False)
    links: list[FairLink] = field(init=False)
    network: FairLink | None = field(init=False)
    _peers: dict[str, dict[str, Peer]] = field(default_factory=dict)  # by model

    def __post_init__(self) -> None:
        section = self.fleet.store
        self.network = None
        self.stores = {}
        if section is not None and self.use_store:
            self.network = self._link(section.network)
            models = {model.name: model for model in map(self.fleet.model_of, self.fleet.replicas)}
            self.stores = {name: self._store(model, share=1 / len(models)) for name, model in models.items()}
        self.links = [] if self.network is None else [self.network]

    def engine_parts(self, replica: Replica, name: str) -> tuple[EngineSettings, ServiceTimes]:
        fleet, seed = self.fleet, self.seed
        extra = fleet.engine or fleet_file.Engine()
        model = fleet.model_of(replica)
        times = ServiceTimes(
            model,
            fleet.cards[replica.card],
            speed=fleet.speed / replica.slow,
            jitter=extra.jitter,
            straggler_share=extra.straggler_share,
            straggler_factor=extra.straggler_factor,
            rng=random.Random(f"{seed}/{name}/steps"),
        )
        settings = EngineSettings(
            name=name,
            vocab=model.vocab,
            kv_blocks=fleet.kv_blocks(replica.card, model),
            block_tokens=fleet.block_tokens,
            token_budget=extra.token_budget,
            max_running=extra.max_running,
            max_model_len=extra.max_model_len,
            median_output_tokens=extra.median_output_tokens,
            sigma_output_tokens=extra.sigma_output_tokens,
            seed=seed,
        )
        return settings, times

    def fetcher(self, replica: Replica) -> Fetcher | None:
        """One rank's ways to state beyond its HBM; None where there is none."""
        fleet = self.fleet
        model = fleet.model_of(replica)
        store = self.stores.get(model.name)
        if store is None and fleet.tiers is None and fleet.peers is None:
            return None
        fetch = fleet.fetch or fleet_file.Fetch()
        tiers = self._tiers(model)
        told = fleet.told_of(replica)
        own = self._places(store, tiers)
        return Fetcher(
            DISCIPLINES[fetch.discipline],
            self.alarms,
            block_tokens=fleet.block_tokens,
            bytes_per_token=model.kv_bytes_per_token,
            layers=model.layers,
            places=[place for place in own if place.source != "store"],
            remote=own,
            tiers=tiers,
            store=store,
            directed=fetch.by == "directed" and (told is None or told.peer in ("header", "body")),
            asks_store=fetch.by == "engine" or (told is not None and told.store == "engine"),
            minimum_tokens=fetch.minimum_tokens,
            limit_s=fetch.limit_ms / 1e3 / fleet.speed,
            space=PrefetchSpace() if fetch.prefetch_gib is None else PrefetchSpace(fetch.prefetch_gib * 2**30),
            peers=self._peers.setdefault(model.name, {}),
        )

    def join(self, engine: Engine, replica: Replica, fetcher: Fetcher | None) -> None:
        """Make a rank readable for its peers, over a link of its own."""
        if self.fleet.peers is None or fetcher is None:
            return
        egress = self._own_link(self.fleet.peers.link)
        engine.peer = Peer(engine.cache, fetcher.tiers, egress, engine.kept)
        self._peers[self.fleet.model_of(replica).name][engine.settings.name] = engine.peer

    def _places(self, store: SharedStore | None, tiers: TierStack) -> list[Place]:
        """Tiers and store with the links one rank reads them over; links of one name are one link of the rank."""
        section, links = self.fleet.tiers, dict[str, FairLink]()

        def own(name: str) -> FairLink:
            if name not in links:
                links[name] = self._own_link(name)
            return links[name]

        places: list[Place] = []
        if section is not None:
            host = own(section.host.link)
            places.append(Place("host", tiers.tiers["host"], (host,)))
            if section.disk is not None:
                places.append(Place("disk", tiers.tiers["disk"], (own(section.disk.link), host)))
        if store is not None:
            assert self.network is not None, "who has a store has its network"
            assert self.fleet.store is not None, "who has a store has its section"
            places.append(Place("store", store, (self.network, own(self.fleet.store.host))))
        return places

    def _tiers(self, model: Model) -> TierStack:
        section = self.fleet.tiers
        if section is None:
            return TierStack()
        disk = 0 if section.disk is None else self._blocks(section.disk.capacity_gib, model)
        host = self._blocks(section.host.capacity_gib, model)
        return TierStack(host_blocks=host, disk_blocks=disk)

    def _store(self, model: Model, *, share: float) -> SharedStore:
        assert self.fleet.store is not None, "who has a store has its section"
        capacity_blocks = self._blocks(self.fleet.store.capacity_gib * share, model)
        return SharedStore(capacity_blocks=capacity_blocks, record_changes=self.record)

    def _blocks(self, capacity_gib: float, model: Model) -> int:
        return max(1, int(capacity_gib * 2**30 // (model.kv_bytes_per_token * self.fleet.block_tokens)))

    def _link(self, name: str) -> FairLink:
        link, speed = self.fleet.links[name], self.fleet.speed
        return FairLink(rate_bytes_per_s=link.gb_s * 1e9 * speed, start_s=link.start_ms / 1e3 / speed)

    def _own_link(self, name: str) -> FairLink:
        link = self._link(name)
        self.links.append(link)
        return link
