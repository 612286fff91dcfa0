"""Blocks that requests in flight will leave on their replicas.

Model     a placed request leaves every whole block of its prompt. Every eighth block of its chain and the last stand
          for all before them, since a block's hash covers its whole prefix
Valid     until an event confirms the last block, the caller cancels, the engine contradicts, or time or room runs out
Blind to  when a block is there: a request still in the queue counts as one that has run
Errors    a prompt that leaves a chain between two of those blocks is credited up to the one before: 7 blocks too few
          at most
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.blocks.chain_index import bits_of

Int32s = npt.NDArray[np.int32]

_STRIDE = 8


@dataclass(frozen=True, slots=True)
class _Placed:
    row: int
    hashes: Sequence[int]
    lapses_at_s: float


class Expected:
    """Requests in flight, by a number given out for each.

    Parameters
    ----------
    most : blocks of all chains together; beyond it the oldest request is no longer expected
    lapse_s : seconds after which a request nobody confirmed is no longer expected, > 0
    """

    def __init__(self, *, most: int, lapse_s: float) -> None:
        self._most = most
        self._lapse_s = lapse_s
        self._placed: dict[int, _Placed] = {}  # oldest first
        self._numbers = 0
        self.blocks = 0  # of all chains together
        self._rows_at: dict[int, int] = {}  # block -> bit mask of rows
        self._more: dict[tuple[int, int], int] = {}  # (block, row) -> requests beyond the first
        self._last: dict[int, dict[int, list[int]]] = {}  # row -> last block -> numbers

    def __len__(self) -> int:
        return len(self._placed)

    def place(self, row: int, hashes: Sequence[int], now_s: float) -> int:
        """A request with this chain was sent to `row`. Returns its number."""
        self.lapse(now_s)
        self._numbers += 1
        if not 0 < len(hashes) <= self._most:
            return self._numbers
        while self.blocks + len(hashes) > self._most:
            self.cancel(next(iter(self._placed)))
        self._placed[self._numbers] = _Placed(row, hashes, now_s + self._lapse_s)
        self.blocks += len(hashes)
        bit = 1 << row
        for block in _marks(hashes):
            rows = self._rows_at.get(block, 0)
            if rows & bit:
                self._more[block, row] = self._more.get((block, row), 0) + 1
            else:
                self._rows_at[block] = rows | bit
        self._last.setdefault(row, {}).setdefault(hashes[-1], []).append(self._numbers)
        return self._numbers

    def cancel(self, number: int) -> None:
        """Expect nothing of this request any more; no effect when that is so already."""
        placed = self._placed.pop(number, None)
        if placed is None:
            return
        self.blocks -= len(placed.hashes)
        for block in _marks(placed.hashes):
            self._unmark(block, placed.row)
        lasts = self._last[placed.row]
        numbers = lasts[placed.hashes[-1]]
        numbers.remove(number)
        if not numbers:
            del lasts[placed.hashes[-1]]
            if not lasts:
                del self._last[placed.row]

    def stored(self, row: int, blocks: Collection[int]) -> None:
        """`row` announced these blocks: requests whose last block is among them are confirmed."""
        lasts = self._last.get(row)
        if lasts is None or lasts.keys().isdisjoint(blocks):
            return
        for block in lasts.keys() & blocks:
            for number in list(lasts[block]):
                self.cancel(number)

    def contradict(self, row: int, hashes: Sequence[int], reused: int) -> None:
        """`row` reused only the first `reused` blocks of this chain: requests that should have left more did not."""
        if row not in self._last or reused >= len(hashes):
            return
        wrong = [
            number
            for number, placed in self._placed.items()
            if placed.row == row and len(placed.hashes) > reused and placed.hashes[reused] == hashes[reused]
        ]
        for number in wrong:
            self.cancel(number)

    def clear(self, row: int) -> None:
        """`row` restarted or emptied its cache."""
        for number in [number for numbers in self._last.get(row, {}).values() for number in numbers]:
            self.cancel(number)

    def lapse(self, now_s: float) -> None:
        """Drop what nobody confirmed in time."""
        while self._placed:
            number, placed = next(iter(self._placed.items()))
            if placed.lapses_at_s > now_s:
                return
            self.cancel(number)

    def leading(self, hashes: Sequence[int], rows: int) -> Int32s:
        """For each row, how many leading blocks of this chain requests in flight will leave there."""
        counts = np.zeros(rows, dtype=np.int32)
        alive, before = (1 << rows) - 1, -1  # rows that will have everything up to the block `before`
        while alive and before < len(hashes) - 1:
            mark = min(before + _STRIDE, len(hashes) - 1)
            is_mark = mark == before + _STRIDE
            there = self._rows_at.get(hashes[mark], 0) & alive
            ended = alive ^ there if is_mark else alive
            self._write_ended(counts, ended, hashes, before, mark if is_mark else mark + 1)
            alive, before = (there, mark) if is_mark else (0, mark)
        for row in bits_of(alive):
            counts[row] = before + 1
        return counts

    def _write_ended(self, counts: Int32s, ended: int, hashes: Sequence[int], before: int, mark: int) -> None:
        """Rows whose chains end or turn off between two marks: their last block may be in between."""
        for depth in range(mark - 1, before, -1):
            if not ended:
                return
            here = self._rows_at.get(hashes[depth], 0) & ended
            for row in bits_of(here):
                counts[row] = depth + 1
            ended ^= here
        if before >= 0:
            for row in bits_of(ended):
                counts[row] = before + 1

    def _unmark(self, block: int, row: int) -> None:
        more = self._more.pop((block, row), 0)
        if more > 1:
            self._more[block, row] = more - 1
        if more:
            return
        rows = self._rows_at[block] & ~(1 << row)
        if rows:
            self._rows_at[block] = rows
        else:
            del self._rows_at[block]


def _marks(hashes: Sequence[int]) -> list[int]:
    """Every eighth block and the last, each once."""
    marks = list(hashes[_STRIDE - 1 :: _STRIDE])
    if len(hashes) % _STRIDE:
        marks.append(hashes[-1])
    return marks
