"""Which replica keeps a response that a client may ask for again, by the id its answer carried.

Model     the ids seen last, each with the name of a replica: names stay true when rows are numbered anew
Valid     ids of one router: another router, or this one after a restart, has to ask
Blind to  responses that a replica has dropped since, and whether it was asked to keep them at all
"""

from __future__ import annotations

from collections import OrderedDict

LONGEST_ID = 256  # characters; engines make about forty


class StoredAnswers:
    """A bounded memory of ids. capacity : ids kept, >= 1; a hundred thousand take about 25 MB"""

    def __init__(self, capacity: int = 100_000) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        self._holders: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, answer_id: str, replica: str) -> None:
        """`replica` has answered with this id."""
        if not 0 < len(answer_id) <= LONGEST_ID:
            return
        self._holders[answer_id] = replica
        self._holders.move_to_end(answer_id)
        if len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def holder(self, answer_id: str) -> str:
        """Name of the replica that keeps it; "" when that is not known."""
        replica = self._holders.get(answer_id, "")
        if replica:
            self._holders.move_to_end(answer_id)
        return replica
