"""Q, R, C, first token and price of one request on every replica, by every path: one call, arrays out.

Model     queueing.py (Q), routes.py and links.py (R), roofline.py corrected by calibration.py (C), first_token.py
          (T_first), hit_probability.py and mixture.py (what if the blocks are gone), price.py. Where the engine
          decides the path by itself, only what it will do is possible
Valid     replicas of one model; one shared store
Blind to  blocks that are evicted only in part: all a path reuses is there, or none of it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from estimators.conformal import Conformal
from estimators.few_replicas import BY_PATH, BY_ROW, MOST_ROWS, Asked, FewReplicas
from estimators.first_token import Discipline, Rest, Service, in_turn_mask, service, service_by_row
from estimators.hit_probability import TIER_ROW, HitProbability
from estimators.mixture import spread_quantile_s
from estimators.paths import COLUMN, PATHS, Path
from estimators.prefetch import PrefetchSpace
from estimators.prefill_features import Beside, prefill_s
from estimators.price import queue_behind_s, running_decodes_s
from estimators.queueing import beside, memory_wait_s, or_mean_of_known, start_s
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.routes import DISK, HOST, NO_LINK, PEER, STORE, Held, Routes, Rows, best_peers
from estimators.shape_costs import ShapeCosts
from estimators.spread import ResidualSpread
from estimators.tiers import Tier
from estimators.view import Column, FleetView

Grid = npt.NDArray[np.float64]  # (paths, rows)
Mask = npt.NDArray[np.bool_]

LEVELS = (0.9, 0.99)  # of the quantiles that receipts carry and coverage is counted of

_LOCAL, _RECOMPUTE, _REMOTE, _PEER, _HOST, _DISK = (COLUMN[path] for path in PATHS)
_IN_HBM, _IN_HOST, _ON_DISK, _IN_STORE = (TIER_ROW[tier] for tier in (Tier.HBM, Tier.HOST, Tier.DISK, Tier.REMOTE))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else is going on for this request's model: inputs of the price.

    arrival_rps : arrivals per second at one replica, >= 0; the same for all, see `price.py`
    mean_compute_s : mean prefill work of a request, seconds, >= 0
    mean_context_tokens : mean context of a request, >= 0
    output_tokens : expected output of this request, > 0
    others_output_tokens : what a request met at a random moment of its decode has yet to produce, expected, > 0
    """

    arrival_rps: float
    mean_compute_s: float
    mean_context_tokens: float
    output_tokens: float
    others_output_tokens: float


@dataclass(frozen=True, slots=True)
class Doubt:
    """What is learned of how estimates fail, read for every request.

    hits : whether believed blocks are still there; spread : how far first tokens are from their estimates
    conformal : what makes quantiles cover what they claim
    """

    hits: HitProbability
    spread: ResidualSpread
    conformal: Conformal


@dataclass  # not frozen: that many checked assignments would be a tenth of a decision
class Estimates:
    """All candidates of one request, not to be changed. Times in seconds.

    Grids have shape (paths, rows), of the leading ones of `PATHS`, as many as the fleet has.

    possible : the engine can and, left to itself, will take this path there, and the replica may be chosen
    reused_tokens : prompt tokens not computed, if all believed blocks are there
    queue_s : Q, shape (rows,)
    fetch_s : F, the fetch's duration from its start; zero where nothing is fetched
    ready_s : earliest start the fetch allows, from now; zero where nothing is fetched
    prefill_s : computing what is not reused, running decodes in the same steps included
    compute_s : C, the length of the service: that, and what a fetch adds to it; max(Q, ready_s) + C is the first token
    first_token_s : T_first, if all believed blocks are there
    hit_probability : that they are; 1 where nothing is reused
    stored_probability : that they are not, but the store has its part of the prompt; zero without a store
    stored_s : T_first then, shape (rows,); if neither, it is that of RECOMPUTE
    age_s : how long ago each tier's blocks were last heard of, (tiers, rows); NaN unknown
    pace_s : seconds per output token there, shape (rows,)
    decoding, remaining_tokens : decodes running there, and output they have yet to produce, shape (rows,)
    step_growth_s : what this request's context adds to each later step, shape (rows,)
    around, prompt_tokens : of the request
    peers : replica each one reads from on path PEER, shape (rows,); None without peers
    scale, shift : of the logarithm of observed over expected first token, shape (rows,); see `spread.py`
    doubt : where those came from; None where nothing is learned
    """

    possible: npt.NDArray[np.bool_]
    reused_tokens: Grid
    queue_s: Column
    fetch_s: Grid
    ready_s: Grid
    prefill_s: Grid
    compute_s: Grid
    first_token_s: Grid
    hit_probability: Grid
    stored_probability: Grid
    stored_s: Column
    age_s: npt.NDArray[np.float64]
    pace_s: Column
    decoding: Column
    remaining_tokens: Column
    step_growth_s: Column
    around: Surroundings
    prompt_tokens: int
    peers: npt.NDArray[np.int64] | None = None
    scale: Column | float = 0.0
    shift: Column | float = 0.0
    doubt: Doubt | None = None

    @property
    def usable_rows(self) -> npt.NDArray[np.bool_]:
        """Whether each replica has a possible path, shape (rows,)."""
        return np.asarray(self.possible.any(axis=0))

    @property
    def output_tokens(self) -> float:
        """Expected output of this request."""
        return self.around.output_tokens

    def path_at(self, row: int) -> Path:
        """The possible path with the earliest first token on `row`; at least one must be possible there."""
        times_s = np.where(self.possible[:, row], self.expected_s[:, row], np.inf)
        return PATHS[int(np.argmin(times_s))]

    @cached_property
    def expected_s(self) -> Grid:
        """Mean first token, over where the blocks then really are."""
        if self.doubt is None:
            return self.first_token_s
        recompute_s, expected_s = np.empty((2, *self.first_token_s.shape))
        recompute_s[:] = self.first_token_s[_RECOMPUTE]
        expected_s[:] = self.stored_s
        expected_s -= recompute_s
        expected_s *= self.stored_probability
        expected_s += recompute_s
        np.subtract(self.first_token_s, recompute_s, out=recompute_s)
        recompute_s *= self.hit_probability
        expected_s += recompute_s
        return np.asarray(expected_s)

    @cached_property
    def queue_price_s(self) -> Grid:
        """Delay caused to requests that come later; see `price.py`."""
        around = self.around
        return queue_behind_s(
            arrival_rps=around.arrival_rps,
            utilisation=around.arrival_rps * around.mean_compute_s,
            queue_s=self.queue_s,
            work_s=self.compute_s,
        )

    @cached_property
    def decode_price_s(self) -> Grid:
        """Delay caused to running decodes; see `price.py`."""
        return running_decodes_s(
            decode_batch=self.decoding,
            work_s=self.compute_s,
            step_growth_s=self.step_growth_s,
            remaining_tokens=self.remaining_tokens,
        )

    def quantiles_s(self, path: Path, row: int) -> tuple[Column, Column]:
        """Quantiles of the first token at LEVELS of one candidate: as the mixture has them, and as issued.

        Both are needed later, when the outcome corrects the second.
        """
        column = COLUMN[path]
        raw = self._quantiles(np.s_[column : column + 1, row])[:, 0]
        return raw, self._corrected(raw)

    @cached_property
    def quantile_grid_s(self) -> npt.NDArray[np.float64]:
        """Quantiles at LEVELS of every possible candidate, shape (levels, paths, rows); inf where it is impossible."""
        grid = np.full((len(LEVELS), *self.possible.shape), np.inf)
        grid[:, self.possible] = self._corrected(self._quantiles(self.possible))
        return grid

    def _corrected(self, raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return raw if self.doubt is None else self.doubt.conformal.corrected(self.prompt_tokens, raw)

    def _quantiles(self, which: npt.NDArray[np.bool_] | tuple[slice, int]) -> npt.NDArray[np.float64]:
        """(levels, n) of the candidates that `which` selects from a grid."""

        def chosen(values: Grid | float) -> npt.NDArray[np.float64]:
            return np.broadcast_to(values, self.possible.shape)[which]

        hit, stored = chosen(self.hit_probability), chosen(self.stored_probability)
        probability = np.stack((hit, stored, 1.0 - hit - stored))
        recompute_s = self.first_token_s[_RECOMPUTE]
        time_s = np.stack((self.first_token_s[which], chosen(self.stored_s), chosen(recompute_s)))
        scale, shift = chosen(self.scale), chosen(self.shift)
        return np.stack([spread_quantile_s(probability, time_s, q, scale=scale, shift=shift) for q in LEVELS])


class Estimator:
    """Turns facts into `Estimates`. Changes nothing of what it reads.

    costs : of the model; layers : it has
    rows : replicas
    routes : links from store, peers and own tiers to each replica; None where there is nothing but HBM
    space : room for fetches under way on each replica; None where there is no limit
    step_tokens : prompt tokens an engine computes in one step at most, >= 1
    minimum_fetch_tokens : a gain shorter than this is computed rather than fetched, >= 1
    engine_decides : the engine looks the store up by itself; otherwise store and peers are read when told to
    doubt : what is learned of how estimates fail; None believes everything
    """

    def __init__(
        self,
        *,
        costs: ShapeCosts,
        layers: int,
        rows: int,
        routes: Routes | None = None,
        space: PrefetchSpace | None = None,
        minimum_fetch_tokens: int = 1,
        step_tokens: int = 2048,
        engine_decides: bool = True,
        doubt: Doubt | None = None,
    ) -> None:
        require(layers >= 1, "layers", layers)
        require(minimum_fetch_tokens >= 1, "minimum_fetch_tokens", minimum_fetch_tokens)
        require(step_tokens >= 1, "step_tokens", step_tokens)
        self.costs = costs
        self.routes = routes or Routes()
        self.space = space
        self.step_tokens = step_tokens
        self.doubt = doubt
        self.layers = layers
        self._minimum_fetch_tokens = minimum_fetch_tokens
        self._engine_decides = engine_decides
        self._egress = np.array(self.routes.egress, dtype=np.int64)
        self._has_store, self._has_tiers = bool(self.routes.store), bool(self.routes.host)
        self._has_peers = len(self._egress) > 0
        self._paths = _paths_of(self.routes)
        # What an engine fetches without being asked: tiers of its own, and the store if it looks it up by itself.
        tiers = (_HOST, _DISK) if self._has_tiers else ()
        self._unasked = (_REMOTE, *tiers) if engine_decides and self._paths > _REMOTE else tiers
        stages = self.routes.stages(rows)[: self._paths - _REMOTE]
        self._stages = np.concatenate((stages, stages[:1])) if self._has_store else stages
        self._ways = self.routes.table.ways(self._stages)
        # Candidates are the paths, with a store its whole prefix on an empty replica, and what waits on the replica.
        self._candidates = self._paths + self._has_store + 1
        self._unknown_ages = np.full((len(TIER_ROW), rows), np.nan)
        self._few = None
        if rows <= MOST_ROWS and not self._has_tiers:
            self._few = FewReplicas(
                costs=costs,
                routes=self.routes,
                step_tokens=step_tokens,
                minimum_fetch_tokens=minimum_fetch_tokens,
                engine_decides=engine_decides,
            )

    def estimate(
        self, request: RequestFacts, held: Held, view: FleetView, around: Surroundings, now_s: float
    ) -> Estimates:
        """Estimates of `request` as it stands at `now_s`. Replicas that are not ready have no possible path."""
        prompt = float(max(request.prompt_tokens, 1))
        paths, discipline = self._paths, view.discipline
        if self._few is not None and discipline is Discipline.OVERLAPPED and self.space is None:
            return self._estimate_few(self._few, prompt, request, held, view, around, now_s)
        peers = best_peers(held.local_blocks, self._egress, self._outstanding(now_s)) if self._has_peers else None
        reused = self._reused(request.block_tokens, held, peers, prompt)
        near = beside(view, around.mean_context_tokens)
        computed = self._compute_s(prompt, reused, view, near)
        prefill = compute = computed[:-1]
        pace_s, growth_s = self._pace(view, near, prompt)
        queue = self._queue_s(view, around, near, computed[-1], pace_s, prompt - reused[_LOCAL], now_s)
        fetch = ready = np.zeros(prefill.shape)
        size = None
        if paths > _REMOTE:
            size = self._sizes(reused)
            took_s, first_byte_s = self._fetches(size, queue, peers, view, discipline, now_s)
            fetch[_REMOTE:] = took_s
        if discipline is Discipline.OVERLAPPED or size is None:  # without what the others need
            first = np.empty(prefill.shape)
            first[:] = queue
            np.maximum(first, fetch, out=first)
            first += prefill
        else:
            served = self._served(took_s, first_byte_s, reused, prefill, queue, view, discipline)
            first, ready = queue + prefill, np.zeros(prefill.shape)
            first[_REMOTE:], ready[_REMOTE:] = served.first_token_s, served.ready_s
            compute = np.concatenate((prefill[:_REMOTE], served.work_s))
        cached = reused[_LOCAL] > 0
        age_s = self._unknown_ages if held.age_s is None else held.age_s
        hit, stored = self._hits(held.age_s, cached, reused, peers, now_s)
        doubt, decoding = self.doubt, np.asarray(near.decodes)
        remaining = decoding - view.decode_batch
        remaining *= around.others_output_tokens
        remaining += view.remaining_tokens
        return Estimates(
            possible=self._possible(reused, cached, size, view.ready),
            reused_tokens=reused[:paths],
            queue_s=queue,
            fetch_s=fetch[:paths],
            ready_s=ready[:paths],
            prefill_s=prefill[:paths],
            compute_s=compute[:paths],
            first_token_s=first[:paths],
            hit_probability=hit,
            stored_probability=stored,
            stored_s=first[paths] if self._has_store else first[_RECOMPUTE],
            age_s=age_s,
            pace_s=pace_s,
            decoding=decoding,
            remaining_tokens=remaining,
            step_growth_s=growth_s,
            around=around,
            prompt_tokens=request.prompt_tokens,
            peers=peers,
            scale=0.0 if doubt is None else doubt.spread.scale(now_s),
            shift=0.0 if doubt is None else doubt.spread.shift(now_s),
            doubt=doubt,
        )

    def _estimate_few(
        self,
        few: FewReplicas,
        prompt: float,
        request: RequestFacts,
        held: Held,
        view: FleetView,
        around: Surroundings,
        now_s: float,
    ) -> Estimates:
        """The same, in plain numbers as far as it goes."""
        peers = best_peers(held.local_blocks, self._egress, self._outstanding(now_s)) if self._has_peers else None
        age_s = self._unknown_ages if held.age_s is None else held.age_s
        doubt = self.doubt
        survives = None if doubt is None else doubt.hits.survivals(held.age_s, now_s).tolist()
        block, most = request.block_tokens, prompt - 1.0
        asked = Asked(
            prompt=prompt,
            hbm=[min(float(blocks * block), most) for blocks in held.local_blocks.tolist()],
            store=min(float(held.store_blocks * block), most),
            peers=None if peers is None else peers.tolist(),
            in_hbm=None if survives is None else survives[_IN_HBM],
            in_store=None if survives is None else survives[_IN_STORE],
            now_s=now_s,
        )
        numbers = few.numbers(asked, view, around)
        queue, pace_s, growth_s, decoding, remaining, stored_s = numbers[: len(BY_ROW)]
        grids = numbers[len(BY_ROW) :].reshape(len(BY_PATH), -1, view.rows)[:, : self._paths]
        possible, reused, fetch, prefill, first, hit, stored = grids
        return Estimates(
            possible=possible > 0.0,
            reused_tokens=reused,
            queue_s=queue,
            fetch_s=fetch,
            ready_s=fetch,
            prefill_s=prefill,
            compute_s=prefill,
            first_token_s=first,
            hit_probability=hit,
            stored_probability=stored,
            stored_s=stored_s,
            age_s=age_s,
            pace_s=pace_s,
            decoding=decoding,
            remaining_tokens=remaining,
            step_growth_s=growth_s,
            around=around,
            prompt_tokens=request.prompt_tokens,
            peers=peers,
            scale=0.0 if doubt is None else doubt.spread.scale(now_s),
            shift=0.0 if doubt is None else doubt.spread.shift(now_s),
            doubt=doubt,
        )

    def work_s(self, row: int, new_tokens: float, cached_tokens: float, view: FleetView) -> tuple[float, float]:
        """Linear and attention seconds, at the roofline, of computing tokens on one replica; output head excluded."""
        pairs = float(self.costs.pairs(new_tokens, cached_tokens))
        return new_tokens * float(view.linear_s_per_token[row]), pairs * float(view.attention_s_per_pair[row])

    def fetched_bytes(self, estimates: Estimates, path: Path, row: int) -> list[tuple[list[int], float]]:
        """What one candidate moves: for each place it reads from, the links crossed and the bytes. Empty: nothing."""
        column = COLUMN[path]
        if column < _REMOTE:
            return []
        reused = estimates.reused_tokens[:, row].tolist()
        hbm = own = reused[_LOCAL]
        parts: list[tuple[int, float, float]] = []
        if self._has_tiers:
            host, disk = (reused[_HOST], reused[_DISK]) if path is not Path.HOST else (reused[_HOST],) * 2
            parts, own = [(HOST, hbm, host), (DISK, host, disk)], disk
        if path in (Path.REMOTE, Path.PEER):
            parts.append((STORE if path is Path.REMOTE else PEER, own, reused[column]))
        moved = []
        for place, start, stop in parts:
            size = float(self.costs.kv_bytes_between(start, stop))
            stages = [int(self._egress[estimates.peers[row]])] if place == PEER and estimates.peers is not None else []
            stages = stages or [link for link in self._stages[place, row].tolist() if link != NO_LINK]
            if size > 0:
                moved.append((stages, size))
        return moved

    def fetch_alone(self, estimates: Estimates, path: Path, row: int, starts_s: float) -> tuple[float, float]:
        """F and its part before the first byte of one candidate's fetch if it started at `starts_s`, absolute."""
        fetches = [
            self.routes.table.fetch_one(stages, size, starts_s)
            for stages, size in self.fetched_bytes(estimates, path, row)
        ]
        return max(fetches, default=(0.0, 0.0))

    def rest_of(self, estimates: Estimates, path: Path, row: int, view: FleetView) -> Rest:
        """C(x) of one candidate: what is left to compute when a share of its fetch has come."""
        all_s, none_s = estimates.prefill_s[COLUMN[path], row].item(), estimates.prefill_s[_LOCAL, row].item()
        gained = float(estimates.reused_tokens[COLUMN[path], row] - estimates.reused_tokens[_LOCAL, row])
        bend_s = 0.5 * gained * gained * float(view.attention_s_per_pair[row] * view.coefficients[row, 1])
        return Rest(all_s, max(all_s, none_s), min(bend_s, max(0.0, none_s - all_s)))

    # Where the state is, and what is left to compute

    def _reused(self, block: int, held: Held, peers: Rows | None, prompt: float) -> Grid:
        """Tokens not computed on each path, (paths, rows), and with a store in a last row those of its whole prefix."""
        most = prompt - 1.0  # an engine always computes one token
        hbm = np.minimum(held.local_blocks * float(block), most)
        reused = np.zeros((self._paths + self._has_store, len(hbm)))
        reused[_LOCAL] = own = hbm
        if self._has_tiers:
            host = hbm if held.host_blocks is None else held.host_blocks * float(block)
            disk = host if held.disk_blocks is None else held.disk_blocks * float(block)
            reused[_HOST] = np.minimum(np.maximum(host, hbm), most)
            reused[_DISK] = own = np.minimum(np.maximum(disk, reused[_HOST]), most)
        if self._has_store:
            stored = min(float(held.store_blocks * block), most)
            reused[_REMOTE] = np.maximum(own, stored)
            reused[-1] = stored
        elif self._paths > _REMOTE:
            reused[_REMOTE] = own
        if peers is not None:
            reused[_PEER] = np.maximum(own, hbm[peers])
        elif self._paths > _PEER:
            reused[_PEER] = own
        return reused

    def _compute_s(self, prompt: float, reused: Grid, view: FleetView, near: Beside) -> Grid:
        """C of every candidate, and in a last row that of the work that waits: one call for all is the cheapest."""
        shape = (self._candidates, view.rows)
        tokens, linear, attention = work = np.empty((3, *shape))
        rates = np.empty((3, self._candidates - 1, view.rows))
        rates[:] = view.work_rates[:, None]
        linear_s, attention_s, head_s = rates
        new = tokens[:-1]
        np.subtract(prompt, reused, out=new)
        np.multiply(new, linear_s, out=linear[:-1])
        linear[:-1] += head_s
        np.multiply(self.costs.pairs(new, reused), attention_s, out=attention[:-1])
        work[1:, -1] = view.waiting[:2]
        np.maximum(view.waiting_tokens, 1.0, out=tokens[-1])
        compute = prefill_s(
            linear_s=linear,
            attention_s=attention,
            new_tokens=tokens,
            beside=near,
            step_tokens=self.step_tokens,
            coefficients=view.coefficients,
        )
        compute[-1] *= np.sign(view.waiting_tokens)  # nothing, where nothing waits
        return compute

    # Q

    def _pace(self, view: FleetView, near: Beside, prompt: float) -> tuple[Column, Column]:
        """Seconds per output token of this request on every replica, and its own context's part of them."""
        growth_s = view.context_s_per_token * float(self.costs.read_tokens(prompt))
        step_s = near.memory_s + growth_s
        if self.costs.chosen_share < 1.0:  # a few decodes touch few of the experts
            step_s = step_s - view.experts_s * self.costs.untouched_share(np.add(near.decodes, 1.0))
        return view.pace_scale * step_s, growth_s

    def _queue_s(
        self,
        view: FleetView,
        around: Surroundings,
        near: Beside,
        waiting_s: Column,
        pace_s: Column,
        needed_tokens: Column,
        now_s: float,
    ) -> Column:
        foreign = or_mean_of_known(view.foreign_waiting, view.ready)
        step_s = view.pace_scale * near.memory_s
        step_s *= np.sign(near.decodes)  # nothing, where nothing decodes
        queue = start_s(
            view,
            now_s,
            step_s=step_s,
            waiting_s=waiting_s + view.waiting_held_s,
            foreign_waiting=foreign,
            mean_compute_s=around.mean_compute_s,
        )
        if not view.knows_capacity:
            return queue
        strangers = foreign + near.decodes - view.decode_batch
        memory_s = memory_wait_s(
            view,
            needed_tokens=needed_tokens,
            foreign_tokens=strangers * around.mean_context_tokens,
            turnover_s=around.others_output_tokens * pace_s,
        )
        return np.maximum(queue, memory_s)

    # R

    def _outstanding(self, now_s: float) -> npt.NDArray[np.float64]:
        return self.routes.table.outstanding_bytes(now_s)

    def _sizes(self, reused: Grid) -> Grid:
        """Bytes each place delivers, in the order of the paths: (store, peer, host, disk, store from nothing)."""
        hbm = reused[_LOCAL]
        begin = np.empty_like(reused[_REMOTE:])
        begin[:] = reused[_DISK] if self._has_tiers else hbm
        if self._has_tiers:
            begin[_HOST - _REMOTE], begin[_DISK - _REMOTE] = hbm, reused[_HOST]
        if self._has_store:
            begin[-1] = 0.0
        return self.costs.kv_bytes_between(begin, reused[_REMOTE:])

    def _fetches(
        self,
        size: Grid,
        queue: Column,
        peers: Rows | None,
        view: FleetView,
        discipline: Discipline | None,
        now_s: float,
    ) -> tuple[Grid, Grid]:
        """F of each path that fetches, and its part before the first byte."""
        starts_s: Column | float = now_s
        if discipline is None:
            starts_s = now_s + queue * in_turn_mask(view.disciplines)
        elif discipline.in_turn:
            starts_s = now_s + queue
        if peers is not None:
            self._ways.turn(PEER, self._egress[peers])
        fetch = self.routes.table.fetch(self._ways, size, starts_s)
        took_s = fetch.duration_s
        if self._has_tiers:  # own tiers deliver beside store and peer
            own_s = np.maximum(took_s[_HOST - _REMOTE], took_s[_DISK - _REMOTE])
            took_s[: _HOST - _REMOTE] = np.maximum(took_s[: _HOST - _REMOTE], own_s)
            took_s[_DISK - _REMOTE] = own_s
        return took_s, fetch.first_byte_s

    def _served(
        self,
        took_s: Grid,
        first_s: Grid,
        reused: Grid,
        compute: Grid,
        queue: Column,
        view: FleetView,
        discipline: Discipline | None,
    ) -> Service:
        """What each replica's discipline makes of Q, F and C."""
        rest = Rest(compute[_REMOTE:])
        if discipline is None or discipline.takes_parts:
            gained, none_s = np.empty((2, *compute[_REMOTE:].shape))
            gained[:] = reused[_REMOTE:] - reused[_LOCAL]
            none_s[:] = compute[_LOCAL]
            if self._has_store:  # the whole prefix, from nothing
                gained[-1], none_s[-1] = reused[-1], compute[_RECOMPUTE]
            bend_s = 0.5 * gained * gained * view.attention_s_per_pair * view.coefficients[:, 1]
            rest = Rest(compute[_REMOTE:], none_s, bend_s)
        if discipline is not None:
            return service(
                discipline,
                queue_s=queue,
                fetch_s=took_s,
                first_byte_s=first_s,
                rest=rest,
                layers=self.layers,
                limit_s=view.limit_s,
            )
        return service_by_row(
            view.disciplines,
            queue_s=queue,
            fetch_s=took_s,
            first_byte_s=first_s,
            rest=rest,
            layers=self.layers,
            limit_s=view.limit_s,
        )

    def _possible(self, reused: Grid, cached: Mask, size: Grid | None, ready: Mask) -> Mask:
        """What an engine will do, or can be told to, on replicas that are ready: (paths, rows)."""
        possible = np.empty((self._paths, len(cached)), dtype=np.bool_)
        possible[_LOCAL] = cached
        np.logical_not(cached, out=possible[_RECOMPUTE])
        if size is not None:
            fetched = possible[_REMOTE:]
            size = size[: len(fetched)]
            np.greater(size, 0.0, out=fetched)  # a place has to add something to the ones before it
            if self._has_tiers:  # the deepest that does names the path
                _and_not(possible[_HOST], possible[_DISK])
            if self._engine_decides:
                for path in range(_PEER, self._paths):
                    _and_not(possible[path], True if path == _PEER else possible[_REMOTE])
            if self._minimum_fetch_tokens > 1:
                fetched &= reused[_REMOTE : self._paths] >= reused[_LOCAL] + self._minimum_fetch_tokens
            if self.space is not None:
                fetched &= self.space.fits(size)
            for path in self._unasked:
                _and_not(possible[_LOCAL], possible[path])
                _and_not(possible[_RECOMPUTE], possible[path])
        possible &= ready
        return possible

    # Are the blocks still there?

    def _hits(
        self, age_s: Grid | None, cached: Mask, reused: Grid, peers: Rows | None, now_s: float
    ) -> tuple[Grid, Grid]:
        """Probability of each path that all it reuses is there, and that it is not but the store has its part."""
        shape = (self._paths, len(cached))
        if self.doubt is None:
            return np.ones(shape), np.zeros(shape)
        survives = self.doubt.hits.survivals(age_s, now_s)
        hbm = np.where(cached, survives[_IN_HBM], 1.0)
        hit = np.empty(shape)
        hit[:] = hbm
        hit[_RECOMPUTE] = 1.0
        if peers is not None:
            hit[_PEER] *= survives[_IN_HBM][peers]
        if self._has_tiers:
            hit[_HOST:] *= survives[_IN_HOST]
            hit[_DISK] *= survives[_ON_DISK]
        if not (self._has_store and reused[-1, 0] >= self._minimum_fetch_tokens):
            return hit, np.zeros(shape)
        stored = np.empty(shape)
        stored[:] = store = survives[_IN_STORE]
        np.multiply(hbm, store, out=hit[_REMOTE])
        stored -= stored * hit
        stored[_REMOTE] = store - hit[_REMOTE]
        return hit, stored


def _and_not(one: Mask, other: Mask | bool) -> None:
    """`one` and not `other`, in place."""
    np.greater(one, other, out=one)


def _paths_of(routes: Routes) -> int:
    """How many of PATHS a fleet with these routes has."""
    if routes.host:
        return len(PATHS)
    if routes.egress:
        return _PEER + 1
    return _REMOTE + 1 if routes.store else _REMOTE
