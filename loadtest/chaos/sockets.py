"""Which sockets another process holds, read from /proc: whether it let go of what it should have.

Valid     Linux, IPv4, a process of the same user
Blind to  sockets of other kinds, which are counted in `all` alone
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CLOSE_WAIT, _LISTEN = "08", "0A"  # as the kernel writes states


@dataclass(frozen=True, slots=True)
class Sockets:
    """Of one process. all : of any kind; clients : connections taken on one port; half_closed : those whose peer has
    closed its side and that are still open on this one"""

    all: int
    clients: int
    half_closed: int


def sockets_of(pid: int, *, port: int) -> Sockets:
    """What the process holds now. port : whose connections count as `clients`"""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since it was listed
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    own = [(int(row[1].rpartition(":")[2], 16), row[3]) for row in rows if row[9] in inodes]
    return Sockets(
        all=len(inodes),
        clients=sum(at == port and state != _LISTEN for at, state in own),
        half_closed=sum(state == _CLOSE_WAIT for _, state in own),
    )
