"""What no router can beat: each request alone on an idle fleet, and the smallest mean over all schedules.

Model     perfect cache: every full block of a prompt that arrived earlier is at hand everywhere, for free.
          Alone: the request's chunks, one after another, on the card that is fastest for it, nothing beside them.
          Pooled: one server as fast as all replicas together, shortest remaining work first, which has the smallest
          mean time in system of all schedules of one server. How much of its time it works is the ideal cached load
Valid     engines without jitter (with jitter: in the mean over seeds), one model, prompts alike as far as their ids
          say. Times in seconds as on cards of normal speed, whatever the fleet file's `speed`
Blind to  decodes, memory, fetches, routing: all of them can only add. docs/bounds.md has the argument
Source    Schrage 1968 (shortest remaining first); service times are the simulated engines' own
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loadtest.traffic import TOKENS_PER_ID, TrafficRow
from sim_backends import fleet as fleet_file
from sim_backends.fleet import Fleet
from sim_backends.service_times import ServiceTimes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MANY_PAIRS = 1e10  # enough attention to make any step bound by compute, few enough to keep a difference exact


class Prompt(Protocol):
    """What of a request is needed to know its prefill."""

    @property
    def input_length(self) -> int: ...

    @property
    def hash_ids(self) -> list[int]: ...


def ideal_cached_tokens(rows: Sequence[Prompt], *, block_tokens: int, tokens_per_id: int = TOKENS_PER_ID) -> Ints:
    """Prompt tokens of each request that a perfect cache has when it arrives; shape (rows,).

    All prompts of earlier rows count as computed. Whole blocks only, and at least one token is left to compute, as
    in the engines.

    Parameters
    ----------
    rows : in order of arrival
    block_tokens : of the engines' cache, >= 1
    tokens_per_id : tokens behind each of the rows' ids, the last one cut, >= 1
    """
    if block_tokens < 1 or tokens_per_id < 1:
        raise ValueError(f"block_tokens {block_tokens} and tokens_per_id {tokens_per_id} must be at least 1")
    chain: dict[tuple[int, int], int] = {}  # (what comes before, id) -> number of this prefix
    known_tokens: list[int] = []  # of the last id of each prefix: it may have been cut
    cached = np.zeros(len(rows), dtype=np.int64)
    for index, row in enumerate(rows):
        before, hits, whole = -1, 0, True
        for start, key in zip(range(0, row.input_length, tokens_per_id), row.hash_ids, strict=False):
            own = min(tokens_per_id, row.input_length - start)
            number = chain.setdefault((before, key), len(known_tokens))
            if number == len(known_tokens):
                known_tokens.append(0)
            if whole:
                hits = start + min(own, known_tokens[number])
                whole = hits == start + tokens_per_id
            known_tokens[number] = max(known_tokens[number], own)
            before = number
        cached[index] = min(hits, row.input_length - 1) // block_tokens * block_tokens
    return cached


def best_possible_s(fleet: Fleet, rows: Sequence[TrafficRow], *, tokens_per_id: int = TOKENS_PER_ID) -> Floats:
    """Smallest possible time to the first token of each request, from its arrival; shape (rows,), > 0.

    With the perfect cache, alone on the fleet's fastest replica for it. Slowdown is the observed time over this.
    `rows` in order of arrival; the size of a cache block is the fleet's.
    """
    cached = ideal_cached_tokens(rows, block_tokens=fleet.block_tokens, tokens_per_id=tokens_per_id)
    return fastest_s(fleet, prefill_alone_s(fleet, prompt_tokens=prompt_tokens_of(rows), cached_tokens=cached))


def fastest_s(fleet: Fleet, by_card_s: dict[str, Floats]) -> Floats:
    """Of times on each healthy card, those on the replica that is fastest for each request."""
    kinds = {(replica.card, replica.slow) for replica in fleet.replicas}
    return np.asarray(np.min([by_card_s[card] * slow for card, slow in kinds], axis=0))


def prompt_tokens_of(rows: Sequence[Prompt]) -> Ints:
    return np.fromiter((row.input_length for row in rows), dtype=np.int64, count=len(rows))


def prefill_alone_s(fleet: Fleet, *, prompt_tokens: Ints, cached_tokens: Ints) -> dict[str, Floats]:
    """Time of each request's prefill alone on an idle, healthy card, for every one the fleet uses; each (requests,).

    Chunk by chunk under the fleet's token budget. `cached_tokens` in 0..prompt_tokens - 1 are not computed.
    """
    _check_lengths(prompt_tokens, cached_tokens)
    budget = _engine(fleet).token_budget
    lengths = list(zip(prompt_tokens.tolist(), cached_tokens.tolist(), strict=True))
    return {
        card: np.array([_chunks_s(times, prompt, cached, budget) for prompt, cached in lengths], dtype=np.float64)
        for card, times in _times_by_card(fleet).items()
    }


def _chunks_s(times: ServiceTimes, prompt: int, cached: int, budget: int) -> float:
    total_s = 0.0
    for start in range(cached, prompt, budget):
        new = min(budget, prompt - start)
        total_s += times.step_s(
            tokens=new, pairs=new * start + 0.5 * new * new, kv_tokens_read=0, emitting=start + new == prompt
        )
    return total_s


def least_work_s(fleet: Fleet, *, prompt_tokens: Ints, cached_tokens: Ints) -> dict[str, Floats]:
    """Least GPU time each request takes of any steps, for every card the fleet uses; each (requests,).

    Below `prefill_alone_s`: a step is shared by up to `token_budget` tokens, so a token cannot be charged more than
    its share of what a full step costs once.
    """
    _check_lengths(prompt_tokens, cached_tokens)
    budget = _engine(fleet).token_budget
    new = prompt_tokens - cached_tokens
    pairs = 0.5 * (prompt_tokens.astype(np.float64) ** 2 - cached_tokens.astype(np.float64) ** 2)
    work_s: dict[str, Floats] = {}
    for card, times in _times_by_card(fleet).items():
        token_s, pair_s, emit_s = _marginal_s(times, budget)
        work_s[card] = new * token_s + pairs * pair_s + emit_s
    return work_s


def _marginal_s(times: ServiceTimes, budget: int) -> tuple[float, float, float]:
    """Seconds per token (of a full step), per query-key pair and per first token, measured from outside."""
    base_s = times.step_s(tokens=budget, pairs=_MANY_PAIRS, kv_tokens_read=0, emitting=0)
    more_s = times.step_s(tokens=budget, pairs=2 * _MANY_PAIRS, kv_tokens_read=0, emitting=0)
    emit_s = times.step_s(tokens=budget, pairs=_MANY_PAIRS, kv_tokens_read=0, emitting=1) - base_s
    pair_s = (more_s - base_s) / _MANY_PAIRS
    return (base_s - _MANY_PAIRS * pair_s) / budget, pair_s, emit_s


@dataclass(frozen=True, slots=True)
class MeanBound:
    """Two lower bounds of the mean time to the first token, seconds; the larger one is the bound.

    pooled_s : one server as fast as all replicas, shortest remaining work first
    alone_s : mean over requests of their best possible
    """

    pooled_s: float
    alone_s: float

    @property
    def bound_s(self) -> float:
        return max(self.pooled_s, self.alone_s)


def mean_bound(
    fleet: Fleet, rows: Sequence[TrafficRow], *, tokens_per_id: int = TOKENS_PER_ID, first: int = 0
) -> MeanBound:
    """Lower bound of the mean time to the first token of `rows[first:]`, for every policy on this fleet.

    Parameters
    ----------
    rows : in order of arrival, arrivals as on cards of normal speed
    first : rows before it only fill the cache (warm-up), 0 <= first < len(rows)

    Raises
    ------
    ValueError : no row is left to count.
    """
    if not 0 <= first < len(rows):
        raise ValueError(f"first is {first}, but there are {len(rows)} rows")
    prompts = prompt_tokens_of(rows)[first:]
    cached = ideal_cached_tokens(rows, block_tokens=fleet.block_tokens, tokens_per_id=tokens_per_id)[first:]
    arrived_s = np.array([row.at_s for row in rows[first:]])
    lengths = {"prompt_tokens": prompts, "cached_tokens": cached}
    in_system_s = shortest_remaining_first_s(arrived_s, pooled_work_s(fleet, **lengths))
    return MeanBound(
        pooled_s=float(np.mean(in_system_s)),
        alone_s=float(np.mean(fastest_s(fleet, prefill_alone_s(fleet, **lengths)))),
    )


def ideal_busy_s(fleet: Fleet, rows: Sequence[Prompt], *, tokens_per_id: int = TOKENS_PER_ID) -> float:
    """How long the pooled server works on all `rows` with the perfect cache, seconds.

    Over the time in which they arrive it is the ideal cached load: at 1 all of that server's time is just enough.
    """
    cached = ideal_cached_tokens(rows, block_tokens=fleet.block_tokens, tokens_per_id=tokens_per_id)
    return float(pooled_work_s(fleet, prompt_tokens=prompt_tokens_of(rows), cached_tokens=cached).sum())


def pooled_work_s(fleet: Fleet, *, prompt_tokens: Ints, cached_tokens: Ints) -> Floats:
    """Least time of each request on one server as fast as all replicas together, seconds; shape (requests,).

    Cards differ in more than one number, so a card counts with the largest speed it shows for any of these requests;
    a slow replica with that much less.
    """
    work_s = least_work_s(fleet, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    reference = work_s[fleet.replicas[0].card]
    speed = {card: float(np.max(reference / own_s)) for card, own_s in work_s.items()}
    together = sum(speed[replica.card] / replica.slow * replica.ranks for replica in fleet.replicas)
    return np.asarray(reference / together)


def shortest_remaining_first_s(arrived_s: Floats, work_s: Floats) -> Floats:
    """Time in system of each request on one server of speed 1 that always does the shortest remaining work.

    The smallest mean of all schedules, pre-emptive ones included (Schrage 1968). O(n log n); shape (requests,).
    `arrived_s` ascending, `work_s` >= 0, both finite.
    """
    if not (np.isfinite(arrived_s).all() and np.isfinite(work_s).all()):
        raise ValueError("arrivals and work must be finite")
    if (np.diff(arrived_s) < 0.0).any() or (work_s < 0.0).any():
        raise ValueError("arrivals must ascend and work must not be negative")
    in_system_s = np.zeros(len(work_s))
    for index, ended_s in _ends(arrived_s.tolist(), work_s.tolist()):
        in_system_s[index] = ended_s - arrived_s[index]
    return in_system_s


def _ends(arrived_s: list[float], work_s: list[float]) -> Iterator[tuple[int, float]]:
    """(request, its end) in order of ending."""
    waiting: list[tuple[float, int]] = []  # (remaining work, request)
    now_s = 0.0
    for index, (at_s, own_s) in enumerate(zip(arrived_s, work_s, strict=True)):
        yield from _serve(waiting, now_s, at_s)
        heapq.heappush(waiting, (own_s, index))
        now_s = at_s
    yield from _serve(waiting, now_s, inf)


def _serve(waiting: list[tuple[float, int]], now_s: float, until_s: float) -> Iterator[tuple[int, float]]:
    """Work from `now_s` to `until_s`; what is begun and not done goes back with what is left of it."""
    while waiting and now_s < until_s:
        left_s, index = heapq.heappop(waiting)
        if now_s + left_s > until_s:
            heapq.heappush(waiting, (left_s - (until_s - now_s), index))
            return
        now_s += left_s
        yield index, now_s


def _times_by_card(fleet: Fleet) -> dict[str, ServiceTimes]:
    """Exact service times of every card that a replica has, at normal speed; a replica that is slow takes longer.

    Raises
    ------
    ValueError : replicas serve different models, so no request can run on all of them.
    """
    if any(fleet.model_of(replica) != fleet.model for replica in fleet.replicas):
        raise ValueError("bounds are of fleets with one model, but replicas of this one name others")
    cards = dict.fromkeys(replica.card for replica in fleet.replicas)
    return {
        card: ServiceTimes(fleet.model, fleet.cards[card], speed=1.0, jitter=0.0, rng=random.Random(0))
        for card in cards
    }


def _engine(fleet: Fleet) -> fleet_file.Engine:
    return fleet.engine or fleet_file.Engine()


def _check_lengths(prompt_tokens: Ints, cached_tokens: Ints) -> None:
    if (cached_tokens < 0).any() or (cached_tokens >= prompt_tokens).any():
        raise ValueError("cached tokens must be at least 0 and less than the prompt's")
