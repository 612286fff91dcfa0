"""Where one replica finds the state of a prompt outside its GPU memory, and the fetches it makes of it.

Model     blocks beyond what HBM has are taken, in the order of the prompt, from the first place that has them: host
          tier, disk, store, or the peer that a directive names. Host state comes over PCIe; the disk's over its
          link, then PCIe; the store's over the network, then PCIe; a peer's over the link that leaves it, straight
          into GPU memory
Valid     blocks of one size
Blind to  the source's own PCIe link when a peer sends from its host memory
Source    Mooncake Store, vLLM's OffloadingConnector and NixlConnector, SGLang HiCache, by their documentation
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sim_backends.alarms import Alarms
from sim_backends.directives import Directive, Path
from sim_backends.disciplines import HAND_OFF, Discipline
from sim_backends.fetch import Fetch, Peer, Plan, Segment
from sim_backends.links import Done, FairLink
from sim_backends.prefetch_space import PrefetchSpace
from sim_backends.store import SharedStore
from sim_backends.tiers import TierStack


class Holder(Protocol):
    """What has blocks: a tier, the store, a peer."""

    def match(self, digests: Sequence[bytes], start: int, limit: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A holder, what its blocks are counted as, and the links they pass."""

    source: str
    holder: Holder
    route: tuple[FairLink, ...]


@dataclass(slots=True)
class Fetcher:
    """One replica's ways to state that its HBM lacks. Links and store may be shared with other replicas.

    places : own tiers, fastest first; remote : the same and the store
    layers : of the model, for the layered shape
    directed : store and peers are read when a directive says so
    asks_store : every request looks the store up, whatever a directive says
    minimum_tokens : a shorter gain is computed rather than fetched; hand-offs are always taken
    limit_s : patience of the time-limited discipline at the turn, >= 0
    peers : by replica name; filled once all replicas exist
    """

    discipline: Discipline
    alarms: Alarms
    block_tokens: int
    bytes_per_token: int
    layers: int
    places: list[Place] = field(default_factory=list)
    remote: list[Place] = field(default_factory=list)
    tiers: TierStack = field(default_factory=TierStack)
    store: SharedStore | None = None
    directed: bool = False
    asks_store: bool = True
    minimum_tokens: int = 0
    limit_s: float = 0.0
    space: PrefetchSpace = field(default_factory=PrefetchSpace)
    peers: Mapping[str, Peer] = field(default_factory=dict)
    fetched_tokens: Counter[str] = field(default_factory=Counter)  # used, by source
    wasted_tokens: int = 0  # asked for and not used

    def plan(
        self, digests: Sequence[bytes], *, here: int, limit: int, prompt_tokens: int, directive: Directive | None
    ) -> Plan | None:
        """What to fetch for a prompt whose first `here` blocks are in HBM; None when the rest is to be computed.

        limit : blocks that may be reused, >= here
        """
        if directive is not None and directive.path is Path.HAND_OFF:
            return self._hand_off(directive, here * self.block_tokens, prompt_tokens)
        segments = self._segments(digests, here, limit, self._places(directive))
        tokens = sum(segment.tokens for segment in segments)
        if tokens == 0 or tokens < self.minimum_tokens:
            return None
        read = any(segment.source == "peer" for segment in segments)
        return Plan(here * self.block_tokens, segments, self.discipline, self._peer(directive) if read else None)

    def has_space(self, plan: Plan) -> bool:
        """Whether the prefetch space has room for what `plan` moves; a hand-off needs none."""
        return self.space.has(self._space_bytes(plan))

    def start(self, plan: Plan, digests: Sequence[bytes], now_s: float, *, first_done: Done, done: Done) -> Fetch:
        """Begin what `plan`, just made for `digests`, says."""
        self.space.take(self._space_bytes(plan))
        fetched = digests[plan.start_tokens // self.block_tokens : plan.end_tokens // self.block_tokens]
        for tier in self.tiers.tiers.values():
            tier.refresh(fetched)
        if self.store is not None:
            self.store.refresh(fetched)
        fetch = Fetch(
            plan,
            bytes_per_token=self.bytes_per_token,
            layers=self.layers,
            first_done=first_done,
            done=done,
            ended=self._ended,
        )
        if plan.peer is not None:
            plan.peer.readers[fetch] = None
            if plan.hand_off is not None:
                plan.peer.kept.reading(plan.hand_off)
        fetch.start(now_s)
        return fetch

    def computed(self, digests: Sequence[bytes], now_s: float) -> None:
        """Blocks are complete in HBM: the store is written through."""
        if self.store is not None:
            self.store.put(digests, now_s)

    def _ended(self, fetch: Fetch, now_s: float) -> None:
        """Give back what a fetch held and count what came of it."""
        plan = fetch.plan
        self.space.give_back(self._space_bytes(plan))
        left = fetch.usable_tokens - plan.start_tokens
        self.wasted_tokens += plan.tokens - left
        for segment in plan.segments:
            used = min(left, segment.tokens)
            self.fetched_tokens[segment.source] += used
            left -= used
        if plan.peer is not None:
            del plan.peer.readers[fetch]
            if plan.hand_off is not None:
                plan.peer.kept.release(plan.hand_off, now_s)

    def _space_bytes(self, plan: Plan) -> int:
        """A hand-off goes straight into the blocks that wait for it."""
        return 0 if plan.hand_off is not None else plan.tokens * self.bytes_per_token

    def _peer(self, directive: Directive | None) -> Peer | None:
        if not self.directed or directive is None or directive.path is not Path.PEER or directive.source is None:
            return None
        return self.peers.get(directive.source)

    def _places(self, directive: Directive | None) -> list[Place]:
        told = self.directed and directive is not None and directive.path is Path.REMOTE
        places = self.remote if self.asks_store or told else self.places
        peer = self._peer(directive)
        return places if peer is None else [*places, Place("peer", peer, (peer.egress,))]

    def _segments(self, digests: Sequence[bytes], here: int, limit: int, places: list[Place]) -> list[Segment]:
        """Runs of blocks by the first place that has them, up to the first block that none has."""
        segments: list[Segment] = []
        position = here
        while position < limit:
            for number, place in enumerate(places):
                end = place.holder.match(digests, position, limit)
                if end > position:
                    end = _before_any(places[:number], digests, position + 1, end)
                    segments.append(Segment(place.source, place.route, (end - position) * self.block_tokens))
                    position = end
                    break
            else:
                break
        return segments

    def _hand_off(self, directive: Directive, start_tokens: int, prompt_tokens: int) -> Plan | None:
        assert directive.source is not None, "checked when the directive was made"
        assert directive.request_id is not None, "checked when the directive was made"
        peer = self.peers.get(directive.source)
        if peer is None:
            return None
        tokens = min(peer.kept.tokens(directive.request_id), prompt_tokens) - start_tokens
        if tokens <= 0:
            return None
        segments = [Segment("hand_off", (peer.egress,), tokens)]
        return Plan(start_tokens, segments, HAND_OFF, peer, directive.request_id)


def _before_any(places: Sequence[Place], digests: Sequence[bytes], start: int, end: int) -> int:
    """The first block in start..end-1 that one of `places` has, else `end`."""
    for index in range(start, end if places else start):
        if any(place.holder.match(digests, index, index + 1) > index for place in places):
            return index
    return end
