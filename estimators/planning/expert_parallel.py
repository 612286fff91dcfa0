"""How uneven are the cards of an expert-parallel group, and how long do their exchanges take at least?

Model     experts in order, equally many on each card. Rows of a card: those of its experts. Exchange: the longest of
          what any card sends, any card receives and any cut carries, each over its own rate. With a barrier between
          stages: dispatch + computation of the fullest card + combine
Valid     one copy of each expert; every dispatch moves its own vector; lower bounds, as starts and queues are left out
Blind to  sending a vector once to a card with several of its experts, reduction before combine, padding, data that is
          late, overlap
Source    textbook section 9.4.1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MOST_COUNTS = 100_000_000  # kept of a simulation
MOST_COMPARED = 10_000_000_000  # picks of a simulation, each with those before it: some ten seconds


def one_hot_expert(*, tokens: int, chosen: int, experts: int, hot_rows: float) -> Array:
    """Rows of each expert when the first gets `hot_rows` and the others share what is left equally.

    Raises
    ------
    ValueError : fewer than two experts, or more hot rows than tokens (each token passes an expert once).
    """
    require(experts >= 2, "experts", experts)
    require(1 <= chosen <= experts, "chosen", chosen, f"outside 1 to {experts}")
    require(0 <= hot_rows <= tokens, "hot_rows", hot_rows, f"outside 0 to the {tokens} tokens")
    rows = np.full(experts, (tokens * chosen - hot_rows) / (experts - 1))
    rows[0] = hot_rows
    return rows


def card_rows(expert_rows: npt.ArrayLike, cards: int) -> Array:
    """Rows of each card along the last axis: experts in order, the first cards one more where it does not come out.

    Raises
    ------
    ValueError : there are fewer experts than cards, so that a card would have none.
    """
    rows = np.asarray(expert_rows, dtype=np.float64)
    experts = rows.shape[-1]
    require(1 <= cards <= experts, "cards", cards, f"outside 1 to the {experts} experts")
    each, more = divmod(experts, cards)
    starts = np.arange(cards) * each + np.minimum(np.arange(cards), more)
    return np.asarray(np.add.reduceat(rows, starts, axis=-1))


def skew(rows: npt.ArrayLike) -> Array:
    """Rows of the fullest card over the mean of all cards, along the last axis; 1 is even.

    Raises
    ------
    ValueError : there is no row at all.
    """
    values = np.asarray(rows, dtype=np.float64)
    mean = values.mean(axis=-1)
    require(bool((mean > 0).all()), "rows", "all 0", "nothing to compare")
    return np.asarray(values.max(axis=-1) / mean)


def random_rows(rng: np.random.Generator, *, tokens: int, chosen: int, experts: int, batches: int) -> Counts:
    """Rows of each expert in `batches` batches: every token picks `chosen` different ones, all alike likely.

    Returns counts, one row a batch. Floyd's way to draw a subset, for all tokens of a batch at once.
    """
    require(tokens >= 1, "tokens", tokens)
    require(batches >= 1, "batches", batches)
    require(1 <= chosen <= experts, "chosen", chosen, f"outside 1 to {experts}")
    kept = batches * experts
    require(kept <= MOST_COUNTS, "batches x experts", kept, f"more than {MOST_COUNTS:,}")
    compared = batches * tokens * chosen**2
    require(compared <= MOST_COMPARED, "batches x tokens x chosen x chosen", compared, f"more than {MOST_COMPARED:,}")
    counts = np.empty((batches, experts), dtype=np.int64)
    for batch in range(batches):
        picked = np.empty((chosen, tokens), dtype=np.int64)
        for place, last in enumerate(range(experts - chosen, experts)):
            drawn = rng.integers(0, last + 1, size=tokens)
            taken = (picked[:place] == drawn).any(axis=0)
            picked[place] = np.where(taken, last, drawn)
        counts[batch] = np.bincount(picked.ravel(), minlength=experts)
    return counts


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of links that all data from `senders` to `receivers` must pass. bytes_per_s : of all together, > 0"""

    senders: Sequence[int]
    receivers: Sequence[int]
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ExchangeBound:
    """Least time of one exchange by what limits it, seconds: the longest holds."""

    send_s: float
    receive_s: float
    cut_s: float

    @property
    def least_s(self) -> float:
        return max(self.send_s, self.receive_s, self.cut_s)

    @property
    def limited_by(self) -> str:
        parts = {"sender": self.send_s, "receiver": self.receive_s, "cut": self.cut_s}
        return max(parts, key=parts.__getitem__)


def exchange_bound(
    counts: npt.ArrayLike,
    *,
    item_bytes: float,
    send_bytes_per_s: npt.ArrayLike,
    receive_bytes_per_s: npt.ArrayLike,
    cuts: Sequence[Cut] = (),
) -> ExchangeBound:
    """Bound of an exchange in which sender i gives receiver j `counts[i, j]` items.

    Parameters
    ----------
    counts : items, >= 0, one row a sender
    item_bytes : of each, > 0
    send_bytes_per_s, receive_bytes_per_s : of each sender and receiver, or one number for all, > 0
    cuts : links they share

    Raises
    ------
    ValueError : an argument is out of range or of the wrong shape.
    """
    items = np.asarray(counts, dtype=np.float64)
    require(items.ndim == 2 and items.size > 0, "counts", items.shape, "not a table of senders and receivers")
    require(bool((np.isfinite(items) & (items >= 0)).all()), "counts", counts)
    require(0 < item_bytes < inf, "item_bytes", item_bytes)
    sent = _per_place(items.sum(axis=1), send_bytes_per_s, "send_bytes_per_s")
    received = _per_place(items.sum(axis=0), receive_bytes_per_s, "receive_bytes_per_s")
    across = 0.0
    for cut in cuts:
        require(0 < cut.bytes_per_s < inf, "cut.bytes_per_s", cut.bytes_per_s)
        across = max(across, float(items[np.ix_(cut.senders, cut.receivers)].sum()) / cut.bytes_per_s)
    return ExchangeBound(sent * item_bytes, received * item_bytes, across * item_bytes)


def _per_place(items: Array, rate: npt.ArrayLike, name: str) -> float:
    rates = np.asarray(rate, dtype=np.float64)
    require(rates.shape in ((), items.shape), name, rates.shape, f"not one for each of {len(items)}")
    require(bool((np.isfinite(rates) & (rates > 0)).all()), name, rate)
    return float((items / rates).max())


def compute_s(rows: float, *, row_flops: float, flops_per_s: float) -> float:
    """Arithmetic of `rows` on one card, seconds."""
    require(0 <= rows < inf, "rows", rows)
    require(0 < row_flops < inf, "row_flops", row_flops)
    require(0 < flops_per_s < inf, "flops_per_s", flops_per_s)
    return rows * row_flops / flops_per_s


@dataclass(frozen=True, slots=True)
class LayerBound:
    """Least time of an expert layer whose three stages wait for each other, seconds."""

    dispatch_s: float
    compute_s: float
    combine_s: float

    @property
    def stages_s(self) -> tuple[float, float, float]:
        return self.dispatch_s, self.compute_s, self.combine_s

    @property
    def total_s(self) -> float:
        return sum(self.stages_s)

    @property
    def batches_per_s(self) -> float:
        """What the busiest resource carries when batches follow each other without a barrier, at most."""
        return 1.0 / max(self.stages_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What connects sources and expert groups, each way.

    card_bytes_per_s : of each card, > 0
    cut_bytes_per_s : of all links between sources and groups together, > 0; inf where nothing is shared
    """

    card_bytes_per_s: float
    cut_bytes_per_s: float = inf


def layer_bound(
    counts: npt.ArrayLike,
    *,
    dispatch_bytes: float,
    combine_bytes: float,
    fabric: Fabric,
    row_flops: float,
    flops_per_s: float,
) -> LayerBound:
    """Bound of a layer in which source i sends expert group j `counts[i, j]` rows and gets as many back.

    dispatch_bytes, combine_bytes : of one row on its way there and back
    """
    there = np.asarray(counts, dtype=np.float64)
    bounds = []
    for table, item_bytes in ((there, dispatch_bytes), (there.T, combine_bytes)):
        senders, receivers = map(range, table.shape)
        cuts = [Cut(senders, receivers, fabric.cut_bytes_per_s)] if fabric.cut_bytes_per_s < inf else []
        bounds.append(
            exchange_bound(
                table,
                item_bytes=item_bytes,
                send_bytes_per_s=fabric.card_bytes_per_s,
                receive_bytes_per_s=fabric.card_bytes_per_s,
                cuts=cuts,
            )
        )
    busiest = float(there.sum(axis=0).max())
    return LayerBound(
        dispatch_s=bounds[0].least_s,
        compute_s=compute_s(busiest, row_flops=row_flops, flops_per_s=flops_per_s),
        combine_s=bounds[1].least_s,
    )
