"""The shared store beyond its events: the directory, recent look-ups and what was written through, as one belief.

Model     of what the sources say of a prompt the longest prefix counts, since events and look-ups rather miss blocks
          than invent them; of equally long ones the surest: events, then a look-up, then what was written
Valid     one shared store; `written` for a store without events, as it cannot hear of evictions
Blind to  what look-ups know of replicas' host memory and disks (`Answers.held` has it): estimates have no such path
Errors    as those of the source that was believed; `Belief` names it, so that a receipt can
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from estimators.routes import Held
from router.dispatch import Holdings
from router.signals.looked_up import Answers
from router.signals.written_store import WrittenStore


class Knowledge(Enum):
    """Who says what the store holds, the surest first. A closed set: it can become a metric label."""

    EVENTS = "events"
    LOOK_UP = "look_up"
    WRITTEN = "written"  # approximate


@dataclass(frozen=True, slots=True)
class Belief:
    """Leading blocks of a chain in the store. age_s : of the knowledge; NaN for events, which are followed live."""

    blocks: int
    source: Knowledge
    age_s: float = float("nan")

    @property
    def approximate(self) -> bool:
        return self.source is Knowledge.WRITTEN


class OtherTiers:
    """The directory as the dispatcher asks it, and the store with it.

    Parameters
    ----------
    directory : what events say
    clock : of whoever drives the dispatcher, seconds; a replay gives its own
    answers : of a look-up service, if there is one
    written : what was written through to a store without events, if there is one
    """

    def __init__(
        self,
        directory: Holdings,
        clock: Callable[[], float],
        *,
        answers: Answers | None = None,
        written: WrittenStore | None = None,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._answers = answers
        self._written = written

    def held(self, chain: list[int]) -> Held:
        """What the directory says, with the store as far as anybody knows."""
        held = self._directory.held(chain)
        believed = self.store(chain, held.store_blocks)
        return held if believed.blocks == held.store_blocks else replace(held, store_blocks=believed.blocks)

    def store(self, chain: list[int], by_events: int) -> Belief:
        """What is believed of the store. by_events : blocks its events name, >= 0"""
        now_s, best = self._clock(), Belief(by_events, Knowledge.EVENTS)
        if self._answers is not None:
            found = self._answers.held(chain, now_s)
            if found.store_blocks > best.blocks:
                best = Belief(found.store_blocks, Knowledge.LOOK_UP, found.age_s)
        if self._written is not None:
            wrote = self._written.held(chain, now_s)
            if wrote.blocks > best.blocks:
                best = Belief(wrote.blocks, Knowledge.WRITTEN, wrote.age_s)
        return best
