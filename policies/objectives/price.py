"""What others lose by a choice, weighted into one number of seconds.

Model    running_decodes x delay of running decodes
         + fetch x utilisation x duration of the fetch: what comes over a link is in the way of what others want over
         it, and the memory it comes into is held from the request's arrival, not from its turn. With nobody else
         about it costs nothing
         + while a replica is free: queue_behind x delay of later requests + joining x delay of those who come while
         the queue of now lasts; while none is: levelling x what those who would have taken a short queue lose by work
         beyond a mean request's + backlog x what all lose who come while there are queues. Without a weight of
         levelling the first always. All from `estimators/price.py`
Why more than the delay itself, with joining: of many replicas the one whose queue is estimated too short is taken, so
         the queue that is joined is longer than it looks. That there is none is known without an estimate
Why another price when none is free: who comes next chooses too, and takes the shortest queue. Long requests do least
         harm behind the longest one, where nobody else wants to go; short ones then have short queues for themselves
Why backlog: queues of half a minute hide behind their errors what a prompt's state is worth. Counted whole, requests
         would wait for their state however long its queue is
Blind to how full each link and each memory is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from estimators.candidates import Few, Grid, Surroundings
from estimators.estimates import Estimates
from estimators.ranges import require

FREE_SHARE = 0.1  # of a mean request's work: a shorter queue is none, and nor is one of a decode step


@dataclass(frozen=True, slots=True)
class Price:
    """Weights, >= 0 and finite; ValueError names the one that is not."""

    queue_behind: float
    running_decodes: float
    fetch: float = 0.0
    joining: float = 0.0
    levelling: float = 0.0
    backlog: float = 0.0

    def __post_init__(self) -> None:
        weight("queue_behind", self.queue_behind)
        weight("running_decodes", self.running_decodes)
        weight("fetch", self.fetch)
        weight("joining", self.joining)
        weight("levelling", self.levelling)
        weight("backlog", self.backlog)

    def of(self, estimates: Estimates) -> Grid:
        """Seconds that others lose by each candidate, (paths, rows)."""
        around = estimates.around
        utilisation = min(1.0, around.utilisation)
        price_s = self.running_decodes * estimates.decode_price_s + self.fetch * utilisation * estimates.fetch_s
        if self.levelling > 0.0 and is_none_free(estimates):
            levelled_s = price_s + self.levelling * estimates.levelling_price_s
            return levelled_s if self.backlog == 0.0 else levelled_s + self.backlog * estimates.backlog_price_s
        price_s = price_s + self.queue_behind * estimates.queue_price_s
        return price_s if self.joining == 0.0 else price_s + self.joining * estimates.joining_price_s

    def of_few(self, estimates: Estimates, few: Sequence[Few]) -> list[float]:
        """The same of each of `few`, all possible candidates, in plain numbers."""
        around = estimates.around
        if self.levelling > 0.0 and is_none_of_few_free(few, around):
            price_s = self.of(estimates)
            return [price_s.item((one.column, one.row)) for one in few]
        fetch = self.fetch * min(1.0, around.utilisation)
        queue, decodes, joining = self.queue_behind, self.running_decodes, self.joining
        return [
            decodes * one.decode_price_s
            + fetch * one.fetch_s
            + queue * one.queue_price_s
            + joining * one.joining_price_s
            for one in few
        ]


def is_none_free(estimates: Estimates) -> bool:
    """Whether there is a queue wherever this request can go. One no longer than a step of the decodes there is none:
    every prefill waits for the step under way, and where prefills are short that is much of a mean one.

    Not before it is known what a request takes: till then nobody can say which are long.
    """
    mean_s = estimates.around.mean_compute_s
    longest_s = np.maximum(FREE_SHARE * mean_s, estimates.pace_s)
    return mean_s > 0.0 and not ((estimates.queue_s <= longest_s) & estimates.usable_rows).any()


def is_none_of_few_free(few: Sequence[Few], around: Surroundings) -> bool:
    """The same in plain numbers."""
    mean_s = around.mean_compute_s
    longest_s = FREE_SHARE * mean_s
    return mean_s > 0.0 and not any(one.queue_s <= longest_s or one.queue_s <= one.pace_s for one in few)


def weight(name: str, value: float) -> float:
    """`value`, if it can be a weight."""
    require(0 <= value < inf, name, value)
    return value
