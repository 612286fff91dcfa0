"""llm-d's scheduler: a weighted sum of scores for prefix, queue and free KV memory.

Model     each score is 0..1: h/n; (q_max - q)/(q_max - q_min), 1 where all are alike; 1 - u. Weights 3, 2, 2 here;
          2:1:1 and 1:1:1 are published too. Where nobody has any of the prompt: the replica that was least recently
          given such a prompt. Queue and memory are those of the last report
Reads    cached tokens; requests queued and share of KV memory used, as reported every `period_s`
Ties     broken uniformly at random
Blind to the length of prompts, the speed of the card, and what it has placed itself since the last report. A replica
         that reports no memory counts as the mean of those that do
Source   llm-d inference scheduler: prefix, queue, KV-cache-utilisation and no-hit-LRU scorers
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.queueing import or_mean_of_known
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import Column, FleetView
from policies.base import Choice, Mask, Reason, choose_replica, draw, smallest
from policies.newcomers import Newcomers
from policies.reports import Reports
from policies.symbols import cached_tokens, queued
from policies.watcher import Placed, Watcher

NEVER_S = -1e300  # finite, since ties are told by differences


class LlmD(Watcher):
    """prefix, queue, kv : weights of the scores, >= 0; period_s : of the load reports, >= 0"""

    summary = "a weighted sum of prefix, queue and KV memory scores"
    reads = "cached tokens; requests queued and KV memory used, as reported now and then"
    source = "llm-d scheduler"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        prefix: float = 3.0,
        queue: float = 2.0,
        kv: float = 2.0,
        period_s: float = 0.05,
    ) -> None:
        for name, weight in (("prefix", prefix), ("queue", queue), ("kv", kv)):
            require(0 <= weight < float("inf"), name, weight)
        self._rng = rng
        self._prefix, self._queue, self._kv = prefix, queue, kv
        self._reports = Reports(period_s, lambda fleet: (queued(fleet), fleet.kv_used_share.copy()))
        self._newcomers = Newcomers()
        self._missed_s: Column = np.empty(0)  # when each was last given a prompt nobody had any of

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        self._meet(fleet)
        usable, cached = estimates.usable_rows, cached_tokens(request, estimates)
        if not (cached[usable] > 0).any():
            return draw(smallest(self._missed_s, usable), Reason.NO_PREFIX, estimates, self._rng)
        queue, used = self._reports.last(fleet)
        score = (
            self._prefix * cached / request.prompt_tokens
            + self._queue * queue_score(queue, usable)
            + self._kv * (1.0 - or_mean_of_known(used, usable))
        )
        return choose_replica(-score, Reason.BEST_SCORE, estimates, self._rng)

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        self._meet(fleet)
        if not (cached_tokens(placed.request, estimates)[estimates.usable_rows] > 0).any():
            self._missed_s[placed.row] = fleet.now_s
        self._reports.note(fleet)

    def first_token(self, placed: Placed, fleet: FleetView) -> None:
        self._reports.note(fleet)

    def ended(self, placed: Placed, fleet: FleetView) -> None:
        self._reports.note(fleet)

    def _meet(self, fleet: FleetView) -> None:
        for row in self._newcomers.rows(fleet):
            if len(self._missed_s) != fleet.rows:
                self._missed_s = np.empty(fleet.rows)
            self._missed_s[row] = NEVER_S


def queue_score(queue: Column, usable: Mask) -> Column:
    """1 for the shortest queue of the usable, 0 for the longest; 1 for all when they are alike."""
    most, fewest = queue[usable].max(), queue[usable].min()
    if most == fewest:
        return np.ones(len(queue))
    return np.asarray((most - queue) / (most - fewest))
