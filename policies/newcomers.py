"""Rows that are another replica than before, for rules that remember something of each.

Model     a row is the replica of its name; the fleet view has another tuple of names once one changes
Blind to  a replica that starts again under its name: what is remembered of it stands
"""

from __future__ import annotations

from estimators.view import FleetView


class Newcomers:
    """Names as they were when it was last asked."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def rows(self, fleet: FleetView) -> list[int]:
        """Rows whose replica is another since the last call; at first all."""
        names, known = fleet.names, self._names
        if names is known:
            return []
        self._names = names
        return [row for row, name in enumerate(names) if row >= len(known) or known[row] != name]
