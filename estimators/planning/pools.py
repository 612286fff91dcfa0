"""How many requests a second do so many cards serve, together or split into prefill and decode pools?

Model     a request costs a card prefill_s and decode_s GPU-seconds. Colocated: they add up. Split: the slowest of
          prefill pool, decode pool and link. Ideal piggyback: chunks of prefill hide in decode steps, so a request
          costs the longer of all its arithmetic and all its reads, one pass over the weights for its prefill included
Valid     steady state, every card a whole replica, decode at a constant batch and at the mean context of an answer
Blind to  queues, lengths that vary, the time a handoff takes (only its rate counts), reads of earlier chunks' KV
Source    textbook section 9.2; DistServe, arXiv 2401.09670; Sarathi-Serve (chunked prefill), arXiv 2403.02310
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, prod

import numpy as np
import numpy.typing as npt

from estimators.hardware import Card
from estimators.ranges import require
from estimators.roofline import Roofline
from estimators.shape_costs import costs_of
from estimators.shapes import ModelShape

Array = npt.NDArray[np.float64]

MOST_SPLITS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one request asks for.

    new_tokens : prompt tokens that prefill computes, >= 1
    cached_tokens : prompt tokens it finds in place, >= 0
    output_tokens : tokens of the answer, >= 1; the prefill samples the first of them
    batch : sequences that share a decode step, >= 1
    """

    new_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    batch: int = 32

    def __post_init__(self) -> None:
        require(self.new_tokens >= 1, "new_tokens", self.new_tokens)
        require(self.cached_tokens >= 0, "cached_tokens", self.cached_tokens)
        require(self.output_tokens >= 1, "output_tokens", self.output_tokens)
        require(self.batch >= 1, "batch", self.batch)

    @property
    def prompt_tokens(self) -> int:
        return self.new_tokens + self.cached_tokens

    @property
    def calls(self) -> int:
        """Decode calls: the last token returned is never put back into the model."""
        return self.output_tokens - 1

    @property
    def mean_context(self) -> float:
        """Tokens a decode call sees on average."""
        return self.prompt_tokens + self.calls / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One request on one card, seconds of that card.

    prefill_s : its prefill alone on the card
    decode_s : its share of the decode steps it takes part in
    step_s : one decode step of the batch; 0 when nothing is decoded
    step_compute_s : the arithmetic of that step
    compute_s : arithmetic of prefill and decode together
    read_s : reads of both, with one pass over the weights for the prefill
    idle_tokens : prefill tokens whose arithmetic fits beside one step's reads
    """

    prefill_s: float
    decode_s: float
    step_s: float
    step_compute_s: float
    compute_s: float
    read_s: float
    idle_tokens: float

    @property
    def colocated_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def piggyback_s(self) -> float:
        """With prefill hidden in decode steps as far as arithmetic and reads allow."""
        return max(self.compute_s, self.read_s)


def stage_times(shape: ModelShape, card: Card, work: Work, *, extra_call_s: float = 0.0) -> StageTimes:
    """Times of `work` on a replica of `shape` made of `card`.

    extra_call_s : arithmetic of every decode call besides the shape's own, that reads do not hide, >= 0
    """
    require(0 <= extra_call_s < inf, "extra_call_s", extra_call_s)
    roofline = Roofline.of(shape, card)
    rates = roofline.rates
    prefill_s = roofline.prefill_s(new_tokens=work.new_tokens, cached_tokens=work.cached_tokens)
    if not work.calls:
        return StageTimes(
            prefill_s=prefill_s,
            decode_s=0.0,
            step_s=0.0,
            step_compute_s=0.0,
            compute_s=prefill_s,
            read_s=rates.weights_s,
            idle_tokens=0.0,
        )
    step_s = roofline.decode_step_s([work.mean_context] * work.batch)
    read_tokens = float(roofline.costs.read_tokens(work.mean_context))
    step_compute_s = rates.decode_compute_s(context_tokens=work.batch * read_tokens, batch=work.batch)
    steps = work.calls / work.batch
    extra_s = work.calls * extra_call_s
    return StageTimes(
        prefill_s=prefill_s,
        decode_s=steps * step_s + extra_s,
        step_s=step_s,
        step_compute_s=step_compute_s,
        compute_s=prefill_s + steps * step_compute_s + extra_s,
        read_s=rates.weights_s + steps * step_s,
        idle_tokens=max(step_s - step_compute_s, 0.0) * work.new_tokens / prefill_s,
    )


@dataclass(frozen=True, slots=True)
class Chunked:
    """One prefill carried by decode steps. chunk_tokens : of each, at most; first_token_s : until the last has run."""

    chunk_tokens: int
    chunks: int
    first_token_s: float


def chunked_prefill(times: StageTimes, *, new_tokens: int) -> Chunked:
    """The prompt in chunks that just fill the idle arithmetic of decode steps, which take no longer for it.

    Raises
    ------
    ValueError : a step leaves no room for a token.
    """
    room = int(times.idle_tokens)
    require(room >= 1, "idle tokens of a decode step", times.idle_tokens, "below 1: nothing can ride along")
    chunks = ceil(new_tokens / room)
    return Chunked(chunk_tokens=room, chunks=chunks, first_token_s=chunks * times.step_s)


@dataclass(frozen=True, slots=True)
class Group:
    """`count` (>= 0) equal cards and what a request costs on one."""

    count: int
    times: StageTimes


def per_s(cards: Sequence[float], seconds: Sequence[float]) -> float:
    """Requests a second of a pool: cards of each kind over the seconds a request takes there; inf for no work."""
    return sum(count / each if each > 0 else inf for count, each in zip(cards, seconds, strict=True) if count > 0)


def colocated_per_s(groups: Sequence[Group]) -> float:
    """Every card does both stages, one after the other."""
    return per_s([group.count for group in groups], [group.times.colocated_s for group in groups])


def piggyback_per_s(groups: Sequence[Group]) -> float:
    """Every card does both stages, prefill hidden in decode steps: an upper bound for chunked prefill."""
    return per_s([group.count for group in groups], [group.times.piggyback_s for group in groups])


@dataclass(frozen=True, slots=True)
class Splits:
    """Every way to give whole cards to prefill, the others to decode.

    prefill_per_s, decode_per_s : one axis for each group, indexed by its cards given to prefill, requests/s
    link_per_s : what the handoff link carries, requests/s; inf without one
    """

    prefill_per_s: Array
    decode_per_s: Array
    link_per_s: float

    @property
    def per_s(self) -> Array:
        return np.minimum(np.minimum(self.prefill_per_s, self.decode_per_s), self.link_per_s)

    @property
    def best(self) -> tuple[int, ...]:
        """Cards of each group for prefill; of equal ones, that with the most room behind the link."""
        compute = np.minimum(self.prefill_per_s, self.decode_per_s)
        order = np.lexsort((-compute.ravel(), -self.per_s.ravel()))
        return tuple(int(one) for one in np.unravel_index(int(order[0]), compute.shape))

    def at(self, prefill_cards: Sequence[int]) -> Split:
        """The rates of one way to split."""
        where = tuple(prefill_cards)
        require(
            len(where) == self.prefill_per_s.ndim
            and all(0 <= one < size for one, size in zip(where, self.prefill_per_s.shape, strict=True)),
            "prefill_cards",
            where,
            "no way to split these cards",
        )
        return Split(where, float(self.prefill_per_s[where]), float(self.decode_per_s[where]), self.link_per_s)


@dataclass(frozen=True, slots=True)
class Split:
    """One row of `Splits`."""

    prefill_cards: tuple[int, ...]
    prefill_per_s: float
    decode_per_s: float
    link_per_s: float

    @property
    def per_s(self) -> float:
        return min(self.prefill_per_s, self.decode_per_s, self.link_per_s)

    @property
    def limited_by(self) -> str:
        """The scarcest of the three, as a person calls it."""
        rates = {"prefill pool": self.prefill_per_s, "decode pool": self.decode_per_s, "link": self.link_per_s}
        return min(rates, key=rates.__getitem__)


def all_splits(groups: Sequence[Group], *, link_per_s: float = inf) -> Splits:
    """Rates of every integer split of `groups` (at least one).

    link_per_s : handoffs a second the link carries, > 0; see `handoffs_per_s`
    """
    require(len(groups) > 0, "groups", groups, "empty")
    require(link_per_s > 0, "link_per_s", link_per_s)
    ways = prod(group.count + 1 for group in groups)
    require(ways <= MOST_SPLITS, "ways to split", ways, f"more than {MOST_SPLITS:,}: count cards in larger units")
    prefill = _each_way([(np.arange(group.count + 1), group.times.prefill_s) for group in groups])
    if not any(group.times.decode_s for group in groups):
        return Splits(prefill, np.full_like(prefill, inf), inf)
    left = [(np.arange(group.count, -1, -1), group.times.decode_s) for group in groups]
    return Splits(prefill, _each_way(left), link_per_s)


def _each_way(cards: Sequence[tuple[npt.NDArray[np.int64], float]]) -> Array:
    """Rates of a pool that may get any of these numbers of cards of each kind, requests/s; one axis a kind."""
    rates: Array = np.zeros(())
    for counts, request_s in cards:
        own = counts / request_s if request_s > 0 else np.where(counts > 0, inf, 0.0)  # as in `per_s`
        rates = np.add.outer(rates, own)
    return rates


def handoffs_per_s(*, link_bytes_per_s: float, state_bytes: float, moves: float = 1.0) -> float:
    """States a second that a link carries when each crosses it `moves` (> 0) times.

    Raises
    ------
    ValueError : a rate or size is not above 0, infinite or NaN.
    """
    for name, value in (("link_bytes_per_s", link_bytes_per_s), ("state_bytes", state_bytes), ("moves", moves)):
        require(0 < value < inf, name, value)
    return link_bytes_per_s / (state_bytes * moves)


def spare_call_s(groups: Sequence[Group], *, arrival_rps: float, calls: float) -> float:
    """How much longer every decode call may take until this pool no longer keeps up; below 0: it does not now.

    Groups of one kind of card only: with several the answer depends on who is slowed.
    """
    require(len(groups) == 1, "groups", len(groups), "more than one kind of card")
    require(0 < arrival_rps < inf, "arrival_rps", arrival_rps)
    require(0 < calls < inf, "calls", calls)
    return (groups[0].count / arrival_rps - groups[0].times.decode_s) / calls


def absorbed_call_flops(shape: ModelShape) -> int:
    """FLOPs a decode call adds to read the compact latent: query and value transforms of every layer; 0 without it."""
    if shape.latent is None or shape.latent.expanded:
        return 0
    return shape.attention_layers * shape.latent.expansion_flops(shape.heads)


def resident_bytes(shape: ModelShape, work: Work, *, arriving: int = 1) -> float:
    """Memory of a decode card: weights, the whole batch at its longest, and buffers for `arriving` (>= 0) states."""
    require(arriving >= 0, "arriving", arriving)
    costs = costs_of(shape)
    longest = costs.kv_bytes(float(work.prompt_tokens + work.calls))
    return shape.weights_bytes + work.batch * longest + arriving * costs.kv_bytes(float(work.prompt_tokens))
