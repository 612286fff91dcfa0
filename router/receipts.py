"""Receipts: everything that went into one decision, and later what really happened. One JSON line each.

A receipt holds no prompt text and no credentials. Writing never delays a request: a bounded queue feeds one
thread, and what does not fit, or cannot be written, is dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import IO

import msgspec

SCHEMA = 1  # raised when a field changes its meaning or leaves; new fields alone do not raise it

log = logging.getLogger(__name__)


class Candidate(msgspec.Struct):
    """One (replica, path) that was possible. Seconds from the choice; tokens of the prompt.

    Fields from `first_token_p90_s` to `discipline` are worked out for the chosen candidate alone.
    """

    replica: str
    path: str
    queue_s: float
    fetch_s: float
    compute_s: float
    first_token_s: float  # if all believed blocks are there
    expected_s: float  # mean first token, over where the blocks then really are
    hit_probability: float  # that all believed blocks are there
    local_tokens: int  # reusable from the replica's own memory
    fetched_tokens: int  # to come from the store
    pace_s: float  # per output token
    queue_price_s: float  # delay caused to later requests; a policy weights it
    decode_price_s: float  # delay caused to running decodes; a policy weights it
    signal_age_s: float | None = None  # of the replica's load report; None: never seen
    calibration: str = "uncalibrated"  # or "calibrated": whether the replica's times rest on observed first tokens
    first_token_p90_s: float | None = None
    first_token_p99_s: float | None = None
    evidence: str | None = None  # what the hit probability rests on; None where nothing is reused
    discipline: str | None = None  # what the replica is believed to do about the fetch; None without one
    approximate: bool = False  # what is reused is a guess from what was sent there, or written, for want of events


class Receipt(msgspec.Struct, kw_only=True):
    """One request. `None` is unknown. Times in seconds from arrival, except arrived_at (Unix time)."""

    schema: int = SCHEMA
    request_id: str
    arrived_at: float
    endpoint: str
    model: str
    prompt_tokens: int
    prompt_exact: bool
    streamed: bool
    policy: str
    client: str | None = None  # name of the key that let it in
    edited: tuple[str, ...] = ()  # fields of the body that the router changed or added
    candidates: list[Candidate] = []
    chosen: int | None = None  # index into candidates
    reason: str | None = None
    probability: float | None = None
    placed_s: float | None = None  # when the last choice was made; what its candidates expect counts from here
    expected_output_tokens: float | None = None
    arrival_rps: float | None = None  # at one replica
    mean_compute_s: float | None = None
    attempts: int = 0
    tried: list[str] = []  # replicas of failed attempts
    outcome: str | None = None
    cause: str | None = None  # of a failure or a refusal
    status: int | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # as the engine reported

    @property
    def choice(self) -> Candidate | None:
        """The chosen candidate; None when nothing was chosen."""
        return None if self.chosen is None else self.candidates[self.chosen]

    def summary(self) -> str:
        """The decision as one line of JSON, for the response header `x-tfirst-explain`."""
        return msgspec.json.encode(
            {
                "policy": self.policy,
                "reason": self.reason,
                "candidates": len(self.candidates),
                "chosen": self.choice,
            }
        ).decode()


class ReceiptWriter:
    """Appends receipts to a file from one thread. `dropped` counts those that were lost, and why is logged once."""

    def __init__(self, path: Path, capacity: int = 10_000) -> None:
        """Open `path` for appending; `OSError` when that is not possible."""
        self.dropped = 0
        self._file: IO[bytes] = path.open("ab")
        self._queue: queue.Queue[Receipt | None] = queue.Queue(capacity)
        self._warned = False
        self._thread = threading.Thread(target=self._write_all, name="receipts", daemon=True)
        self._thread.start()

    def write(self, receipt: Receipt) -> None:
        """Hand over one finished receipt; it must not change afterwards."""
        try:
            self._queue.put_nowait(receipt)
        except queue.Full:
            self._drop("the disk is slower than the traffic")

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _write_all(self) -> None:
        encoder = msgspec.json.Encoder()
        while (receipt := self._queue.get()) is not None:
            try:
                self._file.write(encoder.encode(receipt) + b"\n")
                if self._queue.empty():
                    self._file.flush()
            except OSError as exc:
                self._drop(str(exc))

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self._warned:
            self._warned = True
            log.warning("receipts are being dropped: %s", why)
