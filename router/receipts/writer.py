"""Receipts from the loop to a file, by a thread of their own.

Model     the loop hands over a finished receipt and what its last decision noted, which costs it a few microseconds; a
          thread makes the line of it. A sampled share, and everything that failed, was late, overridden or asked
          about, names all candidates; the rest the chosen and the best, or leaves no line. What does not fit into the
          ring, or cannot be written, is dropped and counted
Valid     one writer to a file. Prompts and sessions are recognised within the life of one writer only: its hashes have
          a random key, which nobody else has
Blind to  lines lost after they were written: nothing is flushed to the disk itself
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import xxhash

from router.receipts.file import RotatedFile
from router.receipts.ring import Ring
from router.receipts.schema import Receipt

log = logging.getLogger(__name__)

BEST = 4  # candidates named beside the chosen one where not all are
PERIOD_S = 0.1  # between two looks at the ring: woken for each, it would break into other requests every time
PAUSE_S = 5e-5  # after each line, so that the loop never waits longer than a line for the interpreter
BATCH_BYTES = 1 << 18  # written at once at most

GOOD = frozenset({"ok", "cancelled", "client_error"})  # outcomes that are no failure of router or replicas


class Detail(Protocol):
    """What a decision noted, from which another thread works out the rest."""

    def complete(self, receipt: Receipt, *, best: int | None) -> None:
        """Name the candidates, the chosen and the `best` others, or all, and say what it regrets."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """marks : hashes of leading parts of its prompt; unit : what an experiment assigned it by; neither is written"""

    receipt: Receipt
    detail: Detail | None
    marks: Sequence[int] = ()
    unit: str | None = None


class ReceiptWriter:
    """Appends receipts to a file. `dropped` counts those that were lost, `written` those that were not.

    share : of requests whose receipt names all candidates, 0..1
    others : what the rest get: "best" (the chosen and the best four) or "none" (no line)
    capacity : receipts waiting for the thread at most
    max_bytes, keep : of the file, see `RotatedFile`
    trouble : why the last line could not be written; None while they can be
    """

    def __init__(
        self,
        path: Path,
        *,
        share: float = 1.0,
        others: Literal["best", "none"] = "best",
        capacity: int = 8192,
        max_bytes: int = 1 << 28,
        keep: int = 4,
    ) -> None:
        """Open `path` for appending; `OSError` when that is not possible."""
        self.written = 0
        self.trouble: str | None = None
        self._lost_here, self._lost_there = 0, 0  # each counted by one thread
        self._below = round(share * 2**32)
        self._others = others
        self._file = RotatedFile(path, max_bytes=max_bytes, keep=keep)
        self._ring: Ring[Finished] = Ring(capacity)
        self._key = secrets.token_bytes(16)
        self._wake, self._closing = threading.Event(), False
        self._encoder = msgspec.json.Encoder()
        self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return self._lost_here + self._lost_there

    def write(
        self, receipt: Receipt, detail: Detail | None = None, *, chain: Sequence[int] = (), unit: str | None = None
    ) -> None:
        """Hand over one finished receipt; nothing of it may change afterwards. Never waits.

        chain : of its prompt's blocks; unit : what an experiment assigned it by
        """
        receipt.late = was_late(receipt)
        if self._others == "none" and not self._is_full(receipt):
            return
        if not self._ring.put(Finished(receipt, detail, marks_of(chain), unit)):
            self._lost_here += 1
        if len(self._ring) * 2 > self._ring.capacity:
            self._wake.set()

    def report(self) -> dict[str, object]:
        """Lines written, lost and waiting, and why the last could not be written, as plain values."""
        return {
            "written": self.written,
            "dropped": self.dropped,
            "waiting": len(self._ring),
            "trouble": self.trouble,
        }

    def close(self) -> None:
        """Write what is waiting and close the file."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._file.close()

    def _is_full(self, receipt: Receipt) -> bool:
        return is_notable(receipt) or self._is_sampled(receipt)

    def _is_sampled(self, receipt: Receipt) -> bool:
        return xxhash.xxh32_intdigest(receipt.request_id.encode()) < self._below

    # The thread

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        lines: list[bytes] = []
        size = 0
        while (finished := self._ring.take()) is not None:
            line = self._line(finished)
            if line is None:
                continue
            lines.append(line)
            size += len(line)
            if size > BATCH_BYTES:
                self._append(lines)
                lines, size = [], 0
            if not self._closing and len(self._ring) * 2 < self._ring.capacity:
                time.sleep(PAUSE_S)
        if lines:
            self._append(lines)

    def _line(self, finished: Finished) -> bytes | None:
        """The receipt as a line; None when it cannot be made, which is counted."""
        receipt = finished.receipt
        try:
            if finished.detail is not None:
                finished.detail.complete(receipt, best=None if self._is_full(receipt) else BEST)
            receipt.sampled = self._others == "best" or self._is_sampled(receipt)
            receipt.marks = [self._masked(mark.to_bytes(8, "little", signed=mark < 0)) for mark in finished.marks]
            receipt.unit = None if finished.unit is None else self._masked(finished.unit.encode())
            return self._encoder.encode(receipt) + b"\n"
        except Exception:  # one receipt that cannot be made must not end all others
            log.exception("the receipt of request %s cannot be made", receipt.request_id)
            self._lost_there += 1
            return None

    def _masked(self, value: bytes) -> str:
        return blake2b(value, digest_size=6, key=self._key).hexdigest()

    def _append(self, lines: list[bytes]) -> None:
        try:
            self._file.append(b"".join(lines))
        except OSError as exc:
            self._lost_there += len(lines)
            if self.trouble is None:
                log.warning("receipts are being dropped: %s", exc)
            self.trouble = str(exc)
            return
        self.written += len(lines)
        if self.trouble is not None:
            log.warning("receipts are written again; %d were dropped", self.dropped)
            self.trouble = None


def is_notable(receipt: Receipt) -> bool:
    """Whether somebody will want to know all of it: it failed, was late, overridden or asked about."""
    return receipt.outcome not in GOOD or receipt.late is True or receipt.override or receipt.explained


def was_late(receipt: Receipt) -> bool | None:
    """Whether its first token came after its deadline, or the p99 it was expected within; None: nobody saw it."""
    waited_s, choice = receipt.waited_s, receipt.choice
    if receipt.first_token_s is None:
        return None
    if receipt.deadline_s is not None and receipt.first_token_s > receipt.deadline_s:
        return True
    if waited_s is None:
        return None
    return choice is not None and choice.first_token_p99_s is not None and waited_s > choice.first_token_p99_s


def marks_of(chain: Sequence[int]) -> list[int]:
    """Hashes of the first 1, 2, 3, 4, 6, 8, 12, ... blocks of a chain and of all of them: which prefixes it shares.

    A chain's hash covers all blocks before it, so the last common mark of two says how much they have in common, to
    within a third.

    >>> marks_of(list(range(1, 11)))
    [1, 2, 3, 4, 6, 8, 10]
    """
    return [chain[end - 1] for end in mark_ends(len(chain))]


def mark_ends(blocks: int) -> list[int]:
    """Number of blocks behind each mark of a prompt of so many."""
    ends = []
    step = 1
    while step < blocks:
        ends.append(step)
        if step > 1 and step + step // 2 < blocks:
            ends.append(step + step // 2)
        step *= 2
    if blocks:
        ends.append(blocks)
    return ends
