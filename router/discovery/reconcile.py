"""The rule that compares the replicas that should be there with the rows there are, and says what is to be done.

Model     a replica is the same one while its name, URL and card are; what else its entry says can change under way. Who
          is not wanted leaves: nothing new goes there, and its row is spare once its last request has ended. Who comes
          back before that takes up where it was. Replicas that share a URL are the ranks of one server, numbered by
          their order, so they come and go together: a list that names other ranks than before is another server
Valid     names without repeats; any order of lists, any loss of news between them, since each list is whole
Blind to  what sources are, and time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from router.fleet import ReplicaSpec


class Stage(Enum):
    """What a row is used for. A closed set."""

    SPARE = "spare"
    MEMBER = "member"
    LEAVING = "leaving"  # its last requests are still running


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it is. replica : whose it is, or was last; None for a spare one"""

    stage: Stage
    replica: ReplicaSpec | None


SPARE = Row(Stage.SPARE, None)


@dataclass(frozen=True, slots=True)
class Steps:
    """What makes the rows as they should be, to be done in this order.

    left : members that nobody wants any more
    returned : rows that were leaving and whose replica is wanted again, with its entry as it is now
    changed : members whose entry says something else than before about the same replica
    joined : spare rows and who takes them; ranks of one server in their order
    waiting : wanted, and no row is spare for them
    """

    left: list[int] = field(default_factory=list)
    returned: dict[int, ReplicaSpec] = field(default_factory=dict)
    changed: dict[int, ReplicaSpec] = field(default_factory=dict)
    joined: dict[int, ReplicaSpec] = field(default_factory=dict)
    waiting: list[ReplicaSpec] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.left or self.returned or self.changed or self.joined)


def reconcile(wanted: Iterable[ReplicaSpec], rows: Sequence[Row]) -> Steps:
    """What has to be done so that exactly `wanted` are members. An entry without an address is of nobody."""
    steps = Steps()
    servers = _servers(replica for replica in wanted if replica.url)
    members = _rows_of(rows, Stage.MEMBER)
    leaving = _rows_of(rows, Stage.LEAVING)
    spare = [number for number, row in enumerate(rows) if row.stage is Stage.SPARE]
    stays: set[tuple[ReplicaSpec, ...]] = set()
    newcomers: list[list[ReplicaSpec]] = []
    for server in servers:
        key = _key(server)
        if key in members:
            stays.add(key)
            steps.changed.update(_changes(members[key], server, rows))
        elif key in leaving:
            steps.returned.update(zip(leaving[key], server, strict=True))
        else:
            newcomers.append(server)
    steps.left.extend(row for key, at in members.items() if key not in stays for row in at)
    for server in newcomers:  # all ranks of a server or none: a part of them would be numbered wrongly
        if len(server) > len(spare):
            steps.waiting.extend(server)
        else:
            steps.joined.update((spare.pop(0), replica) for replica in server)
    return steps


def same_replica(one: ReplicaSpec, other: ReplicaSpec) -> bool:
    """Whether two entries are of one replica, so that what was learned of it and runs there stays true."""
    return _essence(one) == _essence(other)


def merged(lists: Iterable[tuple[str, Iterable[ReplicaSpec]]]) -> tuple[list[ReplicaSpec], list[str]]:
    """Several sources' lists as one, and a sentence for each entry that is left out: the first source counts.

    lists : (source, its replicas). A source may name the ranks of one server, two sources cannot name one URL.
    """
    found: list[ReplicaSpec] = []
    names: set[str] = set()
    source_of_url: dict[str, str] = {}
    left_out: list[str] = []
    for source, replicas in lists:
        for replica in replicas:
            if not replica.url:
                continue
            url = _url(replica)
            if replica.name in names:
                left_out.append(f"{source} lists {replica.name!r}, a name that is taken")
            elif source_of_url.setdefault(url, source) != source:
                left_out.append(f"{source} lists {url}, which {source_of_url[url]} lists already")
            else:
                names.add(replica.name)
                found.append(replica)
    return found, left_out


def _servers(wanted: Iterable[ReplicaSpec]) -> list[list[ReplicaSpec]]:
    """Replicas by URL, in listed order: each the ranks of one server."""
    servers: dict[str, list[ReplicaSpec]] = {}
    for replica in wanted:
        servers.setdefault(_url(replica), []).append(replica)
    return list(servers.values())


def _rows_of(rows: Sequence[Row], stage: Stage) -> dict[tuple[ReplicaSpec, ...], list[int]]:
    """Rows at this stage by server; of two servers that look alike the one in the later rows."""
    servers: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.stage is stage and row.replica is not None:
            servers.setdefault(_url(row.replica), []).append(number)
    return {_key([_replica(rows, number) for number in numbers]): numbers for numbers in servers.values()}


def _changes(numbers: list[int], server: list[ReplicaSpec], rows: Sequence[Row]) -> dict[int, ReplicaSpec]:
    ranks = zip(numbers, server, strict=True)
    return {number: replica for number, replica in ranks if replica != rows[number].replica}


def _replica(rows: Sequence[Row], number: int) -> ReplicaSpec:
    replica = rows[number].replica
    assert replica is not None, "only spare rows are nobody's"
    return replica


def _key(server: Sequence[ReplicaSpec]) -> tuple[ReplicaSpec, ...]:
    return tuple(_essence(replica) for replica in server)


def _essence(replica: ReplicaSpec) -> ReplicaSpec:
    """What makes a replica the one it is."""
    return ReplicaSpec(name=replica.name, url=_url(replica), card=replica.card)


def _url(replica: ReplicaSpec) -> str:
    return (replica.url or "").rstrip("/")
