"""Rows of columns, given out and taken back: keys given together lie side by side.

Model     a row is a number from 1; given out from those taken back last, else from those never used. A chain that one
          event announced is one run of rows, and is compared with a question as one stretch of memory
Valid     fewer than 2**32 rows
Errors    none; a row taken back must have been given out
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
Unsigned = type[np.unsignedinteger[Any]]

BEYOND = 8  # rows at the end are never given out, so that so many may be looked at from any row on


class Rows:
    """A key of 64 bits and some columns for each row. Rows that are not given out hold zero everywhere.

    Parameters
    ----------
    dtypes : one column each
    most : rows there will hardly ever be more of, >= 1. Room for them is set aside (address space, no memory), so that
        growing copies nothing; beyond it growing copies everything
    """

    def __init__(self, dtypes: list[Unsigned], *, most: int) -> None:
        room = 1 + most + BEYOND
        self.held = 0
        self.keys: UInt64s = np.zeros(room, dtype=np.uint64)
        self.columns: list[npt.NDArray[Any]] = [np.zeros(room, dtype=dtype) for dtype in dtypes]
        self.used = 1  # rows from here on were never given out; row 0 never is
        self._back = np.zeros(room, dtype=np.uint32)  # a stack of rows taken back
        self._backs = self._most_backs = 0
        self._look_again()

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows never given out have no memory."""
        return self.used * (8 + sum(column.itemsize for column in self.columns)) + 4 * self._most_backs

    def add_column(self, dtype: Unsigned) -> None:
        """A further column, of zeros."""
        self.columns.append(np.zeros(len(self.keys), dtype=dtype))
        self._look_again()

    def take(self, key: int) -> int:
        """A row for one key."""
        self.held += 1
        if self._backs:
            self._backs -= 1
            row = int(self._back[self._backs])
        else:
            self._room(1)
            row = self.used
            self.used += 1
        self.key_view[row] = key
        return row

    def take_many(self, keys: UInt64s) -> Positions:
        """Rows for keys, ascending, so that what was side by side when it was taken back is so again."""
        count = len(keys)
        self.held += count
        again = min(count, self._backs)
        self._backs -= again
        rows = np.sort(self._back[self._backs : self._backs + again]).astype(np.int64)
        if again < count:
            self._room(count - again)
            rows = np.concatenate((rows, np.arange(self.used, self.used + count - again)))
            self.used += count - again
        self.keys[rows] = keys
        return rows

    def give_back(self, row: int) -> None:
        """This row is free."""
        self.key_view[row] = 0
        for view in self.views:
            view[row] = 0
        self._back[self._backs] = row
        self._given_back(1)

    def give_back_many(self, rows: Positions) -> None:
        """These rows, distinct, are free."""
        self.keys[rows] = 0
        for column in self.columns:
            column[rows] = 0
        self._back[self._backs : self._backs + len(rows)] = rows
        self._given_back(len(rows))

    def run(self, row: int, keys: UInt64s) -> int:
        """How many of `keys` lie side by side from `row` on, which holds the first."""
        same = self.keys[row : row + len(keys)] == keys[: len(self.keys) - row]
        end = int(same.argmin())
        return len(same) if same[end] else end

    def _given_back(self, count: int) -> None:
        self.held -= count
        self._backs += count
        self._most_backs = max(self._most_backs, self._backs)

    def _room(self, more: int) -> None:
        if self.used + more + BEYOND > len(self.keys):
            room = 2 * len(self.keys) + more
            self.keys, self._back = longer(self.keys, room), longer(self._back, room)
            self.columns = [longer(column, room) for column in self.columns]
            self._look_again()

    def _look_again(self) -> None:
        """Views of the arrays, which are other arrays now. A memoryview reads one place at a third of the cost."""
        self.key_view = memoryview(self.keys)  # type: ignore[arg-type]  # arrays are buffers
        self.views = [memoryview(column) for column in self.columns]  # type: ignore[arg-type]


def longer(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """A copy with zeros at its end."""
    copy = np.zeros(length, dtype=array.dtype)
    copy[: len(array)] = array
    return copy
