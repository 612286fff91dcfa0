"""What operators change by admin calls: replicas added beside all lists, taken off them, or given nothing new.

Model     an edit lies over the lists of all sources until it is undone. What was removed stays away, and what was
          drained stays drained, for as long as some source lists it; after that the name is free for whoever comes
Valid     one router's run: edits are not written down, so what is to outlast it belongs into a file
Blind to  other routers
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from router.discovery.reconcile import same_replica
from router.errors import ConfigError
from router.fleet import ReplicaSpec, check_url

Reply = tuple[int, dict[str, Any]]  # HTTP status and what to answer


class AddBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What adds a replica. name : its URL's host and port if it is not given; the rest as in a fleet file"""

    url: str
    name: str | None = None
    card: str | None = None
    events: str | None = None
    replay: str | None = None
    api_key_env: str | None = None


class NameBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What names one."""

    name: str


class Edits:
    """Owner of all edits. Its calls take decoded JSON; the change is seen when the lists are next looked at.

    check : raises `ConfigError` for a replica this router cannot have
    room : rows that nobody has or waits for
    """

    def __init__(self, *, check: Callable[[ReplicaSpec], object], room: Callable[[], int]) -> None:
        self._check = check
        self._room = room
        self._added: dict[str, ReplicaSpec] = {}
        self._removed: set[str] = set()
        self._drained: set[str] = set()
        self._listed: dict[str, ReplicaSpec] = {}  # by all others
        self._wanted: dict[str, ReplicaSpec] = {}

    @property
    def added(self) -> Sequence[ReplicaSpec]:
        """Those that only an admin call names."""
        return list(self._added.values())

    @property
    def drained(self) -> Collection[str]:
        """Names of those that are given nothing new."""
        return frozenset(self._drained)

    def laid_over(self, listed: Iterable[ReplicaSpec]) -> list[ReplicaSpec]:
        """The replicas wanted, of those all sources list, the added ones among them."""
        self._listed = {replica.name: replica for replica in listed}
        self._removed &= self._listed.keys()
        self._wanted = {name: replica for name, replica in self._listed.items() if name not in self._removed}
        self._drained &= self._wanted.keys()
        return list(self._wanted.values())

    def add(self, body: Any) -> Reply:
        """A replica from now on, or again."""
        try:
            replica = _replica(msgspec.convert(body, AddBody))
            self._check(replica)
        except (msgspec.ValidationError, ConfigError) as exc:
            return 400, {"error": str(exc)}
        known = self._wanted.get(replica.name)
        if known is not None:
            if same_replica(known, replica):
                return 200, {"replica": replica.name, "state": "is there already"}
            return 409, {
                "error": f"another replica is called {replica.name!r}; remove it first, or choose another name"
            }
        taken = next((other.name for other in self._wanted.values() if _url(other) == _url(replica)), None)
        if taken is not None:
            return 409, {"error": f"{_url(replica)} is {taken!r} already"}
        if self._room() < 1:
            return 409, {"error": "there is no room for another replica: raise discovery.max_replicas and restart"}
        self._removed.discard(replica.name)
        listed = self._listed.get(replica.name)
        if listed is None or not same_replica(listed, replica):
            self._added[replica.name] = replica
        self._wanted[replica.name] = replica
        return 201, {"replica": replica.name, "state": "added"}

    def drain(self, body: Any) -> Reply:
        """Nothing new for a replica; it stays in sight, and what runs there ends as it would."""
        return self._named(body, self._drained.add, "drained")

    def undrain(self, body: Any) -> Reply:
        """Traffic for it again."""
        return self._named(body, self._drained.discard, "in use")

    def remove(self, body: Any) -> Reply:
        """A replica, and the other ranks of its server, are gone: drained and forgotten. Running requests end."""
        return self._named(body, self._remove, "removed")

    def _remove(self, name: str) -> None:
        url = _url(self._wanted[name])
        for other in [other.name for other in self._wanted.values() if _url(other) == url]:
            del self._wanted[other]
            if self._added.pop(other, None) is not None:
                self._listed.pop(other, None)  # by nobody else
            self._drained.discard(other)
            self._removed.add(other)

    def _named(self, body: Any, then: Callable[[str], object], state: str) -> Reply:
        try:
            name = msgspec.convert(body, NameBody).name
        except msgspec.ValidationError as exc:
            return 400, {"error": str(exc)}
        if name not in self._wanted:
            return 404, {"error": f"no replica is called {name!r}", "replicas": list(self._wanted)}
        then(name)
        return 200, {"replica": name, "state": state}


def _replica(body: AddBody) -> ReplicaSpec:
    url = check_url(body.url)
    return ReplicaSpec(
        name=body.name or urlsplit(url).netloc,
        url=url,
        card=body.card,
        events=body.events,
        replay=body.replay,
        api_key_env=body.api_key_env,
    )


def _url(replica: ReplicaSpec) -> str:
    return (replica.url or "").rstrip("/")
