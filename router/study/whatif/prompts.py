"""Chains of blocks for requests of which only marks were kept, sharing what the requests shared.

Model     a request continues the latest one that has its longest known mark: they share at least the blocks up to
          that mark and fewer than up to its next one. Within that, what the router then believed to be cached
          somewhere says how many; a candidate that reuses more than the mark tells must have had that much in common
Valid     receipts of one run of a router, in order of arrival
Blind to  more in common than up to a mark with a request that was cached nowhere any more
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from router.receipts import Receipt
from router.receipts.writer import mark_ends


def renumbered(chain: Sequence[int], seed: int) -> list[int]:
    """Other numbers for the same blocks: for rules that go by the number itself, which nobody kept."""
    odd = 2 * (0x9E3779B97F4A7C15 * (seed + 1) % 2**62) + 1
    return [number * odd % 2**63 for number in chain]


def chains_of(receipts: Sequence[Receipt]) -> list[list[int]]:
    """A chain of made-up block numbers, >= 1, for each receipt; empty where it has no marks."""
    fresh = count(1)
    by_mark: dict[str, int] = {}  # the latest request that has it
    chains: list[list[int]] = []
    for index, receipt in enumerate(receipts):
        blocks = receipt.blocks or 0
        ends = mark_ends(blocks)
        if not blocks or len(ends) != len(receipt.marks):
            chains.append([])
            continue
        known = sum(1 for _ in _leading(receipt.marks, by_mark))
        start: list[int] = []
        if known:
            other = chains[by_mark[receipt.marks[known - 1]]]
            least = ends[known - 1]
            most = blocks if known == len(ends) else ends[known] - 1
            start = other[: min(max(least, _believed_blocks(receipt)), most, len(other))]
        chains.append([*start, *(next(fresh) for _ in range(blocks - len(start)))])
        by_mark.update(dict.fromkeys(receipt.marks, index))
    return chains


def _leading(marks: Sequence[str], known: dict[str, int]) -> Sequence[str]:
    """The marks before the first that nobody had."""
    for place, mark in enumerate(marks):
        if mark not in known:
            return marks[:place]
    return marks


def _believed_blocks(receipt: Receipt) -> int:
    """Leading blocks that were believed to be somewhere."""
    tokens = max((one.local_tokens + one.fetched_tokens for one in receipt.candidates), default=0)
    return tokens // (receipt.block_tokens or 1)
