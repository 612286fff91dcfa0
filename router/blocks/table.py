"""A map from 64-bit hashes to numbers in columns: small in memory, and quick for one key and for thousands.

Model     rows without gaps hold the keys and their columns, a hash table beside them the rows' numbers
Valid     keys whose bits are well mixed, as those of hashes are. Others stay correct and become slow
Blind to  the key 0, which marks a free row: it is kept under another number
Errors    two keys are taken for one only if one of them is 0 and the other that number
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from router.blocks.places import Places
from router.blocks.rows import BEYOND, Positions, Rows, UInt64s, Unsigned

__all__ = ["BlockTable", "Positions", "UInt64s"]

_ZERO = 0x9E3779B97F4A7C15  # stands for the key 0
_STRIDE = BEYOND
_STEPS = np.arange(_STRIDE)
_AT_ONCE = 1 << 14  # keys looked up together: their buckets fit a processor's cache, and memory is used again
_NOWHERE: Positions = np.empty(0, dtype=np.int64)


class BlockTable:
    """Keys are unsigned 64-bit integers. A key's position, >= 1, is the same from its insertion to its removal.

    The columns of a new key hold zeros.

    Parameters
    ----------
    dtypes : one column each
    most : keys there will hardly ever be more of, >= 1. Room for them is set aside (address space, no memory), so that
        growing copies nothing; beyond it growing copies everything
    """

    def __init__(self, *dtypes: Unsigned, most: int = 1) -> None:
        self._dtypes = list(dtypes)
        self._most = most
        self.clear()

    def __len__(self) -> int:
        return self._rows.held

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in use: rows and buckets never used have no memory."""
        return self._rows.nbytes + self._places.nbytes

    @property
    def columns(self) -> list[npt.NDArray[Any]]:
        """Good until something is inserted."""
        return self._rows.columns

    @property
    def views(self) -> list[memoryview]:
        """The columns, quicker to read in one place. Good until something is inserted."""
        return self._rows.views

    def add_column(self, dtype: Unsigned) -> int:
        """A further column, of zeros; returns its number."""
        self._dtypes.append(dtype)
        self._rows.add_column(dtype)
        return len(self._dtypes) - 1

    def clear(self) -> None:
        """Drop all keys and give the memory back."""
        self._rows = Rows(self._dtypes, most=self._most)
        self._places = Places(self._rows, most=self._most)

    # One key

    def find(self, key: int) -> int:
        """Position of `key`, or -1."""
        return self._places.find(key or _ZERO)

    def insert(self, key: int) -> int:
        """Position of `key`; if it was absent, it is inserted at `position` and `~position` returned, a negative."""
        key = key or _ZERO
        found = self._places.find(key)
        if found >= 0:
            return found
        row = self._rows.take(key)
        self._places.put(key, row)
        return ~row

    def remove(self, position: int) -> None:
        """Free the row of a key."""
        self._places.drop(self._rows.key_view[position], position)
        self._rows.give_back(position)

    # Many keys

    def find_many(self, keys: UInt64s) -> Positions:
        """Positions of `keys`, -1 where absent."""
        if len(keys) > _AT_ONCE:
            parts = [self.find_many(keys[at : at + _AT_ONCE]) for at in range(0, len(keys), _AT_ONCE)]
            return np.concatenate(parts)
        return self._places.find_many(_without_zero(keys))

    def find_run(self, keys: UInt64s) -> Positions:
        """Positions of as many of the first keys as are side by side, in order; empty if the first is absent.

        Keys inserted together mostly are, and are found at a tenth of the cost.
        """
        first = self.find(int(keys[0]))
        return _NOWHERE if first < 0 else np.arange(first, first + (self._rows.run(first, keys) or 1))

    def find_runs(self, keys: UInt64s) -> Positions:
        """As `find_many`, at half the cost where keys were inserted in runs of eight or more.

        Every eighth is looked up, and those between are sought after it and before the next.
        """
        keys = _without_zero(keys)
        eighth = self._places.find_many(keys[::_STRIDE])
        found = (eighth[:, None] + _STEPS).ravel()[: len(keys)]
        wrong = np.flatnonzero(self._differ(found, keys))
        if len(wrong):
            found[wrong] = np.append(eighth, 0)[wrong // _STRIDE + 1] + wrong % _STRIDE - _STRIDE
            wrong = wrong[self._differ(found[wrong], keys[wrong])]
            found[wrong] = self._places.find_many(keys[wrong])
        return found

    def insert_many(self, keys: UInt64s) -> Positions:
        """Insert `keys`, all of them absent and distinct; returns their positions."""
        keys = _without_zero(keys)
        rows = self._rows.take_many(keys)
        self._places.put_many(keys, rows)
        return rows

    def remove_many(self, positions: Positions) -> None:
        """Free the rows of distinct keys."""
        self._places.drop_many(self._rows.keys[positions], positions)
        self._rows.give_back_many(positions)

    def keys(self) -> UInt64s:
        """All keys, in no order."""
        return self.keys_at(self.positions())

    def key_at(self, position: int) -> int:
        """Key at this position."""
        key: int = self._rows.key_view[position]
        return 0 if key == _ZERO else key

    def keys_at(self, positions: npt.NDArray[np.integer[Any]]) -> UInt64s:
        """Keys at these positions."""
        keys: UInt64s = self._rows.keys[positions]
        keys[keys == np.uint64(_ZERO)] = 0
        return keys

    def positions(self) -> Positions:
        """Positions of all keys."""
        return np.flatnonzero(self._rows.keys[: self._rows.used])

    def where(self, column: int, value: int) -> Positions:
        """Positions at which a column has this value, not 0."""
        return np.flatnonzero(self._rows.columns[column][: self._rows.used] == value)

    def _differ(self, positions: Positions, keys: UInt64s) -> npt.NDArray[np.bool_]:
        """Whether these positions, some of them negative or never given out, hold other keys. No key is 0."""
        differ: npt.NDArray[np.bool_] = self._rows.keys.take(positions, mode="clip") != keys
        return differ


def _without_zero(keys: UInt64s) -> UInt64s:
    return keys if keys.all() else np.where(keys == 0, np.uint64(_ZERO), keys)
