"""Estimates of one replica and path at a time, by the scalar functions: slow, and easy to see through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from estimators.estimates import Doubt, Surroundings
from estimators.first_token import Discipline, Rest, service
from estimators.hit_probability import TIER_ROW
from estimators.paths import Path
from estimators.prefetch import PrefetchSpace
from estimators.prefill_features import Beside, prefill_features
from estimators.queueing import OVERDUE_SHARE
from estimators.request import RequestFacts
from estimators.routes import Held, Routes
from estimators.shape_costs import ShapeCosts
from estimators.tiers import Tier
from estimators.view import FleetView


@dataclass(frozen=True)
class Candidate:
    possible: bool
    reused_tokens: float
    fetch_s: float
    ready_s: float
    prefill_s: float
    compute_s: float
    first_token_s: float
    hit_probability: float
    stored_probability: float


@dataclass(frozen=True)
class World:
    """Everything an estimate rests on."""

    costs: ShapeCosts
    layers: int
    routes: Routes
    space: PrefetchSpace | None
    step_tokens: int
    minimum_fetch_tokens: int
    engine_decides: bool
    doubt: Doubt | None
    view: FleetView
    held: Held
    request: RequestFacts
    around: Surroundings
    now_s: float

    @property
    def prompt(self) -> float:
        return float(max(self.request.prompt_tokens, 1))

    def tokens(self, blocks: float) -> float:
        """Of so many leading blocks those that can be reused."""
        return min(float(blocks) * self.request.block_tokens, self.prompt - 1.0)


class OnReplica:
    """All there is to know of one replica."""

    def __init__(self, world: World, row: int, peer: int | None) -> None:
        self.world, self.row, self.peer = world, row, peer
        held, view, around = world.held, world.view, world.around
        self.hbm = world.tokens(held.local_blocks[row])
        self.host = self.hbm if held.host_blocks is None else max(self.hbm, world.tokens(held.host_blocks[row]))
        self.disk = self.host if held.disk_blocks is None else max(self.host, world.tokens(held.disk_blocks[row]))
        if not world.routes.host:
            self.host = self.disk = self.hbm
        self.store = world.tokens(held.store_blocks) if world.routes.store else 0.0
        self.waiting = known(view.foreign_waiting, view.ready, row)
        self.decoding = known(view.foreign_decoding, view.ready, row)
        self.decodes = float(view.decode_batch[row]) + self.decoding
        foreign_read = float(world.costs.read_tokens(around.mean_context_tokens))
        context = float(view.decode_read_tokens[row]) + self.decoding * foreign_read
        weights_s = float(view.weights_s[row])
        self.beside = Beside(
            decodes=self.decodes,
            linear_s=self.decodes * float(view.linear_s_per_token[row] + view.head_s[row]),
            attention_s=context * float(view.decode_attention_s_per_pair[row]),
            memory_s=weights_s + context * float(view.context_s_per_token[row]),
            weights_s=weights_s,
        )

    def prefill_s(self, linear_s: float, attention_s: float, new_tokens: float) -> float:
        features = prefill_features(
            linear_s=linear_s,
            attention_s=attention_s,
            new_tokens=new_tokens,
            beside=self.beside,
            step_tokens=self.world.step_tokens,
        )
        return float(features @ self.world.view.coefficients[self.row])

    def prompt_s(self, reused: float) -> float:
        view, new = self.world.view, self.world.prompt - reused
        linear_s = new * float(view.linear_s_per_token[self.row]) + float(view.head_s[self.row])
        pairs = float(self.world.costs.pairs(new, reused))
        return self.prefill_s(linear_s, pairs * float(view.attention_s_per_pair[self.row]), new)

    @property
    def pace_s(self) -> float:
        view, costs = self.world.view, self.world.costs
        step_s = float(self.beside.memory_s)
        step_s += float(costs.read_tokens(self.world.prompt)) * float(view.context_s_per_token[self.row])
        step_s -= float(view.experts_s[self.row]) * float(costs.untouched_share(self.decodes + 1.0))
        return float(view.pace_scale[self.row]) * step_s

    @property
    def queue_s(self) -> float:
        view, row = self.world.view, self.row
        queue_s = 0.0
        if view.head_ends_s[row] > -np.inf:
            left_s = float(view.head_ends_s[row]) - self.world.now_s
            queue_s += max(left_s, OVERDUE_SHARE * float(view.head_compute_s[row]))
        elif self.decodes > 0:
            untouched_s = float(view.experts_s[row]) * float(self.world.costs.untouched_share(self.decodes))
            queue_s += float(view.pace_scale[row]) * (float(self.beside.memory_s) - untouched_s) / 2.0
        if view.waiting_tokens[row] > 0:
            linear_s, attention_s = float(view.waiting_linear_s[row]), float(view.waiting_attention_s[row])
            queue_s += self.prefill_s(linear_s, attention_s, max(1.0, float(view.waiting_tokens[row])))
        queue_s += float(view.waiting_held_s[row]) + self.waiting * (
            self.world.around.mean_compute_s or self.prompt_s(0.0)
        )
        return max(queue_s, self._memory_s)

    @property
    def _memory_s(self) -> float:
        used, over = self._memory_tokens
        capacity = float(self.world.view.capacity_tokens[self.row])
        given_back = max(1.0, min(used, capacity)) / (self.world.around.others_output_tokens * self.pace_s)
        return max(0.0, over / given_back)

    @property
    def _memory_tokens(self) -> tuple[float, float]:
        """Used, and lacking for this request; nothing lacks where the capacity is unknown."""
        view, row, around = self.world.view, self.row, self.world.around
        capacity = float(view.capacity_tokens[row])
        if isnan(capacity):
            return 1.0, 0.0
        booked = view.decode_context_tokens[row] + view.head_tokens[row] + view.waiting_context_tokens[row]
        foreign = (self.waiting + self.decoding) * around.mean_context_tokens
        used = (float(booked) + foreign) * float(view.occupancy[row])
        return used, used + self.world.prompt - self.hbm - capacity

    # One path.

    def reused(self, path: Path) -> float:
        theirs = 0.0 if self.peer is None else self.world.tokens(self.world.held.local_blocks[self.peer])
        most = {Path.REMOTE: self.store, Path.PEER: theirs}
        if path in most:
            return max(self.disk, most[path])
        return {Path.LOCAL: self.hbm, Path.RECOMPUTE: 0.0, Path.HOST: self.host, Path.DISK: self.disk}[path]

    def fetched(self, path: Path) -> tuple[float, float, float]:
        """F, its part before the first byte of the place the path is named after, and the bytes from there."""
        routes = self.world.routes
        own = [self._part(routes.host, self.hbm, self.host), self._part(routes.disk, self.host, self.disk)]
        if path in (Path.LOCAL, Path.RECOMPUTE):
            return 0.0, 0.0, 0.0
        if path is Path.HOST:
            return own[0]
        if path is Path.REMOTE:
            named = self._part(routes.store, self.disk, self.reused(path))
        elif path is Path.PEER:
            link = [] if self.peer is None else [routes.egress[self.peer]]
            named = self._part([link] * self.world.view.rows, self.disk, self.reused(path))
        else:
            named = own[1]
        return max(named[0], own[0][0], own[1][0]), named[1], named[2]

    def _part(self, place: Sequence[Sequence[int]], begin: float, end: float) -> tuple[float, float, float]:
        if not place or end <= begin:
            return 0.0, 0.0, 0.0
        size = float(self.world.costs.kv_bytes_between(begin, end))
        took_s, first_s = self.world.routes.table.fetch_one(place[self.row], size, self._starts_s)
        return took_s, first_s, size

    @property
    def _discipline(self) -> Discipline:
        return self.world.view.disciplines[self.row]

    @property
    def _starts_s(self) -> float:
        return self.world.now_s + (self.queue_s if self._discipline.in_turn else 0.0)

    def served(self, reused: float, base: float, fetch_s: float, first_byte_s: float) -> tuple[float, float, float]:
        """T_first, the earliest start that the fetch allows, and the length of the service."""
        view, row = self.world.view, self.row
        gained = reused - base
        pair_s = float(view.attention_s_per_pair[row]) * float(view.coefficients[row, 1])
        step_share = self.world.step_tokens / max(gained, 1.0)
        rest = Rest(self.prompt_s(reused), self.prompt_s(base), 0.5 * gained * gained * pair_s, step_share)
        answer = service(
            self._discipline,
            queue_s=self.queue_s,
            fetch_s=fetch_s,
            first_byte_s=first_byte_s,
            rest=rest,
            layers=self.world.layers,
            limit_s=float(view.limit_s[row]),
        )
        return float(answer.first_token_s), float(answer.ready_s), float(answer.work_s)

    def survives(self, tier: Tier, row: int) -> float:
        assert self.world.doubt is not None
        age_s = self.world.held.age_s
        ages = np.full((len(TIER_ROW), self.world.view.rows), np.nan) if age_s is None else age_s
        return float(self.world.doubt.hits.survival(tier, ages[TIER_ROW[tier]], self.world.now_s)[row])

    def _hit(self, path: Path) -> float:
        if self.world.doubt is None or path is Path.RECOMPUTE:
            return 1.0
        hit = self.survives(Tier.HBM, self.row) if self.hbm > 0 else 1.0
        if path is Path.PEER and self.peer is not None:
            hit *= self.survives(Tier.HBM, self.peer)
        if path is not Path.LOCAL and self.host > self.hbm:
            hit *= self.survives(Tier.HOST, self.row)
        if path not in (Path.LOCAL, Path.HOST) and self.disk > self.host:
            hit *= self.survives(Tier.DISK, self.row)
        return hit

    def probabilities(self, path: Path) -> tuple[float, float]:
        hit = self._hit(path)
        if self.world.doubt is None or not self.world.routes.store or self.store < self.world.minimum_fetch_tokens:
            return hit, 0.0
        store = self.survives(Tier.REMOTE, self.row)
        if path is Path.REMOTE:
            return hit * store, (1.0 - hit) * store
        falls_to_it = self.world.engine_decides and path is not Path.RECOMPUTE
        return hit, (1.0 - hit) * store if falls_to_it else 0.0

    def _adds(self, path: Path) -> bool:
        begin = self.hbm if path is Path.HOST else self.host if path is Path.DISK else self.disk
        return self.reused(path) > begin

    def _is_read(self, path: Path) -> bool:
        """Whether the engine reads that place, or can be told to."""
        world = self.world
        if not self._adds(path) or (path is Path.PEER and world.engine_decides):
            return False
        if path is Path.HOST and self._adds(Path.DISK):
            return False
        if path in (Path.HOST, Path.DISK) and world.engine_decides and self._adds(Path.REMOTE):
            return False
        if self.reused(path) - self.hbm < world.minimum_fetch_tokens:
            return False
        if self._memory_tokens[1] > 0.0 and not self._discipline.in_turn:
            return False
        size = self.fetched(path)[2]
        return world.space is None or bool(world.space.fits([size] * world.view.rows)[self.row])

    def possible(self, path: Path) -> bool:
        if not self.world.view.ready[self.row]:
            return False
        if path not in (Path.LOCAL, Path.RECOMPUTE):
            return self._is_read(path)
        unasked = [Path.HOST, Path.DISK] + [Path.REMOTE] * self.world.engine_decides
        if any(self._is_read(other) for other in unasked):
            return False
        return (self.hbm > 0) == (path is Path.LOCAL)

    def candidate(self, path: Path) -> Candidate:
        reused = self.reused(path)
        fetch_s, first_byte_s, _ = self.fetched(path)
        first_s, ready_s, work_s = self.served(reused, self.hbm, fetch_s, first_byte_s)
        if path in (Path.LOCAL, Path.RECOMPUTE):
            work_s = self.prompt_s(reused)
            first_s, ready_s = self.queue_s + work_s, 0.0
        hit, stored = self.probabilities(path)
        return Candidate(
            possible=self.possible(path),
            reused_tokens=reused,
            fetch_s=fetch_s,
            ready_s=ready_s,
            prefill_s=self.prompt_s(reused),
            compute_s=work_s,
            first_token_s=first_s,
            hit_probability=hit,
            stored_probability=stored,
        )

    @property
    def stored_s(self) -> float:
        """T_first when only the store has its part."""
        if not self.world.routes.store:
            return self.queue_s + self.prompt_s(0.0)
        fetch_s, first_byte_s, _ = self._part(self.world.routes.store, 0.0, self.store)
        return self.served(self.store, 0.0, fetch_s, first_byte_s)[0]


def known(reported: np.ndarray[tuple[int], np.dtype[np.float64]], ready: object, row: int) -> float:
    """What a replica reports; else the mean of those that may take the request and do; else nothing."""
    if not isnan(reported[row]):
        return float(reported[row])
    heard = [float(value) for value, may in zip(reported, np.asarray(ready), strict=True) if may and not isnan(value)]
    return sum(heard) / len(heard) if heard else 0.0
