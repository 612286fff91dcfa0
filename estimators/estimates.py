"""Q, R, C, first token and price of one request on every replica, by every path: one call, arrays out.

Model     queueing.py (Q), links.py (R), roofline.py corrected by calibration.py (C), first_token.py (T_first),
          price.py. Where the engine decides the path by itself, only what it will do is possible.
Valid     replicas of one model shape; one shared store
Blind to  eviction between the decision and the request's turn; KV space
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from estimators.calibration import FEATURES
from estimators.first_token import Discipline, first_layer_s, first_token_s
from estimators.links import Link, fetch_s
from estimators.paths import COLUMN, PATHS, Path
from estimators.price import queue_behind_s, running_decodes_s
from estimators.queueing import decodes, queue_s, step_share_s
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.shapes import prefill_work
from estimators.view import Column, FleetView

Grid = npt.NDArray[np.float64]  # (rows, paths)


@dataclass(frozen=True, slots=True)
class Held:
    """Where the leading blocks of a prompt are, as the directory believes.

    local_blocks : leading blocks in each replica's HBM, int array (rows,)
    store_blocks : leading blocks in the shared store
    """

    local_blocks: npt.NDArray[np.int32]
    store_blocks: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else is going on for this request's model: inputs of the price.

    arrival_rps : arrivals per second at one replica, >= 0; the same for all, see `price.py`
    mean_compute_s : mean prefill work of a request, seconds, >= 0
    mean_context_tokens : mean context of a request, >= 0
    output_tokens : expected output of this request, > 0
    others_output_tokens : expected output of a request that is running already, > 0
    """

    arrival_rps: float
    mean_compute_s: float
    mean_context_tokens: float
    output_tokens: float
    others_output_tokens: float


@dataclass(frozen=True, slots=True)
class Estimates:
    """All candidates of one request. Grids have shape (rows, paths) in the order of `PATHS`; times in seconds.

    possible : the engine can and, left to itself, will take this path there, and the replica may be chosen
    reused_tokens : prompt tokens not computed
    queue_s : Q, shape (rows,)
    fetch_s : F, the fetch's duration from its start; zero where nothing is fetched
    ready_s : earliest start the fetch allows, from now; zero where nothing is fetched
    compute_s : C, running decodes in the same steps included
    features : (rows, paths, features) of `estimators.calibration`, for learning from the outcome
    first_token_s : T_first
    step_share_s : what the running decodes add to each step of a prefill, shape (rows,)
    pace_s : seconds per output token there, shape (rows,)
    queue_price_s, decode_price_s : delay caused to requests behind, and to running decodes
    output_tokens : expected output of this request
    """

    possible: npt.NDArray[np.bool_]
    reused_tokens: Grid
    queue_s: Column
    fetch_s: Grid
    ready_s: Grid
    compute_s: Grid
    features: npt.NDArray[np.float64]
    first_token_s: Grid
    step_share_s: Column
    pace_s: Column
    queue_price_s: Grid
    decode_price_s: Grid
    output_tokens: float

    @property
    def usable_rows(self) -> npt.NDArray[np.bool_]:
        """Whether each replica has a possible path, shape (rows,)."""
        return np.asarray(self.possible.any(axis=1))

    def path_at(self, row: int) -> Path:
        """The possible path with the earliest first token on `row`; at least one must be possible there."""
        times_s = np.where(self.possible[row], self.first_token_s[row], np.inf)
        return PATHS[int(np.argmin(times_s))]


class Estimator:
    """Turns facts into `Estimates`. Stateless but for the links it reads.

    stages : links a fetch crosses on each replica, in order; empty when there is no store
    step_tokens : prompt tokens an engine computes in one step at most, >= 1
    minimum_fetch_tokens : a store prefix longer by less than this is not fetched, >= 1
    engine_decides : the engine looks the store up by itself; otherwise every path is open
    """

    def __init__(
        self,
        *,
        kv_bytes_per_token: int,
        layers: int,
        stages: Sequence[Sequence[Link]],
        discipline: Discipline = Discipline.OVERLAPPED,
        minimum_fetch_tokens: int = 1,
        step_tokens: int = 2048,
        engine_decides: bool = True,
    ) -> None:
        require(kv_bytes_per_token >= 1, "kv_bytes_per_token", kv_bytes_per_token)
        require(layers >= 1, "layers", layers)
        require(minimum_fetch_tokens >= 1, "minimum_fetch_tokens", minimum_fetch_tokens)
        require(step_tokens >= 1, "step_tokens", step_tokens)
        self.stages = stages
        self.discipline = discipline
        self._kv_bytes_per_token = kv_bytes_per_token
        self._layers = layers
        self._minimum_fetch_tokens = minimum_fetch_tokens
        self.step_tokens = step_tokens
        self._engine_decides = engine_decides
        self._fetch_start_s = stages[0][0].start_s if stages else 0.0

    def fetch_bytes(self, tokens: float) -> float:
        """Bytes of KV of `tokens` tokens."""
        return tokens * self._kv_bytes_per_token

    def estimate(
        self, request: RequestFacts, held: Held, view: FleetView, around: Surroundings, now_s: float
    ) -> Estimates:
        """Estimates of `request` as it stands at `now_s`. Replicas that are not ready have no possible path."""
        prompt = max(request.prompt_tokens, 1)
        local = np.minimum(held.local_blocks * float(request.block_tokens), prompt - 1.0)
        stored = min(float(held.store_blocks * request.block_tokens), prompt - 1.0)
        fetched = np.maximum(stored - local, 0.0)

        reused = np.zeros((view.rows, len(PATHS)))
        reused[:, COLUMN[Path.LOCAL]] = local
        reused[:, COLUMN[Path.REMOTE]] = np.maximum(local, stored)

        share_s = step_share_s(view, around.mean_context_tokens)
        queue = queue_s(view, now_s, step_share_s=share_s, mean_compute_s=around.mean_compute_s)
        features = self._features(prompt - reused, reused, view)
        steps = np.ceil((prompt - reused) / self.step_tokens)
        ideal_s = np.einsum("rpf,rf->rp", features, view.coefficients)
        compute = np.maximum(ideal_s, view.weights_s[:, None]) + steps * share_s[:, None]
        fetch = np.zeros_like(reused)
        starts_s = now_s + queue if self.discipline is Discipline.SERIAL else np.full(view.rows, now_s)
        fetch[:, COLUMN[Path.REMOTE]] = self._fetch_s(fetched, starts_s)

        decoding = decodes(view)
        step_growth_s = prompt * view.context_s_per_token
        return Estimates(
            possible=self._possible(local, fetched, view),
            reused_tokens=reused,
            queue_s=queue,
            fetch_s=fetch,
            ready_s=self._ready_s(queue, fetch, compute),
            compute_s=compute,
            features=features,
            first_token_s=first_token_s(
                self.discipline,
                queue_s=np.broadcast_to(queue[:, None], compute.shape),
                fetch_s=fetch,
                fetch_start_s=self._fetch_start_s,
                compute_s=compute,
                layers=self._layers,
            ),
            step_share_s=share_s,
            pace_s=view.pace_scale * (view.weights_s + share_s + step_growth_s),
            queue_price_s=queue_behind_s(
                arrival_rps=around.arrival_rps,
                utilisation=around.arrival_rps * around.mean_compute_s,
                queue_s=queue[:, None],
                work_s=compute,
            ),
            decode_price_s=running_decodes_s(
                decode_batch=decoding[:, None],
                work_s=compute,
                step_growth_s=step_growth_s[:, None],
                remaining_tokens=(decoding * around.others_output_tokens)[:, None],
            ),
            output_tokens=around.output_tokens,
        )

    def _ready_s(self, queue: Column, fetch: Grid, compute: Grid) -> Grid:
        """Earliest start each discipline allows, so that start + C is the first token: R, Q + F(Q), or layer one's."""
        if self.discipline is Discipline.SERIAL:
            return np.where(fetch > 0, queue[:, None] + fetch, 0.0)
        if self.discipline is Discipline.LAYERWISE:
            first_s = first_layer_s(fetch, self._fetch_start_s, self._layers)
            return np.maximum(first_s, fetch - compute * (1.0 - 1.0 / self._layers)) * (fetch > 0)
        return fetch

    def _fetch_s(self, tokens: Column, starts_s: Column) -> Column:
        if not self.stages:
            return np.zeros_like(tokens)
        return np.array(
            [
                fetch_s(self.fetch_bytes(size), *links, now_s=start_s)
                for size, start_s, links in zip(tokens.tolist(), starts_s.tolist(), self.stages, strict=True)
            ]
        )

    def _features(self, new: Grid, cached: Grid, view: FleetView) -> npt.NDArray[np.float64]:
        features = np.empty((*new.shape, len(FEATURES)))
        weights_s = view.weights_s[:, None]
        features[..., 0] = new * view.linear_s_per_token[:, None] + view.head_s[:, None]
        features[..., 1] = (new * cached + new * new / 2) * view.attention_s_per_pair[:, None]
        features[..., 2] = np.ceil(new / self.step_tokens) * weights_s
        features[..., 3] = weights_s
        return features

    def features_at(self, row: int, *, new_tokens: float, cached_tokens: float, view: FleetView) -> Column:
        """Physical features of one prefill on one replica, shape (features,): what calibration learns from."""
        work = prefill_work(new_tokens=new_tokens, cached_tokens=cached_tokens)
        weights_s = float(view.weights_s[row])
        return np.array(
            [
                work.tokens * view.linear_s_per_token[row] + view.head_s[row],
                work.pairs * view.attention_s_per_pair[row],
                ceil(new_tokens / self.step_tokens) * weights_s,
                weights_s,
            ]
        )

    def _possible(self, local: Column, fetched: Column, view: FleetView) -> npt.NDArray[np.bool_]:
        worth = (fetched >= self._minimum_fetch_tokens) & bool(self.stages)
        possible = np.empty((view.rows, len(PATHS)), dtype=np.bool_)
        possible[:, COLUMN[Path.REMOTE]] = worth
        possible[:, COLUMN[Path.LOCAL]] = local > 0
        if self._engine_decides:
            possible[:, COLUMN[Path.LOCAL]] &= ~worth
        possible[:, COLUMN[Path.RECOMPUTE]] = (local == 0) & ~worth if self._engine_decides else True
        possible &= view.ready[:, None]
        return possible
