"""What a replica does about a fetch: when it starts, in which pieces, and what happens at the request's turn.

Q  moment the GPU can start the request, from arrival     R  moment its state is ready, from arrival
F(t)  duration of the fetch if it starts at t             C  work left once both are there

    overlapped         starts on arrival, the start waits for it        max(Q, R) + C
    serial             starts at the turn, others run meanwhile         Q + F(Q) + C
    blocking           starts at the turn and holds the GPU             Q + F(Q) + C for it, F(Q) for everyone there
    layerwise          starts on arrival, compute trails the layers     max(Q + C, R1 + C, R + C/L)
    layerwise_in_turn  the same from the turn                           Q added to R1 and R
    best_effort        starts on arrival, ends at the turn              Q + C of what had arrived by Q
    time_limited       the same with some patience at the turn          Q + min(max(R - Q, 0), limit) + C of what had
                                                                        arrived
    two_ends           starts on arrival at the tail; from the turn     Q + C' F / (C' + F) + C_new if F starts at Q,
                       the head is computed until both meet             C' recompute of the reusable part

Where all is fetched that the request can use (overlapped, layerwise), one that had nothing to fetch on arrival looks
once more at its turn: what was in HBM then may have been evicted while it waited, and what others computed in the
meantime may be in the store.

Blind to  a GPU that is slowed by the copies themselves
Source    vLLM V1, which asks its connector when a request is first scheduled; CachedAttention (USENIX ATC 2024) for
          layer by layer, SGLang HiCache's prefetch policies (best_effort, timeout, wait_complete), Cake (Jin et al.
          2024) for the two ends
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Shape(Enum):
    """In which parts the bytes come, each of them usable once it has come."""

    WHOLE = "whole"  # all or nothing
    LAYERS = "layers"  # the first layer of all tokens, then the rest
    HEAD_FIRST = "head_first"  # pieces of some hundred tokens, from the start of the prompt
    TAIL_FIRST = "tail_first"  # the same pieces, from the end


class AtTurn(Enum):
    """What happens when the GPU could start a request whose fetch is still under way."""

    NOT_QUEUED = "not_queued"  # it has no turn before its state is there
    TAKE = "take"  # the fetch ends; what has come is used
    WAIT = "wait"  # the same after some patience, in which others run
    MEET = "meet"  # the head is computed while the tail comes


@dataclass(frozen=True, slots=True)
class Discipline:
    """on_arrival : the fetch starts on arrival, else at the turn; holds_gpu : no step starts while it is under way
    looks_again : at the turn, for a request that had nothing to fetch on arrival
    """

    name: str
    on_arrival: bool
    shape: Shape
    at_turn: AtTurn
    holds_gpu: bool = False
    looks_again: bool = False


_ALL = (
    Discipline("overlapped", True, Shape.WHOLE, AtTurn.NOT_QUEUED, looks_again=True),
    Discipline("serial", False, Shape.WHOLE, AtTurn.NOT_QUEUED),
    Discipline("blocking", False, Shape.WHOLE, AtTurn.NOT_QUEUED, holds_gpu=True),
    Discipline("layerwise", True, Shape.LAYERS, AtTurn.NOT_QUEUED, looks_again=True),
    Discipline("layerwise_in_turn", False, Shape.LAYERS, AtTurn.NOT_QUEUED),
    Discipline("best_effort", True, Shape.HEAD_FIRST, AtTurn.TAKE),
    Discipline("time_limited", True, Shape.HEAD_FIRST, AtTurn.WAIT),
    Discipline("two_ends", True, Shape.TAIL_FIRST, AtTurn.MEET),
)
DISCIPLINES: dict[str, Discipline] = {discipline.name: discipline for discipline in _ALL}
HAND_OFF = Discipline("hand_off", True, Shape.WHOLE, AtTurn.NOT_QUEUED)  # a prefill's state is of use only in full
