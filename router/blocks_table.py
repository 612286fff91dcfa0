"""A map from 64-bit hashes to numbers in columns: small in memory, and quick for one key and for thousands.

Model     up to 65,536 keys a dictionary says where a key's columns are. Beyond that, buckets of eight keys (one cache
          line) grown by linear hashing: one run of buckets after another is split in two, so that no step copies
          much and the load stays the same. A key that finds its bucket full stays with the dictionary until that
          bucket is split
Valid     keys whose low bits are well mixed, as those of hashes are. Others stay correct at a dictionary entry each
Blind to  the key 0, which marks a free place: it is kept under another number
Errors    two keys are taken for one only if one of them is 0 and the other that number
Source    Litwin, VLDB 1980 (linear hashing)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

_ZERO = 0x9E3779B97F4A7C15  # stands for the key 0
_FOLD = 32
_FOLD_64 = np.uint64(_FOLD)
_PLACES = 8  # keys in a bucket
_LOAD = 4.0  # keys per bucket on average: at 5 twice as many do not fit their bucket, at 3 a third more memory
_SPLIT = 64  # buckets split together, or as many as there are
_FEW = 1 << 16  # keys up to which a dictionary, of 100 bytes a key, is the quicker choice


class BlockTable:
    """Keys are unsigned 64-bit integers. A position is good until `layout` changes, which only inserting does.

    Free places hold zero in every column, so the columns of a new key start with zeros.

    Parameters
    ----------
    dtypes : one column each
    most : keys there will hardly ever be more of, >= 1. Room for them is set aside (address space, no memory) once
        there are many, so that growing copies nothing; beyond it growing copies everything
    """

    def __init__(self, *dtypes: type[np.unsignedinteger[Any]], most: int = 1) -> None:
        self._dtypes: list[type[np.unsignedinteger[Any]]] = list(dtypes)
        self._most = most
        self.layout = 0
        self._start()

    def __len__(self) -> int:
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays up to the last place in use, and of the dictionary's entries roughly."""
        return self._used * (8 + sum(column.itemsize for column in self.columns)) + 160 * len(self._listed)

    def add_column(self, dtype: type[np.unsignedinteger[Any]]) -> int:
        """A further column, of zeros; returns its number."""
        self._dtypes.append(dtype)
        self.columns.append(np.zeros(len(self._keys), dtype=dtype))
        self._look_again()
        return len(self.columns) - 1

    def clear(self) -> None:
        """Drop all keys and give the memory back."""
        self._start()

    # One key

    def find(self, key: int) -> int:
        """Position of `key`, or -1."""
        key = key or _ZERO
        if not self._buckets:
            return self._listed.get(key, -1)
        bucket = (key ^ key >> _FOLD) & self._high
        if bucket >= self._buckets:
            bucket &= self._low
        start = self._first + bucket * _PLACES
        row = self._key_view[start : start + _PLACES].tolist()
        if key in row:
            return start + row.index(key)
        return self._listed.get(key, -1)

    def insert(self, key: int) -> int:
        """Position of `key`; if it was absent, it is inserted at `position` and `~position` returned, a negative."""
        if self._buckets or self._held >= self._full_at:
            found = self.find(key)
            return ~self._place(key or _ZERO) if found < 0 else found
        key = key or _ZERO
        position = self._listed.get(key)
        if position is not None:
            return position
        self._held += 1
        return ~self._list(key, -1)

    def remove(self, position: int) -> None:
        """Free the place of a key."""
        if position < self._first:
            self._unlist(position)
        self._key_view[position] = 0
        for view in self.views:
            view[position] = 0
        self._held -= 1

    # Many keys

    def find_many(self, keys: UInt64s) -> Positions:
        """Positions of `keys`, -1 where absent."""
        keys = _without_zero(keys)
        if not self._buckets:
            listed = self._listed
            return np.array([listed.get(key, -1) for key in keys.tolist()], dtype=np.int64)
        bucket = self._buckets_of(keys)
        hits = np.flatnonzero(self._rows.take(bucket, axis=0) == keys[:, None])
        if len(hits) == len(keys):
            hits &= _PLACES - 1
            bucket *= _PLACES
            bucket += hits
            bucket += self._first
            return bucket
        found = np.full(len(keys), -1, dtype=np.int64)
        which = hits >> 3
        hits &= _PLACES - 1
        found[which] = bucket[which] * _PLACES + hits + self._first
        if self._listed:
            missing = found < 0
            missing &= self._overflows[bucket]
            if missing.any():
                found[missing] = [self._listed.get(key, -1) for key in keys[missing].tolist()]
        return found

    def insert_many(self, keys: UInt64s) -> Positions:
        """Insert `keys`, all of them absent and distinct; returns their positions."""
        keys = _without_zero(keys)
        if self._held + len(keys) > self._full_at:
            self._grow(len(keys))
        self._room_to_list(len(keys))
        if not self._buckets:
            return np.array([self._place(key) for key in keys.tolist()], dtype=np.int64)
        self._held += len(keys)
        placed = np.empty(len(keys), dtype=np.int64)
        left, bucket = np.arange(len(keys)), self._buckets_of(keys)
        while len(left):
            free = self._rows.take(bucket, axis=0) == 0
            place = free.argmax(axis=1)
            fits = free[np.arange(len(left)), place]
            if not fits.all():
                for at in np.flatnonzero(~fits).tolist():
                    placed[left[at]] = self._list(int(keys[left[at]]), int(bucket[at]))
                left, bucket, place = left[fits], bucket[fits], place[fits]
            position = self._first + bucket * _PLACES + place
            wanted = keys[left]
            self._keys[position] = wanted
            placed[left] = position
            lost = self._keys[position] != wanted  # two new keys met in one place and the later one got it
            left, bucket = left[lost], bucket[lost]
        return placed

    def remove_many(self, positions: Positions) -> None:
        """Free the places of distinct keys."""
        if self._listed:
            for position in positions[positions < self._first].tolist():
                self._unlist(position)
        self._keys[positions] = 0
        for column in self.columns:
            column[positions] = 0
        self._held -= len(positions)

    def keys(self) -> UInt64s:
        """All keys, in no order."""
        return self.keys_at(self.positions())

    def keys_at(self, positions: Positions) -> UInt64s:
        """Keys at these positions."""
        keys = self._keys[positions]
        keys[keys == np.uint64(_ZERO)] = 0
        return keys

    def positions(self) -> Positions:
        """Positions of all keys."""
        return np.flatnonzero(self._keys[: self._used])

    def where(self, column: int, value: int) -> Positions:
        """Positions at which a column has this value, not 0."""
        return np.flatnonzero(self.columns[column][: self._used] == value)

    # Arrays: places of listed keys first, then those of the buckets

    def _start(self) -> None:
        self._held = 0
        self._listed: dict[int, int] = {}  # keys outside the buckets
        self._listed_in: dict[int, list[int]] = {}  # by bucket
        self._first = 8  # places of listed keys
        self._free: list[int] = []  # places of listed keys given back; from `_next` on none was ever taken
        self._next = 0
        self._set_buckets(0)
        self._keys: UInt64s = np.zeros(self._first, dtype=np.uint64)
        self._overflows = np.zeros(0, dtype=bool)  # buckets with listed keys
        self.columns: list[npt.NDArray[Any]] = [np.zeros(self._first, dtype=dtype) for dtype in self._dtypes]
        self._look_again()

    def _look_again(self) -> None:
        """Views of the arrays, which are other arrays now. A memoryview reads one place at a third of the cost."""
        self.layout += 1
        self._key_view = memoryview(self._keys)  # type: ignore[arg-type]  # arrays are buffers
        self._rows = self._keys[self._first :].reshape(-1, _PLACES)
        self.views = [memoryview(column) for column in self.columns]  # type: ignore[arg-type]

    def _set_buckets(self, buckets: int) -> None:
        self._buckets = buckets
        self._low = (1 << buckets.bit_length() >> 1) - 1
        self._high = 2 * self._low + 1
        self._full_at = int(buckets * _LOAD) if buckets else _FEW
        self._used = self._first + buckets * _PLACES

    def _buckets_of(self, keys: UInt64s) -> Positions:
        bucket: Positions = ((keys ^ keys >> _FOLD_64) & np.uint64(self._high)).view(np.int64)
        bucket -= (bucket >= self._buckets) * (self._low + 1)
        return bucket

    def _move(self, first: int, buckets: int) -> None:
        """Copy everything to larger arrays. Pages never touched cost no memory, so room for growth is free."""
        before, used, shift = self._first, self._used, first - self._first
        arrays = []
        for column in (self._keys, *self.columns):
            larger = np.zeros(first + buckets * _PLACES, dtype=column.dtype)
            larger[:before] = column[:before]
            larger[before + shift : used + shift] = column[before:used]
            arrays.append(larger)
        self._keys, *self.columns = arrays
        more = np.zeros(buckets - len(self._overflows), dtype=bool)
        self._overflows = np.concatenate([self._overflows, more])
        self._first = first
        self._used += shift
        self._look_again()

    # Growth

    def _grow(self, more: int) -> None:
        """Make `more` keys fit."""
        if not self._buckets:
            if self._held + more <= _FEW:
                return
            self._leave_dictionary()
        while self._held + more > self._full_at:
            half = self._low + 1
            wanted = max(_SPLIT, int((self._held + more) / _LOAD) + 1 - self._buckets)
            self._split(min(wanted, 2 * half - self._buckets))

    def _leave_dictionary(self) -> None:
        """Put all keys into buckets."""
        positions = self.positions()
        keys, columns = self._keys[positions], [column[positions] for column in self.columns]
        self._start()
        buckets = 1 << int(len(keys) / _LOAD).bit_length()
        self._move(max(len(keys), self._most) // 32, max(2 * buckets, int(self._most / _LOAD) + _SPLIT))
        self._set_buckets(buckets)
        positions = self.insert_many(keys)
        for column, values in zip(self.columns, columns, strict=True):
            column[positions] = values

    def _split(self, count: int) -> None:
        """Split the next `count` buckets. Each key keeps its place in the row, of the old bucket or of the new."""
        half = self._low + 1
        first = self._buckets - half
        if self._used + count * _PLACES > len(self._keys):
            self._move(self._first, 2 * (self._buckets + count))
        self.layout += 1
        old = slice(self._first + first * _PLACES, self._first + (first + count) * _PLACES)
        new = slice(old.start + half * _PLACES, old.stop + half * _PLACES)
        keys = self._keys[old]
        moves = ((keys ^ keys >> _FOLD_64) & np.uint64(half)) != 0
        for column in (self._keys, *self.columns):
            np.multiply(column[old], moves, out=column[new])
            column[old] *= ~moves
        self._set_buckets(self._buckets + count)
        if self._listed_in:
            for bucket in self._listed_in.keys() & range(first, first + count):
                self._overflows[bucket] = False
                for key in self._listed_in.pop(bucket):
                    self._place_again(key)

    def _place_again(self, key: int) -> None:
        """A listed key whose bucket was split: it may fit now."""
        old = self._listed.pop(key)
        values = [view[old] for view in self.views]
        self._key_view[old] = 0
        for view in self.views:
            view[old] = 0
        self._free.append(old)
        self._held -= 1
        new = self._put(key)
        for view, value in zip(self.views, values, strict=True):
            view[new] = value

    # Places

    def _place(self, key: int) -> int:
        """Take a place for a key that is absent."""
        if self._held >= self._full_at:
            self._grow(1)
        return self._put(key)

    def _put(self, key: int) -> int:
        self._held += 1
        if not self._buckets:
            return self._list(key, -1)
        bucket = (key ^ key >> _FOLD) & self._high
        if bucket >= self._buckets:
            bucket &= self._low
        start = self._first + bucket * _PLACES
        row = self._key_view[start : start + _PLACES].tolist()
        if 0 not in row:
            return self._list(key, bucket)
        position: int = start + row.index(0)
        self._key_view[position] = key
        return position

    def _room_to_list(self, keys: int) -> None:
        if self._first - self._next + len(self._free) < keys:
            self._move(2 * self._first + keys, (len(self._keys) - self._first) // _PLACES)

    def _list(self, key: int, bucket: int) -> int:
        """Keep a key with the dictionary; `bucket` is where it would belong, -1 when there are none."""
        if self._free:
            position = self._free.pop()
        else:
            self._room_to_list(1)
            position = self._next
            self._next += 1
        self._listed[key] = position
        self._key_view[position] = key
        if bucket >= 0:
            self._listed_in.setdefault(bucket, []).append(key)
            self._overflows[bucket] = True
        return position

    def _unlist(self, position: int) -> None:
        key = self._key_view[position]
        del self._listed[key]
        self._free.append(position)
        if not self._buckets:
            return
        bucket = (key ^ key >> _FOLD) & self._high
        if bucket >= self._buckets:
            bucket &= self._low
        self._listed_in[bucket].remove(key)
        if not self._listed_in[bucket]:
            del self._listed_in[bucket]
            self._overflows[bucket] = False


def _without_zero(keys: UInt64s) -> UInt64s:
    return keys if keys.all() else np.where(keys == 0, np.uint64(_ZERO), keys)
