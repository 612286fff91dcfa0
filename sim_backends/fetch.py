"""One fetch: what is to come from where, in which parts, and which tokens have come.

Model     consecutive tokens of a prompt in segments, each delivered by one place over one route; places deliver side
          by side, one place its segments one after the other. The parts depend on the discipline's shape
Valid     calls in order of time
Blind to  a block that leaves its source while it is being read (it is still delivered)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sim_backends.block_cache import BlockCache
from sim_backends.disciplines import Discipline, Shape
from sim_backends.links import Done, FairLink
from sim_backends.roles import KeptState
from sim_backends.tiers import TierStack
from sim_backends.transfers import Lane

PIECE_TOKENS = 512  # of the shapes that use what has come: fewer make more events, more waste what is under way


@dataclass(slots=True, eq=False)
class Peer:
    """What other replicas can read of one replica, and who is reading. `egress` is the link that leaves it."""

    cache: BlockCache
    tiers: TierStack
    egress: FairLink
    kept: KeptState
    readers: dict[Fetch, None] = field(default_factory=dict)

    def match(self, digests: Sequence[bytes], start: int, limit: int) -> int:
        """How many leading digests it holds if the first `start` are taken for granted, in HBM or in its tiers."""
        found = max(start, self.cache.match(digests, limit))
        for tier in self.tiers.tiers.values():
            found = tier.match(digests, found, limit)
        return found

    def lose_readers(self, now_s: float) -> None:
        """The replica died: whoever reads from it goes on with what has come."""
        for fetch in list(self.readers):
            fetch.source_lost(now_s)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens that one place delivers."""

    source: str
    route: tuple[FairLink, ...]
    tokens: int

    def piece_tokens(self, index: int) -> int:
        """Size of piece `index`: all are PIECE_TOKENS but the last."""
        return min(PIECE_TOKENS, self.tokens - index * PIECE_TOKENS)


@dataclass(frozen=True, slots=True)
class Plan:
    """One fetch before it starts. Tokens are counted from the start of the prompt; `peer` only if it is read."""

    start_tokens: int
    segments: list[Segment]
    discipline: Discipline
    peer: Peer | None = None
    hand_off: str | None = None

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def end_tokens(self) -> int:
        return self.start_tokens + self.tokens


class Fetch:
    """Exactly one of `done` and `stop` ends it; `first_done` is called by the layered shape before `done`."""

    def __init__(
        self,
        plan: Plan,
        *,
        bytes_per_token: int,
        layers: int,
        first_done: Done,
        done: Done,
        ended: Callable[[Fetch, float], None],
    ) -> None:
        """`ended(fetch, at_s)` is called once however it ends, before `done`."""
        self.plan = plan
        self.over = False
        self._bytes_per_token = bytes_per_token
        self._layers = layers
        self._first_done = first_done
        self._done = done
        self._ended = ended
        self._lanes: list[Lane] = []
        self._pieces: list[list[bool]] = []  # of each segment in prompt order: what has come
        self._first_layers = 0  # lanes whose first layer has not come
        self._open_parts = 0

    @property
    def usable_tokens(self) -> int:
        """Tokens from the start of the prompt whose state is here without a gap, those before the fetch included."""
        if self._open_parts == 0:
            return self.plan.end_tokens
        end = self.plan.start_tokens
        for segment, pieces in zip(self.plan.segments, self._pieces, strict=True):
            for index, here in enumerate(pieces):
                if not here:
                    return end
                end += segment.piece_tokens(index)
        return end

    @property
    def tail_from_tokens(self) -> int:
        """From this token on everything has come, to the end of the plan."""
        start = self.plan.end_tokens
        for segment, pieces in zip(reversed(self.plan.segments), reversed(self._pieces), strict=True):
            for index in range(len(pieces) - 1, -1, -1):
                if not pieces[index]:
                    return start
                start -= segment.piece_tokens(index)
        return start

    def start(self, now_s: float) -> None:
        shape = self.plan.discipline.shape
        split = shape in (Shape.HEAD_FIRST, Shape.TAIL_FIRST)
        lanes: dict[str, list[tuple[int, int]]] = {}
        for number, segment in enumerate(self.plan.segments):
            count = -(-segment.tokens // PIECE_TOKENS) if split else 1
            self._pieces.append([False] * count)
            lanes.setdefault(segment.source, []).extend((number, index) for index in range(count))
        for pieces in lanes.values():
            if shape is Shape.TAIL_FIRST:
                pieces.reverse()
            self._lanes.append(self._pieces_lane(pieces) if split else self._whole_lane(pieces))
        for lane in self._lanes:
            lane.start(now_s)

    def stop(self, now_s: float) -> int:
        """End it, whatever has come; returns `usable_tokens`. Neither callback comes any more."""
        for lane in self._lanes:
            lane.cancel(now_s)
        self._end(now_s)
        return self.usable_tokens

    def source_lost(self, now_s: float) -> None:
        """Its peer died: it is done with what has come. Layers behind a first one in use are taken to come."""
        if self.plan.discipline.shape is Shape.LAYERS and self._first_layers == 0:
            return
        self.stop(now_s)
        self._done(now_s)

    def _pieces_lane(self, pieces: list[tuple[int, int]]) -> Lane:
        segments = self.plan.segments
        parts = [float(segments[number].piece_tokens(index) * self._bytes_per_token) for number, index in pieces]
        self._open_parts += len(parts)

        def arrived(part: int, at_s: float) -> None:
            number, index = pieces[part]
            self._pieces[number][index] = True
            self._part_here(at_s)

        return Lane(segments[pieces[0][0]].route, parts, arrived)

    def _whole_lane(self, pieces: list[tuple[int, int]]) -> Lane:
        """All segments of one place at once, or their first layer and then the rest."""
        segments = self.plan.segments
        parts = [float(sum(segments[number].tokens for number, _ in pieces) * self._bytes_per_token)]
        if self.plan.discipline.shape is Shape.LAYERS and self._layers > 1:
            first = parts[0] / self._layers
            parts = [first, parts[0] - first]
            self._first_layers += 1
        self._open_parts += len(parts)
        return Lane(segments[pieces[0][0]].route, parts, self._layer_here if len(parts) > 1 else self._all_here)

    def _layer_here(self, part: int, at_s: float) -> None:
        if part == 0:
            self._first_layers -= 1
            if self._first_layers == 0:
                self._first_done(at_s)
        self._part_here(at_s)

    def _all_here(self, part: int, at_s: float) -> None:
        self._part_here(at_s)

    def _part_here(self, at_s: float) -> None:
        self._open_parts -= 1
        if self._open_parts == 0 and not self.over:
            self._end(at_s)
            self._done(at_s)

    def _end(self, now_s: float) -> None:
        if not self.over:
            self.over = True
            self._ended(self, now_s)
