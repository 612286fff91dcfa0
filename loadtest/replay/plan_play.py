"""Plays requests through a planned deployment of simulated engines, without a router in between.

Model     the cards as the plan takes them: peaks and bandwidths are scaled so that the engines' own efficiencies give
          the shares that the fleet file states. Requests wait in one line and go to the replica that has least before
          it. Split: to the least busy prefill replica, at most two there, then over the link to the decode replica with
          room and least to do; no more prefills begin while as many states wait for such a place as there are prefill
          replicas. Nothing is served before the service is ready
Valid     dense models with grouped-query attention on one card each; whole replicas, and prefill and decode apart with
          states handed over directly
Blind to  a store, whose writes the simulated engines do for free; what a router's policy does about full replicas
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, nan

import numpy as np
import numpy.typing as npt

from estimators.planning.deployments import (
    Deployment,
    Facts,
    Organisation,
    RequestKind,
    batch_on,
    link_bytes_per_s,
    mean_times,
    times_on,
)
from router.errors import ConfigError
from sim_backends import fleet as sim_fleet
from sim_backends.directives import Directive, Path
from sim_backends.links import FairLink
from sim_backends.requests import EngineRequest, Output
from sim_backends.service_times import Constants
from sim_backends.world import World, build

BLOCK_TOKENS = 64  # coarser than engines' 16, which changes nothing here and is played faster
MOST_AT_PREFILL = 2  # one computed, one waiting: more only grow old there

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. number : unique; at_s : arrival"""

    number: int
    at_s: float
    kind: RequestKind


@dataclass(frozen=True, slots=True)
class Played:
    """Requests in order of arrival, seconds; each shape (requests,)."""

    arrived_s: Times
    first_token_s: Times  # since arrival
    ended_s: Times  # absolute
    output_tokens: npt.NDArray[np.int64]
    card: npt.NDArray[np.int64]  # kind of card that decoded, its place among the facts' cards

    def pace_s(self, first: int) -> float:
        """Mean time between tokens on the kind of card where it is longest, of requests from `first` on; 0: none."""
        several = (self.output_tokens > 1) & (np.arange(len(self.card)) >= first)
        took_s = self.ended_s - self.arrived_s - self.first_token_s
        pace_s = took_s[several] / (self.output_tokens[several] - 1)
        return max((float(np.mean(pace_s[self.card[several] == one])) for one in set(self.card[several])), default=0.0)

    def waiting(self, at_s: Times) -> Times:
        """Requests that have come and have no first token, at each of these times."""
        came = np.searchsorted(self.arrived_s, at_s, side="right")
        begun = np.searchsorted(np.sort(self.arrived_s + self.first_token_s), at_s, side="right")
        return np.asarray(came - begun, dtype=np.float64)


@dataclass(slots=True)
class _Replica:
    """row : in the world; card : its kind; batch : places; prefill_s, step_s : by formula, to tell who is faster

    waiting, running : requests before and after their first token there
    """

    row: int
    name: str
    card: int
    batch: int
    prefill_s: float
    step_s: float
    waiting: int = 0
    running: int = 0

    @property
    def present(self) -> int:
        return self.waiting + self.running


@dataclass(slots=True)
class _Open:
    asked: Asked
    replica: _Replica
    first_token_s: float = nan  # absolute
    source: _Replica | None = None  # where its state is kept


@dataclass(slots=True)
class Play:
    """One deployment under one list of arrivals."""

    facts: Facts
    chosen: Deployment
    seed: int
    ready_s: float
    _world: World = field(init=False)
    _prefill: list[_Replica] = field(init=False)
    _decode: list[_Replica] = field(init=False)
    _line: deque[Asked] = field(default_factory=deque)
    _computed: deque[_Open] = field(default_factory=deque)  # states that wait for a place to decode
    _open: dict[str, _Open] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engines = engines_of(self.facts, self.chosen)
        self._world = build(engines, seed=self.seed, outputs="ends")
        replicas = self._replicas(engines)
        splits = self.chosen.organisation.splits
        self._prefill = [one for one in replicas if one.name.startswith("p")] if splits else replicas
        self._decode = [one for one in replicas if one.name.startswith("d")] if splits else replicas
        if splits and self.facts.peer_bytes_per_s is None:
            self._share_one_link()

    def run(self, rows: Sequence[Asked], on_ended: Callable[[], None] | None = None) -> Played:
        """Play all `rows`, in order of arrival, to the last token. `on_ended` hears of each request that ends."""
        size = len(rows)
        played = Played(
            np.array([row.at_s for row in rows]),
            np.full(size, nan),
            np.full(size, nan),
            np.array([row.kind.output_tokens for row in rows], dtype=np.int64),
            np.zeros(size, dtype=np.int64),
        )
        coming = deque(rows)
        while coming or self._line or self._open or self._computed:
            now_s = self._next_s(coming)
            for output in self._world.advance(now_s):
                if self._hear(output, played) and on_ended is not None:
                    on_ended()
            while coming and coming[0].at_s <= now_s:
                self._line.append(coming.popleft())
            if now_s >= self.ready_s:
                self._place(now_s)
        return played

    def _next_s(self, coming: deque[Asked]) -> float:
        due_s = self._world.next_due_s()
        times_s = [inf if due_s is None else due_s, coming[0].at_s if coming else inf]
        if self._line and not self._open and not self._computed:
            times_s.append(max(self.ready_s, self._line[0].at_s))
        now_s = min(times_s)
        assert now_s < inf, "requests wait but nothing will happen"
        return now_s

    def _place(self, now_s: float) -> None:
        if self.chosen.organisation.splits:
            self._hand_over(now_s)
        while self._line and (replica := self._for_prefill()) is not None:
            self._begin(self._line.popleft(), replica, now_s)

    def _for_prefill(self) -> _Replica | None:
        if self.chosen.organisation.splits:
            free = [one for one in self._prefill if one.waiting < MOST_AT_PREFILL]
            if len(self._computed) >= len(self._prefill):
                return None  # decode is what is short of: states would only fill the memory of prefill
        else:
            free = [one for one in self._prefill if one.present < one.batch]
        return min(free, key=_prefill_load, default=None)

    def _begin(self, asked: Asked, replica: _Replica, now_s: float) -> None:
        hands_over = self.chosen.organisation.splits and asked.kind.output_tokens > 1
        output = 1 if hands_over else asked.kind.output_tokens
        name = f"p-{asked.number}"
        directive = Directive(request_id=name, keep=True) if hands_over else None
        self._submit(name, asked, replica, output, directive, now_s, given=asked.kind.cached_tokens)

    def _submit(
        self,
        name: str,
        asked: Asked,
        replica: _Replica,
        output: int,
        directive: Directive | None,
        now_s: float,
        *,
        given: int = 0,
    ) -> None:
        tokens = asked.kind.input_tokens
        full = tokens // BLOCK_TOKENS
        first = asked.number * full  # no two prompts share a block: what is cached is said, not found
        request = EngineRequest(
            name,
            max_tokens=output,
            output_tokens=output,
            block_ids=list(range(first, first + full)),
            prompt_tokens=tokens,
            directive=directive,
            given_tokens=given,
        )
        self._open[name] = _Open(asked, replica)
        replica.waiting += 1
        self._world.submit(replica.row, request, now_s)

    def _hand_over(self, now_s: float) -> None:
        while self._computed:
            free = [one for one in self._decode if one.present < one.batch]
            replica = min(free, key=_decode_load, default=None)
            if replica is None:
                return
            done = self._computed.popleft()
            directive = Directive(Path.HAND_OFF, source=done.replica.name, request_id=f"p-{done.asked.number}")
            self._submit(f"d-{done.asked.number}", done.asked, replica, done.asked.kind.output_tokens, directive, now_s)

    def _hear(self, output: Output, played: Played) -> bool:
        """Whether a request has ended with it."""
        one = self._open[output.request_id]
        replica, asked = one.replica, one.asked
        if output.index == 0:
            replica.waiting -= 1
            replica.running += 1
            played.first_token_s[asked.number] = output.at_s - asked.at_s
        if output.finish_reason is None:
            return False
        replica.running -= 1
        del self._open[output.request_id]
        if output.request_id.startswith("p-") and self.chosen.organisation.splits and asked.kind.output_tokens > 1:
            self._computed.append(one)
            return False
        played.ended_s[asked.number] = output.at_s
        played.card[asked.number] = replica.card
        return True

    def _replicas(self, engines: sim_fleet.Fleet) -> list[_Replica]:
        names = [kind.name for kind in self.facts.cards]
        found = []
        for row, replica in enumerate(engines.replicas):
            kind = names.index(replica.card)
            card = self.facts.cards[kind].card
            times = mean_times(times_on(self.facts, card, self.chosen.organisation), self.facts.shares)
            batch = batch_on(self.facts, card)
            prefill_s, step_s = max(times.prefill_s, 1e-9), max(times.step_s, 1e-9)
            found.append(_Replica(row, replica.name, kind, batch, prefill_s, step_s))
        return found

    def _share_one_link(self) -> None:
        """All hand-offs over the one network, not each sender over its own."""
        network = FairLink(rate_bytes_per_s=link_bytes_per_s(self.facts, self.chosen.organisation))
        links = self._world.links
        for engine in self._world.engines:
            assert engine.peer is not None, "the fleet has a link between peers"
            engine.peer.egress = network
        links[:] = [network]
        self._world = World(
            self._world.engines,
            links,
            alarms=self._world.alarms,
            rows=self._world.rows,
        )


def _prefill_load(replica: _Replica) -> tuple[float, float]:
    return (replica.waiting + 1) * replica.prefill_s, (replica.running + 1) * replica.step_s


def _decode_load(replica: _Replica) -> float:
    return (replica.present + 1) * replica.step_s


def engines_of(facts: Facts, chosen: Deployment) -> sim_fleet.Fleet:
    """The deployment as the simulated engines read a fleet.

    Raises
    ------
    ConfigError : they cannot play this model.
    """
    own = Constants()
    cards = {
        kind.name: sim_fleet.Card(
            peak_tflops=kind.card.peak_tflops * kind.card.compute_share / own.linear_efficiency,
            memory_gb_s=kind.card.memory_gb_s * kind.card.memory_share / own.memory_efficiency,
            memory_gib=kind.card.memory_gib,
        )
        for kind in facts.cards
    }
    rate = link_bytes_per_s(facts, Organisation.SPLIT)
    longest = max(kind.input_tokens + kind.output_tokens for kind in facts.kinds)
    return sim_fleet.Fleet(
        model=model_of(facts),
        cards=cards,
        replicas=_rows(facts, chosen),
        block_tokens=BLOCK_TOKENS,
        links={"peer": sim_fleet.Link(gb_s=rate / 1e9)} if rate < inf else {},
        peers=sim_fleet.Peers(link="peer") if chosen.organisation.splits else None,
        fetch=sim_fleet.Fetch(by="directed"),
        engine=sim_fleet.Engine(max_running=facts.batch, max_model_len=longest),
    )


def _rows(facts: Facts, chosen: Deployment) -> list[sim_fleet.Replica]:
    """Replicas by role; a prefix of the name says which."""
    splits = chosen.organisation.splits
    parts = [("p", chosen.prefill), ("d", chosen.decode)] if splits else [("r", chosen.prefill)]
    return [
        sim_fleet.Replica(name=f"{role}-{kind.name}-{number}", card=kind.name)
        for role, counts in parts
        for many, kind in zip(counts, facts.cards, strict=True)
        for number in range(many)
    ]


def model_of(facts: Facts) -> sim_fleet.Model:
    """The shape as the simulated engines know shapes. Raises ConfigError."""
    shape = facts.shape
    differs = (
        ("experts", shape.experts is not None),
        ("latent attention", shape.latent is not None),
        ("recurrent or windowed layers", set(shape.pattern) != {"full"}),
        ("number formats", shape.weights is not None or shape.kv is not None),
    )
    for what, has in differs:
        if has:
            raise ConfigError(f"--simulate: the model has {what}, which the simulated engines do not play")
    return sim_fleet.Model(
        name=shape.name,
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        value_bytes=shape.value_bytes,
    )
