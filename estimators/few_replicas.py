"""The grids of `estimates.py` for a few replicas: one after another, in plain numbers.

Model     that of `estimates.py`, `queueing.py` and `prefill_features.py`. An operation on arrays costs as much for a
          handful of elements as for a hundred, and ten times as much as one on two numbers. So here everything has a
          local name, and functions are few and long: a call or an attribute costs as much as a line of sums
Valid     replicas without tiers of their own, that fetch while the request queues
Blind to  as there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isnan

import numpy as np

from estimators.candidates import Doubt, Estimates, Surroundings
from estimators.few_estimates import FewEstimates, Numbers
from estimators.queueing import OVERDUE_SHARE
from estimators.request import RequestFacts
from estimators.routes import Held, Routes, Rows
from estimators.shape_costs import ShapeCosts
from estimators.tiers import Tier
from estimators.view import FleetView
from estimators.whereabouts import survival, unknown_ages

MOST_ROWS = 8  # beyond, arrays are cheaper

MOST_PATHS = 4


@dataclass(slots=True)
class Asked:
    """One request, and where its prompt's state is.

    prompt : tokens, >= 1
    hbm : reusable tokens on each replica, < prompt; store : in the store, < prompt
    peers : replica each one would read from; None without peers
    in_hbm, in_store : probability that a copy is there, for each replica; None: they are, or nothing is believed to be
    """

    prompt: float
    hbm: list[float]
    store: float
    peers: list[int] | None
    in_hbm: list[float] | None
    in_store: list[float] | None
    now_s: float


class FewReplicas:
    """What does not change from one request to the next; the arguments are those of `Estimator`."""

    def __init__(
        self,
        *,
        costs: ShapeCosts,
        rows: int,
        routes: Routes,
        step_tokens: int,
        minimum_fetch_tokens: int,
        engine_decides: bool,
        doubt: Doubt | None,
    ) -> None:
        self._costs = costs
        self._bytes_per_token = 0.0 if costs.size.window_bytes or costs.size.state_bytes else costs.size.full_bytes
        self._table = routes.table
        self._from_store = [list(route) for route in routes.store]
        self._from_peer = [[link] for link in routes.egress]
        self._store_alone, self._peer_alone = self._alone(self._from_store), self._alone(self._from_peer)
        self._step_tokens = float(step_tokens)
        self._minimum_fetch_tokens = minimum_fetch_tokens
        self._engine_decides = engine_decides
        self._doubt = doubt
        self._unknown_ages = unknown_ages(rows)
        self._paths = MOST_PATHS if routes.egress else MOST_PATHS - 1 if routes.store else MOST_PATHS - 2
        self._only_own = self._paths == MOST_PATHS - 2  # nothing but HBM

    def estimate(
        self,
        request: RequestFacts,
        held: Held,
        peers: Rows | None,
        view: FleetView,
        around: Surroundings,
        now_s: float,
    ) -> Estimates:
        """As `Estimator.estimate`. peers : replica each one would read from; None without peers"""
        doubt, block, prompt = self._doubt, request.block_tokens, float(max(request.prompt_tokens, 1))
        most = prompt - 1.0  # an engine always computes one token
        hbm = [min(float(blocks * block), most) for blocks in held.local_blocks.tolist()]
        store = min(float(held.store_blocks * block), most)
        counts = doubt is not None and (peers is not None or any(hbm))
        asked = Asked(
            prompt=prompt,
            hbm=hbm,
            store=store,
            peers=None if peers is None else peers.tolist(),
            in_hbm=survival(doubt.hits, Tier.HBM, held, now_s).tolist() if doubt is not None and counts else None,
            in_store=None if doubt is None or not store else survival(doubt.hits, Tier.REMOTE, held, now_s).tolist(),
            now_s=now_s,
        )
        of_rows, of_paths = self._numbers(asked, view, around)
        return FewEstimates(
            of_rows,
            of_paths,
            paths=self._paths,
            view=view,
            age_s=self._unknown_ages if held.age_s is None else held.age_s,
            around=around,
            prompt_tokens=request.prompt_tokens,
            peers=peers,
            scale=0.0 if doubt is None else doubt.spread.scale_at(view, now_s),
            shift=0.0 if doubt is None else doubt.spread.shift(now_s),
            doubt=doubt,
            held=held,
        )

    def _numbers(self, asked: Asked, view: FleetView, around: Surroundings) -> tuple[list[Numbers], list[Numbers]]:
        """`BY_ROW` of every replica, and its `BY_PATH` for two or for all paths."""
        straight = self._table.idle and self._bytes_per_token > 0.0
        ready = view.ready.tolist()
        waiting = known(view.foreign_waiting.tolist(), ready)
        decoding = known(view.foreign_decoding.tolist(), ready)
        of_rows: list[Numbers] = []
        of_paths: list[Numbers] = []
        for number, row in enumerate(view.table.T.tolist()):
            own, work_s, full = self._of_row(number, asked, row, around, waiting[number], decoding[number])
            if self._only_own:
                stored_s, by_path = self._of_own(number, asked, ready[number], own[0], work_s)
            else:
                stored_s, by_path = self._by_path(number, asked, ready[number], own[0], work_s, straight, full)
            of_rows.append((*own, stored_s))
            of_paths.append(by_path)
        return of_rows, of_paths

    def _of_row(
        self,
        number: int,
        asked: Asked,
        row: list[float],
        around: Surroundings,
        foreign_waiting: float,
        foreign_decoding: float,
    ) -> tuple[tuple[float, ...], list[float], bool]:
        """`BY_ROW` but the last; C of the prompt with what HBM, nothing, the store and the peer have of it; and
        whether there is no KV memory for it now.
        """
        # fmt: off
        (
            token_s, pair_s, head_s, weights_s, experts_s, context_s, decode_pair_s,
            of_linear, of_attention, of_steps, of_constant, of_memory,
            waiting_linear_s, waiting_attention_s, waiting_tokens, waiting_context, held_s,
            head_ends_s, head_compute_s, head_tokens,
            batch, context, read, remaining, _, _, capacity, pace_scale, occupancy,
        ) = row
        # fmt: on
        costs, prompt, plain = self._costs, asked.prompt, self._costs.plain
        mean_context, others_output = around.mean_context_tokens, around.others_output_tokens

        # What running decodes make of every step.
        decodes = batch + foreign_decoding
        contexts = read + foreign_decoding * (mean_context if plain else float(costs.read_tokens(mean_context)))
        linear_s = decodes * (token_s + head_s)
        attention_s = contexts * decode_pair_s
        memory_s = weights_s + contexts * context_s
        gap_s = memory_s - linear_s - attention_s
        step_s = of_linear * linear_s + of_attention * attention_s + of_steps * weights_s
        constant_s = of_constant * weights_s
        room = max(self._step_tokens - decodes, 1.0)

        # C of the prompt, by how much of it is reused, and of what waits.
        hbm = asked.hbm[number]
        works = []
        reusable: tuple[float, ...] = (0.0,)
        if not self._only_own:
            reusable = hbm, 0.0, asked.store, hbm if asked.peers is None else asked.hbm[asked.peers[number]]
        elif hbm > 0.0:
            reusable = hbm, 0.0
        for reused in reusable:
            new = prompt - reused
            pairs = new * (reused + 0.5 * new) if plain else float(costs.pairs(new, reused))
            works.append((new * token_s + head_s, pairs * pair_s, new))
        if waiting_tokens > 0.0:
            works.append((waiting_linear_s, waiting_attention_s, max(waiting_tokens, 1.0)))
        computed = []
        for linear_s, attention_s, new in works:
            full = new / room
            steps = ceil(full)
            work_s = of_linear * linear_s + of_attention * attention_s + steps * step_s + constant_s
            lacks_s = gap_s - (linear_s + attention_s) * (full - steps + 1.0) / full
            computed.append(work_s + of_memory * lacks_s if lacks_s > 0.0 else work_s)
        if len(reusable) == 1:  # with nothing in HBM both are the same
            computed.insert(0, computed[0])

        # The pace of a decode, and Q.
        growth_s = float(costs.read_tokens(prompt)) * context_s
        pace_s = memory_s + growth_s
        if costs.chosen_share < 1.0:  # a few decodes touch few of the experts
            pace_s -= experts_s * float(costs.untouched_share(decodes + 1.0))
        pace_s *= pace_scale
        queue_s = held_s + foreign_waiting * (around.mean_compute_s or computed[1])
        if waiting_tokens > 0.0:
            queue_s += computed.pop()
        if head_ends_s > -inf:
            queue_s += max(head_ends_s - asked.now_s, OVERDUE_SHARE * head_compute_s)
        elif decodes > 0.0:
            untouched = 0.0 if costs.chosen_share >= 1.0 else float(costs.untouched_share(decodes))
            queue_s += 0.5 * pace_scale * (memory_s - experts_s * untouched)
        foreign = (foreign_waiting + foreign_decoding) * mean_context
        used = (context + head_tokens + waiting_context + foreign) * occupancy
        over = used + prompt - hbm - capacity
        if over > 0.0:  # never so where the capacity is not known
            queue_s = max(queue_s, over * others_output * pace_s / max(min(used, capacity), 1.0))
        return (queue_s, pace_s, growth_s, decodes, remaining + foreign_decoding * others_output), computed, over > 0.0

    def _of_own(
        self, number: int, asked: Asked, ready: bool, queue_s: float, work_s: list[float]
    ) -> tuple[float, Numbers]:
        """`_by_path` for fleets that have nothing but HBM: the first two paths alone."""
        local_s, recompute_s = work_s
        hbm = asked.hbm[number]
        in_hbm = asked.in_hbm[number] if asked.in_hbm is not None and hbm > 0.0 else 1.0
        alone_s = queue_s + recompute_s
        # fmt: off
        return alone_s, (
            ready and hbm > 0.0, ready and hbm == 0.0,
            hbm, 0.0,
            0.0, 0.0,
            local_s, recompute_s,
            queue_s + local_s, alone_s,
            in_hbm, 1.0,
            0.0, 0.0,
        )
        # fmt: on

    def _by_path(
        self, number: int, asked: Asked, ready: bool, queue_s: float, work_s: list[float], straight: bool, full: bool
    ) -> tuple[float, Numbers]:
        """First token with what only the store has; and `BY_PATH`, of one replica.

        straight : whether every fetch takes a fixed time, and then the same for each token
        full : there is no memory for what a fetch brings, so the replica computes
        """
        local_s, recompute_s, of_store_s, of_peer_s = work_s
        hbm, store, now_s, least = asked.hbm[number], asked.store, asked.now_s, self._minimum_fetch_tokens
        stored_s = queue_s + recompute_s
        in_hbm, in_store, in_both, at_peer = 1.0, 0.0, 1.0, 1.0
        if asked.in_hbm is not None and hbm > 0.0:
            in_hbm = in_both = asked.in_hbm[number]

        from_store, from_store_s, remote_s, remote = hbm, 0.0, local_s, False
        if self._from_store:
            route = self._from_store[number]
            fixed_s, token_s = self._store_alone[number]
            if store > 0.0:
                whole_s = fixed_s + store * token_s if straight else self._fetch_s(route, store, now_s)
                stored_s = max(queue_s, whole_s) + of_store_s
            if store > hbm:
                from_store, remote_s = store, of_store_s
                gained = store - hbm
                from_store_s = fixed_s + gained * token_s if straight else self._fetch_s(route, gained, now_s)
                remote = ready and not full and store >= hbm + least
            if asked.in_store is not None and store >= least:
                in_store = asked.in_store[number]
                in_both = in_hbm * in_store

        from_peer, from_peer_s, peer_s, peer = hbm, 0.0, local_s, False
        if asked.peers is not None:
            other = asked.peers[number]
            theirs = asked.hbm[other]
            if theirs > hbm:
                from_peer, peer_s = theirs, of_peer_s
                fixed_s, token_s = self._peer_alone[other]
                gained, route = theirs - hbm, self._from_peer[other]
                from_peer_s = fixed_s + gained * token_s if straight else self._fetch_s(route, gained, now_s)
                peer = ready and not (full or self._engine_decides) and theirs >= hbm + least
            at_peer = in_hbm if asked.in_hbm is None else in_hbm * asked.in_hbm[other]

        itself = ready and not (remote and self._engine_decides)
        unasked = in_store if self._engine_decides else 0.0  # who does not look it up has nothing to fall to
        # fmt: off
        return stored_s, (
            itself and hbm > 0.0, itself and hbm == 0.0, remote, peer,
            hbm, 0.0, from_store, from_peer,
            0.0, 0.0, from_store_s, from_peer_s,
            local_s, recompute_s, remote_s, peer_s,
            queue_s + local_s, queue_s + recompute_s,
            max(queue_s, from_store_s) + remote_s, max(queue_s, from_peer_s) + peer_s,
            in_hbm, 1.0, in_both, at_peer,
            unasked * (1.0 - in_hbm), 0.0, in_store * (1.0 - in_hbm), unasked * (1.0 - at_peer),
        )
        # fmt: on

    def _alone(self, routes: list[list[int]]) -> list[tuple[float, float]]:
        """Of a fetch that is alone on its links: the fixed time, and the time of a token, where all have the same."""
        ways = [self._table.ways(np.array([route])) for route in routes]
        return [(float(way.fixed_s[0]), float(way.s_per_byte[0]) * self._bytes_per_token) for way in ways]

    def _fetch_s(self, route: list[int], tokens: float, now_s: float) -> float:
        size = tokens * self._bytes_per_token or float(self._costs.kv_bytes(tokens))
        return self._table.fetch_one(route, size, now_s)[0]


def known(reported: Sequence[float], alike: Sequence[bool]) -> Sequence[float]:
    """`queueing.or_mean_of_known`."""
    if not isnan(sum(reported)):
        return reported
    heard = [number for number, fits in zip(reported, alike, strict=True) if fits and not isnan(number)]
    mean = sum(heard) / len(heard) if heard else 0.0
    return [mean if isnan(number) else number for number in reported]
