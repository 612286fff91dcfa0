"""A ring of replicas for consistent hashing: who leaves takes only its own keys along.

Model     each replica has `virtual_nodes` points on a ring of 2^64; a key belongs to the first point at or after it
Valid     keys are hashes already, 0 to 2^64 - 1
Source    Karger et al., STOC 1997
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from estimators.ranges import require
from estimators.view import is_nobody


class Ring:
    """seed : rings of different seeds are independent of each other"""

    def __init__(self, virtual_nodes: int, seed: int = 0) -> None:
        require(virtual_nodes >= 1, "virtual_nodes", virtual_nodes)
        self._virtual_nodes = virtual_nodes
        self._seed = seed
        self._names: tuple[str, ...] = ()
        self._points = np.empty(0, dtype=np.uint64)
        self._owners = np.empty(0, dtype=np.intp)

    def owners(self, names: tuple[str, ...], key: int) -> Iterator[int]:
        """Rows of `names` clockwise from `key`, each virtual node's in turn, so rows come again and again."""
        if names != self._names:
            self._build(names)
        first = int(np.searchsorted(self._points, np.uint64(key)))
        return map(int, np.roll(self._owners, -first))

    def _build(self, names: tuple[str, ...]) -> None:
        points = [
            (xxhash.xxh3_64_intdigest(f"{name}/{node}".encode(), seed=self._seed), row)
            for row, name in enumerate(names)
            if not is_nobody(name)  # else the share of who comes next in the ring would be larger
            for node in range(self._virtual_nodes)
        ]
        points.sort()
        self._points = np.array([point for point, _ in points], dtype=np.uint64)
        self._owners = np.array([row for _, row in points], dtype=np.intp)
        self._names = names
