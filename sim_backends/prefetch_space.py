"""Room for fetches under way on one replica.

Model     a fetch holds its bytes from its start to its end, however much of it has come. One that does not fit is
          not made: the request computes
Source    SGLang HiCache, `prefetch_capacity_limit` (a share of the host pool), by its documentation
"""

from __future__ import annotations

from math import inf


class PrefetchSpace:
    """`capacity_bytes` > 0; inf where a replica has no such limit."""

    def __init__(self, capacity_bytes: float = inf) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.refused = 0  # times a fetch found no room

    def has(self, size_bytes: int) -> bool:
        """Whether `size_bytes` more fit; a no is counted."""
        fits = self.used_bytes + size_bytes <= self.capacity_bytes
        self.refused += not fits
        return fits

    def take(self, size_bytes: int) -> None:
        """Hold bytes that fit."""
        self.used_bytes += size_bytes
        assert self.used_bytes <= self.capacity_bytes, "asked for before it was taken"

    def give_back(self, size_bytes: int) -> None:
        """What one `take` has held."""
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0, "no more is given back than was taken"
