"""What an operator sees of each event source, and when a missing one is worth a warning.

Model     a source that has served requests and from which nothing has come for `grace_s` is named once in a warning;
          once more only after it has been live in between
Valid     any kind of source; the age is by the router's own clock
Blind to  a source that is live and quiet: an engine whose cache does not change says nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from router.signals.sequence import State
from router.signals.stream import Stream


class Carrier(Enum):
    """How events reach us. A closed set: it becomes a metric label."""

    ZMQ = "zmq"
    SHARED = "shared"  # one socket for several publishers
    HTTP = "http"
    NONE = "none"  # the replica names no source


@dataclass(frozen=True, slots=True)
class SourceReport:
    """One source now.

    name : of the replica, or of the store
    address : where it is listened to; None when nobody said
    age_s : since the last batch took effect; None when none ever has
    counts : name of a counter -> its total since the start
    """

    name: str
    carrier: Carrier
    address: str | None
    state: State
    connected: bool
    age_s: float | None
    counts: dict[str, int]


def report_of(name: str, carrier: Carrier, address: str | None, stream: Stream, now_s: float) -> SourceReport:
    """The report of a source that has a stream."""
    sequence, counts = stream.sequence, stream.counts
    return SourceReport(
        name=name,
        carrier=carrier,
        address=address,
        state=sequence.state,
        connected=sequence.connected,
        age_s=None if sequence.last_event_s is None else now_s - sequence.last_event_s,
        counts={
            "batches": counts.batches,
            "bad_frames": counts.bad_frames,
            "bad_events": counts.bad_events,
            "unknown_events": counts.unknown_events,
            "unread_removals": counts.unread_removals,
            "pair_events": counts.pair_events,
            "extra_fields": counts.extra_fields,
            "gaps": sequence.gaps,
            "gap_batches": sequence.gap_batches,
            "restarts": sequence.restarts,
            "stale_batches": sequence.stale,
            "replays": counts.replays,
            "replays_failed": counts.replays_failed,
            "reconnects": counts.reconnects,
            "unreplayable": counts.unreplayable,
            "errors": counts.errors,
        },
    )


def missing_report(name: str, carrier: Carrier = Carrier.NONE, address: str | None = None) -> SourceReport:
    """The report of a source of which nobody has heard: it has no stream, so it has no counters."""
    return SourceReport(name, carrier, address, State.NEVER_CONNECTED, False, None, {})


_ADVICE = {
    Carrier.NONE: "it names no source: start it with KV cache events on (see README)",
    Carrier.ZMQ: "nothing was heard at {address}: check that the engine publishes there, and its port and topic",
    Carrier.SHARED: "nothing was heard at {address}: check the engine's endpoint, topic and rank",
    Carrier.HTTP: "nothing was posted",
}
_MISSING = frozenset({State.NEVER_CONNECTED, State.SILENT})


class SourceWatch:
    """Decides when to warn. No clock of its own.

    grace_s : how long a source may be missing, > 0; engines need a moment after they come up
    served : name -> requests its replica has been given
    """

    def __init__(self, *, grace_s: float, served: Callable[[str], int]) -> None:
        if not grace_s > 0:
            raise ValueError("grace_s must be positive")
        self._grace_s = grace_s
        self._served = served
        self._missing_since_s: dict[str, float] = {}
        self._warned: set[str] = set()

    def forget(self, name: str) -> None:
        """The replica called `name` is gone."""
        self._missing_since_s.pop(name, None)
        self._warned.discard(name)

    def due(self, reports: Iterable[SourceReport], now_s: float) -> list[str]:
        """Warnings to give now, a sentence each."""
        warnings = []
        for report in reports:
            if report.state not in _MISSING:
                self._missing_since_s.pop(report.name, None)
                self._warned.discard(report.name)
                continue
            missing_s = now_s - self._missing_since_s.setdefault(report.name, now_s)
            served = self._served(report.name)
            if missing_s < self._grace_s or report.name in self._warned or not served:
                continue
            self._warned.add(report.name)
            advice = _ADVICE[report.carrier].format(address=report.address)
            warnings.append(
                f"{report.name} was given {served} requests and told nothing of its cache in {missing_s:.0f} s "
                f"({report.state.value}), so it is placed without it: {advice}"
            )
        return warnings
