"""The shared store, and how one replica reads from it.

Model     every full block an engine computes is written through at once; least recently written or read blocks
          leave when the bytes run out; a read passes the store's link (look-up, then fair sharing with the
          reads of all replicas) and then the replica's own PCIe link, one after the other
Blind to  the bytes of writes on the links, replication, segments that go away with their owner
Source    Mooncake Store and vLLM's MooncakeStoreConnector, by their documentation
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sim_backends.links import Done, FairLink, Transfer


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One block entered or left the store at virtual time `at_s`."""

    at_s: float
    digest: bytes
    stored: bool


class SharedStore:
    """Blocks by digest, least recently used first. `changes` is None when nobody listens."""

    def __init__(self, *, capacity_blocks: int, record_changes: bool = False) -> None:
        """`capacity_blocks` >= 1."""
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._changes: list[StoreChange] | None = [] if record_changes else None

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def match(self, digests: Sequence[bytes], start: int, limit: int) -> int:
        """How many leading digests are here if the first `start` are taken for granted; at most `limit`."""
        blocks = self._blocks
        end = min(limit, len(digests))
        for index in range(start, end):
            if digests[index] not in blocks:
                return index
        return max(start, end)

    def put(self, digests: Sequence[bytes], now_s: float) -> None:
        """Write blocks, or refresh those that are here."""
        blocks, changes = self._blocks, self._changes
        for digest in digests:
            if digest in blocks:
                blocks.move_to_end(digest)
                continue
            blocks[digest] = None
            if changes is not None:
                changes.append(StoreChange(now_s, digest, stored=True))
            if len(blocks) > self.capacity_blocks:
                oldest, _none = blocks.popitem(last=False)
                if changes is not None:
                    changes.append(StoreChange(now_s, oldest, stored=False))

    def refresh(self, digests: Sequence[bytes]) -> None:
        """Mark blocks as just read."""
        for digest in digests:
            if digest in self._blocks:
                self._blocks.move_to_end(digest)

    def take_changes(self) -> list[StoreChange]:
        """Changes since the last call, oldest first."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes


class Fetch:
    """Bytes on their way from the store to one replica, in one or two parts, each over two links in series."""

    def __init__(self, network: FairLink, host: FairLink, *, done: Done, first_done: Done | None = None) -> None:
        """`first_done(at_s)` is called when the first part has come, `done(at_s)` when all has."""
        self._network = network
        self._host = host
        self._done = done
        self._first_done = first_done
        self._open: dict[Transfer, FairLink] = {}

    def start(self, size_bytes: float, now_s: float, *, parts: int = 1) -> None:
        """Start; with `parts` > 1 the first part is 1/parts of the bytes and the rest follows behind it."""
        if parts == 1:
            self._stages(size_bytes, now_s, self._done, look_up=True, behind=None)
            return
        first_bytes = size_bytes / parts
        first_done = self._first_done or (lambda _at_s: None)

        def rest(at_s: float) -> None:
            self._stages(size_bytes - first_bytes, at_s, self._done, look_up=False, behind=None)

        self._stages(first_bytes, now_s, first_done, look_up=True, behind=rest)

    def cancel(self, now_s: float) -> None:
        """Stop; neither callback comes any more."""
        for transfer, link in self._open.items():
            link.cancel(transfer, now_s)
        self._open.clear()

    def _stages(self, size_bytes: float, now_s: float, done: Done, *, look_up: bool, behind: Done | None) -> None:
        def network_done(at_s: float) -> None:
            del self._open[network]
            if behind is not None:
                behind(at_s)
            host = self._host.start(size_bytes, at_s, lambda end_s: host_done(host, end_s))
            self._open[host] = self._host

        def host_done(host: Transfer, at_s: float) -> None:
            del self._open[host]
            done(at_s)

        network = self._network.start(size_bytes, now_s, network_done, look_up=look_up)
        self._open[network] = self._network


@dataclass(frozen=True, slots=True)
class StoreReader:
    """One replica's way to the store.

    discipline : overlapped, serial or layerwise
    minimum_tokens : a shorter gain is computed rather than fetched
    parts : layers of the model, for layerwise
    """

    store: SharedStore
    network: FairLink
    host: FairLink
    discipline: str
    minimum_tokens: int
    bytes_per_block: int
    parts: int

    def fetch(self, digests: Sequence[bytes], now_s: float, *, first_done: Done, done: Done) -> Fetch:
        """Start to bring `digests`; layerwise calls `first_done` after one layer, the others never call it."""
        self.store.refresh(digests)
        fetch = Fetch(self.network, self.host, done=done, first_done=first_done)
        parts = self.parts if self.discipline == "layerwise" else 1
        fetch.start(float(len(digests) * self.bytes_per_block), now_s, parts=parts)
        return fetch
