"""Where one event source stands: which batch comes next, and how far its view can be trusted.

Model     a publisher numbers its batches by one, from `first`; the live stream keeps that order. A number
          that goes back on the live stream is a new process; a number that jumps ahead is a gap.
Blind to  a process that restarted and has already passed our last number: it looks like a gap. The
          subscriber catches that by asking for the last batch again after every reconnect.
Source    vLLM and SGLang publishers
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What to do with a live batch."""

    APPLY = "apply"
    GAP = "gap"  # batches before it are missing: replay from `Sequence.expected`, then ask again
    RESTART = "restart"  # a new process: drop everything, replay from the start, then ask again
    STALE = "stale"  # already applied, by a replay


class State(Enum):
    """What an operator sees of a source. A closed set: each becomes a metric label."""

    NEVER_CONNECTED = "never_connected"
    SILENT = "silent"  # connected, but no batch has ever come
    LIVE = "live"
    REPLAYING = "replaying"
    DEGRADED = "degraded"  # part of the history is lost: the view is smaller than the truth, never larger


class Sequence:
    """Cursor of one source. No I/O and no clock: times come in as arguments.

    first : number of a new process's first batch (0 for vLLM and SGLang, 1 for Mooncake's master)
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.last: int | None = None  # highest number applied
        self.live_last: int | None = None  # highest number seen on the live stream
        self.last_event_s: float | None = None  # router's clock, when a batch was last applied
        self.connected = False
        self.lost = False  # history is missing and nothing since has made that irrelevant
        self.gaps = 0
        self.gap_batches = 0
        self.restarts = 0
        self.stale = 0
        self._last_ts_s = 0.0
        self._live_before: int | None = None
        self._replaying = False

    @property
    def expected(self) -> int:
        """Number of the next batch if none is lost."""
        return self.first if self.last is None else self.last + 1

    @property
    def state(self) -> State:
        if self._replaying:
            return State.REPLAYING
        if self.lost:
            return State.DEGRADED
        if self.last is not None:
            return State.LIVE
        return State.SILENT if self.connected else State.NEVER_CONNECTED

    def feed(self, seq: int, ts_s: float = 0.0) -> Verdict:
        """Judge a batch of the live stream. Changes no cursor but the live one; `applied` moves on.

        ts_s : the publisher's own time of the batch, 0 when unknown. It only settles one doubtful case: the
            first live batch after a replay may be one the replay already gave, or the first of a new process.
        """
        self._live_before = self.live_last
        backwards = self.live_last is not None and seq <= self.live_last
        self.live_last = seq
        if backwards or (self.last is not None and seq <= self.last and ts_s > self._last_ts_s):
            self.restarts += 1
            return Verdict.RESTART
        return self.judge(seq)

    def judge(self, seq: int) -> Verdict:
        """Judge a batch that is known to be of the same process, after a replay."""
        if self.last is not None and seq <= self.last:
            self.stale += 1
            return Verdict.STALE
        return Verdict.APPLY if seq == self.expected else Verdict.GAP

    def is_older(self, ts_s: float) -> bool:
        """Whether a batch was made before the last one applied, by the publisher's clock."""
        return ts_s < self._last_ts_s

    def stray(self) -> None:
        """The batch just fed is not of this process after all: the live cursor does not count it."""
        self.live_last = self._live_before
        self.stale += 1

    def applied(self, seq: int, ts_s: float, now_s: float) -> None:
        """Batch `seq` has taken effect."""
        self.last = seq
        self._last_ts_s = ts_s
        self.last_event_s = now_s

    def gap(self, seq: int) -> None:
        """Batches from `expected` up to and without `seq` did not come by themselves."""
        self.gaps += 1
        self.gap_batches += seq - self.expected

    def replaying(self, active: bool) -> None:
        self._replaying = active

    def history_lost(self) -> None:
        self.lost = True

    def history_whole(self) -> None:
        """The source said it is empty, or a replay reached back to its first batch."""
        self.lost = False

    def reset(self) -> None:
        """Forget the cursors: what comes next is a new process. Counters stay."""
        self.last = None
        self.live_last = None
        self._live_before = None
        self.lost = False
        self._last_ts_s = 0.0
