"""One fleet for a replay, read twice: as the router reads it and as the simulated engines do.

Model     the fleet file as it is, but at speed 1 (virtual time costs nothing), with addresses nobody calls, and each
          rank of a server as the replica it is to the router: `name/0`, `name/1`, behind one URL
Valid     one model, every replica for prefill and decode; others are refused
Blind to  what only sockets have: ports, publishers, probes
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from estimators.hardware import CARDS
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec, check_fleet
from sim_backends import fleet as sim_fleet

Spec = TypeVar("Spec", ReplicaSpec, sim_fleet.Replica)


@dataclass(frozen=True, slots=True)
class Fleets:
    """Both readings of one fleet, replicas in the same order, one rank each."""

    router: Fleet
    engines: sim_fleet.Fleet

    @property
    def model(self) -> str:
        return self.engines.model.name

    @property
    def directed(self) -> bool:
        """Whether the file says that engines fetch only what they are told to."""
        return self.engines.fetch is not None and self.engines.fetch.by == "directed"

    @property
    def replicas(self) -> list[str]:
        return [replica.name for replica in self.engines.replicas]

    @property
    def cards(self) -> list[str]:
        return [replica.card for replica in self.engines.replicas]


def of_file(path: Path) -> Fleets:
    """The fleet in `path`. Raises ConfigError when either reader cannot use it."""
    try:
        return of_text(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "not UTF-8 text"
        raise ConfigError(f"fleet file {path}: {reason}") from exc


def of_text(text: str, source: str) -> Fleets:
    """The fleet written in `text`; `source` names it in errors."""
    try:
        engines = sim_fleet.parse(text, source=f"fleet file {source}")
        router = msgspec.yaml.decode(text, type=Fleet)
    except sim_fleet.BadFleet as exc:
        raise ConfigError(str(exc)) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"fleet file {source}: {exc}") from exc
    _check_playable(engines, source)
    router = msgspec.structs.replace(router, speed=1.0, replicas=_ranks_of(_addressed(router)))
    check_fleet(router)
    return Fleets(router, msgspec.structs.replace(engines, speed=1.0, replicas=_ranks_of(engines.replicas)))


def of_cards(replicas: int, cards: list[str]) -> Fleets:
    """The simulator's default fleet with `replicas` replicas of `cards`, in equal runs; any card the router knows."""
    if replicas < len(cards):
        raise ConfigError(f"--replicas {replicas} is fewer than the {len(cards)} cards named")
    known = {
        name: sim_fleet.Card(peak_tflops=card.peak_tflops, memory_gb_s=card.memory_gb_s, memory_gib=card.memory_gib)
        for name, card in CARDS.items()
    }
    try:
        engines = sim_fleet.built(replicas=replicas, cards=cards, speed=1.0, known=known)
    except sim_fleet.BadFleet as exc:
        raise ConfigError(str(exc)) from exc
    plain = {key: value for key, value in msgspec.to_builtins(engines).items() if value is not None}
    return of_text(msgspec.yaml.encode(plain).decode(), "command line")


def with_blocks(fleets: Fleets, *, router_tokens: int, engine_tokens: int) -> Fleets:
    """The same fleet with other block sizes: tokens in a block of the router's chain, and in one of the engines'."""
    return Fleets(
        msgspec.structs.replace(fleets.router, block_tokens=router_tokens),
        msgspec.structs.replace(fleets.engines, block_tokens=engine_tokens),
    )


def with_store(fleets: Fleets, capacity_gib: float) -> Fleets:
    """The same fleet with a shared store of this size, > 0; the router is told of sizes by nobody."""
    store = fleets.engines.store
    if store is None:
        raise ConfigError("the fleet has no shared store whose size could be set")
    larger = msgspec.structs.replace(store, capacity_gib=capacity_gib)
    return Fleets(fleets.router, msgspec.structs.replace(fleets.engines, store=larger))


def fetch_decided_by(fleets: Fleets, by: Literal["engine", "directed"]) -> Fleets:
    """The same fleet whose engines look the store up by themselves, or fetch only what the router's choice says."""
    fetch = fleets.engines.fetch or sim_fleet.Fetch()
    return Fleets(
        msgspec.structs.replace(fleets.router, fetch=msgspec.structs.replace(fleets.router.fetch, by=by)),
        msgspec.structs.replace(fleets.engines, fetch=msgspec.structs.replace(fetch, by=by)),
    )


def _check_playable(fleet: sim_fleet.Fleet, source: str) -> None:
    """Refuse what the engines can do and the router's dispatcher has no choice for: results would mean nothing."""
    for replica in fleet.replicas:
        for has, what in (
            (replica.role != "both", f"role {replica.role}"),
            (replica.model is not None, "a model of its own"),
        ):
            if has:
                raise ConfigError(f"fleet file {source}: replica {replica.name!r} has {what}, which cannot be replayed")


def _ranks_of(replicas: list[Spec]) -> list[Spec]:
    """One replica for each rank, named as `sim_backends.world` names its engines."""
    return [
        msgspec.structs.replace(replica, name=replica.name if replica.ranks == 1 else f"{replica.name}/{rank}", ranks=1)
        for replica in replicas
        for rank in range(replica.ranks)
    ]


def _addressed(fleet: Fleet) -> list[ReplicaSpec]:
    return [msgspec.structs.replace(replica, url=f"http://{replica.name}.invalid:8000") for replica in fleet.replicas]
