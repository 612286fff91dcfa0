"""The time replicas are at work, divided among the requests they work on: what each of them took of its card.

Model     whoever is at a replica takes an equal part of each of its seconds, 1/n of n requests, from the choice to the
          end. So the parts of all requests add up to the seconds in which a replica had any, whatever became of them
Valid     times of one clock; of each replica in order
Blind to  who of them computes, waits or fetches; requests of other clients; seconds in which it has nothing to do
Source    processor sharing, Kleinrock 1967, with its virtual time for one addition an event
"""

from __future__ import annotations


class BusyTime:
    """Of `rows` replicas. Each `begins` is followed by one `ends`."""

    __slots__ = ("_at_s", "_each_s", "_there")

    def __init__(self, rows: int) -> None:
        self._there = [0] * rows  # requests
        self._at_s = [0.0] * rows  # when that last changed
        self._each_s = [0.0] * rows  # what one that came when the replica was last idle would have had

    def begins(self, row: int, now_s: float) -> float:
        """A request comes to `row`. What is to be given back at its end."""
        self._pass(row, now_s)
        self._there[row] += 1
        return self._each_s[row]

    def ends(self, row: int, began_s: float, now_s: float) -> float:
        """It leaves `row`: its part of the time since it came, seconds. began_s : what `begins` said"""
        self._pass(row, now_s)
        took_s = self._each_s[row] - began_s
        self._there[row] -= 1
        if not self._there[row]:  # nobody compares with it any more
            self._each_s[row] = self._at_s[row] = 0.0
        return took_s

    def _pass(self, row: int, now_s: float) -> None:
        there = self._there[row]
        if there and now_s > self._at_s[row]:
            self._each_s[row] += (now_s - self._at_s[row]) / there
        self._at_s[row] = now_s
