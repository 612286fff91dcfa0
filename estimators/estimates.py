"""Q, R, C, first token and price of one request on every replica, by every path: one call, arrays out.

Model     queueing.py (Q), routes.py and links.py (R), roofline.py corrected by calibration.py (C), first_token.py
          (T_first), hit_probability.py and mixture.py (what if the blocks are gone), price.py. Where the engine
          decides the path by itself, only what it will do is possible
Valid     replicas of one model; one shared store
Blind to  blocks that are evicted only in part: all a path reuses is there, or none of it
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from estimators.candidates import LEVELS, Doubt, Estimates, Few, Grid, Mask, One, Surroundings
from estimators.few_replicas import MOST_ROWS, FewReplicas
from estimators.first_token import Discipline, Rest, Service, in_turn_mask, service, service_by_row
from estimators.paths import COLUMN, PATHS, Path
from estimators.prefetch import PrefetchSpace
from estimators.prefill_features import Beside, prefill_s
from estimators.queueing import beside, decode_step_s, lacking_tokens, memory_wait_s, or_mean_of_known, start_s
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.routes import DISK, HOST, NO_LINK, PEER, STORE, Held, Routes, Rows
from estimators.shape_costs import ShapeCosts
from estimators.told import narrow
from estimators.view import Column, FleetView
from estimators.whereabouts import Whereabouts, unknown_ages

__all__ = ["LEVELS", "Doubt", "Estimates", "Estimator", "Few", "One", "Surroundings"]

# Arrays: a Python number among the operands is converted at every call, for as much as the call itself.
_ZERO, _ONE = np.array(0.0), np.array(1.0)

_LOCAL, _RECOMPUTE, _REMOTE, _PEER, _HOST, _DISK = (COLUMN[path] for path in PATHS)


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
        self._where = where = Whereabouts(
            routes=self.routes,
            costs=costs,
            minimum_fetch_tokens=minimum_fetch_tokens,
            engine_decides=engine_decides,
        )
        stages = self.routes.stages(rows)[: where.paths - _REMOTE]
        if where.has_peers:  # at first its own; each request has its own best
            stages[PEER, :, 0] = where.egress
        self._stages = np.concatenate((stages, stages[:1])) if where.has_store else stages
        self._ways = self.routes.table.ways(self._stages)
        self._unknown_ages = unknown_ages(rows)
        self._few = None
        if rows <= MOST_ROWS and not where.has_tiers:
            self._few = FewReplicas(
                costs=costs,
                rows=rows,
                routes=self.routes,
                step_tokens=step_tokens,
                minimum_fetch_tokens=minimum_fetch_tokens,
                engine_decides=engine_decides,
                doubt=doubt,
            )

    def estimate(
        self, request: RequestFacts, held: Held, view: FleetView, around: Surroundings, now_s: float
    ) -> Estimates:
        """Estimates of `request` as it stands at `now_s`. Replicas that are not ready have no possible path."""
        where, discipline, doubt = self._where, view.discipline, self.doubt
        if where.has_peers and not view.up.all():  # who is down cannot be read from
            held = replace(held, local_blocks=np.where(view.up, held.local_blocks, 0))
        peers = where.peers(held, now_s)
        if self._few is not None and discipline is Discipline.OVERLAPPED and self.space is None:
            few = self._few.estimate(request, held, peers, view, around, now_s)
            few.put_off = self.put_off_s
            if view.told is None:
                return few
            grids = few.changed()  # what is told takes paths away in them
            narrow(grids, view.told, view)
            return grids
        paths, prompt = where.paths, float(max(request.prompt_tokens, 1))
        reused = where.reused_tokens(held, peers, block_tokens=request.block_tokens, prompt=prompt)
        near = beside(view, float(self.costs.read_tokens(around.mean_context_tokens)))
        computed = self._compute_s(prompt, reused, view, near)
        prefill = compute = computed[:-1]
        pace_s, growth_s = self._pace(view, near, prompt)
        queue, full = self._queue_s(view, around, near, computed, pace_s, prompt - reused[_LOCAL], now_s)

        fetch = ready = np.zeros(prefill.shape)
        size = None
        if paths > _REMOTE:
            size = where.moved_bytes(reused)
            took_s, first_byte_s = self._fetches(size, queue, peers, view, discipline, now_s)
            fetch[_REMOTE:] = took_s
        if discipline is Discipline.OVERLAPPED or size is None:  # without what the others need
            first = np.empty(prefill.shape)
            first[:] = queue
            np.maximum(first, fetch, out=first)
            first += prefill
        else:
            served = self._served(took_s, first_byte_s, reused[:-1], prefill, queue, view, discipline)
            first, ready = queue + prefill, np.zeros(prefill.shape)
            first[_REMOTE:], ready[_REMOTE:] = served.first_token_s, served.ready_s
            compute = np.concatenate((prefill[:_REMOTE], served.work_s))

        nothing = reused[_LOCAL] == _ZERO
        possible = where.possible(reused, nothing, size, self.space, self._cannot_fetch(full, view, discipline))
        possible &= view.ready
        if doubt is None:
            hit, stored = np.ones(possible.shape), np.zeros(possible.shape)
        else:
            hit, stored = where.hits(doubt.hits, held, reused, nothing, peers, now_s)
        decoding = np.asarray(near.decodes)
        remaining = decoding - view.decode_batch
        remaining *= around.others_output_tokens
        remaining += view.remaining_tokens
        estimates = Estimates(
            possible=possible,
            reused_tokens=reused[:paths],
            queue_s=queue,
            fetch_s=fetch[:paths],
            ready_s=ready[:paths],
            prefill_s=prefill[:paths],
            compute_s=compute[:paths],
            first_token_s=first[:paths],
            hit_probability=hit,
            stored_probability=stored,
            stored_s=first[paths] if where.has_store else first[_RECOMPUTE],
            age_s=self._unknown_ages if held.age_s is None else held.age_s,
            pace_s=pace_s,
            decoding=decoding,
            remaining_tokens=remaining,
            step_growth_s=growth_s,
            around=around,
            prompt_tokens=request.prompt_tokens,
            pace_scale=view.pace_scale,
            weights_s=view.weights_s,
            usd_per_hour=view.usd_per_hour,
            peers=peers,
            scale=0.0 if doubt is None else doubt.spread.scale_at(view, now_s),
            shift=0.0 if doubt is None else doubt.spread.shift(now_s),
            doubt=doubt,
            held=held,
            put_off=self.put_off_s,
        )
        if view.told is not None:
            narrow(estimates, view.told, view)
        return estimates

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
        if self._where.has_tiers:
            host, disk = (reused[_HOST], reused[_DISK]) if path is not Path.HOST else (reused[_HOST],) * 2
            parts, own = [(HOST, hbm, host), (DISK, host, disk)], disk
        if path in (Path.REMOTE, Path.PEER):
            parts.append((STORE if path is Path.REMOTE else PEER, own, reused[column]))
        moved = []
        for place, start, stop in parts:
            size = float(self.costs.kv_bytes_between(start, stop))
            stages = (
                [int(self._where.egress[estimates.peers[row]])] if place == PEER and estimates.peers is not None else []
            )
            stages = stages or [link for link in self._stages[place, row].tolist() if link != NO_LINK]
            if size > 0:
                moved.append((stages, size))
        return moved

    def put_off_s(self, estimates: Estimates) -> Grid:
        """How much later fetches under way would end if each candidate's joined them, at most: (paths, rows).

        Of store and peers; a replica's own tiers are read by nobody else.
        """
        late_s = np.zeros(estimates.possible.shape)
        table, reused = self.routes.table, estimates.reused_tokens
        if table.idle:
            return late_s
        own = reused[_DISK] if self._where.has_tiers else reused[_LOCAL]
        for path, place, there in (
            (_REMOTE, STORE, self._where.has_store),
            (_PEER, PEER, estimates.peers is not None),
        ):
            if there:
                stages = self._stages[place]
                if place == PEER:
                    stages = self._where.egress[estimates.peers][:, None]
                late_s[path] = table.put_off_s(stages, self.costs.kv_bytes_between(own, np.maximum(own, reused[path])))
        return late_s

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
        step_share = self.step_tokens / max(gained, 1.0)
        return Rest(all_s, max(all_s, none_s), min(bend_s, max(0.0, none_s - all_s)), step_share)

    # C

    def _compute_s(self, prompt: float, reused: Grid, view: FleetView, near: Beside) -> Grid:
        """C of every candidate, and in a last row that of the work that waits: one call for all is the cheapest."""
        work = np.empty((6, *reused.shape))
        tokens, linear, attention, linear_s, attention_s, head_s = work
        work[3:] = view.work_rates[:, None]
        np.subtract(prompt, reused, out=tokens)
        np.multiply(tokens, linear_s, out=linear)
        linear += head_s
        np.multiply(self.costs.pairs(tokens, reused), attention_s, out=attention)
        np.maximum(view.waiting_tokens, _ONE, out=tokens[-1])
        work[1:3, -1] = view.waiting[:2]
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
        computed: Grid,
        pace_s: Column,
        needed_tokens: Column,
        now_s: float,
    ) -> tuple[Column, Mask | None]:
        """Q, and which replicas lack memory for the prompt now; None: none does."""
        foreign = or_mean_of_known(view.foreign_waiting, view.ready)
        step_s = view.pace_scale * decode_step_s(view, near)
        step_s *= np.sign(near.decodes)  # nothing, where nothing decodes
        queue = start_s(
            view,
            now_s,
            step_s=step_s,
            waiting_s=computed[-1] + view.waiting_held_s,
            foreign_waiting=foreign,
            # While nothing is answered yet, others are taken to be as this one.
            mean_compute_s=around.mean_compute_s or computed[_RECOMPUTE],
        )
        if not view.knows_capacity:
            return queue, None
        strangers = foreign + near.decodes - view.decode_batch
        over, used = lacking_tokens(
            view, needed_tokens=needed_tokens, foreign_tokens=strangers * around.mean_context_tokens
        )
        if over[over.argmax()] <= 0.0:  # all known, and none over: the usual case
            return queue, None
        turnover_s = around.others_output_tokens * pace_s
        memory_s = memory_wait_s(view, over_tokens=over, used_tokens=used, turnover_s=turnover_s)
        return np.maximum(queue, memory_s), over > 0.0

    # R

    def _cannot_fetch(self, full: Mask | None, view: FleetView, discipline: Discipline | None) -> Mask | None:
        """Replicas with no room for what a fetch on arrival brings. One in turn waits until there is."""
        if full is None or (discipline is not None and discipline.in_turn):
            return None
        return full if discipline is not None else full & ~in_turn_mask(view.disciplines)

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
            self._ways.turn(PEER, self._where.egress[peers])
        fetch = self.routes.table.fetch(self._ways, size, starts_s)
        took_s = fetch.duration_s
        if self._where.has_tiers:  # own tiers deliver beside store and peer
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
            if self._where.has_store:  # the whole prefix, from nothing
                gained[-1], none_s[-1] = reused[-1], compute[_RECOMPUTE]
            bend_s = 0.5 * gained * gained * view.attention_s_per_pair * view.coefficients[:, 1]
            rest = Rest(compute[_REMOTE:], none_s, bend_s, self.step_tokens / np.maximum(gained, 1.0))
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
