"""Ways to use a set of cards for one model, and how many requests a second each carries.

Model     organisations: whole replicas; the same with chunks of prefill hidden in decode steps as far as arithmetic
          and reads allow (an upper bound); replicas that share a store; prefill and decode apart with states handed
          over directly; the same by way of the store. A request costs each card the mean over the kinds of requests
          over the link: directly the state once; by way of a store once to write and once to read. Of a prompt whose
          stored part is all of it, nothing is computed for prefill: decode reads it
Valid     every replica on as many cards as its shape says; one shared network, or a link of each prefill replica
Blind to  the batch's mixing of kinds, memory of prefill replicas, links inside a replica, evictions from the store
Source    AI Infra textbook, sections 9.2.3, 9.2.4 and 9.7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import product
from math import ceil, inf

from estimators.hardware import Card
from estimators.planning.pools import Group, StageTimes, Work, all_splits, per_s, stage_times
from estimators.ranges import require
from estimators.shape_costs import ShapeCosts, costs_of
from estimators.shapes import ModelShape

GIB = 2.0**30
USABLE_SHARE = 0.9  # of a card's memory, as engines set aside (vLLM's gpu_memory_utilization)
MOST_SPLITS = 100_000  # looked at for sub-fleets; with more cards only the whole fleet is


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKind:
    """Requests alike. share : of all requests, > 0; they need not sum to 1.

    input_tokens, output_tokens : >= 1
    cached_tokens : of the input, in the own memory of the replica that computes it, >= 0
    stored_tokens : of the input, found in a shared store and nowhere else, >= 0; without a store they are computed
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    stored_tokens: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.share < inf, "share", self.share)
        require(self.input_tokens >= 1, "input_tokens", self.input_tokens)
        require(self.output_tokens >= 1, "output_tokens", self.output_tokens)
        require(0 <= self.cached_tokens < self.input_tokens, "cached_tokens", self.cached_tokens)
        room = self.input_tokens - self.cached_tokens
        require(0 <= self.stored_tokens <= room, "stored_tokens", self.stored_tokens, f"not within 0..{room}")

    def found_tokens(self, *, store: bool) -> int:
        """Of the input, not computed."""
        return self.cached_tokens + (self.stored_tokens if store else 0)

    def work(self, batch: int, *, store: bool) -> Work:
        """As pools count it; an engine always computes one token."""
        found = min(self.found_tokens(store=store), self.input_tokens - 1)
        return Work(
            new_tokens=self.input_tokens - found,
            cached_tokens=found,
            output_tokens=self.output_tokens,
            batch=batch,
        )


@dataclass(frozen=True, slots=True)
class CardKind:
    """`count` (>= 0) replicas, each of as many of these cards as the shape is sharded over."""

    name: str
    card: Card
    count: int

    def __post_init__(self) -> None:
        require(self.count >= 0, "count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What there is, and what comes.

    kinds : at least one
    cards : at least one, each kind once
    batch : sequences in a decode step at most, >= 1; fewer where memory holds fewer
    network_bytes_per_s : the link all share, to the store and, without `peer_bytes_per_s`, between the pools
    peer_bytes_per_s : the link that leaves each replica
    store : whether there is a shared store on the network
    state_shape : whose state is handed over, where it is not the model's
    """

    shape: ModelShape
    kinds: tuple[RequestKind, ...]
    cards: tuple[CardKind, ...]
    batch: int
    network_bytes_per_s: float | None = None
    peer_bytes_per_s: float | None = None
    store: bool = False
    state_shape: ModelShape | None = None

    def __post_init__(self) -> None:
        require(len(self.kinds) > 0, "kinds", self.kinds, "empty")
        require(any(kind.count for kind in self.cards), "cards", self.cards, "none")
        require(self.batch >= 1, "batch", self.batch)
        for name in ("network_bytes_per_s", "peer_bytes_per_s"):
            rate = getattr(self, name)
            require(rate is None or 0 < rate < inf, name, rate)
        require(not self.store or self.network_bytes_per_s is not None, "store", self.store, "without a network")

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each kind, summing to 1."""
        whole = sum(kind.share for kind in self.kinds)
        return tuple(kind.share / whole for kind in self.kinds)

    @property
    def costs(self) -> ShapeCosts:
        return _costs(self.shape)

    @property
    def state_costs(self) -> ShapeCosts:
        return _costs(self.state_shape or self.shape)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(kind.count for kind in self.cards)

    @property
    def cards_each(self) -> int:
        """Cards of one replica."""
        return self.shape.shards.tensor * self.shape.shards.pipeline


@lru_cache(maxsize=16)
def _costs(shape: ModelShape) -> ShapeCosts:
    return costs_of(shape)


class Organisation(Enum):
    REPLICAS = "replicas"
    CHUNKED = "replicas, ideal chunks"
    REPLICAS_STORE = "replicas + store"
    SPLIT = "P-D direct"
    SPLIT_STORE = "P-D by store"

    @property
    def splits(self) -> bool:
        return self in (Organisation.SPLIT, Organisation.SPLIT_STORE)

    @property
    def uses_store(self) -> bool:
        return self in (Organisation.REPLICAS_STORE, Organisation.SPLIT_STORE)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One way to use cards.

    prefill, decode : replicas of each kind of card; the same ones where they are not apart
    rates_rps : what each resource carries, requests/s, by name; the least is the deployment's
    moved_bytes : over the link for one request
    """

    organisation: Organisation
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    rates_rps: dict[str, float]
    moved_bytes: float

    @property
    def limited_by(self) -> str:
        return min(self.rates_rps, key=self.rates_rps.__getitem__)

    @property
    def per_s(self) -> float:
        return self.rates_rps[self.limited_by]

    @property
    def counts(self) -> tuple[int, ...]:
        """Replicas of each kind of card in use."""
        if not self.organisation.splits:
            return self.prefill
        return tuple(a + b for a, b in zip(self.prefill, self.decode, strict=True))


def batch_on(facts: Facts, card: Card) -> int:
    """Sequences of the longest kind that fit beside the weights and one arriving state, `facts.batch` at most."""
    costs = facts.costs
    longest = max(costs.kv_bytes(float(kind.input_tokens + kind.output_tokens - 1)) for kind in facts.kinds)
    arriving = max(costs.kv_bytes(float(kind.input_tokens)) for kind in facts.kinds)
    free = USABLE_SHARE * card.memory_gib * GIB * facts.cards_each - facts.shape.weights_bytes - arriving
    return max(0, min(facts.batch, int(free // longest)))


def times_on(facts: Facts, card: Card, organisation: Organisation) -> list[StageTimes]:
    """Of each kind of request on one replica of `card`.

    Raises
    ------
    ValueError : not one sequence fits.
    """
    batch = batch_on(facts, card)
    require(batch >= 1, "batch", batch, f"0: no request fits into {card.memory_gib:g} GiB beside the weights")
    return list(_times(facts.shape, card, facts.kinds, batch, organisation))


@lru_cache(maxsize=256)
def _times(
    shape: ModelShape, card: Card, kinds: tuple[RequestKind, ...], batch: int, organisation: Organisation
) -> tuple[StageTimes, ...]:
    store = organisation.uses_store
    times = []
    for kind in kinds:
        own = stage_times(shape, card, kind.work(batch, store=store))
        if organisation is Organisation.SPLIT_STORE and kind.found_tokens(store=True) == kind.input_tokens:
            own = replace(own, prefill_s=0.0)
        times.append(own)
    return tuple(times)


def mean_times(times: Sequence[StageTimes], shares: Sequence[float]) -> StageTimes:
    """The mean request: GPU-seconds add up whatever they are of."""

    def mean(name: str) -> float:
        return sum(share * float(getattr(one, name)) for one, share in zip(times, shares, strict=True))

    return StageTimes(**{name: mean(name) for name in StageTimes.__dataclass_fields__})


def moved_bytes(facts: Facts, kind: RequestKind, organisation: Organisation) -> float:
    """Bytes that one request of `kind` moves over the link; the store has what a replica has cached."""
    costs = facts.state_costs
    whole = float(costs.kv_bytes(float(kind.input_tokens)))
    if organisation is Organisation.SPLIT:
        return whole if kind.output_tokens > 1 else 0.0
    if not organisation.uses_store:
        return 0.0
    found = kind.found_tokens(store=True)
    written = float(costs.kv_bytes_between(float(found), float(kind.input_tokens)))
    fetched = float(costs.kv_bytes_between(float(kind.cached_tokens), float(found)))
    if organisation is Organisation.REPLICAS_STORE or kind.output_tokens == 1:
        return written + fetched
    if found == kind.input_tokens:
        return whole  # nothing is left for prefill: decode reads the state where it is
    return fetched + written + whole


def mean_moved_bytes(facts: Facts, organisation: Organisation) -> float:
    return sum(
        share * moved_bytes(facts, kind, organisation) for kind, share in zip(facts.kinds, facts.shares, strict=True)
    )


def organisations(facts: Facts) -> list[Organisation]:
    """Those for which there is a link."""
    found = [Organisation.REPLICAS, Organisation.CHUNKED]
    if facts.store and any(kind.stored_tokens for kind in facts.kinds):
        found.append(Organisation.REPLICAS_STORE)
    if facts.peer_bytes_per_s is not None or facts.network_bytes_per_s is not None:
        found.append(Organisation.SPLIT)
    if facts.store:
        found.append(Organisation.SPLIT_STORE)
    return found


def deployment(
    facts: Facts,
    organisation: Organisation,
    *,
    counts: Sequence[int] | None = None,
    prefill: Sequence[int] | None = None,
) -> Deployment | None:
    """The best of an organisation; None where its cards cannot be split.

    Parameters
    ----------
    counts : replicas of each kind of card to use; None: all
    prefill : of those, for prefill; None: the best split
    """
    used = facts.counts if counts is None else tuple(counts)
    times = [
        mean_times(times_on(facts, kind.card, organisation), facts.shares) if count else None
        for kind, count in zip(facts.cards, used, strict=True)
    ]
    moved = mean_moved_bytes(facts, organisation)
    if organisation.splits:
        return _split(facts, organisation, used, times, moved, prefill)
    seconds = [0.0 if one is None else _whole_s(one, organisation) for one in times]
    rates = {"cards": per_s(used, seconds)}
    if organisation.uses_store:
        rates["link"] = _link_rps(facts, organisation, moved, sum(used))
    return Deployment(organisation, used, used, rates, moved)


def _whole_s(times: StageTimes, organisation: Organisation) -> float:
    return times.piggyback_s if organisation is Organisation.CHUNKED else times.colocated_s


def _split(
    facts: Facts,
    organisation: Organisation,
    used: tuple[int, ...],
    times: Sequence[StageTimes | None],
    moved: float,
    prefill: Sequence[int] | None,
) -> Deployment | None:
    some = [(count, one) for count, one in zip(used, times, strict=True) if one is not None]
    if sum(used) < 2:
        return None
    splits = all_splits([Group(count, one) for count, one in some], link_per_s=inf)
    if prefill is None:
        best = iter(splits.best)
        chosen = tuple(next(best) if one is not None else 0 for one in times)
    else:
        chosen = tuple(prefill)
    at = splits.at([given for given, one in zip(chosen, times, strict=True) if one is not None])
    rates = {"prefill pool": at.prefill_per_s, "decode pool": at.decode_per_s}
    rates["link"] = _link_rps(facts, organisation, moved, sum(chosen))
    decode = tuple(count - given for count, given in zip(used, chosen, strict=True))
    return Deployment(organisation, chosen, decode, rates, moved)


def link_bytes_per_s(facts: Facts, organisation: Organisation) -> float:
    """Rate of one link that states pass; inf where none do."""
    if organisation is Organisation.SPLIT and facts.peer_bytes_per_s is not None:
        return facts.peer_bytes_per_s
    if facts.network_bytes_per_s is None or not (organisation.splits or organisation.uses_store):
        return inf
    return facts.network_bytes_per_s


def _link_rps(facts: Facts, organisation: Organisation, moved: float, senders: int) -> float:
    """Requests a second that the link carries; links of the senders add up, the network is one for all."""
    own = organisation is Organisation.SPLIT and facts.peer_bytes_per_s is not None
    rate = link_bytes_per_s(facts, organisation) * (senders if own else 1)
    return rate / moved if moved > 0 else inf


def sub_fleets(facts: Facts) -> Iterator[tuple[int, ...]]:
    """Every choice of replicas to use, all of them first; only that where looking at each split takes too long."""
    yield facts.counts
    splits = 1
    for count in facts.counts:
        splits *= (count + 1) * (count + 2) // 2
    if splits > MOST_SPLITS:
        return
    for counts in product(*(range(count + 1) for count in facts.counts)):
        if any(counts) and counts != facts.counts:
            yield counts


def all_deployments(facts: Facts) -> list[Deployment]:
    """The best of each organisation on each sub-fleet."""
    found = [
        deployment(facts, organisation, counts=counts)
        for counts in sub_fleets(facts)
        for organisation in organisations(facts)
    ]
    return [one for one in found if one is not None and one.per_s > 0]


def kinds_of_lengths(
    input_tokens: Sequence[int], output_tokens: Sequence[int], cached_tokens: Sequence[int], *, most: int = 8
) -> tuple[RequestKind, ...]:
    """At most `most` kinds that stand for many requests: equal numbers of them in order of length, each by its means.

    cached_tokens : of each request, below its input
    """
    require(len(input_tokens) > 0, "input_tokens", input_tokens, "empty")
    require(most >= 1, "most", most)
    order = sorted(range(len(input_tokens)), key=lambda row: (input_tokens[row], output_tokens[row]))
    size = ceil(len(order) / most)
    return tuple(
        _mean_kind(order[first : first + size], input_tokens, output_tokens, cached_tokens)
        for first in range(0, len(order), size)
    )


def _mean_kind(
    rows: Sequence[int], input_tokens: Sequence[int], output_tokens: Sequence[int], cached_tokens: Sequence[int]
) -> RequestKind:
    def mean(values: Sequence[int]) -> int:
        return round(sum(values[row] for row in rows) / len(rows))

    whole = max(1, mean(input_tokens))
    return RequestKind(
        input_tokens=whole,
        output_tokens=max(1, mean(output_tokens)),
        cached_tokens=min(mean(cached_tokens), whole - 1),
        share=float(len(rows)),
    )
