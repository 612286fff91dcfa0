"""Which identity stands behind the model name a client uses.

A replica lists its base model first; other names without a parent are aliases of it, names with a parent are adapters.
Aliases share the base model's cache, adapters have one of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class ModelNames:
    """Names of all replicas, as each last listed them."""

    def __init__(self) -> None:
        self._listed: dict[int, dict[str, tuple[str, str]]] = {}  # by row
        self._identities: dict[str, tuple[str, str]] = {}

    def listed(self, row: int, models: Iterable[str], parents: Mapping[str, str]) -> None:
        """`row` lists `models`, its base model first; `parents` names the base of each adapter."""
        names = list(models)
        base = next((name for name in names if name not in parents), "")
        self._listed[row] = {name: (base or name, name if name in parents else "") for name in names}
        self._identities = {name: found for one in self._listed.values() for name, found in one.items()}

    def resolve(self, name: str) -> tuple[str, str]:
        """(base model, adapter) behind `name`. Without a name, the base model if all names share one."""
        if name:
            return self._identities.get(name, (name, ""))
        bases = {base for base, _ in self._identities.values()}
        return (bases.pop() if len(bases) == 1 else "", "")
