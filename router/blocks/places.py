"""Where a key's row is: a hash table of row numbers, which grows without ever standing still.

Model     buckets of eight places, grown by linear hashing: one run of buckets after another is split in two, so that no
          step copies much and the load stays the same. A place is a row number and 16 bits of its key, so that other
          keys are hardly ever looked at. A key that finds its bucket full joins the bucket's list of others until the
          bucket is split: one in fifty, and a tenth of the newest
Valid     keys whose bits are well mixed, as those of hashes are, and not 0. Others stay correct, their lists long
Source    Litwin, VLDB 1980 (linear hashing)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from router.blocks.rows import Positions, Rows, UInt64s, longer

_FOLD, _TAG = 32, 48
_FOLD_64, _TAG_64 = np.uint64(_FOLD), np.uint64(_TAG)
_ONE = np.uint64(1)
_WORD = np.dtype("<u8")
# 256.0 ** place has the exponent 1023 + 8 place, so the bits above the 55th are 127 + place.
_PLACE_SHIFT, _PLACE_BIAS = 55, 127
_PLACES = 8  # in a bucket
_LOAD = 4.0  # keys per bucket on average: at 5 twice as many do not fit their bucket, at 3 a third more memory
_SPLIT = 64  # buckets split together, or as many as there are
_FIRST_BUCKETS = 8
_FEW = 32  # lists up to here are walked one by one


class Places:
    """Rows by key. The keys themselves are in `rows`, lent, before they are put here and until they are dropped.

    Parameters
    ----------
    most : keys there will hardly ever be more of, >= 1, see `Rows`
    """

    def __init__(self, rows: Rows, *, most: int) -> None:
        self._rows = rows
        self._held = 0
        room = 2 * _FIRST_BUCKETS + int(most / _LOAD)
        self._refs = np.zeros(room * _PLACES, dtype=np.uint32)  # rows, 0 where a place is free
        self._tags = np.zeros(room * _PLACES, dtype=np.uint16)  # 0 where a place is free
        # Rows of keys that did not fit: numbers from 1, and of each the next in its bucket's list, 0 for none.
        self._heads = np.zeros(room, dtype=np.uint32)
        self._listed = np.zeros(8 + most // 32, dtype=np.uint32)
        self._nexts = np.zeros(len(self._listed), dtype=np.uint32)
        self._free: list[int] = []  # of those numbers, given back; from `_untaken` on none was ever taken
        self._untaken = 1
        self._set_buckets(_FIRST_BUCKETS)
        self._look_again()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._buckets * (_PLACES * 6 + 4) + self._untaken * 8

    # One key

    def find(self, key: int) -> int:
        """Row of `key`, or -1."""
        bucket, tag = self._bucket_of(key), key >> _TAG or 1
        start, keys = bucket * _PLACES, self._rows.key_view
        tags = self._tag_view[start : start + _PLACES].tolist()
        if tag in tags:
            row: int = self._ref_view[start + tags.index(tag)]
            if keys[row] == key:
                return row
            for place, its in enumerate(tags):
                if its == tag and keys[row := self._ref_view[start + place]] == key:
                    return row
        return self._find_listed(key, bucket)

    def put(self, key: int, row: int) -> None:
        """`key`, which is absent, has this row."""
        if self._held >= self._full_at:
            self._grow(1)
        self._held += 1
        self._put(key, row)

    def drop(self, key: int, row: int) -> None:
        """`key` is there no more."""
        bucket = self._bucket_of(key)
        start = bucket * _PLACES
        refs = self._ref_view[start : start + _PLACES].tolist()
        if row in refs:
            place = start + refs.index(row)
            self._ref_view[place] = self._tag_view[place] = 0
        else:
            self._leave_list(row, bucket)
        self._held -= 1

    # Many keys

    def find_many(self, keys: UInt64s) -> Positions:
        """Rows of `keys`, -1 where absent."""
        bucket = self._buckets_of(keys)
        hit = _as_words(self._tag_rows.take(bucket, axis=0) == _tags_of(keys)[:, None])
        found = self._refs.take(_place(hit, bucket), mode="clip").astype(np.int64)
        missing = np.flatnonzero(self._rows.keys.take(found) != keys)
        if len(missing):
            found[missing] = self._find_elsewhere(keys[missing], bucket[missing], hit[missing])
        return found

    def put_many(self, keys: UInt64s, rows: Positions) -> None:
        """Distinct keys, all absent, have these rows."""
        if self._held + len(keys) > self._full_at:
            self._grow(len(keys))
        self._held += len(keys)
        bucket, tags, refs = self._buckets_of(keys), _tags_of(keys), rows.astype(np.uint32)
        while len(refs):
            free = _as_words(self._tag_rows.take(bucket, axis=0) == 0)
            if not free.all():
                inside = free != 0
                for at in np.flatnonzero(~inside).tolist():
                    self._join_list(int(refs[at]), int(bucket[at]))
                free, bucket, tags, refs = free[inside], bucket[inside], tags[inside], refs[inside]
            place = _place(free, bucket)
            self._refs[place] = refs
            self._tags[place] = tags
            lost = self._refs[place] != refs  # two new keys met in one place and the later one got it
            if not lost.any():
                return
            bucket, tags, refs = bucket[lost], tags[lost], refs[lost]

    def drop_many(self, keys: UInt64s, rows: Positions) -> None:
        """Distinct keys with these rows are there no more."""
        bucket = self._buckets_of(keys)
        hit = _as_words(self._ref_rows.take(bucket, axis=0) == rows.astype(np.uint32)[:, None])
        place = _place(hit, bucket)
        if not hit.all():
            for at in np.flatnonzero(hit == 0).tolist():
                self._leave_list(int(rows[at]), int(bucket[at]))
            place = place[hit != 0]
        self._refs[place] = 0
        self._tags[place] = 0
        self._held -= len(keys)

    # Arrays

    def _look_again(self) -> None:
        """Views of the arrays, which are other arrays now."""
        self._ref_rows = self._refs.reshape(-1, _PLACES)
        self._tag_rows = self._tags.reshape(-1, _PLACES)
        arrays: list[npt.NDArray[Any]] = [self._refs, self._tags, self._heads, self._listed, self._nexts]
        views = (memoryview(array) for array in arrays)  # type: ignore[arg-type]  # arrays are buffers
        self._ref_view, self._tag_view, self._head_view, self._listed_view, self._next_view = views

    def _set_buckets(self, buckets: int) -> None:
        self._buckets = buckets
        self._low = (1 << buckets.bit_length() - 1) - 1
        self._high = 2 * self._low + 1
        self._full_at = int(buckets * _LOAD)

    def _bucket_of(self, key: int) -> int:
        bucket = (key ^ key >> _FOLD) & self._high
        return bucket if bucket < self._buckets else bucket & self._low

    def _buckets_of(self, keys: UInt64s) -> Positions:
        bucket: Positions = ((keys ^ keys >> _FOLD_64) & np.uint64(self._high)).view(np.int64)
        bucket -= (bucket >= self._buckets) * (self._low + 1)
        return bucket

    # Growth

    def _grow(self, more: int) -> None:
        """Make `more` keys fit."""
        while self._held + more > self._full_at:
            half = self._low + 1
            wanted = max(_SPLIT, int((self._held + more) / _LOAD) + 1 - self._buckets)
            self._split(min(wanted, 2 * half - self._buckets))

    def _split(self, count: int) -> None:
        """Split the next `count` buckets. Each key keeps its place in the bucket, of the old one or of the new."""
        half = self._low + 1
        first = self._buckets - half
        self._room(self._buckets + count)
        old, new = slice(first, first + count), slice(self._buckets, self._buckets + count)
        keys = self._rows.keys.take(self._ref_rows[old])
        moves = ((keys ^ keys >> _FOLD_64) & np.uint64(half)) != 0
        for places in (self._ref_rows, self._tag_rows):
            np.multiply(places[old], moves, out=places[new])
            places[old] *= ~moves
        self._set_buckets(self._buckets + count)
        for bucket in (first + np.flatnonzero(self._heads[old])).tolist():
            listed, self._head_view[bucket] = self._head_view[bucket], 0
            while listed:  # these may fit now
                row, following = self._listed_view[listed], self._next_view[listed]
                self._free.append(listed)
                self._put(self._rows.key_view[row], row)
                listed = following

    def _room(self, buckets: int) -> None:
        if buckets > len(self._heads):
            self._refs, self._tags = (longer(places, 2 * buckets * _PLACES) for places in (self._refs, self._tags))
            self._heads = longer(self._heads, 2 * buckets)
            self._look_again()

    # Places

    def _put(self, key: int, row: int) -> None:
        bucket = self._bucket_of(key)
        start = bucket * _PLACES
        refs = self._ref_view[start : start + _PLACES].tolist()
        if 0 in refs:
            place = start + refs.index(0)
            self._ref_view[place] = row
            self._tag_view[place] = key >> _TAG or 1
        else:
            self._join_list(row, bucket)

    def _join_list(self, row: int, bucket: int) -> None:
        if self._free:
            listed = self._free.pop()
        else:
            listed = self._untaken
            self._untaken += 1
            if listed == len(self._listed):
                self._listed, self._nexts = (longer(array, 2 * listed) for array in (self._listed, self._nexts))
                self._look_again()
        self._listed_view[listed] = row
        self._next_view[listed] = self._head_view[bucket]
        self._head_view[bucket] = listed

    def _leave_list(self, row: int, bucket: int) -> None:
        before, listed = 0, self._head_view[bucket]
        while self._listed_view[listed] != row:
            before, listed = listed, self._next_view[listed]
        if before:
            self._next_view[before] = self._next_view[listed]
        else:
            self._head_view[bucket] = self._next_view[listed]
        self._free.append(listed)

    def _find_elsewhere(self, keys: UInt64s, bucket: Positions, hit: UInt64s) -> Positions | list[int]:
        """Rows of keys that are not where their tag was last seen in the bucket, -1 where absent."""
        if len(keys) <= _FEW:
            several = zip(keys.tolist(), bucket.tolist(), hit.tolist(), strict=True)
            return [self.find(key) if its & its - 1 else self._find_listed(key, of) for key, of, its in several]
        found = self._find_many_listed(keys, bucket)
        for number in np.flatnonzero(hit & hit - _ONE).tolist():  # one tag in two places: one key in ten thousand
            found[number] = self.find(int(keys[number]))
        return found

    def _find_listed(self, key: int, bucket: int) -> int:
        keys, rows = self._rows.key_view, self._listed_view
        listed = self._head_view[bucket]
        while listed:
            row: int = rows[listed]
            if keys[row] == key:
                return row
            listed = self._next_view[listed]
        return -1

    def _find_many_listed(self, keys: UInt64s, bucket: Positions) -> Positions:
        """All lists are walked in step."""
        found = np.full(len(keys), -1, dtype=np.int64)
        listed = self._heads[bucket]
        left = np.flatnonzero(listed)
        while len(left):
            at = listed[left]
            rows = self._listed[at].astype(np.int64)
            same = self._rows.keys[rows] == keys[left]
            found[left[same]] = rows[same]
            listed[left] = self._nexts[at]
            left = left[~same & (listed[left] != 0)]
        return found


def _tags_of(keys: UInt64s) -> npt.NDArray[np.uint16]:
    tags: npt.NDArray[np.uint16] = np.maximum(keys >> _TAG_64, _ONE).astype(np.uint16)
    return tags


def _as_words(hit: npt.NDArray[np.bool_]) -> UInt64s:
    """One byte for each place, so one word for each bucket: 256 ** place where the key is, 0 where it is not."""
    words: UInt64s = hit.view(_WORD).ravel()
    return words


def _place(hit: UInt64s, bucket: Positions) -> Positions:
    """The last place of the bucket that was hit; outside it where none was."""
    place: Positions = hit.astype(np.float64).view(np.int64)
    place >>= _PLACE_SHIFT
    place += bucket * _PLACES
    place -= _PLACE_BIAS
    return place
