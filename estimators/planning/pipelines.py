"""How long do equal micro-batches take through stages that work at the same time?

Model     every micro-batch passes the stages in order, each stage takes one at a time: the first takes the sum of all
          stages, each later one leaves one longest stage after the one before. Serial: all stages, every time
Valid     micro-batches alike, a stage's time steady, stages on resources of their own, work always at hand
Blind to  what splitting costs (smaller matrices, more starts), memory traffic that stages share, cross-layer waits
Source    flow shop with identical jobs; textbook sections 9.3.4 and 9.4.3
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from estimators.ranges import require


def serial_s(stages_s: Sequence[float], *, batches: int) -> float:
    """`batches` (>= 1) micro-batches one after another through stages of these times (each >= 0), seconds."""
    _check(stages_s, batches)
    return batches * sum(stages_s)


def pipelined_s(stages_s: Sequence[float], *, batches: int) -> float:
    """The same with every stage busy as soon as it can be, seconds.

    >>> pipelined_s([2.0, 3.0], batches=4)
    14.0
    """
    _check(stages_s, batches)
    return sum(stages_s) + (batches - 1) * max(stages_s)


def break_even_factor(stages_s: Sequence[float], slowed: Collection[int], *, batches: int) -> float:
    """How many times as long the stages at `slowed` may take until the pipeline saves nothing over the serial order.

    The serial order keeps the times it had. 1.0 where there is nothing to save; inf where the slowed stages take none.

    Raises
    ------
    ValueError : no stage is named, or one that is not there.
    """
    _check(stages_s, batches)
    require(len(slowed) > 0 and all(0 <= at < len(stages_s) for at in slowed), "slowed", slowed, "no stage")
    slow = [time_s for at, time_s in enumerate(stages_s) if at in slowed]
    rest = [time_s for at, time_s in enumerate(stages_s) if at not in slowed]
    if max(slow) == 0.0:
        return inf
    budget_s = serial_s(stages_s, batches=batches) - sum(rest)
    longest_rest_s = max(rest, default=0.0)
    while_rest_is_longest = (budget_s - (batches - 1) * longest_rest_s) / sum(slow)
    if while_rest_is_longest * max(slow) <= longest_rest_s:
        return while_rest_is_longest
    return budget_s / (sum(slow) + (batches - 1) * max(slow))


def _check(stages_s: Sequence[float], batches: int) -> None:
    require(len(stages_s) > 0, "stages_s", stages_s, "empty")
    require(all(0 <= time_s < inf for time_s in stages_s), "stages_s", stages_s)
    require(batches >= 1, "batches", batches)
