"""The one way an estimator refuses a number it cannot work with."""

from __future__ import annotations

import numpy as np


def require(holds: bool, name: str, value: object, must: str = "out of range") -> None:
    """Raise `ValueError` naming the argument when `holds` is false. NaN fails every comparison, so it never passes."""
    if not holds:
        shown = value.item() if isinstance(value, np.generic) else value  # 0.5, not np.float64(0.5)
        raise ValueError(f"{name} = {shown!r} is {must}")
