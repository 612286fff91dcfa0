"""SGLang's router: balance when queues differ much, else follow the prompts it has sent before.

Model     if max b - min b > abs and max b > rel x min b: the fewest requests. Else the replica with the longest
          remembered prefix when that is more than `threshold` of the prompt; else the one with the smallest index
          (newer versions: the fewest requests). A prompt is remembered for its replica when it is placed
Reads    requests booked per replica, its own index of prompts sent; no cache events
Ties     broken uniformly at random
Blind to what replicas really hold: evicted blocks are remembered, blocks of other routers are not; the length of
         prompts and the speed of the card
Source   SGLang router, cache-aware policy. Two default sets were published: threshold 0.3, abs 64, rel 1.5 (here) and
         0.5, 32, 1.1. It indexes characters; here blocks of tokens, of as many as 2^26 characters have
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Mask, Reason, choose_replica, draw, smallest
from policies.by_cache.remembered import Remembered
from policies.newcomers import Newcomers
from policies.watcher import Placed, Watcher


class SglangCacheAware(Watcher):
    """threshold : share of the prompt, 0..1; balance_abs, balance_rel : of requests in flight, >= 0 and >= 1

    fallback : "smallest_index" or "least_load"; index_tokens : remembered for each replica, >= 1
    """

    summary = "the longest prefix sent there before, unless queues differ too much"
    reads = "requests booked per replica, its own index of prompts sent"
    source = "SGLang router, cache-aware"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        threshold: float = 0.3,
        balance_abs: float = 64,
        balance_rel: float = 1.5,
        fallback: str = "smallest_index",
        index_tokens: int = 2**24,
    ) -> None:
        require(0 <= threshold <= 1, "threshold", threshold)
        require(0 <= balance_abs < float("inf"), "balance_abs", balance_abs)
        require(1 <= balance_rel < float("inf"), "balance_rel", balance_rel)
        require(
            fallback in ("smallest_index", "least_load"), "fallback", fallback, "neither smallest_index nor least_load"
        )
        require(index_tokens >= 1, "index_tokens", index_tokens)
        self._rng = rng
        self._threshold, self._abs, self._rel = threshold, balance_abs, balance_rel
        self._by_index = fallback == "smallest_index"
        self._index_tokens = index_tokens
        self._newcomers = Newcomers()
        self._sent: dict[int, Remembered] = {}  # by row

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        self._meet(fleet)
        usable, booked = estimates.usable_rows, fleet.booked.astype(np.float64)
        if self._unbalanced(booked[usable].tolist()):
            return choose_replica(booked, Reason.LOWER_LOAD, estimates, self._rng)
        blocks = np.array([self._matched(row, request) for row in range(fleet.rows)], dtype=np.float64)
        longest = smallest(-blocks, usable)
        share = blocks[longest][0] * request.block_tokens / max(request.prompt_tokens, 1)
        if share > self._threshold:
            return draw(longest, Reason.LONGEST_PREFIX, estimates, self._rng)
        return draw(self._fallback(usable, booked), Reason.NO_PREFIX, estimates, self._rng)

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        self._meet(fleet)
        request = placed.request
        if placed.row not in self._sent:
            self._sent[placed.row] = Remembered(max(1, self._index_tokens // request.block_tokens))
        self._sent[placed.row].add(request.chain)

    def _unbalanced(self, booked: list[float]) -> bool:
        most, fewest = max(booked), min(booked)
        return most - fewest > self._abs and most > self._rel * fewest

    def _meet(self, fleet: FleetView) -> None:
        for row in self._newcomers.rows(fleet):
            self._sent.pop(row, None)

    def _matched(self, row: int, request: RequestFacts) -> int:
        sent = self._sent.get(row)
        return 0 if sent is None else sent.matched(request.chain)

    def _fallback(self, usable: Mask, booked: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Mask:
        if not self._by_index:
            return smallest(booked, usable)
        sizes = [len(self._sent[row]) if row in self._sent else 0 for row in range(len(booked))]
        return smallest(np.array(sizes, dtype=np.float64), usable)
