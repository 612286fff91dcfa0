"""Which identity stands behind the model name a client uses.

A replica lists its base model first; other names without a parent are aliases of it, names with a parent are adapters.
Aliases share the base model's cache, adapters have one of their own, which is void once other weights have their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class ModelNames:
    """Names of all replicas, as each last listed them."""

    def __init__(self) -> None:
        self._listed: dict[int, dict[str, tuple[str, str]]] = {}  # by row
        self._identities: dict[str, tuple[str, str]] = {}
        self._adapters: dict[int, dict[str, tuple[str, str | None]]] = {}  # by row: base and source of their weights

    def listed(
        self, row: int, models: Iterable[str], parents: Mapping[str, str], roots: Mapping[str, str] | None = None
    ) -> list[str]:
        """`row` lists `models`, its base model first. The adapters whose state on `row` is of no use any more.

        Those are the ones it listed before and does not list now, or lists with another base or source of weights.

        parents : base of each adapter; roots : where the weights of adapters come from, as far as that is said
        """
        names = list(models)
        adapters = {name: (parents[name], (roots or {}).get(name)) for name in names if name in parents}
        before, self._adapters[row] = self._adapters.get(row, {}), adapters
        base = next((name for name in names if name not in parents), "")
        self._listed[row] = {name: (base or name, name if name in parents else "") for name in names}
        self._identities = {name: found for one in self._listed.values() for name, found in one.items()}
        return [name for name, weights in before.items() if adapters.get(name) != weights]

    def forget(self, row: int) -> None:
        """`row` is nobody's from now on. Names that only it listed are unknown again."""
        self._adapters.pop(row, None)
        if self._listed.pop(row, None) is not None:
            self._identities = {name: found for one in self._listed.values() for name, found in one.items()}

    def resolve(self, name: str) -> tuple[str, str]:
        """(base model, adapter) behind `name`. Without a name, the base model if all names share one."""
        if name:
            return self._identities.get(name, (name, ""))
        bases = {base for base, _ in self._identities.values()}
        return (bases.pop() if len(bases) == 1 else "", "")
