"""State brought into one replica's host memory because somebody asked for it, not a request.

Model     leading blocks of a prompt that host memory lacks and the source has, in pieces, over the one link that leaves
          the store or the peer; each piece is in host memory when it has come, and a stop keeps what has
Valid     calls in order of time
Blind to  room reserved for it: it pushes out what was read longest ago; a source that gives blocks up meanwhile
Source    LMCache's `move` and prefetch, by their documentation; it writes host memory through, so a peer's whole cache
          can be copied
"""

from __future__ import annotations

from collections.abc import Sequence

from sim_backends.fetch import PIECE_TOKENS
from sim_backends.fetching import Fetcher, Holder
from sim_backends.links import FairLink
from sim_backends.transfers import Lane


class Bring:
    """Blocks on their way. tokens : from the start of the prompt, that will be in host memory"""

    def __init__(self, fetcher: Fetcher, blocks: Sequence[bytes], route: FairLink, *, tokens: int) -> None:
        self.tokens = tokens
        self.blocks = len(blocks)
        self.brought = 0
        self.stopped = False
        self._fetcher = fetcher
        size = max(1, PIECE_TOKENS // fetcher.block_tokens)
        self._pieces = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        block_bytes = fetcher.block_tokens * fetcher.bytes_per_token
        self._lane = Lane((route,), [float(len(piece) * block_bytes) for piece in self._pieces], self._arrived)

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self.stopped or self.brought == self.blocks

    def start(self, now_s: float) -> None:
        self._lane.start(now_s)

    def stop(self, now_s: float) -> None:
        """Bring nothing more."""
        self.stopped = True
        self._lane.cancel(now_s)

    def _arrived(self, piece: int, at_s: float) -> None:
        for digest in self._pieces[piece]:
            self._fetcher.tiers.write_back(digest)
        self.brought += len(self._pieces[piece])


def bring(fetcher: Fetcher, digests: Sequence[bytes], holder: Holder, route: FairLink, now_s: float) -> Bring | None:
    """Begin to bring what `holder` has of a prompt; None when it has nothing that host memory lacks."""
    limit = len(digests)
    here = fetcher.tiers.tiers["host"].match(digests, 0, limit)
    there = holder.match(digests, here, limit)
    if there <= here:
        return None
    begun = Bring(fetcher, digests[here:there], route, tokens=there * fetcher.block_tokens)
    begun.start(now_s)
    return begun
