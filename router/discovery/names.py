"""Replicas behind DNS names: an entry with `url: dns://name:port` stands for one replica at each address of the name.

Model     every name is looked up again and again. An address is there from the first answer with it until it has been
          missing from answers for `grace_s`, since resolvers may give a part of a long list. A look-up that fails
          keeps the last answer for `keep_s`; that a name does not exist, or has no address, is an answer of none
Valid     names whose every address is one server; http, as no certificate could be for all of them
Blind to  the time to live of an answer, which the system's resolver does not tell
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from router.discovery.kept import Kept
from router.discovery.sources import NoList
from router.fleet import ReplicaSpec, is_dns

MOST_ADDRESSES = 1024  # of one name

# Of the C library's answers, those that say there is no such address; all others say that nobody could be asked.
_NONE_THERE = frozenset(code for code in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)) if code is not None)

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


class Name(NamedTuple):
    """What is looked up. port : of the replicas"""

    host: str
    port: int


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """Numeric addresses of `host`, sorted, so that the order of an answer means nothing. None: the name has none.

    Raises
    ------
    NoList : nobody could be asked
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        if exc.errno in _NONE_THERE:
            return []
        raise NoList(f"look-up of {host}: {exc.strerror}") from exc
    except (OSError, UnicodeError) as exc:
        raise NoList(f"look-up of {host}: {exc}") from exc
    addresses = {str(where[0]) for *_, where in found}
    return sorted(address for address in addresses if "%" not in address)  # a scope makes sense on one link only


class Names:
    """Owner of what is known of all names.

    grace_s, keep_s : as in `Kept`
    timeout_s : for one look-up, > 0; one that is not over by then goes on, and counts as failed until it is
    every_s : between two look-ups of a name; >= 0
    """

    def __init__(
        self,
        *,
        grace_s: float = 10.0,
        keep_s: float = 300.0,
        timeout_s: float = 5.0,
        every_s: float = 5.0,
        lookup: Lookup = addresses_of,
    ) -> None:
        self._grace_s = grace_s
        self._keep_s = keep_s
        self._timeout_s = timeout_s
        self._every_s = every_s
        self._lookup = lookup
        self._asked_s: dict[Name, float] = {}  # when each was last asked about
        self._known: dict[Name, Kept[str]] = {}
        self._asked: dict[Name, asyncio.Future[Sequence[str]]] = {}

    @property
    def known(self) -> dict[Name, Kept[str]]:
        """What is known of each name, to be shown."""
        return self._known

    async def look_up(self, replicas: Iterable[ReplicaSpec], clock: Callable[[], float]) -> list[str]:
        """Ask for those names among these entries that are due, and forget the names that are not among them.

        A sentence for each new kind of failure.
        """
        wanted = dict.fromkeys(name for replica in replicas if (name := name_of(replica)) is not None)
        self._known = {
            name: self._known.get(name) or Kept(grace_s=self._grace_s, keep_s=self._keep_s) for name in wanted
        }
        now_s = clock()
        self._asked_s = {name: self._asked_s.get(name, -inf) for name in wanted}
        due = [name for name, asked_s in self._asked_s.items() if now_s - asked_s >= self._every_s]
        self._asked_s.update(dict.fromkeys(due, now_s))
        news = await asyncio.gather(*(self._ask(name, self._known[name], clock) for name in due))
        return [sentence for sentence in news if sentence is not None]

    async def stop(self) -> None:
        """Give up the look-ups under way."""
        asked, self._asked = list(self._asked.values()), {}
        for future in asked:
            future.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    def expanded(self, replicas: Iterable[ReplicaSpec], now_s: float) -> list[ReplicaSpec]:
        """The same list with a replica for each address of a name; of two entries with one address the first."""
        found: list[ReplicaSpec] = []
        for replica in replicas:
            name = name_of(replica)
            if name is None:
                found.append(replica)
            else:
                kept = self._known.get(name)
                addresses = [] if kept is None else sorted(kept.entries(now_s))[:MOST_ADDRESSES]
                found += [at_address(replica, address, name.port) for address in addresses]
        return found

    async def _ask(self, name: Name, kept: Kept[str], clock: Callable[[], float]) -> str | None:
        """Look one name up, and say so if that fails in a new way."""
        asked = self._asked.get(name)
        if asked is None:  # else the resolver still owes an answer: a second question would only take another thread
            asked = self._asked[name] = asyncio.ensure_future(self._lookup(*name))
        done, _ = await asyncio.wait({asked}, timeout=self._timeout_s)
        if not done:
            reason = f"look-up of {name.host}: no answer within {self._timeout_s:g} s"
        else:
            self._asked.pop(name, None)
            try:
                addresses = asked.result()
            except NoList as exc:
                reason = str(exc)
            else:
                kept.good(addresses, clock())
                return None
        return reason if kept.failed(reason, clock()) else None


def name_of(replica: ReplicaSpec) -> Name | None:
    """The name an entry stands for; None when it is one replica with a URL of its own."""
    if not is_dns(replica.url or ""):
        return None
    parts = urlsplit(replica.url or "")
    if not parts.hostname or parts.port is None:
        return None
    return Name(parts.hostname, parts.port)


def at_address(replica: ReplicaSpec, address: str, port: int) -> ReplicaSpec:
    """The replica at one address of a name, called by that address.

    `{address}` in its event addresses stands for the address.

    >>> at_address(ReplicaSpec(name="pool", url="dns://pool:8000"), "10.0.0.5", 8000).url
    'http://10.0.0.5:8000'
    """
    host = f"[{address}]" if ":" in address else address
    where = {
        key: None if (named := getattr(replica, key)) is None else named.replace("{address}", host)
        for key in ("events", "replay")
    }
    return msgspec.structs.replace(replica, name=f"{host}:{port}", url=f"http://{host}:{port}", **where)
