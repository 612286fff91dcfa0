"""Rows of the core that replicas come into and leave: everything kept for a row is begun anew, and nothing else moves.

Model     a core is built with more rows than replicas. Whoever joins takes a spare row and finds it as a core built
          anew would have it, except for what was learned of a replica of this name before, which it gets back. Who
          leaves gives up at once what concerns only the router's choice (its place, its name, what its cache holds),
          and its row once its last request has ended
Valid     calls in the order joined (or there from the start), left, then returned or freed
Blind to  sockets: who polls, follows and relays is told by whoever calls this
"""

from __future__ import annotations

from math import nan

import msgspec

from estimators.first_token import Discipline
from estimators.model_prior import Prior, prior_of
from estimators.roofline import rates_of
from estimators.view import is_nobody, spare_name
from router.dispatch import Dispatcher
from router.fleet import Fleet, ReplicaSpec
from router.holdings import Holdings
from router.names import ModelNames
from router.placing import Replica


class Rows:
    """The rows of one core.

    fleet : with its spare rows; its replicas and cards are those of now, and whoever owns it changes them
    """

    def __init__(self, fleet: Fleet, *, dispatcher: Dispatcher, holdings: Holdings, names: ModelNames) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._holdings = holdings
        self._names = names

    def joined(self, row: int, replica: ReplicaSpec, now_s: float) -> None:
        """The spare `row` is that of `replica` from now on.

        Raises
        ------
        ConfigError : the fleet does not know its card; then nothing has changed
        """
        self._begin(row, replica, now_s)
        self._dispatcher.joins(row, Replica(replica.name, replica.url or ""))

    def left(self, row: int, now_s: float) -> None:
        """The replica of `row` is gone: nothing new goes there, and nothing of its cache is believed."""
        dispatcher, name = self._dispatcher, self._dispatcher.replicas[row].name
        dispatcher.learning.leaves(row, name, now_s)
        dispatcher.leaves(row, Replica(left_name(row), dispatcher.replicas[row].base_url))
        self._call(row, left_name(row))
        self._holdings.forget(row)
        self._names.forget(row)

    def returned(self, row: int, replica: ReplicaSpec) -> None:
        """The replica that left `row` last is wanted again, and its last request has not ended."""
        self._call(row, replica.name)
        self._dispatcher.returns(row, Replica(replica.name, replica.url or ""))

    def is_empty(self, row: int) -> bool:
        """Whether nothing runs there any more."""
        return not self._dispatcher.view.booked.item(row)

    def freed(self, row: int, name: str, now_s: float) -> None:
        """The last request of `row` has ended since the replica called `name` left it: the row is spare."""
        self._dispatcher.learning.leaves(row, name, now_s)  # with what its last requests taught
        self._holdings.forget(row)
        spare = ReplicaSpec(name=spare_name(row))
        self._begin(row, spare, now_s)
        self._dispatcher.joins(row, Replica(spare.name, ""))
        self._dispatcher.leaves(row, Replica(spare.name, ""))

    def _begin(self, row: int, replica: ReplicaSpec, now_s: float) -> None:
        prior = replica_prior(self._fleet, replica)
        self._dispatcher.view.renew(
            row,
            replica.name,
            rates_of(prior.shape, prior.card),
            usd_per_hour=usd_per_hour(prior),
            discipline=first_discipline(self._fleet),
            limit_s=patience_s(self._fleet),
        )
        self._dispatcher.learning.joins(row, replica.name, spread=prior.spread, calibrated=prior.known, now_s=now_s)

    def _call(self, row: int, name: str) -> None:
        self._dispatcher.view.name(row, name)
        self._dispatcher.learning.renamed(row, name)


def with_spares(fleet: Fleet, rows: int) -> Fleet:
    """The fleet with spare rows behind its replicas, `rows` in all, in lists of its own that may be changed."""
    spares = [ReplicaSpec(name=spare_name(row)) for row in range(len(fleet.replicas), rows)]
    return msgspec.structs.replace(fleet, replicas=[*fleet.replicas, *spares], cards=dict(fleet.cards))


def members(fleet: Fleet) -> dict[int, ReplicaSpec]:
    """Replicas that are there, by row."""
    return {row: replica for row, replica in enumerate(fleet.replicas) if not is_nobody(replica.name)}


def left_name(row: int) -> str:
    """What a row is called while the last requests of a replica that left it are running."""
    return f"(left {row})"


def replica_prior(fleet: Fleet, replica: ReplicaSpec) -> Prior:
    """What is believed of a replica at the start, at the fleet's speed."""
    card = None if replica.card is None else fleet.card(replica.card)
    return prior_of(fleet.model, card, speed=fleet.speed)


def usd_per_hour(prior: Prior) -> float:
    """Price of a replica's cards together; NaN where the card's is not known."""
    shards = prior.shape.shards
    price = prior.card.usd_per_hour if prior.known else None
    return nan if price is None else price * shards.tensor * shards.pipeline


def first_discipline(fleet: Fleet) -> Discipline:
    """What a replica is taken to do about a fetch until more is known."""
    return fleet.fetch.discipline or Discipline.OVERLAPPED


def patience_s(fleet: Fleet) -> float:
    """Patience of time-limited fetches, seconds."""
    return fleet.fetch.limit_ms / 1000 / fleet.speed
