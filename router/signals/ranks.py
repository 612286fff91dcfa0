"""Data-parallel ranks behind one URL: which row is which rank, and where each rank publishes.

Model     replicas that share a URL are its ranks 0, 1, ... in the order the fleet file lists them; rank r of a
          publisher uses the port base + r
Valid     vLLM and SGLang; on `inproc` the address gets a suffix instead. vLLM refuses `ipc` with several ranks
Source    vLLM's `ZmqEventPublisher.offset_endpoint_port`; SGLang's kv_events ports
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit


def rows_by_url(urls: Sequence[str | None]) -> dict[str, list[int]]:
    """URL -> rows of its ranks, rank 0 first. A row without a URL is nobody's rank."""
    rows: dict[str, list[int]] = {}
    for row, url in enumerate(urls):
        if url is not None:
            rows.setdefault(url.rstrip("/"), []).append(row)
    return rows


def rank_address(base: str, rank: int) -> str:
    """Address of rank `rank` of a publisher whose rank 0 is at `base`.

    Raises
    ------
    ValueError : the address has no port to add to, or the sum is no port

    >>> rank_address("tcp://*:5557", 2)
    'tcp://*:5559'
    """
    if rank == 0:
        return base
    if base.startswith("inproc://"):
        return f"{base}_dp{rank}"
    head, _, port = base.rpartition(":")
    if not base.startswith("tcp://") or not port.isdecimal() or not 0 < int(port) < 65536 - rank:
        raise ValueError(f"{base} has no port for rank {rank}")
    return f"{head}:{int(port) + rank}"


def configured_addresses(addresses: Mapping[int, str | None], rows: Sequence[int]) -> dict[int, str]:
    """Row -> address, for the rows of one URL: its own, else that of rank 0 shifted by the rank.

    addresses : what the fleet file says, by row
    """
    base = addresses[rows[0]]
    found = {}
    for rank, row in enumerate(rows):
        own = addresses[row]
        if own is not None:
            found[row] = own
        elif base is not None:
            found[row] = rank_address(base, rank)
    return found


def row_of_topic(topic: str, urls: Sequence[str | None], rows: Sequence[int], rank: int | None) -> int | None:
    """Whose events a shared socket brings: by the `<host>:<port>` of a topic `kv@<host>:<port>@<model>`, else by rank.

    rows : those that share the socket; rank : of the batch. None when it can be nobody, or more than one.
    """
    parts = topic.split("@")
    if len(parts) >= 3 and parts[0] == "kv":
        rows = [row for row in rows if urlsplit(urls[row] or "").netloc == parts[1]]
    if len({urls[row] for row in rows}) > 1:
        return None  # ranks of different servers are numbered alike
    if len(rows) == 1:  # a server that is listed once picks among its ranks itself: they share no cache
        return rows[0] if rank in (None, 0) else None
    return rows[rank] if rank is not None and 0 <= rank < len(rows) else None
