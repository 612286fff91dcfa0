"""What a receipt costs the loop, beside the decision it is of.

Question  how long does it take on the loop to note a decision and to hand its receipt over, and how long does the
          writer's thread then take for a line?
Method    one decision of the router's own dispatcher on the default fleet, noted and handed over again and again; each
          part timed alone, the fastest of several rounds, garbage collection off. A line is made on this thread
Pass      noting and handing over take at most 8 microseconds together
Blind to  the thread's own use of the interpreter while the loop wants it: see `PAUSE_S` of the writer

    python -m loadtest.replay.bench_receipts
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

import router.placing
from estimators.request import RequestFacts
from loadtest.replay.fleets import of_cards
from router.actions import Ended, Send
from router.assemble import assemble
from router.config import RouterConfig
from router.notes import Notes
from router.placing import Placement
from router.receipts import Receipt, ReceiptWriter
from router.receipts.writer import BEST, Finished, marks_of

LIMIT_S = 8e-6
WORDS = f"What a receipt costs the loop: at most {1e6 * LIMIT_S:.0f} microseconds."
HEAD = (
    f"{'replicas':>8} {'blocks':>7} {'note':>9} {'hand over':>10} {'on the loop':>12} {'line':>9} {'of the best':>12}"
)
CASES = ((4, 4), (4, 1024), (16, 64), (64, 64))  # replicas, blocks of the prompt
BLOCK, MODEL = 16, "m"
ROUNDS, CALLS = 9, 400


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds a receipt. note_s, hand_over_s : on the loop; whole_s, best_s : of a line, all candidates or the best"""

    note_s: float
    hand_over_s: float
    whole_s: float
    best_s: float

    @property
    def loop_s(self) -> float:
        return self.note_s + self.hand_over_s


@dataclass(frozen=True, slots=True)
class Decision:
    """What the loop has at the end of a request. noted : what `Notes` was made of"""

    request: RequestFacts
    sent: Send
    receipt: Receipt
    notes: Notes
    noted: tuple[Any, ...]


def a_decision(replicas: int, blocks: int) -> Decision:
    """One request that was placed and answered, among `replicas` with a shared store."""
    core = assemble(RouterConfig(), of_cards(replicas, ["A100", "H20"]).router, on_receipt=lambda receipt: None)
    for row in range(replicas):
        core.dispatcher.replica_up(row, frozenset({MODEL}), 0.0)
    request = RequestFacts(
        request_id="r-1", model=MODEL, prompt_tokens=blocks * BLOCK + 5, chain=list(range(1, blocks + 1)), streams=True
    )
    noted: list[tuple[Any, ...]] = []

    def noting(*facts: Any) -> Notes:
        noted.append(facts)
        return Notes(*facts)

    with patch.object(router.placing, "Notes", noting):
        (sent,) = core.dispatcher.arrived(request, 1.0)
    assert isinstance(sent, Send)
    core.dispatcher.first_token(sent, 1.5)
    core.dispatcher.finished(sent, Ended(200, output_tokens=10), 2.0)
    assert isinstance(sent.placement, Placement)
    assert sent.placement.notes is not None
    return Decision(request, sent, sent.placement.receipt, sent.placement.notes, noted[0])


def costs(replicas: int, blocks: int, folder: Path) -> Costs:
    """Of one case."""
    decision = a_decision(replicas, blocks)
    receipt, notes, chain = decision.receipt, decision.notes, decision.request.chain
    finished = Finished(receipt, notes, marks_of(chain), "session")
    writer = ReceiptWriter(folder / f"receipts-{replicas}-{blocks}.jsonl")

    def drained() -> None:
        while len(writer._ring):
            sleep(0.01)

    try:
        return Costs(
            note_s=fastest(lambda: Notes(*decision.noted)),
            hand_over_s=fastest(lambda: writer.write(receipt, notes, chain=chain, unit="session"), between=drained),
            whole_s=fastest(lambda: writer._line(finished), calls=50),
            best_s=fastest(lambda: notes.complete(receipt, best=BEST), calls=50),
        )
    finally:
        writer.close()


def fastest(call: Callable[[], object], *, calls: int = CALLS, between: Callable[[], None] = lambda: None) -> float:
    """Seconds of one `call`, in the best of some rounds. between : done before each of them"""
    best_s = float("inf")
    gc.disable()
    try:
        for _ in range(ROUNDS):
            between()
            begun_s = perf_counter()
            for _ in range(calls):
                call()
            best_s = min(best_s, (perf_counter() - begun_s) / calls)
    finally:
        gc.enable()
    return best_s


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; status 1 when a receipt costs the loop more than it may."""
    argparse.ArgumentParser(prog="python -m loadtest.replay.bench_receipts", description=WORDS).parse_args(argv)
    print(HEAD)
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        for replicas, blocks in CASES:
            found = costs(replicas, blocks, Path(folder))
            parts = (found.note_s, found.hand_over_s, found.loop_s, found.whole_s, found.best_s)
            us = [f"{1e6 * part:.1f} us" for part in parts]
            print(f"{replicas:8d} {blocks:7d} {us[0]:>9} {us[1]:>10} {us[2]:>12} {us[3]:>9} {us[4]:>12}", flush=True)
            passed &= found.loop_s <= LIMIT_S
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
