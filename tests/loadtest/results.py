"""Results by hand, for tests of what is made of them."""

from __future__ import annotations

import numpy as np

from loadtest.replay.measure import Ceiling
from loadtest.replay.results import Result, blank


def a_result(first_token_s: list[float], *, label: str = "some_rule", rows: list[int] | None = None) -> Result:
    """Requests a second apart on two A100, 1000 tokens in and 11 out, 10 s from first to last token; NaN: refused."""
    requests = len(first_token_s)
    result = blank(label, replicas=["one", "two"], cards=["A100", "A100"], requests=requests)
    result.arrived_s[:] = np.arange(requests)
    result.first_token_s[:] = first_token_s
    result.ended_s[:] = result.first_token_s + 10.0
    result.prompt_tokens[:] = 1000
    result.output_tokens[:] = result.wanted_tokens[:] = 11
    result.row[:] = rows if rows is not None else np.arange(requests) % 2
    result.row[np.isnan(result.first_token_s)] = -1
    result.predicted_s[:] = result.first_token_s * 1.5
    result.path[:] = 2
    return result


def a_ceiling(requests: int, *, best_s: float = 0.5, warm: int = 0) -> Ceiling:
    return Ceiling(
        best_s=np.full(requests, best_s),
        ideal_cached_tokens=np.full(requests, 400, dtype=np.int64),
        mean_bound_s=0.25,
        warm=warm,
    )
