"""Bounded hand-over from the loop to one other thread.

Model     one thread puts, one takes; both ends are single operations of a deque, which threads may share. A full ring
          refuses, so that a stuck disk costs a bounded amount of memory and never a wait
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Ring(Generic[Entry]):
    """capacity : entries held at most, >= 1"""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> bool:
        """Hand over `entry`, which must not change afterwards; False when there is no room."""
        if len(self._entries) >= self.capacity:
            return False
        self._entries.append(entry)
        return True

    def take(self) -> Entry | None:
        """The oldest entry; None when there is none."""
        try:
            return self._entries.popleft()
        except IndexError:
            return None
