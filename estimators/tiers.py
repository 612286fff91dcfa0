"""Where a copy of a KV block can be, from fastest to slowest."""

from __future__ import annotations

from enum import Enum


class Tier(Enum):
    """Memory that holds a block. A closed set: each becomes a metric label.

    HBM, HOST and DISK belong to one replica. REMOTE is outside every replica; the shared store is one
    holder of that tier, and all replicas can fetch from it.
    """

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is Python code, run for every block

    HBM = "hbm"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"
