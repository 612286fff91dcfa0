"""What one publisher has said so far: its cursor, its counters, and the effect of its batches. No I/O.

Model     batches are judged by number (`sequence`), then take effect through `apply`; whatever could make the view
          larger than the truth (a lost batch, a failed one, an unreadable removal) drops the whole view instead.
          An unreadable removal is no reason for a replay, which would bring the same bytes again
Valid     one publisher process at a time; how batches reach us (ZMQ, a shared socket, HTTP) is the caller's matter
Source    numbering of vLLM's and SGLang's publishers
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.signals.sequence import Sequence, Verdict
from router.signals.wire import BadFrame, Batch, Cleared, Unread, decode

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StreamCounts:
    """Counters since the start; gaps, restarts and stale batches are on `Stream.sequence`."""

    batches: int = 0
    bad_frames: int = 0
    replays: int = 0
    replays_failed: int = 0  # no end marker within the deadline
    reconnects: int = 0
    unreplayable: int = 0  # gaps and starts that had no replay to fill them
    errors: int = 0  # unexpected exceptions; the batch was skipped or the loop restarted
    bad_events: int = 0  # malformed events, their batches kept
    unknown_events: int = 0  # of a type or medium this version does not know
    unread_removals: int = 0  # among these two, for which the view was dropped; several in a row are one
    pair_events: int = 0  # stores of token pairs (EAGLE), which give no hits
    extra_fields: int = 0  # fields this version does not know, passed over


class Stream:
    """State of one publisher.

    name : for messages to an operator
    apply : called with each batch in the publisher's order; must not await
    cleared : called when everything heard so far must be forgotten
    first_seq : number of a new process's first batch
    clock : the router's own, seconds
    """

    def __init__(
        self,
        name: str,
        apply: Callable[[Batch], object],
        cleared: Callable[[], object],
        *,
        first_seq: int,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.sequence = Sequence(first_seq)
        self.counts = StreamCounts()
        self._apply = apply
        self._cleared = cleared
        self._clock = clock
        self.began_s = float("-inf")  # what is believed now was heard since

    def decoded(self, payload: bytes) -> Batch | None:
        """The batch in `payload`; None, counted, when it holds none."""
        try:
            batch = decode(payload)
        except BadFrame as exc:
            self.counts.bad_frames += 1
            if self.counts.bad_frames == 1:
                log.warning("event source %s: %s", self.name, exc)
            return None
        self.count(batch)
        return batch

    def count(self, batch: Batch) -> None:
        """Keep what the decoder could not understand."""
        self.counts.bad_events += batch.bad
        self.counts.unknown_events += batch.unknown
        self.counts.extra_fields += batch.extra_fields
        self.counts.pair_events += batch.pairs

    def heard(self, seq: int, batch: Batch | None) -> Verdict:
        """A batch of a live stream that has no replay: judge it, and let it take effect unless it is stale."""
        verdict = self.sequence.feed(seq, 0.0 if batch is None else batch.ts_s)
        if verdict is Verdict.RESTART:
            self.forget()
            if self.sequence.judge(seq) is Verdict.GAP:
                self.lose_history()
        elif verdict is Verdict.GAP:
            self.sequence.gap(seq)
            self.lose_history()
        if verdict is not Verdict.STALE:
            self.take(seq, batch)
        return verdict

    def take(self, seq: int, batch: Batch | None, *, begins: bool = True, ends: bool = True) -> None:
        """Let one batch take effect. One that cannot be read is part of the sequence, but its news is lost.

        begins, ends : whether this is the first, the last piece of it; its number counts as applied with the last
        """
        if batch is None:
            self.lose_history()
        else:
            if begins and self.sequence.last is None:
                self.began_s = self._clock()
            if begins and seq == self.sequence.first:
                self.sequence.history_whole()
            self._judge_clears(batch)
            self.counts.batches += self._apply_counted(batch) and ends
        if ends:
            self.sequence.applied(seq, 0.0 if batch is None else batch.ts_s, self._clock())

    def _judge_clears(self, batch: Batch) -> None:
        """What a clear and a removal that cannot be read mean for how far the view can be trusted."""
        for event in batch.events:
            if isinstance(event, Unread):
                self.counts.unread_removals += 1
                self.sequence.history_lost()
            elif isinstance(event, Cleared) and event.model is None:
                self.sequence.history_whole()

    def _apply_counted(self, batch: Batch) -> bool:
        # Caught for each batch: restarting a loop would replay the same batch and fail on it for ever.
        try:
            self._apply(batch)
        except Exception:
            self.counts.errors += 1
            log.exception("event source %s: a batch could not be applied", self.name)
            self.lose_history()
            return False
        return True

    def forget(self) -> None:
        """A new process: nothing heard before counts, and its history is yet to be heard."""
        self._cleared()
        self.sequence.reset()
        self.began_s = self._clock()

    def lose_history(self) -> None:
        """Removals may be among what is missing, so nothing heard before can be believed."""
        self.counts.unreplayable += 1
        if self.sequence.last is not None:
            self._cleared()
        self.sequence.history_lost()
