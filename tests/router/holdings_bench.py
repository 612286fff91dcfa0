"""For tests: a dispatcher beside a real directory, with the tokens of `events.P` as prompts."""

from __future__ import annotations

from typing import Any

from router.actions import Ended, Send
from router.directory import Directory
from router.holdings import DirectoryHoldings
from router.placing import Placement
from router.receipts import Candidate
from tests.builders import a_request
from tests.router.dispatch_bench import Bench, only_send
from tests.router.signals.events import BLOCK, MODEL, P, batch, chain_of, named, stored

__all__ = ["CHAIN", "MODEL", "DirectoryBench", "P", "batch", "chain_of", "named", "stored"]

CHAIN = chain_of(P)


class DirectoryBench(Bench):
    """All replicas publish events, unless `publishes` names those that do."""

    def __init__(self, *cards: str, publishes: list[int] | None = None, **changes: Any) -> None:
        super().__init__(*cards, **changes)
        self.directory = Directory(BLOCK, self.view.rows)
        for row in range(self.view.rows) if publishes is None else publishes:
            self.directory.add_source(row, MODEL)
        self.dispatcher._placer._holdings = DirectoryHoldings(self.directory, ages=True)

    def send_blocks(self, now_s: float, blocks: int, **changes: Any) -> Send:
        """A prompt of so many blocks of CHAIN and one token."""
        facts = {"request_id": f"r-{now_s}-{blocks}", "prompt_tokens": blocks * BLOCK + 1, "chain": CHAIN[:blocks]}
        return only_send(self.dispatcher.arrived(a_request(**{**facts, **changes}), now_s))

    def announce(self, row: int, blocks: int, now_s: float) -> None:
        """`row` says that it has the first blocks of CHAIN."""
        self.directory.apply(row, batch(stored(P[: blocks * BLOCK], 1)), now_s)

    def answer(self, sent: Send, cached_blocks: int | None, *, at_s: float, ended_at_s: float | None = None) -> None:
        """Its first token came at `at_s`, and its answer."""
        self.dispatcher.first_token(sent, at_s)
        cached = None if cached_blocks is None else cached_blocks * BLOCK
        self.dispatcher.finished(sent, Ended(200, output_tokens=5, cached_tokens=cached), ended_at_s or at_s + 1.0)

    def hbm(self, now_s: float | None = None) -> list[int]:
        return [int(blocks) for blocks in self.directory.match(CHAIN, now_s).hbm_blocks]

    @property
    def expected(self) -> int:
        return self.directory.stats().expected


def chosen_of(sent: Send) -> Candidate:
    assert isinstance(sent.placement, Placement)
    assert sent.placement.notes is not None
    return sent.placement.notes.chosen
