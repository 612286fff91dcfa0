"""`Estimates` of a few replicas that were worked out one after another: plain numbers, and grids for who asks for them.

Model     a decision reads a handful of numbers; arrays of them would cost more to make than the numbers themselves
Valid     as `few_replicas.py`, which makes the numbers
Blind to  as there
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.candidates import Doubt, Estimates, Few, One, Surroundings
from estimators.paths import COLUMN, Path
from estimators.price import joining_rate_rps, queue_factor_rps
from estimators.routes import Held, Rows
from estimators.view import FleetView

# What is worked out for each replica: first of itself, then of each path, local, recompute, remote and peer.
BY_ROW = ("queue_s", "pace_s", "step_growth_s", "decoding", "remaining_tokens", "stored_s")
BY_PATH = ("possible", "reused", "fetch_s", "prefill_s", "first_token_s", "hit_probability", "stored_probability")
_QUEUE, _PACE, _GROWTH, _DECODING, _REMAINING, _STORED = range(len(BY_ROW))
_POSSIBLE, _REUSED, _FETCH, _PREFILL, _FIRST, _HIT, _STORED_PROBABILITY = range(len(BY_PATH))
_LOCAL, _RECOMPUTE = COLUMN[Path.LOCAL], COLUMN[Path.RECOMPUTE]

Numbers = Sequence[float]


class FewEstimates(Estimates):
    """See the module. What `Estimates` has as arrays is made when it is first read, all together.

    of_rows : for each replica `BY_ROW`
    of_paths : for each replica `BY_PATH`, each for all paths worked out, of which the fleet has the first `paths`
    scales, shifts : of the replicas, see `Estimates`
    """

    def __init__(
        self,
        of_rows: list[Numbers],
        of_paths: list[Numbers],
        *,
        paths: int,
        view: FleetView,
        age_s: npt.NDArray[np.float64],
        around: Surroundings,
        prompt_tokens: int,
        peers: Rows | None,
        scale: npt.NDArray[np.float64] | float,
        shift: npt.NDArray[np.float64] | float,
        doubt: Doubt | None,
        held: Held,
    ) -> None:
        self._of_rows, self._of_paths, self._paths = of_rows, of_paths, paths
        self._width = len(of_paths[0]) // len(BY_PATH)
        self._few: list[Few] | None = None
        self.age_s = age_s
        self.around = around
        self._factor_rps = queue_factor_rps(arrival_rps=around.arrival_rps, utilisation=around.utilisation)
        self._joining_rps = joining_rate_rps(arrival_rps=around.arrival_rps, mean_work_s=around.mean_compute_s)
        self.prompt_tokens = prompt_tokens
        self.pace_scale = view.pace_scale.copy()  # prices may be asked for when it has moved on
        self.weights_s = view.weights_s
        self.usd_per_hour = view.usd_per_hour
        self.peers = peers
        self.scale = scale
        self.shift = shift
        self.doubt = doubt
        self.held = held

    def __getattr__(self, name: str) -> Any:
        """The grids, which nothing else has: an attribute that is there is found before this is asked."""
        if name not in _GRIDS:
            raise AttributeError(name)
        rows = len(self._of_rows)
        self.queue_s, self.pace_s, self.step_growth_s, self.decoding, self.remaining_tokens, self.stored_s = _turned(
            self._of_rows, rows
        )
        grids = _turned(self._of_paths, rows).reshape(len(BY_PATH), -1, rows)[:, : self._paths]
        self.possible = grids[_POSSIBLE] > 0.0
        self.reused_tokens = grids[_REUSED]
        self.fetch_s = self.ready_s = grids[_FETCH]
        self.prefill_s = self.compute_s = grids[_PREFILL]
        self.first_token_s, self.hit_probability, self.stored_probability = grids[_FIRST:]
        return self.__dict__[name]

    @property
    def few(self) -> list[Few]:
        if self._few is None:
            width, each = self._width, list(zip(self._of_rows, self._of_paths, self.pace_scale.tolist(), strict=True))
            self._few = [
                Few(
                    column,
                    row,
                    own[_QUEUE],
                    of_paths[_FETCH * width + column],
                    *self._priced(own, of_paths, column, pace_scale),
                )
                for column in range(self._paths)
                for row, (own, of_paths, pace_scale) in enumerate(each)
                if of_paths[_POSSIBLE * width + column]
            ]
        return self._few

    @property
    def ready_rows(self) -> list[int]:
        return sorted({candidate.row for candidate in self.few})

    def changed(self, **changes: Any) -> Estimates:
        known = {one.name: getattr(self, one.name) for one in fields(Estimates) if one.init}
        return Estimates(**{**known, **changes})

    def _one_at(self, column: int, row: int) -> One:
        own, of_paths, width = self._of_rows[row], self._of_paths[row], self._width
        expected_s, pace_s, queue_price_s, _joining_price_s, decode_price_s = self._priced(
            own, of_paths, column, self.pace_scale.item(row)
        )
        local = of_paths[_REUSED * width + _LOCAL]
        return One(
            reused_tokens=of_paths[_REUSED * width + column],
            local_tokens=local,
            host_tokens=local,
            disk_tokens=local,
            queue_s=own[_QUEUE],
            fetch_s=of_paths[_FETCH * width + column],
            ready_s=of_paths[_FETCH * width + column],
            prefill_s=of_paths[_PREFILL * width + column],
            compute_s=of_paths[_PREFILL * width + column],
            first_token_s=of_paths[_FIRST * width + column],
            recompute_s=of_paths[_FIRST * width + _RECOMPUTE],
            stored_s=own[_STORED],
            hit_probability=of_paths[_HIT * width + column],
            stored_probability=of_paths[_STORED_PROBABILITY * width + column],
            expected_s=expected_s,
            pace_s=pace_s,
            queue_price_s=queue_price_s,
            decode_price_s=decode_price_s,
            scale=self.scale if isinstance(self.scale, float) else self.scale.item(row),
            shift=self.shift if isinstance(self.shift, float) else self.shift.item(row),
            age_s=self.age_s[:, row].tolist(),
        )

    def _priced(
        self, own: Numbers, of_paths: Numbers, column: int, pace_scale: float
    ) -> tuple[float, float, float, float, float]:
        """Expected first token, pace and the prices of one candidate, as the properties of `Estimates` have them."""
        width = self._width
        first_s, work_s = of_paths[_FIRST * width + column], of_paths[_PREFILL * width + column]
        expected_s = first_s
        if self.doubt is not None:
            recompute_s = of_paths[_FIRST * width + _RECOMPUTE]
            expected_s = (own[_STORED] - recompute_s) * of_paths[_STORED_PROBABILITY * width + column] + recompute_s
            expected_s += (first_s - recompute_s) * of_paths[_HIT * width + column]
        queue_price_s = self._factor_rps * work_s * (2.0 * own[_QUEUE] + work_s)
        joining_price_s = self._joining_rps * own[_QUEUE] * work_s
        decode_price_s = own[_DECODING] * work_s + pace_scale * own[_GROWTH] * own[_REMAINING]
        return expected_s, own[_PACE], queue_price_s, joining_price_s, decode_price_s


_GRIDS = frozenset(
    {
        *("possible", "reused_tokens", "fetch_s", "ready_s", "prefill_s", "compute_s", "first_token_s"),
        *("hit_probability", "stored_probability", "stored_s", "queue_s", "pace_s", "step_growth_s", "decoding"),
        "remaining_tokens",
    }
)


def _turned(numbers: list[Numbers], rows: int) -> npt.NDArray[np.float64]:
    """Numbers of each row as columns of one row each, shape (numbers, rows)."""
    joined = array("d")
    for of_row in numbers:
        joined.extend(of_row)
    return np.frombuffer(joined).reshape(rows, -1).T.copy()
