"""Reads back what an estimate stored: plain values of the expected kind and range, or `ValueError`."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.ranges import require

Array = npt.NDArray[np.float64]


def mapping(value: object, name: str) -> Mapping[Any, Any]:
    """`value` as a mapping."""
    require(isinstance(value, Mapping), name, value, "not a mapping")
    assert isinstance(value, Mapping)
    return value


def items(value: object, name: str, count: int) -> list[Any]:
    """`value` as a list of `count` entries."""
    require(isinstance(value, list) and len(value) == count, name, value, f"not a list of {count}")
    assert isinstance(value, list)
    return value


def number(value: object, name: str, *, least: float = -inf, most: float = inf) -> float:
    """`value` as a finite float within [least, most]."""
    require(isinstance(value, (int, float)) and not isinstance(value, bool), name, value, "not a number")
    assert isinstance(value, (int, float))
    require(-inf < value < inf and least <= value <= most, name, value)
    return float(value)


def weights(value: object, name: str, count: int) -> list[float]:
    """`value` as a list of `count` finite floats, each >= 0."""
    return [number(weight, name, least=0.0) for weight in items(value, name, count)]


def numbers(value: object, name: str, shape: tuple[int, ...]) -> Array:
    """`value`, nested lists, as an array of finite floats in `shape`."""
    try:
        values = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    require(values.shape == shape and bool(np.isfinite(values).all()), name, value, f"not numbers of {shape}")
    return values
