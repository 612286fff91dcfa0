"""A map from 64-bit hashes to numbers in columns: small in memory, and quick for one key and for thousands.

Model     buckets of eight keys (one cache line) grown by linear hashing: one run of buckets after another is split in
          two, so that no step copies much and the load stays the same. A key that finds its bucket full joins the
          bucket's list of others until the bucket is split: one in fifty, and a tenth of the newest
Valid     keys whose low bits are well mixed, as those of hashes are. Others stay correct, their lists long and slow
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
_WORD = np.dtype("<u8")
# 256.0 ** place has the exponent 1023 + 8 place, so the bits above the 55th are 127 + place.
_PLACE_SHIFT, _PLACE_BIAS = 55, 127
_PLACES = 8  # keys in a bucket
_LOAD = 4.0  # keys per bucket on average: at 5 twice as many do not fit their bucket, at 3 a third more memory
_SPLIT = 64  # buckets split together, or as many as there are
_FIRST_BUCKETS = 8
_AT_ONCE = 1 << 14  # keys looked up together: their buckets fit a processor's cache, and memory is used again


class BlockTable:
    """Keys are unsigned 64-bit integers. A position is good until `layout` changes, which only inserting does.

    Free places hold zero in every column, so the columns of a new key start with zeros.

    Parameters
    ----------
    dtypes : one column each
    most : keys there will hardly ever be more of, >= 1. Room for them is set aside (address space, no memory), so that
        growing copies nothing; beyond it growing copies everything
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
        """Bytes of the arrays in use: places never taken have no memory."""
        places = self._untaken + self._buckets * _PLACES
        return places * (8 + sum(column.itemsize for column in self.columns)) + 4 * (self._buckets + self._untaken)

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
        bucket = (key ^ key >> _FOLD) & self._high
        if bucket >= self._buckets:
            bucket &= self._low
        start = self._first + bucket * _PLACES
        row = self._key_view[start : start + _PLACES].tolist()
        if key in row:
            return start + row.index(key)
        position = self._head_view[bucket] - 1
        while position >= 0 and self._key_view[position] != key:
            position = self._next_view[position] - 1
        return position

    def insert(self, key: int) -> int:
        """Position of `key`; if it was absent, it is inserted at `position` and `~position` returned, a negative."""
        found = self.find(key)
        if found >= 0:
            return found
        if self._held >= self._full_at:
            self._grow(1)
        return ~self._put(key or _ZERO)

    def remove(self, position: int) -> None:
        """Free the place of a key."""
        if position < self._first:
            self._leave_list(position)
        self._key_view[position] = 0
        for view in self.views:
            view[position] = 0
        self._held -= 1

    # Many keys

    def find_many(self, keys: UInt64s) -> Positions:
        """Positions of `keys`, -1 where absent."""
        if len(keys) > _AT_ONCE:
            parts = [self.find_many(keys[at : at + _AT_ONCE]) for at in range(0, len(keys), _AT_ONCE)]
            return np.concatenate(parts)
        keys = _without_zero(keys)
        bucket = self._buckets_of(keys)
        # One byte for each place, so one word for each bucket: 256 ** place where the key is, 0 where it is not.
        hit = (self._rows.take(bucket, axis=0) == keys[:, None]).view(_WORD).ravel()
        found: Positions = hit.astype(np.float64).view(np.int64)
        found >>= _PLACE_SHIFT
        found += bucket * _PLACES
        found += self._first - _PLACE_BIAS
        missing = np.flatnonzero(hit == 0)
        if len(missing):
            found[missing] = self._find_listed(keys[missing], bucket[missing])
        return found

    def insert_many(self, keys: UInt64s) -> Positions:
        """Insert `keys`, all of them absent and distinct; returns their positions."""
        keys = _without_zero(keys)
        if self._held + len(keys) > self._full_at:
            self._grow(len(keys))
        self._room_outside(len(keys))
        self._held += len(keys)
        placed = np.empty(len(keys), dtype=np.int64)
        left, bucket = np.arange(len(keys)), self._buckets_of(keys)
        while len(left):
            free = self._rows.take(bucket, axis=0) == 0
            place = free.argmax(axis=1)
            fits = free[np.arange(len(left)), place]
            if not fits.all():
                for at in np.flatnonzero(~fits).tolist():
                    placed[left[at]] = self._join_list(int(keys[left[at]]), int(bucket[at]))
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
        for position in positions[positions < self._first].tolist():
            self._leave_list(position)
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

    # Arrays: first the places outside buckets, then those of the buckets

    def _start(self) -> None:
        self._held = 0
        self._first = 8 + self._most // 32  # places outside buckets
        self._free: list[int] = []  # of those, given back; from `_untaken` on none was ever taken
        self._untaken = 0
        self._set_buckets(_FIRST_BUCKETS)
        room = 2 * _FIRST_BUCKETS + int(self._most / _LOAD)
        self._keys: UInt64s = np.zeros(self._first + room * _PLACES, dtype=np.uint64)
        # A bucket's list of keys that did not fit: places plus one, 0 for none.
        self._heads = np.zeros(room, dtype=np.uint32)
        self._nexts = np.zeros(self._first, dtype=np.uint32)
        self.columns: list[npt.NDArray[Any]] = [np.zeros(len(self._keys), dtype=dtype) for dtype in self._dtypes]
        self._look_again()

    def _look_again(self) -> None:
        """Views of the arrays, which are other arrays now. A memoryview reads one place at a third of the cost."""
        self.layout += 1
        self._key_view = memoryview(self._keys)  # type: ignore[arg-type]  # arrays are buffers
        self._rows = self._keys[self._first :].reshape(-1, _PLACES)
        self._head_view = memoryview(self._heads)  # type: ignore[arg-type]
        self._next_view = memoryview(self._nexts)  # type: ignore[arg-type]
        self.views = [memoryview(column) for column in self.columns]  # type: ignore[arg-type]

    def _set_buckets(self, buckets: int) -> None:
        self._buckets = buckets
        self._low = (1 << buckets.bit_length() - 1) - 1
        self._high = 2 * self._low + 1
        self._full_at = int(buckets * _LOAD)
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
        self._heads = _longer(self._heads, buckets)
        self._nexts = _longer(self._nexts, first)
        self._first = first
        self._used += shift
        self._look_again()

    # Growth

    def _grow(self, more: int) -> None:
        """Make `more` keys fit."""
        while self._held + more > self._full_at:
            half = self._low + 1
            wanted = max(_SPLIT, int((self._held + more) / _LOAD) + 1 - self._buckets)
            self._split(min(wanted, 2 * half - self._buckets))

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
        for bucket in (first + np.flatnonzero(self._heads[first : first + count])).tolist():
            position = self._head_view[bucket] - 1
            self._head_view[bucket] = 0
            while position >= 0:
                position = self._place_again(position)

    def _place_again(self, position: int) -> int:
        """A listed key whose bucket was split: it may fit now. Returns the next in its list, or -1."""
        key, values = self._key_view[position], [view[position] for view in self.views]
        following = self._next_view[position] - 1
        self._key_view[position] = self._next_view[position] = 0
        for view in self.views:
            view[position] = 0
        self._free.append(position)
        self._held -= 1
        new = self._put(key)
        for view, value in zip(self.views, values, strict=True):
            view[new] = value
        return following

    # Places

    def _put(self, key: int) -> int:
        """Take a place for a key that is absent, and for which there is room."""
        self._held += 1
        bucket = (key ^ key >> _FOLD) & self._high
        if bucket >= self._buckets:
            bucket &= self._low
        start = self._first + bucket * _PLACES
        row = self._key_view[start : start + _PLACES].tolist()
        if 0 not in row:
            return self._join_list(key, bucket)
        position = start + row.index(0)
        self._key_view[position] = key
        return position

    def _room_outside(self, keys: int) -> None:
        if self._first - self._untaken + len(self._free) < keys:
            self._move(2 * self._first + keys, (len(self._keys) - self._first) // _PLACES)

    def _outside(self, key: int) -> int:
        """A place outside buckets."""
        if self._free:
            position = self._free.pop()
        else:
            self._room_outside(1)
            position = self._untaken
            self._untaken += 1
        self._key_view[position] = key
        return position

    def _join_list(self, key: int, bucket: int) -> int:
        position = self._outside(key)
        self._next_view[position] = self._head_view[bucket]
        self._head_view[bucket] = position + 1
        return position

    def _leave_list(self, position: int) -> None:
        """Give back a place outside buckets; the caller zeroes key and columns."""
        key = self._key_view[position]
        self._free.append(position)
        bucket = (key ^ key >> _FOLD) & self._high
        if bucket >= self._buckets:
            bucket &= self._low
        following = self._next_view[position]
        self._next_view[position] = 0
        if self._head_view[bucket] == position + 1:
            self._head_view[bucket] = following
            return
        before = self._head_view[bucket] - 1
        while self._next_view[before] != position + 1:
            before = self._next_view[before] - 1
        self._next_view[before] = following

    def _find_listed(self, keys: UInt64s, buckets: Positions) -> Positions:
        """Positions of keys that are not in their buckets, -1 where absent: all lists are walked in step."""
        found = self._heads[buckets].astype(np.int64) - 1
        left = np.flatnonzero(found >= 0)
        while len(left):
            at = found[left]
            other = self._keys[at] != keys[left]
            left, at = left[other], at[other]
            found[left] = self._nexts[at].astype(np.int64) - 1
            left = left[found[left] >= 0]
        return found


def _without_zero(keys: UInt64s) -> UInt64s:
    return keys if keys.all() else np.where(keys == 0, np.uint64(_ZERO), keys)


def _longer(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    longer = np.zeros(length, dtype=array.dtype)
    longer[: len(array)] = array
    return longer
