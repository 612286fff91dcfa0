"""Reads numbers back from a state that was saved: whatever is not what it should be is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

Array = npt.NDArray[np.float64]


def number(state: Mapping[str, Any], key: str) -> float:
    """A finite number of a saved state; `ValueError` when there is none."""
    value = state.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool) and -inf < value < inf
    require(good, key, value, "no number")
    return float(value)  # type: ignore[arg-type]


def numbers(state: Mapping[str, Any], key: str, shape: tuple[int, ...]) -> Array:
    """Finite numbers of a saved state in `shape`; `ValueError` when they are anything else."""
    try:
        values = np.array(state.get(key), dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    require(values.shape == shape and bool(np.isfinite(values).all()), key, state.get(key), f"not numbers of {shape}")
    return values
