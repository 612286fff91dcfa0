"""Which links many fetches cross, with what the links' table says of them for good.

Model     a fetch crosses one link after another, its stages; what of a link never changes is taken from the table once,
          not at every decision
Valid     for the table it was made from
Blind to  what is on the links: links.py
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Rows = npt.NDArray[np.integer]

# Columns of the table that never change.
FIXED_S, SECONDS_PER_BYTE, LOOK_UP_S, START_S, BYTES_PER_S, KEY = range(6)
FOR_GOOD = 6  # how many


@dataclass(slots=True)
class Stage:
    """One link of every way. crossed : all links among them

    The arrays have the shape of what is fetched; `fixed_s` is look-up and start.
    """

    links: Rows
    crossed: set[int]
    fixed_s: Times
    s_per_byte: Times
    look_up_s: Times
    start_s: Times
    bytes_per_s: Times
    key: Times


class Ways:
    """Links that many fetches cross, with what a table says of them for good: made once, by `LinkTable.ways`.

    stages : in the order they are crossed
    fixed_s, s_per_byte : of all stages together
    """

    def __init__(self, links: Rows, table: Times) -> None:
        self._table = table
        self._links = np.moveaxis(links, -1, 0).copy()
        self._columns = np.moveaxis(table.take(self._links, axis=1, mode="wrap"), 0, 1).copy()
        self._sums = self._columns[:, : SECONDS_PER_BYTE + 1].sum(axis=0)
        self.fixed_s, self.s_per_byte = self._sums
        self.stages = [
            Stage(rows, set(rows.ravel().tolist()), *columns)
            for rows, columns in zip(self._links, self._columns, strict=True)
        ]

    def turn(self, place: int, links: Rows) -> None:
        """All at `place`, an index of the first axis, cross one link each from now on, of those they had at first."""
        columns = self._table.take(links, axis=1)
        self._columns[0, :, place] = columns
        self._sums[:, place] = columns[: SECONDS_PER_BYTE + 1]
        self._links[0, place] = links
