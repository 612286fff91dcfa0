"""Where a prompt's blocks are, and which links they cross on the way to each replica.

Model     an engine uses what its HBM has, then the blocks that follow in the prompt from its host memory, its disk,
          the shared store or a peer; places deliver side by side, each over its own route, so a path takes as long as
          its slowest place
Valid     one shared store; peers are read from their HBM over the one link that leaves each
Blind to  a place that has later blocks and not the first missing one
Source    vLLM's OffloadingConnector and NixlConnector, SGLang HiCache, Mooncake Store, by their documentation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from estimators.links import LinkTable
from estimators.ranges import require

NO_LINK = -1

Rows = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.int32]


@dataclass(slots=True)  # not frozen: that many checked assignments cost as much as half a look-up
class Held:
    """Where the leading blocks of a prompt are, as the directory believes. Not to be changed. Arrays of shape (rows,).

    local_blocks : leading blocks in each replica's HBM, or there by the time a request sent now has its turn
    store_blocks : leading blocks in the shared store
    host_blocks : leading blocks in each replica's HBM and host memory together, >= local_blocks; None without hosts
    disk_blocks : the same with its disk, >= host_blocks; None without disks
    age_s : how long ago the last of those blocks was stored or used, by tier (HBM, HOST, DISK, REMOTE), shape
        (4, rows); NaN unknown; None where the directory does not keep ages
    confirmed_blocks : of `local_blocks`, those that are there now; None: all
    approximate : whether what a replica has is a guess from what was sent there, (rows,); None: nowhere
    store_approximate : whether what the store has is a guess
    """

    local_blocks: Blocks
    store_blocks: int
    host_blocks: Blocks | None = None
    disk_blocks: Blocks | None = None
    age_s: npt.NDArray[np.float64] | None = None
    confirmed_blocks: Blocks | None = None
    approximate: npt.NDArray[np.bool_] | None = None
    store_approximate: bool = False


@dataclass(frozen=True, slots=True)
class Routes:
    """Links of `table` that each place's blocks cross on the way to each replica, in order; () where there is no such
    place.

    store, host, disk : for every replica, rows of `table`
    egress : for every replica, the link that leaves it towards its peers
    """

    table: LinkTable = field(default_factory=lambda: LinkTable(bytes_per_s=[]))
    store: Sequence[Sequence[int]] = ()
    host: Sequence[Sequence[int]] = ()
    disk: Sequence[Sequence[int]] = ()
    egress: Sequence[int] = ()

    def stages(self, rows: int) -> Rows:
        """Rows of the table, shape (4 places, rows, stages), places in the order of PLACES; NO_LINK pads.

        The peers' part is filled for one request at a time, by `peers`.
        """
        peers: Sequence[Sequence[int]] = [(NO_LINK,)] * rows if self.egress else ()
        places = (self.store, peers, self.host, self.disk)
        length = max((len(route) for place in places for route in place), default=1)
        stages = np.full((len(PLACES), rows, length), NO_LINK, dtype=np.int64)
        for number, place in enumerate(places):
            require(len(place) in (0, rows), "routes", len(place), "neither none nor one for each replica")
            for row, route in enumerate(place):
                stages[number, row, : len(route)] = route
        return stages


PLACES = ("store", "peer", "host", "disk")
STORE, PEER, HOST, DISK = range(len(PLACES))


def best_peers(blocks: Blocks, egress: Rows, outstanding_bytes: npt.NDArray[np.float64] | None) -> Rows:
    """For every replica the peer to read from: the one with the longest prefix, of equal ones the least busy link.

    blocks : leading blocks in each replica's HBM, (rows,); egress : the link that leaves each, (rows,)
    outstanding_bytes : still to cross each link of the table; None: nothing on any
    Nobody reads from itself; a single replica gets itself, with nothing to gain.
    """
    if outstanding_bytes is None:
        first = int(blocks.argmax())
        others = blocks.copy()
        others[first] = -1
        second = int(others.argmax())
    else:
        order = np.lexsort((outstanding_bytes[egress], -blocks))
        first, second = int(order[0]), int(order[min(1, len(order) - 1)])
    best = np.empty(len(blocks), dtype=np.int64)
    best[:] = first
    best[first] = second
    return best
