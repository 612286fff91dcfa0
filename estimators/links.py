"""How long it takes to bring KV bytes over one or more links, as columns: one row per link.

Model     a stage costs its look-up, its fixed start, then its bytes. Whole: stages follow one another (all of it
          reaches host memory before the host link starts). In chunks: the slowest stage, and one chunk's time on each
          other one. A shared link is one row that every replica's estimate sees, under one of two rules:
          first come   bytes promised before go first                 (sum_i b_i + s) / rate
          fair         all on the link share its rate equally         (s + sum_i min(b_i, s)) / rate
          with b_i what the others have left when the new transfer of s bytes begins there
Valid     rate > 0; under 17 TB on one link; times on one clock, told in order
Blind to  what is promised later, and so a fair link's estimate is a lower bound. A transfer promised but not begun
          yet (its look-up, an earlier stage, its turn) counts as if it were there: late by at most its bytes over
          the rate, and exact where nothing has begun
Source    AI Infra textbook, section 9.5.4, example 9.7: 10 ms look-up, 1.125 GiB over the network, then over PCIe;
          egalitarian processor sharing: Harchol-Balter 2013, ch. 30
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import numpy as np
import numpy.typing as npt

from estimators.ranges import require
from estimators.sharing import (
    APART,
    NOTHING_BYTES,
    Transfer,
    by_begin,
    fair_points,
    level_at,
    pass_fairly,
    pass_first_come,
)
from estimators.ways import (
    BYTES_PER_S,
    FIXED_S,
    FOR_GOOD,
    KEY,
    LOOK_UP_S,
    SECONDS_PER_BYTE,
    START_S,
    Rows,
    Stage,
    Times,
    Ways,
)

# Columns of the packed table after those of `ways.py`: what is on the link, by fair sharing and by first come.
_FROM_S, _LEFT_BYTES, _FREE_S, _LEFT_S = range(FOR_GOOD, FOR_GOOD + 4)


class Sharing(Enum):
    """How a link divides its rate between the transfers on it."""

    FIRST_COME = "first_come"
    FAIR = "fair"


@dataclass(slots=True)  # not frozen: made for every decision
class Fetch:
    """duration_s : F, zero where nothing is fetched
    first_byte_s : its part before anything comes; what is fetched comes evenly from there to the end. In chunks: until
        the first chunk is there
    """

    duration_s: Times
    first_byte_s: Times


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """What `LinkTable.promise` hands out. ends_at_s : when the last byte should be there, absolute."""

    transfers: tuple[Transfer, ...]
    ends_at_s: float


@dataclass(slots=True)
class _Load:
    """What is on a link, as of its last change.

    from_s : when the first of it begins; left_bytes : all of it; lefts : of each transfer, ascending
    points : of `fair_points`; None until they are asked for
    """

    from_s: float
    left_bytes: float
    lefts: list[float]
    points: Times | None = None


@dataclass(slots=True)
class _Queue:
    """Transfers on one link, as they stand at `at_s`; first come: in the order they begin."""

    at_s: float = -inf
    transfers: list[Transfer] = field(default_factory=list)


class LinkTable:
    """All links of a fleet. Estimates read it; whoever sends requests promises and takes back.

    Parameters
    ----------
    bytes_per_s : payload rate of each link, > 0; gives the number of rows
    start_s : fixed time of each transfer (each chunk) before its first byte, >= 0; the link is free meanwhile
    look_up_s : the same, once for each fetch, >= 0
    sharing : of all links

    Raises
    ------
    ValueError : a rate or a time is out of range, infinite or NaN.
    """

    def __init__(
        self,
        *,
        bytes_per_s: npt.ArrayLike,
        start_s: npt.ArrayLike = 0.0,
        look_up_s: npt.ArrayLike = 0.0,
        sharing: Sharing = Sharing.FAIR,
    ) -> None:
        rate = np.atleast_1d(np.asarray(bytes_per_s, dtype=np.float64))
        self.rows = len(rate)
        self.sharing = sharing
        # One more row that costs nothing: what stage -1 reads.
        self._columns = np.zeros((FOR_GOOD + 4, self.rows + 1))
        self._columns[BYTES_PER_S, :-1] = rate
        self._columns[START_S, :-1] = start_s
        self._columns[LOOK_UP_S, :-1] = look_up_s
        require(bool(np.all((rate > 0) & (rate < inf))), "bytes_per_s", bytes_per_s)
        for name, column in (("start_s", START_S), ("look_up_s", LOOK_UP_S)):
            values = self._columns[column]
            require(bool(np.all((values >= 0) & (values < inf))), name, values[:-1].tolist())
        self._columns[SECONDS_PER_BYTE, :-1] = 1.0 / rate
        self._columns[FIXED_S] = self._columns[LOOK_UP_S] + self._columns[START_S]
        self._columns[KEY] = np.append(np.arange(self.rows), -1.0) * APART
        self._alone: list[list[float]] = self._columns[: SECONDS_PER_BYTE + 1].T.tolist()
        self._queues = [_Queue() for _ in range(self.rows)]
        self._busy: dict[int, _Load] = {}  # only links that something is on
        self._table: Times | None = None  # all points, by row; None after a change

    # Estimates.

    def ways(self, stages: Rows) -> Ways:
        """What `fetch` takes instead of stages that are asked for again and again.

        stages : links in the order they are crossed, int, shape (..., S); -1 is no link
        """
        return Ways(stages, self._columns[:FOR_GOOD])

    def fetch_s(
        self,
        stages: Rows | Ways,
        size_bytes: npt.ArrayLike,
        starts_s: npt.ArrayLike,
        *,
        chunk_bytes: float | None = None,
    ) -> Times:
        """F of `fetch` alone."""
        return self.fetch(stages, size_bytes, starts_s, chunk_bytes=chunk_bytes).duration_s

    def fetch(
        self,
        stages: Rows | Ways,
        size_bytes: npt.ArrayLike,
        starts_s: npt.ArrayLike,
        *,
        chunk_bytes: float | None = None,
    ) -> Fetch:
        """Fetches of `size_bytes` that start at `starts_s`, each as if it were the next to be promised.

        Parameters
        ----------
        stages : links in the order they are crossed, int, shape (..., S), -1 is no link; or the `ways` of such
        size_bytes : >= 0, shape (...); nothing to fetch takes no time
        starts_s : absolute, not before what was told last, shape (...) or a scalar
        chunk_bytes : > 0; None: whole
        """
        ways = stages if isinstance(stages, Ways) else self.ways(stages)
        size, starts = np.asarray(size_bytes, dtype=np.float64), np.asarray(starts_s)
        if chunk_bytes is not None:
            return self._in_chunks(ways, size, starts, chunk_bytes)
        some = np.sign(size)
        if not self._busy:
            first_byte = some * ways.fixed_s
            took = size * ways.s_per_byte
            took += first_byte
            return Fetch(took, first_byte)
        took, first_byte = np.zeros(size.shape), np.zeros(size.shape)
        for stage in ways.stages:
            took += stage.fixed_s
            first_byte += stage.fixed_s
            wait, move = self._cross(stage, size, starts + took)
            if wait is not None:
                took += wait
                first_byte += wait
            took += move
        took *= some
        first_byte *= some
        return Fetch(took, first_byte)

    def _in_chunks(self, ways: Ways, size: Times, starts_s: Times, chunk_bytes: float) -> Fetch:
        require(0 < chunk_bytes < inf, "chunk_bytes", chunk_bytes)
        chunks = np.ceil(size / chunk_bytes)
        share = np.minimum(1.0, chunk_bytes / np.maximum(size, chunk_bytes))
        fixed, moved, slowest = np.zeros_like(size), np.zeros_like(size), np.zeros_like(size)
        for stage in ways.stages:
            fixed = fixed + stage.look_up_s
            at = starts_s + fixed + stage.start_s + moved * share
            wait, move = self._cross(stage, size, at)
            if wait is not None:
                fixed = fixed + wait
            move = move + chunks * stage.start_s
            moved = moved + move
            slowest = np.maximum(slowest, move)
        first_byte = fixed + moved * share
        some = size > 0
        return Fetch((first_byte + slowest * (1.0 - share)) * some, first_byte * some)

    def _cross(self, stage: Stage, size: Times, at_s: Times) -> tuple[Times | None, Times]:
        """Wait for the first byte, and then the time until the last, of transfers that begin at `at_s`."""
        if stage.crossed.isdisjoint(self._busy):
            return None, size * stage.s_per_byte
        if self.sharing is Sharing.FIRST_COME:
            free_s, left_s = self._columns[_FREE_S : _LEFT_S + 1].take(stage.links, axis=1, mode="wrap")
            free_s -= at_s
            return np.minimum(np.maximum(free_s, 0.0), left_s), size * stage.s_per_byte
        from_s, left_bytes = self._columns[_FROM_S : _LEFT_BYTES + 1].take(stage.links, axis=1, mode="wrap")
        done = at_s - from_s
        done *= stage.bytes_per_s
        done = np.minimum(np.maximum(done, 0.0), left_bytes)
        level_keys, done_at_level, done_keys, levels = self._up_to_date()
        level = np.interp(stage.key + done, done_keys, levels)
        level += size
        level += stage.key
        moved = np.interp(level, level_keys, done_at_level)
        moved -= done
        moved += size
        moved *= stage.s_per_byte
        return None, moved

    def fetch_one(
        self, stages: Sequence[int], size_bytes: float, starts_s: float, *, chunk_bytes: float | None = None
    ) -> tuple[float, float]:
        """F and its part before the first byte, of one fetch: the answers of `fetch` without arrays."""
        if size_bytes == 0:
            return 0.0, 0.0
        if chunk_bytes is None:
            return self._whole(stages, size_bytes, starts_s)
        walk = self._walk(stages, size_bytes, starts_s, chunk_bytes)
        return walk.duration_s, walk.first_byte_s

    def _whole(self, stages: Sequence[int], size_bytes: float, starts_s: float) -> tuple[float, float]:
        took_s = first_byte_s = 0.0
        for row in stages:
            if row < 0:
                continue
            fixed_s, s_per_byte = self._alone[row]
            took_s += fixed_s
            first_byte_s += fixed_s
            if row in self._busy:
                wait_s, move_s = self._cross_one(row, size_bytes, starts_s + took_s)
                took_s += wait_s + move_s
                first_byte_s += wait_s
            else:
                took_s += size_bytes * s_per_byte
        return took_s, first_byte_s

    def _walk(self, stages: Sequence[int], size_bytes: float, starts_s: float, chunk_bytes: float | None) -> _Walk:
        require(0 <= size_bytes < APART / 4, "size_bytes", size_bytes)
        require(chunk_bytes is None or 0 < chunk_bytes < inf, "chunk_bytes", chunk_bytes)
        chunk = size_bytes if chunk_bytes is None else min(chunk_bytes, size_bytes)
        chunks, share = (-(-size_bytes // chunk), chunk / size_bytes) if size_bytes else (1.0, 1.0)
        begins: list[tuple[int, float]] = []
        fixed_s = moved_s = slowest_s = starts = 0.0
        for row in stages:
            if row < 0:
                continue
            start_s = float(self._columns[START_S, row])
            fixed_s += float(self._columns[LOOK_UP_S, row])
            begins_s = starts_s + fixed_s + start_s + moved_s * share
            begins.append((row, begins_s))
            wait_s, move_s = self._cross_one(row, size_bytes, begins_s)
            fixed_s += wait_s
            starts += start_s
            move_s += chunks * start_s
            moved_s += move_s
            slowest_s = max(slowest_s, move_s)
        first_chunk_s = fixed_s + moved_s * share
        first_byte_s = fixed_s + starts if chunk_bytes is None else first_chunk_s
        return _Walk(first_chunk_s + slowest_s * (1.0 - share), first_byte_s, begins)

    def _cross_one(self, row: int, size_bytes: float, at_s: float) -> tuple[float, float]:
        s_per_byte = self._alone[row][1]
        load = self._busy.get(row)
        if load is None:
            return 0.0, size_bytes * s_per_byte
        done = min(max((at_s - load.from_s) / s_per_byte, 0.0), load.left_bytes)
        if self.sharing is Sharing.FIRST_COME:
            return (load.left_bytes - done) * s_per_byte, size_bytes * s_per_byte
        level, total = level_at(load.lefts, done), size_bytes
        for left in load.lefts:
            if left > level:
                total += min(left - level, size_bytes)
        return 0.0, total * s_per_byte

    def put_off_s(self, stages: Rows, size_bytes: Times) -> Times:
        """How much later a transfer on the same links ends, at most, if a fetch of each size joins it now, seconds.

        On a fair link min(s, b) / rate, with b what the longest on it has left, as of what was told last. None first
        come: who was there before goes first.

        stages : links each fetch crosses, int, shape (n, S), -1 is no link; size_bytes : >= 0, shape (n,)
        """
        if self.sharing is Sharing.FIRST_COME:
            return np.zeros(len(size_bytes))
        longest = np.zeros(self.rows + 1)
        for row, load in self._busy.items():
            longest[row] = load.lefts[-1]
        late_s = np.minimum(size_bytes[:, None], longest[stages]) * self._columns[SECONDS_PER_BYTE][stages]
        return np.asarray(late_s.max(axis=1, initial=0.0))

    # What is on the links.

    def promise(
        self,
        stages: Sequence[int],
        size_bytes: float,
        *,
        now_s: float,
        starts_s: float | None = None,
        chunk_bytes: float | None = None,
    ) -> Promise:
        """Put a fetch on its links. `starts_s` >= now_s when it begins later; see `fetch` for the others.

        End it with `arrived` when its outcome is known, or with `take_back`; without either it drains as believed.
        """
        require(starts_s is None or starts_s >= now_s, "starts_s", starts_s, "before now_s")
        for row in stages:
            if row >= 0:
                self._pass(row, now_s)
        at_s = now_s if starts_s is None else starts_s
        walk = self._walk(stages, size_bytes, at_s, chunk_bytes)
        if size_bytes == 0:
            return Promise((), at_s)
        transfers = tuple(Transfer(row, size_bytes, begins_s) for row, begins_s in walk.begins)
        for transfer in transfers:
            queue = self._queues[transfer.row]
            queue.transfers.append(transfer)
            queue.transfers.sort(key=by_begin)
            self._changed(transfer.row)
        return Promise(transfers, at_s + walk.duration_s)

    def take_back(self, promise: Promise, now_s: float) -> None:
        """It will not come: what has not crossed by `now_s` leaves the links. Without effect when it is over."""
        for transfer in promise.transfers:
            queue = self._queues[transfer.row]
            self._pass(transfer.row, now_s)
            if transfer in queue.transfers:
                queue.transfers.remove(transfer)
                self._changed(transfer.row)

    def arrived(self, promise: Promise, now_s: float) -> None:
        """It is known to be over by `now_s`: nothing of it is on the links, nor, first come, of those before it."""
        for transfer in promise.transfers:
            queue = self._queues[transfer.row]
            self._pass(transfer.row, now_s)
            if transfer in queue.transfers:
                index = queue.transfers.index(transfer)
                before = 0 if self.sharing is Sharing.FIRST_COME else index
                del queue.transfers[before : index + 1]
                self._changed(transfer.row)

    @property
    def idle(self) -> bool:
        """Whether there is nothing on any link."""
        return not self._busy

    def outstanding_bytes(self, now_s: float) -> Times:
        """Bytes believed still to cross each link, shape (rows,)."""
        left = self._columns[_LEFT_BYTES, :-1]
        passed_s = np.maximum(now_s - self._columns[_FROM_S, :-1], 0.0)
        return np.asarray(np.maximum(left - passed_s * self._columns[BYTES_PER_S, :-1], 0.0))

    def _pass(self, row: int, now_s: float) -> None:
        """Let what is on one link cross until `now_s`."""
        queue = self._queues[row]
        if queue.transfers and now_s > queue.at_s:
            rate = float(self._columns[BYTES_PER_S, row])
            pass_time = pass_first_come if self.sharing is Sharing.FIRST_COME else pass_fairly
            pass_time(queue.transfers, rate, queue.at_s, now_s)
            queue.transfers = [transfer for transfer in queue.transfers if transfer.left_bytes > NOTHING_BYTES]
            queue.at_s = now_s
            self._changed(row)
        queue.at_s = max(queue.at_s, now_s)

    def _changed(self, row: int) -> None:
        """Put one link's transfers into the columns."""
        queue = self._queues[row]
        lefts = sorted([transfer.left_bytes for transfer in queue.transfers])
        if queue.transfers:
            first_s = min([transfer.begins_s for transfer in queue.transfers])
            load = _Load(max(queue.at_s, first_s), sum(lefts), lefts)
            self._busy[row] = load
        else:
            load = _Load(0.0, 0.0, lefts)
            self._busy.pop(row, None)
        left_s = load.left_bytes * self._alone[row][1]
        self._columns[_FROM_S:, row] = (load.from_s, load.left_bytes, load.from_s + left_s, left_s)
        self._table = None

    def _up_to_date(self) -> Times:
        if self._table is None:
            parts = []
            for row, load in sorted(self._busy.items()):
                if load.points is None:
                    load.points = fair_points(row, load.lefts)
                parts.append(load.points)
            self._table = np.concatenate(parts, axis=1)
        return self._table


@dataclass(frozen=True, slots=True)
class _Walk:
    """One fetch; begins : each link it crosses, and when its first byte enters there."""

    duration_s: float
    first_byte_s: float
    begins: list[tuple[int, float]]
