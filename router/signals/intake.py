"""Cache events that come by HTTP: for stores and sidecars that cannot publish over ZMQ.

Model     POST /events carries batches of one publisher, numbered from 1 within its `incarnation`; a number at or
          below the last is a repeat and is not applied again, so a sender may post the same body until it is answered
Valid     JSON, or msgpack with a content type that says so; events in any form `wire` knows. JSON has no bytes:
          hashes that are not integers are written as hexadecimal text
          A push is read and takes effect in slices between which others get the event loop, on the loop: a thread would
          hold the interpreter for five milliseconds at a time. One event is never divided
Errors    a jump in the numbers is taken as lost history: the publisher's view is dropped, and the answer says so
Source    the push of LMCache's coordinator (`instance_id`, `incarnation`, `seq`, and the answer's three counts)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from router.signals.sequence import State, Verdict
from router.signals.stream import Stream
from router.signals.wire import Batch, Removed, Stored, batch_of, joined

FIRST_SEQ = 1
MAX_BATCHES = 10_000  # in one body
MOST_WAITING = 16  # bodies; each may be as long as the admin port takes
SLICE_BYTES = 16 * 1024  # of events read in one go: a third of a millisecond
SLICE_BLOCKS = 256  # that take effect in one go: half a millisecond

Whole = Annotated[int, msgspec.Meta(ge=0)]


class BadPush(ValueError):
    """A body that is not a push; the message says what is wrong with it."""


class TooManyPosts(Exception):
    """Nothing of this one was read."""


class _Numbered(msgspec.Struct, frozen=True):
    seq: Whole
    events: list[msgspec.Raw]
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


Reading = Generator[None, None, Push]

_anything = msgspec.json.Decoder()
_anything_packed = msgspec.msgpack.Decoder()
_JSON = msgspec.json.Decoder(_Body)
_MSGPACK = msgspec.msgpack.Decoder(_Body)


def parse_push(body: bytes, content_type: str) -> Push:
    """Read a body in one go.

    Raises
    ------
    BadPush : it is not a push; nothing of it may be applied
    """
    reading = push_in(body, content_type)
    try:
        while True:
            next(reading)
    except StopIteration as done:
        push: Push = done.value
        return push


async def read_push(body: bytes, content_type: str) -> Push:
    """The same in slices; others get the loop after each. Raises `BadPush`."""
    reading = push_in(body, content_type)
    while True:
        try:
            next(reading)
        except StopIteration as done:
            push: Push = done.value
            return push
        await asyncio.sleep(0)


def push_in(body: bytes, content_type: str) -> Reading:
    """The same; yields after each slice. Raises `BadPush`."""
    packed = "msgpack" in content_type
    try:
        read = (_MSGPACK if packed else _JSON).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadPush(f"not a push of cache events: {exc}") from exc
    if len(read.batches) > MAX_BATCHES:
        raise BadPush(f"{len(read.batches)} batches in one body, at most {MAX_BATCHES} are taken")
    if any(batch.seq < FIRST_SEQ for batch in read.batches):
        raise BadPush(f"batches are numbered from {FIRST_SEQ}")
    push = Push(read.source, read.incarnation, [])
    for numbered in read.batches:
        batch = yield from _batch(numbered, packed)
        push.batches.append((numbered.seq, batch))
    return push


def _batch(numbered: _Numbered, packed: bool) -> Generator[None, None, Batch]:
    """One batch; yields after each slice of its events, so a short batch is read in one slice."""
    parts, events, size = [], [], 0
    for raw in numbered.events:
        events.append(_event(raw, packed))
        size += memoryview(raw).nbytes
        if size >= SLICE_BYTES:
            parts.append(batch_of([numbered.ts, events, numbered.data_parallel_rank]))
            events, size = [], 0
            yield
    parts.append(batch_of([numbered.ts, events, numbered.data_parallel_rank]))
    yield
    return joined(parts)


def _event(raw: msgspec.Raw, packed: bool) -> Any:
    try:
        return _anything_packed.decode(raw) if packed else _with_bytes(_anything.decode(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadPush(f"not a push of cache events: {exc}") from exc


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

    def is_later_than(self, push: Push) -> bool:
        """Whether `push` is of a publisher's earlier life, a sender left over: it says nothing of this one."""
        return self.incarnation is not None and push.incarnation < self.incarnation

    async def accept(self, push: Push) -> PushResult:
        """Apply what is new in `push`, one batch after the other; others get the loop in between.

        Given up in the middle of a batch, it can be posted again: the number of that batch does not count as applied.
        """
        result = PushResult()
        sequence = self.stream.sequence
        if self.is_later_than(push):
            result.stale = len(push.batches)
            result.state = sequence.state
            return result
        if self.incarnation is not None and push.incarnation > self.incarnation:
            sequence.restarts += 1
            self.stream.forget()
        self.incarnation = push.incarnation
        sequence.connected = True
        for at, (seq, batch) in enumerate(push.batches):
            if at:
                await asyncio.sleep(0)
            verdict = sequence.judge(seq)
            if verdict is Verdict.STALE:
                result.duplicates += 1
                continue
            if verdict is Verdict.GAP:
                result.gaps += 1
                sequence.gap(seq)
                self.stream.lose_history()
            self.stream.count(batch)
            await self._take(seq, batch)
            result.applied += 1
        result.state = sequence.state
        return result

    async def _take(self, seq: int, batch: Batch) -> None:
        pieces = pieces_of(batch)
        for at, piece in enumerate(pieces):
            if at:
                await asyncio.sleep(0)
            self.stream.take(seq, piece, begins=at == 0, ends=at == len(pieces) - 1)


def pieces_of(batch: Batch) -> list[Batch]:
    """The same events in batches of `SLICE_BLOCKS`, as far as whole events allow; at least one."""
    pieces, first, blocks = [], 0, 0
    for at, event in enumerate(batch.events, 1):
        blocks += len(event.hashes) if isinstance(event, Stored | Removed) else 1
        if blocks >= SLICE_BLOCKS or at == len(batch.events):
            pieces.append(msgspec.structs.replace(batch, events=batch.events[first:at]))
            first, blocks = at, 0
    return pieces or [batch]


class Intake:
    """All publishers that post, by name. Posts are taken in one at a time, in the order they came: see `turn`.

    stream_of : name -> its stream, made when it first posts; None when no such publisher is known
    """

    def __init__(self, stream_of: Callable[[str], Stream | None]) -> None:
        self.streams: dict[str, PushedStream] = {}
        self._stream_of = stream_of
        self._turn = asyncio.Lock()  # first come, first served
        self._waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Taking one post in. Raises `TooManyPosts` when others wait already; the sender may post it again."""
        if self._waiting >= MOST_WAITING:
            raise TooManyPosts
        self._waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting -= 1

    async def accept(self, push: Push) -> PushResult | None:
        """Apply a push; None when its source is not known."""
        known = self.streams.get(push.source)
        if known is None:
            stream = self._stream_of(push.source)
            if stream is None:
                return None
            known = self.streams[push.source] = PushedStream(stream)
        return await known.accept(push)
