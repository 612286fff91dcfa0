"""Cache events that come by HTTP: for stores and sidecars that cannot publish over ZMQ.

Model     POST /events carries batches of one publisher, numbered from 1 within its `incarnation`; a number at or
          below the last is a repeat and is not applied again, so a sender may post the same body until it is answered
Valid     JSON, or msgpack with a content type that says so; events in any form `wire` knows. JSON has no bytes:
          hashes that are not integers are written as hexadecimal text
Errors    a jump in the numbers is taken as lost history: the publisher's view is dropped, and the answer says so
Source    the push of LMCache's coordinator (`instance_id`, `incarnation`, `seq`, and the answer's three counts)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from router.signals.sequence import State, Verdict
from router.signals.stream import Stream
from router.signals.wire import BadFrame, Batch, batch_of

FIRST_SEQ = 1
MAX_BATCHES = 10_000  # in one body

Whole = Annotated[int, msgspec.Meta(ge=0)]


class BadPush(ValueError):
    """A body that is not a push; the message says what is wrong with it."""


class _Numbered(msgspec.Struct, frozen=True):
    seq: Whole
    events: list[Any]
    ts: float = 0.0
    data_parallel_rank: int | None = None


class _Body(msgspec.Struct, frozen=True):
    source: str
    incarnation: Whole
    batches: list[_Numbered]


@dataclass(frozen=True, slots=True)
class Push:
    """One body, decoded.

    source : name of the publisher: a replica, or the store
    incarnation : grows when the publisher starts anew (its start time will do)
    batches : (number, batch)
    """

    source: str
    incarnation: int
    batches: list[tuple[int, Batch]]


_JSON = msgspec.json.Decoder(_Body)
_MSGPACK = msgspec.msgpack.Decoder(_Body)


def parse_push(body: bytes, content_type: str) -> Push:
    """Read a body.

    Raises
    ------
    BadPush : it is not a push; nothing of it may be applied
    """
    packed = "msgpack" in content_type
    try:
        read = (_MSGPACK if packed else _JSON).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadPush(f"not a push of cache events: {exc}") from exc
    if len(read.batches) > MAX_BATCHES:
        raise BadPush(f"{len(read.batches)} batches in one body, at most {MAX_BATCHES} are taken")
    if any(batch.seq < FIRST_SEQ for batch in read.batches):
        raise BadPush(f"batches are numbered from {FIRST_SEQ}")
    try:
        batches = [(batch.seq, _batch(batch, packed)) for batch in read.batches]
    except BadFrame as exc:
        raise BadPush(str(exc)) from exc
    return Push(read.source, read.incarnation, batches)


def _batch(batch: _Numbered, packed: bool) -> Batch:
    events = batch.events if packed else [_with_bytes(event) for event in batch.events]
    return batch_of([batch.ts, events, batch.data_parallel_rank])


def _with_bytes(event: Any) -> Any:
    """The event with hashes written as text turned into bytes; whatever is no hash is left for `wire` to judge."""
    if isinstance(event, dict):
        return {name: _bytes_of(value) if name in _HASH_FIELDS else value for name, value in event.items()}
    if isinstance(event, list):
        return [_bytes_of(value) if place in _HASH_PLACES else value for place, value in enumerate(event)]
    return event


_HASH_FIELDS = frozenset({"block_hashes", "parent_block_hash", "seq_hashes"})
_HASH_PLACES = frozenset({1, 2})  # of BlockStored; of BlockRemoved the second is a medium


def _bytes_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_bytes_of(item) for item in value]
    if isinstance(value, str):
        try:
            return bytes.fromhex(value.removeprefix("0x"))
        except ValueError:
            return value
    return value


@dataclass(slots=True)
class PushResult:
    """What became of a push. The three counts are batches; `state` is the publisher's afterwards."""

    applied: int = 0
    duplicates: int = 0  # numbers already applied
    stale: int = 0  # of an earlier incarnation
    gaps: int = 0  # jumps in the numbers: the view was dropped
    state: State = State.SILENT


class PushedStream:
    """One publisher that posts. Built around a `Stream` whose first number is `FIRST_SEQ`."""

    def __init__(self, stream: Stream) -> None:
        assert stream.sequence.first == FIRST_SEQ, "pushes are numbered from 1"
        self.stream = stream
        self.incarnation: int | None = None

    def accept(self, push: Push) -> PushResult:
        """Apply what is new in `push`."""
        result = PushResult()
        sequence = self.stream.sequence
        sequence.connected = True
        if self.incarnation is not None and push.incarnation < self.incarnation:
            result.stale = len(push.batches)
            result.state = sequence.state
            return result
        if self.incarnation is not None and push.incarnation > self.incarnation:
            sequence.restarts += 1
            self.stream.forget()
        self.incarnation = push.incarnation
        for seq, batch in push.batches:
            verdict = sequence.judge(seq)
            if verdict is Verdict.STALE:
                result.duplicates += 1
                continue
            if verdict is Verdict.GAP:
                result.gaps += 1
                sequence.gap(seq)
                self.stream.lose_history()
            self.stream.count(batch)
            self.stream.take(seq, batch)
            result.applied += 1
        result.state = sequence.state
        return result


class Intake:
    """All publishers that post, by name.

    stream_of : name -> its stream, made when it first posts; None when no such publisher is known
    """

    def __init__(self, stream_of: Callable[[str], Stream | None]) -> None:
        self.streams: dict[str, PushedStream] = {}
        self._stream_of = stream_of

    def accept(self, push: Push) -> PushResult | None:
        """Apply a push; None when its source is not known."""
        known = self.streams.get(push.source)
        if known is None:
            stream = self._stream_of(push.source)
            if stream is None:
                return None
            known = self.streams[push.source] = PushedStream(stream)
        return known.accept(push)
