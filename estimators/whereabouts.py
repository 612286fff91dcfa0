"""Where a prompt's state is: what each path reuses and moves, what an engine will do, and whether blocks are there.

Model     an engine uses its HBM, then from the places of `routes.py` what follows. Paths are rows of every grid, in the
          order of `PATHS`; below them, with a store, its whole prefix as an engine with nothing would fetch it; a last
          row is left for the work that waits on the replica, which reuses nothing
Valid     one shared store; replicas have all tiers or none
Blind to  blocks that are evicted only in part: all a path reuses is there, or none of it
"""

from __future__ import annotations

import numpy as np

from estimators.candidates import Grid, Mask
from estimators.hit_probability import TIER_ROW, HitProbability
from estimators.paths import COLUMN, PATHS
from estimators.prefetch import PrefetchSpace
from estimators.routes import Held, Routes, Rows, best_peers
from estimators.shape_costs import ShapeCosts
from estimators.tiers import Tier

_LOCAL, _RECOMPUTE, _REMOTE, _PEER, _HOST, _DISK = (COLUMN[path] for path in PATHS)

_ZERO = np.array(0.0)  # an array: a Python number is converted at every call, for as much as the call itself


class Whereabouts:
    """What a fleet's routes make possible.

    paths : how many of PATHS there are; candidates : rows of the grids, see above
    minimum_fetch_tokens, engine_decides : as of the estimator
    """

    def __init__(self, *, routes: Routes, costs: ShapeCosts, minimum_fetch_tokens: int, engine_decides: bool) -> None:
        self._table = routes.table
        self._costs = costs
        self._minimum_fetch_tokens = minimum_fetch_tokens
        self._engine_decides = engine_decides
        self.has_store, self.has_tiers, self.has_peers = bool(routes.store), bool(routes.host), bool(routes.egress)
        self.egress = np.array(routes.egress, dtype=np.int64)
        self.paths = _paths_of(routes)
        self.candidates = self.paths + self.has_store + 1
        # What an engine fetches without being asked: tiers of its own, and the store if it looks it up by itself.
        tiers = (_HOST, _DISK) if self.has_tiers else ()
        self._unasked = (_REMOTE, *tiers) if engine_decides and self.paths > _REMOTE else tiers

    def peers(self, held: Held, now_s: float) -> Rows | None:
        """The replica that each one would read from; None without peers."""
        if not self.has_peers:
            return None
        outstanding = None if self._table.idle else self._table.outstanding_bytes(now_s)
        return best_peers(held.local_blocks, self.egress, outstanding)

    def reused_tokens(self, held: Held, peers: Rows | None, *, block_tokens: int, prompt: float) -> Grid:
        """Tokens that need not be computed, (candidates, rows)."""
        most = prompt - 1.0  # an engine always computes one token
        hbm = np.minimum(held.local_blocks * float(block_tokens), most)
        reused = np.zeros((self.candidates, len(hbm)))
        reused[_LOCAL] = own = hbm
        if self.has_tiers:
            host = hbm if held.host_blocks is None else held.host_blocks * float(block_tokens)
            disk = host if held.disk_blocks is None else held.disk_blocks * float(block_tokens)
            reused[_HOST] = np.minimum(np.maximum(host, hbm), most)
            reused[_DISK] = own = np.minimum(np.maximum(disk, reused[_HOST]), most)
        if self.has_store:
            stored = min(float(held.store_blocks * block_tokens), most)
            np.maximum(own, stored, out=reused[_REMOTE])
            reused[self.paths] = stored
        elif self.paths > _REMOTE:
            reused[_REMOTE] = own
        if peers is not None:
            np.maximum(own, hbm[peers], out=reused[_PEER])
        elif self.paths > _PEER:
            reused[_PEER] = own
        return reused

    def moved_bytes(self, reused: Grid) -> Grid:
        """Bytes each place delivers: (store, peer, host, disk, store from nothing), those that there are."""
        hbm, end = reused[_LOCAL], reused[_REMOTE:-1]
        begin = np.empty(end.shape)
        begin[:] = reused[_DISK] if self.has_tiers else hbm
        if self.has_tiers:
            begin[_HOST - _REMOTE], begin[_DISK - _REMOTE] = hbm, reused[_HOST]
        if self.has_store:
            begin[-1] = 0.0
        return self._costs.kv_bytes_between(begin, end)

    def possible(
        self, reused: Grid, nothing: Mask, size: Grid | None, space: PrefetchSpace | None, full: Mask | None = None
    ) -> Mask:
        """What an engine will do, or can be told to: (paths, rows).

        nothing : whether HBM has nothing, (rows,); size : of `moved_bytes`, None where nothing can be fetched
        full : who has no HBM for what a fetch brings, (rows,), and so computes instead; None: nobody
        """
        possible = np.empty((self.paths, len(nothing)), dtype=np.bool_)
        possible[_RECOMPUTE] = nothing
        np.logical_not(nothing, out=possible[_LOCAL])
        if size is None:
            return possible
        fetched = possible[_REMOTE:]
        size = size[: len(fetched)]
        np.greater(size, _ZERO, out=fetched)  # a place has to add something to the ones before it
        if self.has_tiers:  # the deepest that does names the path
            _and_not(possible[_HOST], possible[_DISK])
        if self._engine_decides:  # it reads no peers, and the store before its tiers
            possible[_PEER : _PEER + 1] = False
            for tier in range(_HOST, self.paths):
                _and_not(possible[tier], possible[_REMOTE])
        if self._minimum_fetch_tokens > 1:
            fetched &= reused[_REMOTE : self.paths] >= reused[_LOCAL] + self._minimum_fetch_tokens
        if space is not None:
            fetched &= space.fits(size)
        if full is not None:
            _and_not(fetched, full)
        for path in self._unasked:
            _and_not(possible[_LOCAL], possible[path])
            _and_not(possible[_RECOMPUTE], possible[path])
        return possible

    def hits(
        self, hits: HitProbability, held: Held, reused: Grid, nothing: Mask, peers: Rows | None, now_s: float
    ) -> tuple[Grid, Grid]:
        """Probability that all a path reuses is there, and that it is not but the store has its part: (paths, rows)."""
        in_hbm = survival(hits, Tier.HBM, held, now_s)
        hbm = in_hbm.copy()
        hbm[nothing] = 1.0
        hit = np.empty((self.paths, len(nothing)))
        hit[:] = hbm
        hit[_RECOMPUTE] = 1.0
        own = hbm
        if self.has_tiers:  # each as far as it adds something
            own = hbm.copy()
            for path, before, tier in ((_HOST, _LOCAL, Tier.HOST), (_DISK, _HOST, Tier.DISK)):
                own *= np.where(reused[path] > reused[before], survival(hits, tier, held, now_s), 1.0)
                hit[path] = own
            hit[_REMOTE] = hit[_PEER] = own
        if peers is not None:
            np.multiply(own, in_hbm[peers], out=hit[_PEER])
        stored = np.zeros(hit.shape)
        if not self.has_store or reused[self.paths, 0] < self._minimum_fetch_tokens:
            return hit, stored
        store = survival(hits, Tier.REMOTE, held, now_s)
        np.multiply(own, store, out=hit[_REMOTE])
        if self._engine_decides:  # who does not look it up has nothing to fall to
            stored[:] = store
            stored -= stored * hit
            stored[_RECOMPUTE] = 0.0
        np.subtract(store, hit[_REMOTE], out=stored[_REMOTE])
        return hit, stored


def survival(hits: HitProbability, tier: Tier, held: Held, now_s: float) -> Grid:
    """Probability that each replica's copies in `tier` are there, (rows,)."""
    return hits.survival(tier, None if held.age_s is None else held.age_s[TIER_ROW[tier]], now_s)


def unknown_ages(rows: int) -> Grid:
    """Ages of which nothing is known, (tiers, rows)."""
    return np.full((len(TIER_ROW), rows), np.nan)


def _and_not(one: Mask, other: Mask) -> None:
    """`one` and not `other`, in place."""
    np.greater(one, other, out=one)


def _paths_of(routes: Routes) -> int:
    """How many of PATHS a fleet with these routes has."""
    if routes.host:
        return len(PATHS)
    if routes.egress:
        return _PEER + 1
    return _REMOTE + 1 if routes.store else _REMOTE
