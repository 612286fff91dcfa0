"""KV blocks of the requests in flight on each replica, shared ones counted once.

Model     each prompt has ceil(n / block) blocks; those of its chain are shared with every other request there that
          begins alike, the rest are its own. A request counts from its placement to its end
Valid     chains are hashes over all before, so what two chains share is a prefix
Blind to  blocks of output, and requests placed before this count began
"""

from __future__ import annotations

from estimators.request import RequestFacts
from policies.by_cache.remembered import leading
from policies.watcher import Placed


class ActiveBlocks:
    """Of all replicas."""

    def __init__(self) -> None:
        self._uses: dict[int, dict[int, int]] = {}  # by row: requests in flight that have the block
        self._own: dict[int, int] = {}  # by row: blocks that nobody else can have
        self._counted: set[Placed] = set()

    def with_request(self, row: int, request: RequestFacts) -> int:
        """Blocks on `row` if `request` were there too."""
        uses = self._uses.get(row)
        total = blocks_of(request)
        if uses is None:
            return total
        return len(uses) + self._own[row] + total - leading(uses, request.chain)

    def add(self, placed: Placed) -> None:
        """`placed` is in flight."""
        chain = placed.request.chain
        uses = self._uses.setdefault(placed.row, {})
        self._own[placed.row] = self._own.get(placed.row, 0) + blocks_of(placed.request) - len(chain)
        for block in chain:
            uses[block] = uses.get(block, 0) + 1
        self._counted.add(placed)

    def remove(self, placed: Placed) -> None:
        """`placed` is over; no effect where it was never counted."""
        if placed not in self._counted:
            return
        self._counted.remove(placed)
        chain, uses = placed.request.chain, self._uses[placed.row]
        self._own[placed.row] -= blocks_of(placed.request) - len(chain)
        for block in chain:
            if uses[block] == 1:
                del uses[block]
            else:
                uses[block] -= 1


def blocks_of(request: RequestFacts) -> int:
    """Blocks its prompt takes, the last one partly filled."""
    return max(len(request.chain), -(-request.prompt_tokens // request.block_tokens))
