"""All candidates of one request, (path, replica) each, with what a rule may read of them.

Model     hit_probability.py and mixture.py (a first token is that of a hit, of the store's part, or of computing all),
          spread.py and conformal.py (quantiles), price.py (what the choice costs others)
Valid     for the moment of the decision
Blind to  blocks that are evicted only in part: all a path reuses is there, or none of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from estimators.conformal import Conformal
from estimators.cost import decode_share_s, gpu_seconds, money_usd
from estimators.hit_probability import HitProbability
from estimators.mixture import spread_quantile_s, spread_quantiles_of_one_s
from estimators.paths import COLUMN, PATHS, Path
from estimators.price import backlog_s, joining_rate_rps, joining_s, levelling_s, queue_behind_s, running_decodes_s
from estimators.routes import Held
from estimators.spread import ResidualSpread
from estimators.view import Column

Grid = npt.NDArray[np.float64]  # (paths, rows)
Mask = npt.NDArray[np.bool_]

LEVELS = (0.9, 0.99)  # of the quantiles that receipts carry and coverage is counted of

_LOCAL, _RECOMPUTE = COLUMN[Path.LOCAL], COLUMN[Path.RECOMPUTE]
_HOST, _DISK = COLUMN[Path.HOST], COLUMN[Path.DISK]


@dataclass(slots=True)  # not frozen: made for every decision, and checked assignments cost as much again
class Surroundings:
    """What else is going on for this request's model: inputs of the price. Not to be changed.

    arrival_rps : arrivals per second at one replica, >= 0; the same for all, see `price.py`
    mean_compute_s : mean prefill work of a request, seconds, >= 0
    mean_context_tokens : mean context of a request, >= 0
    output_tokens : expected output of this request, > 0
    others_output_tokens : what a request met at a random moment of its decode has yet to produce, expected, > 0
    """

    arrival_rps: float
    mean_compute_s: float
    mean_context_tokens: float
    output_tokens: float
    others_output_tokens: float

    @property
    def utilisation(self) -> float:
        """Share of its time that a replica prefills, >= 0; above 1 more arrives than it can do."""
        return self.arrival_rps * self.mean_compute_s


@dataclass(frozen=True, slots=True)
class Doubt:
    """What is learned of how estimates fail, read for every request.

    hits : whether believed blocks are still there; spread : how far first tokens are from their estimates
    conformal : what makes quantiles cover what they claim
    """

    hits: HitProbability
    spread: ResidualSpread
    conformal: Conformal


class Few(NamedTuple):
    """What rules read of one possible candidate, in plain numbers; as `Estimates` has them in grids."""

    column: int
    row: int
    queue_s: float
    fetch_s: float
    expected_s: float
    pace_s: float
    queue_price_s: float
    joining_price_s: float
    decode_price_s: float


@dataclass(slots=True)
class One:
    """One candidate in plain numbers; as `Estimates` has them in grids.

    local_tokens : reusable from the replica's HBM; host_tokens, disk_tokens : with its tiers, as many without
    recompute_s : first token there if nothing is reused
    """

    reused_tokens: float
    local_tokens: float
    host_tokens: float
    disk_tokens: float
    queue_s: float
    fetch_s: float
    ready_s: float
    prefill_s: float
    compute_s: float
    first_token_s: float
    recompute_s: float
    stored_s: float
    hit_probability: float
    stored_probability: float
    expected_s: float
    pace_s: float
    queue_price_s: float
    decode_price_s: float
    scale: float
    shift: float
    age_s: list[float]


@dataclass  # not frozen: that many checked assignments would be a tenth of a decision
class Estimates:
    """All candidates of one request, not to be changed. Times in seconds.

    Grids have shape (paths, rows), of the leading ones of `PATHS`, as many as the fleet has.

    possible : the engine can and, left to itself, will take this path there, and the replica may be chosen
    reused_tokens : prompt tokens not computed, if all believed blocks are there
    queue_s : Q, shape (rows,)
    fetch_s : F, the fetch's duration from its start; zero where nothing is fetched
    ready_s : earliest start the fetch allows, from now; zero where nothing is fetched
    prefill_s : computing what is not reused, running decodes in the same steps included
    compute_s : C, the length of the service: that, and what a fetch adds to it; max(Q, ready_s) + C is the first token
    first_token_s : T_first, if all believed blocks are there
    hit_probability : that they are; 1 where nothing is reused
    stored_probability : that they are not, but the store has its part of the prompt; zero without a store
    stored_s : T_first then, shape (rows,); if neither, it is that of RECOMPUTE
    age_s : how long ago each tier's blocks were last heard of, (tiers, rows); NaN unknown
    pace_s : seconds per output token there, shape (rows,)
    decoding, remaining_tokens : decodes running there, and output they have yet to produce, shape (rows,)
    step_growth_s : what this request's context adds to each later step, shape (rows,)
    around, prompt_tokens : of the request
    pace_scale, weights_s, usd_per_hour : of the replicas, see `FleetView`
    peers : replica each one reads from on path PEER, shape (rows,); None without peers
    held : where the prompt's blocks are believed to be, as it was asked; None where nobody was
    scale, shift : of the logarithm of observed over expected first token, shape (rows,); see `spread.py`
    doubt : where those came from; None where nothing is learned
    put_off : works out `put_off_s`; None where nothing is fetched
    """

    possible: Mask
    reused_tokens: Grid
    queue_s: Column
    fetch_s: Grid
    ready_s: Grid
    prefill_s: Grid
    compute_s: Grid
    first_token_s: Grid
    hit_probability: Grid
    stored_probability: Grid
    stored_s: Column
    age_s: npt.NDArray[np.float64]
    pace_s: Column
    decoding: Column
    remaining_tokens: Column
    step_growth_s: Column
    around: Surroundings
    prompt_tokens: int
    pace_scale: Column
    weights_s: Column
    usd_per_hour: Column
    peers: npt.NDArray[np.int64] | None = None
    scale: Column | float = 0.0
    shift: Column | float = 0.0
    doubt: Doubt | None = None
    held: Held | None = None
    put_off: Callable[[Estimates], Grid] | None = None
    _asked: tuple[Path, int] | None = field(default=None, init=False, repr=False, compare=False)
    _one: One = field(init=False, repr=False, compare=False)

    @property
    def few(self) -> list[Few] | None:
        """The possible candidates by path, then row, where they were worked out one by one; None: read the grids."""
        return None

    @property
    def ready_rows(self) -> list[int]:
        """Replicas that have a possible path, ascending."""
        rows: list[int] = self.usable_rows.nonzero()[0].tolist()
        return rows

    def narrowed(self, ready: Mask) -> Estimates:
        """The same with only `ready` replicas to choose from."""
        return self.changed(possible=self.possible & ready)

    def changed(self, **changes: Any) -> Estimates:
        """The same with other values of some fields."""
        return replace(self, **changes)

    def one(self, path: Path, row: int) -> One:
        """One candidate; asking for the same again costs nothing."""
        if self._asked != (path, row):
            self._asked, self._one = (path, row), self._one_at(COLUMN[path], row)
        return self._one

    def _one_at(self, column: int, row: int) -> One:
        at = column, row
        reused = self.reused_tokens[:, row].tolist()
        local = reused[_LOCAL]
        has_tiers = len(reused) > _HOST
        return One(
            reused_tokens=reused[column],
            local_tokens=local,
            host_tokens=reused[_HOST] if has_tiers else local,
            disk_tokens=reused[_DISK] if has_tiers else local,
            queue_s=self.queue_s.item(row),
            fetch_s=self.fetch_s.item(at),
            ready_s=self.ready_s.item(at),
            prefill_s=self.prefill_s.item(at),
            compute_s=self.compute_s.item(at),
            first_token_s=self.first_token_s.item(at),
            recompute_s=self.first_token_s.item((_RECOMPUTE, row)),
            stored_s=self.stored_s.item(row),
            hit_probability=self.hit_probability.item(at),
            stored_probability=self.stored_probability.item(at),
            expected_s=self.expected_s.item(at),
            pace_s=self.pace_s.item(row),
            queue_price_s=self.queue_price_s.item(at),
            decode_price_s=self.decode_price_s.item(at),
            scale=self.scale if isinstance(self.scale, float) else self.scale.item(row),
            shift=self.shift if isinstance(self.shift, float) else self.shift.item(row),
            age_s=self.age_s[:, row].tolist(),  # a copy: the rest is lent for one decision
        )

    @property
    def usable_rows(self) -> npt.NDArray[np.bool_]:
        """Whether each replica has a possible path, shape (rows,)."""
        return np.asarray(self.possible.any(axis=0))

    @property
    def output_tokens(self) -> float:
        """Expected output of this request."""
        return self.around.output_tokens

    def path_at(self, row: int) -> Path:
        """The possible path with the earliest first token on `row`; at least one must be possible there."""
        times_s = np.where(self.possible[:, row], self.expected_s[:, row], np.inf)
        return PATHS[int(np.argmin(times_s))]

    @cached_property
    def expected_s(self) -> Grid:
        """Mean first token, over where the blocks then really are."""
        if self.doubt is None:
            return self.first_token_s
        recompute_s, expected_s = np.empty((2, *self.first_token_s.shape))
        recompute_s[:] = self.first_token_s[_RECOMPUTE]
        expected_s[:] = self.stored_s
        expected_s -= recompute_s
        expected_s *= self.stored_probability
        expected_s += recompute_s
        np.subtract(self.first_token_s, recompute_s, out=recompute_s)
        recompute_s *= self.hit_probability
        expected_s += recompute_s
        return np.asarray(expected_s)

    @cached_property
    def queue_price_s(self) -> Grid:
        """Delay caused to requests that come later; see `price.py`."""
        around = self.around
        return queue_behind_s(
            arrival_rps=around.arrival_rps,
            utilisation=around.utilisation,
            queue_s=self.queue_s,
            work_s=self.compute_s,
        )

    @cached_property
    def joining_price_s(self) -> Grid:
        """Of that delay, what requests have that come while the queue of now lasts; see `price.py`."""
        around = self.around
        rate_rps = joining_rate_rps(arrival_rps=around.arrival_rps, mean_work_s=around.mean_compute_s)
        return joining_s(joining_rps=rate_rps, queue_s=self.queue_s, work_s=self.compute_s)

    @cached_property
    def levelling_price_s(self) -> Grid:
        """What those lose who would have taken a short queue; see `price.py`."""
        beyond_s = np.maximum(self.compute_s - self.around.mean_compute_s, 0.0)
        return levelling_s(queue_s=self.queue_s, work_s=beyond_s, among=self.usable_rows)

    @cached_property
    def backlog_price_s(self) -> Grid:
        """What all those lose who come while there are queues; see `price.py`."""
        around = self.around
        return backlog_s(
            arrival_rps=around.arrival_rps,
            utilisation=around.utilisation,
            queue_s=self.queue_s,
            work_s=self.compute_s,
            among=self.usable_rows,
        )

    @cached_property
    def decode_price_s(self) -> Grid:
        """Delay caused to running decodes; see `price.py`."""
        return running_decodes_s(
            decode_batch=self.decoding,
            work_s=self.compute_s,
            step_growth_s=self.pace_scale * self.step_growth_s,
            remaining_tokens=self.remaining_tokens,
        )

    @cached_property
    def put_off_s(self) -> Grid:
        """How much later fetches under way on the same links would end, at most, seconds; see `links.py`."""
        return np.zeros(self.possible.shape) if self.put_off is None else self.put_off(self)

    def quantiles_s(self, path: Path, row: int) -> tuple[list[float], list[float]]:
        """Quantiles of the first token at LEVELS of one candidate: as the mixture has them, and as issued.

        Both are needed later, when the outcome corrects the second.
        """
        return self.quantiles_of(self.one(path, row))

    def quantiles_of(self, one: One) -> tuple[list[float], list[float]]:
        """The same of a candidate that was asked for before."""
        hit, stored = one.hit_probability, one.stored_probability
        outcomes = (
            (hit, one.first_token_s),
            (stored, one.stored_s),
            (max(0.0, 1.0 - hit - stored), one.recompute_s),
        )
        raw = spread_quantiles_of_one_s(outcomes, LEVELS, scale=one.scale, shift=one.shift)
        return raw, raw if self.doubt is None else self.doubt.conformal.corrected_one(self.prompt_tokens, raw)

    @cached_property
    def quantile_grid_s(self) -> npt.NDArray[np.float64]:
        """Quantiles at LEVELS of every possible candidate, shape (levels, paths, rows); inf where it is impossible."""
        grid = np.full((len(LEVELS), *self.possible.shape), np.inf)
        grid[:, self.possible] = self._corrected(self._quantiles())
        return grid

    def _corrected(self, raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return raw if self.doubt is None else self.doubt.conformal.corrected(self.prompt_tokens, raw)

    def _quantiles(self) -> npt.NDArray[np.float64]:
        """(levels, n) of the possible candidates, in the order of the grid."""

        def chosen(values: Grid | Column | float) -> npt.NDArray[np.float64]:
            return np.broadcast_to(values, self.possible.shape)[self.possible]

        hit, stored = chosen(self.hit_probability), chosen(self.stored_probability)
        probability = np.stack((hit, stored, 1.0 - hit - stored))
        time_s = np.stack([chosen(s) for s in (self.first_token_s, self.stored_s, self.first_token_s[_RECOMPUTE])])
        scale, shift = chosen(self.scale), chosen(self.shift)
        return np.stack([spread_quantile_s(probability, time_s, q, scale=scale, shift=shift) for q in LEVELS])

    # Money

    @cached_property
    def gpu_s(self) -> Grid:
        """GPU seconds this request takes there: its prefill, and its share of the decode steps it is part of."""
        return gpu_seconds(compute_s=self.compute_s, decode_s=self.decode_share_s)

    @cached_property
    def money_usd(self) -> Grid:
        """Price of those seconds at the replica's price per hour; NaN where that is not known. See `cost.py`."""
        return money_usd(gpu_s=self.gpu_s, usd_per_hour=self.usd_per_hour)

    @property
    def decode_share_s(self) -> Column:
        """Its part of all decode steps it will be in, seconds, shape (rows,)."""
        return decode_share_s(
            shared_step_s=self.pace_scale * self.weights_s,
            own_step_s=self.pace_scale * self.step_growth_s,
            decode_batch=self.decoding,
            output_tokens=self.around.output_tokens,
        )
