"""Engine blocks smaller than the router's: enough of them, one after another, make up one of ours.

Model     each small block ("page") remembers its parent page and its tokens, so that a chain can go on from any page;
          a block is held while the page that completed it is
Valid     pages that divide the router's block, removed children first (as radix caches do)
Blind to  images and other hash inputs besides tokens: such pages are not taken
Errors    a page removed before its children leaves the block credited until the completing page goes
"""

from __future__ import annotations

import numpy as np

from router.blocks.table import BlockTable
from router.identity import chain
from router.signals.wire import Stored

_MOST_COPIES = 255
_ADAPTER, _TOKENS = 3, 4  # columns, the latter and those after it


class Pages:
    """Pages of one publisher.

    Parameters
    ----------
    page_tokens : tokens in a page; divides `block_tokens`
    one_copy : repeated stores are one copy, else each needs its own removal
    """

    def __init__(self, page_tokens: int, block_tokens: int, *, one_copy: bool) -> None:
        self.page_tokens = page_tokens
        self._one_copy = one_copy
        self._block_tokens = block_tokens
        # Column 0: parent page, or the chain's hash before a page that starts a block; then whether it is that; then
        # the copies (stores less removals); then the adapter's number; then the tokens, one column each.
        self._table = BlockTable(np.uint64, np.uint8, np.uint8, np.uint8, *[np.uint32] * page_tokens)
        self._completed = BlockTable(np.uint64)  # block of a page that completed one

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._table.nbytes + self._completed.nbytes

    def adapter_of(self, page: int) -> int:
        """Number of the adapter a page was stored under; 0 for none, and for pages that are not known."""
        position = self._table.find(page)
        return self._table.views[_ADAPTER][position] if position >= 0 else 0

    def drop_adapter(self, adapter: int) -> None:
        """Forget the pages stored under this adapter number."""
        for page in self._table.keys_at(self._table.where(_ADAPTER, adapter)).tolist():
            self._table.remove(self._table.find(page))
            completed = self._completed.find(page)
            if completed >= 0:
                self._completed.remove(completed)

    def stored(
        self, keys: list[int], parent: int | None, root: int | None, event: Stored, *, adapter: int = 0
    ) -> dict[int, int] | None:
        """Take in pages in order. Returns the blocks they complete, by page; None when the parent is not known.

        parent, root : page before the first, or the chain's hash before it; one of them is None
        adapter : its number, 0 for none
        """
        before = self._before(parent, root)
        if before is None or (event.extras and any(event.extras)):
            return None
        previous, tail = before
        completed: dict[int, int] = {}
        for number, key in enumerate(keys):
            tokens = event.tokens[number * self.page_tokens : (number + 1) * self.page_tokens].tolist()
            self._keep(key, previous if parent is None or not tail else parent, not tail, adapter, tokens)
            tail += tokens
            if len(tail) == self._block_tokens:
                (previous,) = chain(previous, tail, self._block_tokens)
                completed[key] = previous
                position = self._completed.insert(key)
                self._completed.views[0][position if position >= 0 else ~position] = previous
                tail = []
            parent = key
        return completed

    def removed(self, keys: list[int]) -> list[int]:
        """One copy less of each page; returns those that stand for a block."""
        standing = []
        for key in keys:
            position = self._table.find(key)
            if position < 0:
                continue
            completed = self._completed.find(key)
            if completed >= 0:
                standing.append(key)
            copies = self._table.views[2]
            copies[position] -= 1
            if not copies[position]:
                self._table.remove(position)
                if completed >= 0:
                    self._completed.remove(completed)
        return standing

    def _keep(self, key: int, before: int, starts: bool, adapter: int, tokens: list[int]) -> None:
        position = self._table.insert(key)
        views = self._table.views
        position = position if position >= 0 else ~position
        views[0][position] = before
        views[1][position] = starts
        copies = views[2][position]
        views[2][position] = 1 if self._one_copy else min(copies + 1, _MOST_COPIES)
        views[_ADAPTER][position] = adapter
        for view, token in zip(views[_TOKENS:], tokens, strict=True):
            view[position] = token

    def _before(self, parent: int | None, root: int | None) -> tuple[int, list[int]] | None:
        """The last whole block up to the page `parent`, and the tokens after it."""
        if parent is None:
            assert root is not None, "a page without a parent starts at a root"
            return root, []
        pages: list[list[int]] = []
        while True:
            position = self._completed.find(parent)
            if position >= 0:
                break
            position = self._table.find(parent)
            if position < 0:
                return None
            views = self._table.views
            pages.append([view[position] for view in views[_TOKENS:]])
            parent = views[0][position]
            if views[1][position]:
                return parent, [token for page in reversed(pages) for token in page]
        return self._completed.views[0][position], [token for page in reversed(pages) for token in page]
