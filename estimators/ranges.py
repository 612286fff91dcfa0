"""The one way an estimator refuses a number it cannot work with."""

from __future__ import annotations


def require(holds: bool, name: str, value: object, must: str = "out of range") -> None:
    """Raise `ValueError` naming the argument when `holds` is false. NaN fails every comparison, so it never passes."""
    if not holds:
        raise ValueError(f"{name} = {value!r} is {must}")
